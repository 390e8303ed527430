// What the kernels' warps do for a batch, counted (ptx_machine.h): a line of JSON for each kernel of each
// operation.
#include <cstdio>

#include "ptx_device.h"
#include "random.h"
#include "runtime.h"
#include "traffic.h"

namespace hkv::testing {
namespace {

class Counted {
 public:
  Counted(const Machine& host, const Machine& device, int64_t buckets, double load, int64_t choices)
      : host_(host),
        device_(device),
        buckets_(buckets),
        slots_(buckets * kLanes),
        load_(load),
        choices_(choices),
        store_(empty_table(buckets, RowType::kFloat32, 0)) {
    store_["clock"] = Buffer::of(std::vector<uint32_t>{1, 0});
    for (const char* name : {"order", "offsets", "pinned"}) store_[name] = Buffer::of(std::vector<int32_t>());
    store_["batch_scores"] = store_["initial_keys"] = Buffer::of(std::vector<Words>());
    constexpr double kOffered = 1.18;  // times the capacity, to fill it
    fill(static_cast<int64_t>(static_cast<double>(slots_) * (load < 1.0 ? load : kOffered)));
    // What is noted of full buckets is then as it is from batch to batch.
    for (int64_t batch = 0; load == 1.0 && batch < 2 * Oldest::kMost; ++batch) evict();
  }

  // Distinct keys, so many of them present.
  void set_batch(double hits) {
    hits_ = hits;
    const auto digests = store_["digests"].as<Digest>();
    const auto present = store_["keys"].as<Words>();
    Random random(static_cast<uint64_t>(1000.0 * hits));
    std::vector<Words> batch;
    std::vector<bool> is_taken(digests.size());
    while (static_cast<double>(batch.size()) < hits * static_cast<double>(buckets_)) {
      const auto slot = static_cast<size_t>(random.below(slots_));
      if (digests[slot] == kEmpty || is_taken[slot]) continue;
      is_taken[slot] = true;
      batch.push_back(present[slot]);
    }
    while (static_cast<int64_t>(batch.size()) < buckets_) batch.push_back(Words::of(random.word()));
    set_batch(batch);
  }

  // As many positions, but a third of the keys.
  void set_repeated_batch() {
    constexpr int64_t kTimes = 3;
    std::vector<Words> batch;
    for (int64_t i = 0; i < buckets_; ++i) {
      batch.push_back(Words::of(static_cast<uint64_t>(i % ((buckets_ + kTimes - 1) / kTimes))));
    }
    set_batch(batch);
    call<Unique>(host_, {{"keys", "batch"}});
    call<ListOccurrences>(host_, {{"order", "all_order"}, {"offsets", "all_offsets"}});
    // Of the first slots, the last one holds the first key.
    std::vector<Slot> slots;
    std::vector<Words> held(static_cast<size_t>(slots_));
    const std::vector<Words> keys = store_.at("unique_keys").as<Words>();
    for (int64_t i = 0; i < buckets_; ++i) {
      slots.push_back(static_cast<Slot>(buckets_ - 1 - i));
      held[static_cast<size_t>(slots.back())] = keys[static_cast<size_t>(i)];
    }
    store_["updated_slots"] = Buffer::of(slots);
    store_["held_keys"] = Buffer::of(held);
    store_["held_digests"] = Buffer::of(std::vector<Digest>(static_cast<size_t>(slots_), 1));
    store_["stale"] = Buffer::of(std::vector<uint32_t>{0});
    store_["steps"] = Buffer::of(std::vector<uint32_t>{1});
    store_["rate"] = Buffer::of(std::vector<float>{0.125f});
  }

  // With rows of several widths, which may be asked for in bfloat16.
  template <class Operation>
  void count_rows(const Names& names, bool as_halves = false) {
    if (as_halves) wishes_["cast"] = static_cast<double>(RowType::kBfloat16);
    for (const int64_t width : {8, 32, 64, 128}) {
      set_width(width);
      count<Operation>(names);
    }
    set_width(0);
    wishes_.clear();
  }

  // The rows of the batch that was upserted last, in one pass and in two.
  void count_first_rows() {
    std::vector<Slot> fresh = store_["unique_slots"].as<Slot>();
    const auto status = store_["unique_status"].as<int32_t>();
    for (size_t u = 0; u < fresh.size(); ++u) {
      const auto own = static_cast<Status>(status[u]);
      if (own != Status::kInserted && own != Status::kEvicted) fresh[u] = kNoSlot;
    }
    store_["fresh_slots"] = Buffer::of(fresh);
    Names names = {{"new_slots", "fresh_slots"}, {"keys", "batch"}, {"initial", "valid"}, {"rows", "found"}};
    count_rows<GatherOrInitRows>(names);
    count_rows<InitRows>({{"slots", "fresh_slots"}, {"keys", "unique_keys"}});
    names["keys"] = "initial_keys";
    count_rows<GatherRows>(names);
    count_rows<GatherRows>(names, true);
  }

  // The entries of as many slots as the batch has keys, with rows of several widths.
  void count_export() {
    store_["offset"] = Buffer::of(std::vector<Slot>{0});
    store_["chosen"] = Buffer::of(std::vector<uint8_t>());  // all are
    count_rows<ExportSlots>({});
  }

  // As many numbers as the batch has keys, of 26 tables one after the other; every fifth of another status.
  void count_tally() {
    constexpr int64_t kTables = 26, kStatuses = kKinds / kTables;
    std::vector<int32_t> numbers;
    for (int64_t i = 0; i < buckets_; ++i) {
      numbers.push_back(static_cast<int32_t>(kStatuses * (i * kTables / buckets_) + (i % 5 == 0 ? 1 : 0)));
    }
    store_["numbers"] = Buffer::of(numbers);
    count<Tally>({{"counts", "tallied"}});
  }

  template <class Operation>
  void count(const Names& names) {
    ptx::Memory& memory = ptx_memory();
    memory.traffic.clear();
    memory.counts = true;
    call<Operation>(device_, names);
    memory.counts = false;
    for (const auto& [kernel, traffic] : memory.traffic) {
      std::printf(
          "{\"load\": %g, \"choices\": %d, \"hits\": %g, \"width\": %d, \"keys\": %d, \"operation\": "
          "\"%s%s\", "
          "\"kernel\": \"%s\", \"launches\": %lld, \"instructions\": %lld, \"requested\": %lld, "
          "\"read\": %lld, \"written\": %lld}\n",
          load_, static_cast<int>(choices_), hits_, static_cast<int>(width_), static_cast<int>(buckets_),
          Operation::kName, wishes_.empty() ? "" : " as bfloat16", kernel.c_str(),
          static_cast<long long>(traffic.launches), static_cast<long long>(traffic.instructions),
          static_cast<long long>(traffic.requested), static_cast<long long>(traffic.read),
          static_cast<long long>(traffic.written));
    }
    std::fflush(stdout);
  }

 private:
  void set_width(int64_t width) {
    width_ = width;
    store_["values"] = Buffer::of_rows(slots_, RowType::kFloat32, width);
    for (const char* name : {"rows", "updated", "first_state", "second_state"}) {
      store_[name] = Buffer::of_rows(buckets_, RowType::kFloat32, width);
    }
  }
  void set_batch(const std::vector<Words>& batch) {
    store_["batch"] = Buffer::of(batch);
    store_["valid"] = Buffer::of(std::vector<uint8_t>());  // all are
    std::vector<int32_t> sources;
    for (size_t i = 0; i < batch.size(); ++i) sources.push_back(static_cast<int32_t>(i));
    store_["sources"] = Buffer::of(sources);
  }
  void fill(int64_t keys) {
    std::vector<Words> batch;
    for (int64_t key = 0; key < keys; ++key) batch.push_back(Words::of(static_cast<uint64_t>(key)));
    upsert(batch);
  }
  // As many new keys as there are buckets.
  void evict() {
    std::vector<Words> batch;
    for (int64_t i = 0; i < buckets_; ++i) batch.push_back(Words::of(random_.word()));
    upsert(batch);
  }
  void upsert(const std::vector<Words>& batch) {
    set_batch(batch);
    call<Unique>(host_, {{"keys", "batch"}});
    call<Upsert>(host_, {});
  }
  template <class Operation>
  void call(const Machine& machine, const Names& names) {
    Attributes attributes = {{"policy", static_cast<double>(Policy::kLru)},
                             {"choices", static_cast<double>(choices_)},
                             {"count", static_cast<double>(buckets_)},
                             {"kinds", kKinds},
                             {"admit", 1},
                             {"write_scores", 1}};
    attributes.insert(wishes_.begin(), wishes_.end());
    const std::string failure = machine.call(Operation::kName, store_, attributes, names);
    if (!failure.empty()) ptx::stop(failure);
  }

  static constexpr int kKinds = 156;

  const Machine& host_;
  const Machine& device_;
  const int64_t buckets_, slots_;
  const double load_;
  const int64_t choices_;
  double hits_ = 0.0;
  Attributes wishes_;
  int64_t width_ = 0;
  Random random_{7};
  Store store_;
};

}  // namespace

void count_traffic(const Machine& host, const Machine& device, int64_t buckets) {
  device_form.multiprocessors = 132;  // an H200's
  for (const int64_t choices : {1, 2}) {
    for (const double load : {0.5, 0.75, 1.0}) {
      for (const double hits : {1.0, 0.6, 0.0}) {
        Counted counted(host, device, buckets, load, choices);
        counted.set_batch(hits);
        counted.count<Unique>({{"keys", "batch"}});
        counted.count<FindSlots>({});
        if (choices == 1 && hits == 1.0) counted.count_export();
        const bool has_room = load == 0.75 && hits == 0.6, evicts = load == 1.0 && hits == 0.0;
        if (choices == 1 && load != 0.75 && hits != 0.0) counted.count_rows<FindRows>({{"rows", "found"}});
        counted.count<Upsert>({});
        if (choices == 1 && (has_room || evicts)) counted.count_rows<ScatterRows>({});
        if (choices == 1 && load == 0.75) counted.count_first_rows();
      }
    }
  }
  // For 16,384 positions 2 multiprocessors are what 132 are for a million: few.
  device_form.multiprocessors = 2;
  Counted counted(host, device, buckets, 0.0, 1);
  counted.set_repeated_batch();
  const Names terms = {{"order", "all_order"},     {"offsets", "all_offsets"}, {"sources", "absent"},
                       {"weights", "absent"},      {"gradients", "rows"},      {"values", "updated"},
                       {"slots", "updated_slots"}, {"keys", "unique_keys"},    {"index_keys", "held_keys"},
                       {"digests", "held_digests"}};
  counted.count_tally();
  counted.count_rows<CombineRows>(terms);
  counted.count_rows<SquareNorm>(terms);
  counted.count_rows<UpdateRows<SgdRule>>(terms);
  counted.count_rows<UpdateRows<AdamRule>>(terms);
}

}  // namespace hkv::testing
