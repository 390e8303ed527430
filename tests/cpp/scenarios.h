// Random batches through all operations, for every policy, number of choices and row type.
#pragma once

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "machines.h"
#include "random.h"

namespace hkv::testing {

struct Form {
  Policy policy;
  int64_t choices;
  int64_t buckets;
  RowType type;
  int64_t width;
  int64_t universe;  // keys that batches are drawn from
  bool stays_full = false;  // nothing is erased

  std::string text() const {
    return "policy " + std::to_string(static_cast<int64_t>(policy)) + ", choices " + std::to_string(choices) +
           ", buckets " + std::to_string(buckets) + ", row type " +
           std::to_string(static_cast<int32_t>(type)) + ", width " + std::to_string(width);
  }
};

// A table on several machines, and batches for it.
class Scenario {
 public:
  Scenario(Together& machines, Checks& checks, const Form& form, uint64_t seed)
      : machines_(machines), checks_(checks), form_(form), random_(seed) {
    machines_.clear();
    for (const auto& [name, buffer] : empty_table(form_.buckets, form_.type, form_.width)) {
      machines_.set(name, buffer);
    }
    machines_.set("clock", Buffer::of(std::vector<uint32_t>{0xfffffff0, 0}));  // its low word wraps soon
    machines_.set("epoch", Buffer::of(std::vector<uint32_t>{3}));
    machines_.set("absent", Buffer::of(std::vector<int32_t>()));
    machines_.set("stale", Buffer::of(std::vector<uint32_t>{0xfffffff0}));  // goes on from 0
  }

  void round(int64_t n) {
    where_ = form_.text() + ", round " + std::to_string(round_++) + ", n " + std::to_string(n);
    tick();
    make_batch(n);
    call<Unique>({}, {{"keys", "batch"}});
    call<ListOccurrences>({});
    route(n);
    upsert(n);
    lookups(n);
    tally(n);
    rows(n);
    if (!form_.stays_full) {
      if (random_.chance(0.5)) erase();
      if (random_.chance(0.05)) call<Clear>({});
    }
    check_state();
  }

 private:
  static inline const Names kTerms = {
      {"rows", "pooled"}, {"sources", "term_sources"}, {"weights", "term_weights"}};

  template <class Operation>
  void call(const Attributes& attributes, const Names& names = {}) {
    machines_.call(Operation::kName, where_, attributes, names);
  }

  void tick() {
    const auto clock = machines_["clock"].as<uint32_t>();
    const Words next = Words::of(Words{clock[0], clock[1]}.value() + 1);
    machines_.set("clock", Buffer::of(std::vector<uint32_t>{next.low, next.high}));
    if (random_.chance(0.3)) {
      machines_.set("epoch", Buffer::of(std::vector<uint32_t>{static_cast<uint32_t>(round_ + 3)}));
    }
  }

  // Keys 0 and 2^64 - 1 among them; a few keys fill half of some batches.
  Key random_key() {
    if (random_.chance(0.02)) return random_.chance(0.5) ? 0 : ~Key{0};
    return mix(static_cast<uint64_t>(random_.below(form_.universe)));
  }

  void make_batch(int64_t n) {
    const bool is_skewed = random_.chance(0.4);
    const double masked = random_.chance(0.1) ? 1.0 : random_.real() * 0.3;
    const Key frequent = random_key();
    std::vector<Words> keys;
    std::vector<uint8_t> valid;
    for (int64_t i = 0; i < n; ++i) {
      keys.push_back(Words::of(is_skewed && random_.chance(0.5) ? frequent : random_key()));
      valid.push_back(random_.chance(masked) ? 0 : 1);
    }
    if (random_.chance(0.3)) valid.clear();  // all are
    machines_.set("batch", Buffer::of(keys));
    machines_.set("valid", Buffer::of(valid));
  }

  // A hop of an exchange in one or two hops; the places suffice now and then.
  void route(int64_t n) {
    const int64_t peers = random_.below(9) + 1;
    const int64_t others = random_.below(3) + 1;  // peers of the other hop
    const bool is_first = random_.chance(0.5);
    const int64_t places = random_.chance(0.5) ? n + 1 : random_.below(n / peers + 1) + 1;
    call<RouteKeys>({{"devices", static_cast<double>(peers * others)},
                     {"inner", static_cast<double>(is_first ? others : 1)},
                     {"p", static_cast<double>(peers)},
                     {"c", static_cast<double>(places)}},
                    {{"keys", "batch"}, {"counts", "routed_counts"}});
  }

  Score random_score() {
    if (random_.chance(0.1)) return random_.chance(0.5) ? 0 : ~Score{0};
    return random_.chance(0.5) ? static_cast<Score>(random_.below(4)) : random_.word();
  }

  // But for some of the highest.
  Score low_score() { return random_.chance(0.005) ? ~Score{0} : static_cast<Score>(random_.below(2)); }

  bool is_counting() const { return Scoring{form_.policy, 0, 0}.counts(); }

  void make_scores(int64_t n, Policy policy) {
    std::vector<Words> scores;
    const bool are_low = form_.stays_full && round_ % 3 == 0;
    if (policy == Policy::kCustom || (is_counting() && random_.chance(0.5))) {
      for (int64_t i = 0; i < n; ++i) {
        scores.push_back(Words::of(are_low ? low_score() : random_score()));
      }
    }
    machines_.set("batch_scores", Buffer::of(scores));
  }

  Slot random_slot() { return static_cast<Slot>(random_.below(form_.buckets * kLanes + 1)) - 1; }

  // Of a larger table: passed over, wherever a slot comes from callers.
  Slot slot_beyond() { return static_cast<Slot>(form_.buckets * kLanes + random_.below(9)); }

  void upsert(int64_t n) {
    // Now and then scores are not of the table's policy, as those of entries that are imported.
    const Policy own = form_.policy;
    const Policy policy = own == Policy::kLru && random_.chance(0.2) ? Policy::kCustom : own;
    make_scores(n, policy);
    std::vector<Slot> pinned;
    if (random_.chance(0.5)) {
      for (int i = 0; i < 20; ++i) pinned.push_back(random_slot());
    }
    machines_.set("pinned", Buffer::of(pinned));
    const bool admits = random_.chance(0.8);
    const bool reports = admits && random_.chance(0.6);
    const bool has_list = is_counting() || random_.chance(0.5);
    const Names list = {{"order", has_list ? "order" : "absent"},
                        {"offsets", has_list ? "offsets" : "absent"}};
    call<Upsert>({{"policy", static_cast<double>(policy)},
                  {"foreign", policy == own ? 0 : 1},
                  {"choices", static_cast<double>(form_.choices)},
                  {"admit", admits ? 1 : 0},
                  {"write_scores", admits || random_.chance(0.5) ? 1 : 0},
                  {"ticks", random_.chance(0.8) ? 1 : 0},
                  {"e", static_cast<double>(reports ? n : 0)},
                  {"m", static_cast<double>(random_.chance(0.8) ? n : 0)}},
                 list);
  }

  void lookups(int64_t n) {
    const Attributes choices = {{"choices", static_cast<double>(form_.choices)}};
    call<FindSlots>(choices, {{"slots", "found_slots"}});
    std::vector<Slot> stale = machines_["found_slots"].as<Slot>();
    for (Slot& slot : stale) {
      if (random_.chance(0.3)) slot = random_.chance(0.1) ? slot_beyond() : random_slot();
    }
    machines_.set("stale_slots", Buffer::of(stale));
    call<VerifySlots>({}, {{"slots", "stale_slots"}});
    const int64_t slots = form_.buckets * kLanes;
    machines_.set("offset", Buffer::of(std::vector<Slot>{static_cast<Slot>(random_.below(slots + 10))}));
    const int64_t count = random_.below(n + 20);
    call<ReadSlots>({{"count", static_cast<double>(count)}});
    const bool is_partial = random_.chance(0.5);
    std::vector<uint8_t> chosen;
    for (int64_t i = 0; is_partial && i < count; ++i) chosen.push_back(random_.chance(0.5) ? 1 : 0);
    machines_.set("chosen", Buffer::of(chosen));
    call<ExportSlots>({{"count", static_cast<double>(count)}});
    machines_.set("initial", Buffer::of(std::vector<uint8_t>()));
    machines_.set("initial_keys", Buffer::of(std::vector<Words>()));
    Attributes zeros = initializer();
    zeros["fill"] = 0;
    call<GatherRows>(zeros,
                     {{"slots", "exported_slots"}, {"keys", "initial_keys"}, {"rows", "rows_of_exported"}});
    checks_.expect(machines_["exported_rows"].bytes == machines_["rows_of_exported"].bytes,
                   where_ + ": exported rows are not those of their slots");
  }

  // Numbers in runs, as tables and statuses of a batch are, or without order.
  void tally(int64_t n) {
    const int64_t kinds = random_.below(random_.chance(0.5) ? 10 : 200);
    const double stays = random_.chance(0.5) ? 0.95 : 0.0;
    std::vector<int32_t> numbers, expected(static_cast<size_t>(kinds));
    for (int64_t i = 0; i < n; ++i) {
      const auto other = static_cast<int32_t>(random_.below(kinds + 4)) - 2;
      const auto far = static_cast<int32_t>(random_.word());
      numbers.push_back(i > 0 && random_.chance(stays) ? numbers.back() : random_.chance(0.02) ? far : other);
      if (numbers.back() >= 0 && numbers.back() < kinds) ++expected[static_cast<size_t>(numbers.back())];
    }
    machines_.set("numbers", Buffer::of(numbers));
    call<Tally>({{"kinds", static_cast<double>(kinds)}}, {{"counts", "tallied"}});
    checks_.expect(machines_["tallied"].as<int32_t>() == expected, where_ + ": numbers are counted wrongly");
  }

  Attributes initializer() {
    return {{"init_kind", static_cast<double>(random_.below(4))},
            {"init_a", -0.25},
            {"init_b", 0.5},
            {"seed", static_cast<double>(random_.below(1 << 20))},
            {"fill", 0.125}};
  }

  float random_element() {
    constexpr uint32_t kNotFinite[] = {0x7f800000, 0xff800000, 0x7fc00000, 0xffc12345};
    if (random_.chance(0.003)) return bit_cast<float>(kNotFinite[random_.below(std::size(kNotFinite))]);
    const double magnitude = random_.chance(0.1) ? 0x1p-140 : 1.0;  // subnormal sums
    return static_cast<float>((random_.real() - 0.5) * magnitude);
  }

  Buffer random_rows(int64_t count, RowType type) {
    Buffer buffer = Buffer::of_rows(count, type, form_.width);
    if (type == RowType::kOther) {
      for (char& byte : buffer.bytes) byte = static_cast<char>(random_.word());
      return buffer;
    }
    const int64_t bytes = form_.width * element_bytes(type);
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t j = 0; j < form_.width; ++j) {
        store_element(type, buffer.bytes.data() + i * bytes, j, random_element());
      }
    }
    return buffer;
  }

  // The distinct keys' slots, each once: without those that a later step does not write, and some beyond.
  std::vector<Slot> written_slots(double kept) {
    std::vector<Slot> slots = machines_["unique_slots"].as<Slot>();
    for (Slot& slot : slots) {
      if (!random_.chance(kept)) slot = random_.chance(0.1) ? slot_beyond() : kNoSlot;
    }
    return slots;
  }

  void rows(int64_t n) {
    const Attributes init = initializer();
    machines_.set("some_slots", Buffer::of(written_slots(0.5)));
    if (form_.type != RowType::kOther) gather_or_init(init);
    const bool is_in_order = random_.chance(0.4);
    const int64_t sources = !is_in_order ? n / 2 + 1 : random_.chance(0.5) ? 1 : n;
    std::vector<int32_t> chosen;
    for (int64_t i = 0; i < (is_in_order ? 0 : n); ++i) {
      chosen.push_back(static_cast<int32_t>(random_.below(sources + 2)) - 1);
    }
    machines_.set("some_slots", Buffer::of(written_slots(0.3)));
    machines_.set("sources", Buffer::of(chosen));
    machines_.set("rows", random_rows(sources, form_.type));
    call<ScatterRows>({}, {{"slots", "some_slots"}});
    machines_.set("row", random_rows(1, form_.type));
    call<FillRows>({{"S", static_cast<double>(n)}}, {{"values", "filled"}});
    if (form_.type != RowType::kOther) sums(n);
    gather(n, init);
  }

  // In one pass what init_rows and gather_rows do in two.
  void gather_or_init(Attributes attributes) {
    wish_for_type(attributes);
    const Buffer before = machines_["values"];
    machines_.set("initial", random_.chance(0.3) ? Buffer::of(std::vector<uint8_t>()) : machines_["valid"]);
    call<GatherOrInitRows>(attributes,
                           {{"new_slots", "some_slots"}, {"keys", "batch"}, {"rows", "rows_at_once"}});
    const Buffer after = machines_["values"];
    machines_.set("values", before);
    call<InitRows>(attributes, {{"slots", "some_slots"}, {"keys", "unique_keys"}});
    attributes["fill"] = 0;
    call<GatherRows>(attributes, {{"keys", "batch"}, {"rows", "rows_read"}});
    checks_.expect(after.bytes == machines_["values"].bytes &&
                       machines_["rows_at_once"].bytes == machines_["rows_read"].bytes,
                   where_ + ": first rows and a gather in one pass differ from those in two");
  }

  void sums(int64_t n) {
    machines_.set("gradients", random_rows(n, form_.type));
    call<CombineRows>({}, {{"rows", "gradients"}, {"sources", "absent"}, {"weights", "absent"}});
    machines_.set("summed_slots", Buffer::of(written_slots(0.9)));
    Names squared = {{"slots", "summed_slots"}, {"sources", "absent"}, {"weights", "absent"}};
    call<SquareNorm>({}, squared);
    if (random_.chance(0.2)) sums_of_any_numbers(n);
    if (random_.chance(0.5)) sums_of_first_keys(n);
    weigh(n);
    call<CombineRows>({}, kTerms);
    squared = kTerms;
    squared.insert({{"slots", "summed_slots"}, {"gradients", "pooled"}});
    call<SquareNorm>({}, squared);
    AllOperations::visit([this]<class Operation>() { update_by(static_cast<Operation*>(nullptr)); });
  }

  // Of the positions of some keys, as many of the batch's as come first.
  void sums_of_first_keys(int64_t n) {
    const auto keys = static_cast<int64_t>(random_.below(n + 1));
    std::vector<int32_t> inverse = machines_["inverse"].as<int32_t>();
    for (int32_t& key : inverse) key = key < keys ? key : -1;
    machines_.set("first_inverse", Buffer::of(inverse));
    Names names = {{"inverse", "first_inverse"}, {"order", "first_order"}, {"offsets", "first_offsets"}};
    call<ListOccurrences>({}, names);
    std::vector<int32_t> offsets = machines_["first_offsets"].as<int32_t>();
    offsets.resize(static_cast<size_t>(keys) + 1);
    machines_.set("first_offsets", Buffer::of(offsets));
    names.insert(
        {{"rows", "gradients"}, {"sources", "absent"}, {"weights", "absent"}, {"sums", "first_sums"}});
    call<CombineRows>({}, names);
    const std::vector<char>& all = machines_["sums"].bytes;
    const std::vector<char>& first = machines_["first_sums"].bytes;
    checks_.expect(std::equal(first.begin(), first.end(), all.begin()),
                   where_ + ": the sums of some keys differ from those of all");
  }

  // Numbers and a count that `unique` has not made, as callers may give them.
  void sums_of_any_numbers(int64_t n) {
    const auto any = [&] { return static_cast<int32_t>(random_.below(n + 6)) - 3; };
    std::vector<int32_t> inverse;
    for (int64_t i = 0; i < n; ++i) inverse.push_back(any());
    machines_.set("any_inverse", Buffer::of(inverse));
    machines_.set("any_count", Buffer::of(std::vector<int32_t>{any()}));
    Names names = {{"inverse", "any_inverse"},
                   {"count", "any_count"},
                   {"order", "any_order"},
                   {"offsets", "any_offsets"}};
    call<ListOccurrences>({}, names);
    names.insert({{"rows", "gradients"}, {"sources", "absent"}, {"weights", "absent"}, {"sums", "any_sums"}});
    call<CombineRows>({}, names);
    names.insert({"slots", "summed_slots"});
    call<SquareNorm>({}, names);
    machines_.set("steps", Buffer::of(std::vector<uint32_t>{1}));
    machines_.set("rate", Buffer::of(std::vector<float>{0.125f}));
    names.insert({{"index_keys", "keys"}, {"keys", "unique_keys"}});
    call<UpdateRows<SgdRule>>({{"stochastic", 0}, {"seed", 0}}, names);
  }

  // Pooled gradients: positions share rows, some have none, and there are weights now and then.
  void weigh(int64_t n) {
    const int64_t bags = random_.chance(0.1) ? 0 : n / 3 + 1;
    std::vector<int32_t> sources;
    std::vector<float> weights;
    const bool is_weighted = random_.chance(0.5);
    for (int64_t i = 0; i < n; ++i) {
      sources.push_back(static_cast<int32_t>(random_.below(bags + 2)) - 1);
      if (is_weighted) weights.push_back(static_cast<float>(random_.real() - 0.3));
    }
    machines_.set("term_sources", Buffer::of(sources));
    machines_.set("term_weights", Buffer::of(weights));
    constexpr RowType kTypes[] = {RowType::kFloat32, RowType::kBfloat16, RowType::kFloat16};
    machines_.set("pooled", random_rows(bags, kTypes[random_.below(std::size(kTypes))]));
  }

  template <class Operation>
  void update_by(Operation*) {}  // no optimizer

  template <class Rule>
  void update_by(UpdateRows<Rule>*) {
    const int64_t slots = form_.buckets * kLanes;
    constexpr const char* kNames[] = {"first_state", "second_state"};
    for (int number = 0; number < Rule::kStates; ++number) {
      const RowType type = random_.chance(0.7) ? RowType::kFloat32 : RowType::kBfloat16;
      Buffer state = random_rows(slots, type);
      if (number >= UpdateRows<Rule>::kElementStates) {  // one number a row
        state.width = 1;
        state.bytes.resize(static_cast<size_t>(slots * element_bytes(type)));
      }
      for (int64_t i = 0; i < slots * state.width; ++i) {  // squares are summed there
        const float value = load_element(type, state.bytes.data(), i);
        store_element(type, state.bytes.data(), i, value < 0.0f ? -value : value);
      }
      machines_.set(kNames[number], state);
    }
    const bool counts_rows = random_.chance(0.5);
    std::vector<uint32_t> steps;
    for (int64_t i = 0; i < (counts_rows ? slots : 1); ++i) {
      steps.push_back(static_cast<uint32_t>(random_.below(1000)) + (counts_rows ? 0 : 1));
    }
    machines_.set("steps", Buffer::of(steps));
    machines_.set("rate", Buffer::of(std::vector<float>{0.125f}));
    const bool is_stochastic = form_.type == RowType::kBfloat16 && random_.chance(0.5);
    Attributes attributes = {{"momentum", 0.9}, {"nesterov", random_.chance(0.5) ? 1 : 0},
                             {"eps", 1e-7},     {"eps_root", 0.0},
                             {"b1", 0.9},       {"b2", 0.999},
                             {"l1", 0.01},      {"l2", 0.1},
                             {"beta", 1.0},     {"weight_decay", 0.01}};
    attributes["stochastic"] = is_stochastic ? 1 : 0;
    attributes["seed"] = static_cast<double>(random_.below(1 << 20));
    if (random_.chance(0.5)) attributes["max_gradient"] = 0.5;
    Names names = kTerms;
    std::vector<Slot> stale = machines_["summed_slots"].as<Slot>();
    for (Slot& slot : stale) {
      if (random_.chance(0.1)) slot = random_slot();
    }
    machines_.set("updated_slots", Buffer::of(stale));
    names.insert({{"slots", "updated_slots"},
                  {"index_keys", "keys"},
                  {"keys", "unique_keys"},
                  {"gradients", "pooled"}});
    call<UpdateRows<Rule>>(attributes, names);
  }

  void gather(int64_t n, const Attributes& init) {
    const bool has_initial = form_.type != RowType::kOther && random_.chance(0.5);
    std::vector<uint8_t> initial;
    for (int64_t i = 0; has_initial && i < n; ++i) initial.push_back(random_.chance(0.5) ? 1 : 0);
    if (random_.chance(0.3)) initial.clear();  // all positions
    machines_.set("initial", Buffer::of(initial));
    machines_.set("initial_keys", has_initial ? machines_["batch"] : Buffer::of(std::vector<Words>()));
    const Names names = {{"slots", "stale_slots"}, {"keys", "initial_keys"}, {"rows", "gathered"}};
    call<GatherRows>(init, names);
    call_cast<GatherRows>(init, names, "gathered");
    if (form_.type != RowType::kOther) pool(n, init);
    find(init);
  }

  void wish_for_type(Attributes& attributes) {
    if (form_.type != RowType::kOther) attributes["cast"] = static_cast<double>(random_.below(3));
  }

  // Rows in a type of their own are those that came in the usual one, converted.
  template <class Operation>
  void call_cast(Attributes attributes, const Names& names, const std::string& rows) {
    if (form_.type == RowType::kOther) return;
    const Buffer usual = machines_[rows];
    wish_for_type(attributes);
    call<Operation>(attributes, names);
    const Buffer& cast = machines_[rows];
    Buffer expected = Buffer::of_rows(usual.rows, cast.type, usual.width);
    for (int64_t i = 0; i < usual.rows * usual.width && cast.type != usual.type; ++i) {
      store_element(cast.type, expected.bytes.data(), i, load_element(usual.type, usual.bytes.data(), i));
    }
    checks_.expect(cast.bytes == (cast.type == usual.type ? usual : expected).bytes,
                   where_ + ": rows cast while they are read are not the rows, cast");
  }

  // In one pass what find_slots and gather_rows find in two.
  void find(Attributes attributes) {
    const bool initializes = form_.type != RowType::kOther && random_.chance(0.5);
    attributes["choices"] = static_cast<double>(form_.choices);
    attributes["initialize"] = initializes ? 1 : 0;
    wish_for_type(attributes);
    call<FindRows>(attributes, {{"slots", "slots_of_rows"}, {"rows", "found_rows"}});
    machines_.set("initial", initializes ? machines_["valid"] : Buffer::of(std::vector<uint8_t>()));
    machines_.set("initial_keys", initializes ? machines_["batch"] : Buffer::of(std::vector<Words>()));
    call<FindSlots>(attributes, {{"slots", "slots_alone"}});
    call<GatherRows>(attributes,
                     {{"slots", "slots_alone"}, {"keys", "initial_keys"}, {"rows", "rows_alone"}});
    checks_.expect(machines_["slots_of_rows"].bytes == machines_["slots_alone"].bytes &&
                       machines_["found_rows"].bytes == machines_["rows_alone"].bytes,
                   where_ + ": a lookup in one pass differs from one in two");
  }

  // Bags of no, few and many positions, with weights now and then; some splits are outside the batch.
  void pool(int64_t n, const Attributes& init) {
    constexpr int64_t kLongest[] = {2, 12, 3000};  // of the first, nearly all bags have one position or none
    const int64_t longest = kLongest[random_.below(std::size(kLongest))];
    std::vector<int32_t> splits = {0};
    while (splits.back() < n) {
      const int64_t own = random_.chance(0.02) ? 12 : longest;
      splits.push_back(splits.back() + static_cast<int32_t>(random_.below(own)));
    }
    const double outside = std::min(0.01, 5.0 / static_cast<double>(splits.size()));  // such bags are long
    for (int32_t& split : splits) {
      if (random_.chance(outside)) split = random_.chance(0.5) ? -3 : static_cast<int32_t>(2 * n + 1);
    }
    std::vector<float> weights;
    const bool is_weighted = random_.chance(0.5);
    for (int64_t i = 0; is_weighted && i < n; ++i) {
      weights.push_back(static_cast<float>(random_.real() - 0.3));
    }
    machines_.set("splits", Buffer::of(splits));
    machines_.set("ends", Buffer::of(std::vector<int32_t>()));
    machines_.set("pool_weights", Buffer::of(weights));
    const Names names = {{"slots", "stale_slots"},
                         {"keys", "initial_keys"},
                         {"weights", "pool_weights"},
                         {"pooled", "pooled_bags"}};
    call<PoolRows>(init, names);
    call_cast<PoolRows>(init, names, "pooled_bags");
    pool_with_padding(init, splits);
    std::vector<float> divisors(weights.rbegin(), weights.rend());
    for (float& divisor : divisors) divisor = random_.chance(0.1) ? 0.0f : divisor * divisor;
    machines_.set("pool_divisors", Buffer::of(divisors));
    call<DivideWeights>({{"root", random_.chance(0.5) ? 1 : 0}},
                        {{"weights", "pool_weights"}, {"divisors", "pool_divisors"}});
  }

  // Bags with padding behind them are every second one of those whose padding is a bag, too.
  void pool_with_padding(const Attributes& init, const std::vector<int32_t>& splits) {
    std::vector<int32_t> ends, apart;
    for (size_t bag = 0; bag + 1 < splits.size(); ++bag) {
      const int64_t length = std::max(splits[bag + 1] - splits[bag], 0);
      ends.push_back(splits[bag] + static_cast<int32_t>(random_.below(length + 1)));
      apart.insert(apart.end(), {splits[bag], ends.back()});
    }
    apart.push_back(splits.back());
    machines_.set("ends", Buffer::of(ends));
    Names names = {{"slots", "stale_slots"},
                   {"keys", "initial_keys"},
                   {"weights", "pool_weights"},
                   {"pooled", "bags_before_padding"}};
    call<PoolRows>(init, names);
    machines_.set("splits_apart", Buffer::of(apart));
    machines_.set("ends", Buffer::of(std::vector<int32_t>()));
    names["splits"] = "splits_apart";
    names["pooled"] = "bags_and_padding";
    call<PoolRows>(init, names);
    const Buffer& apart_rows = machines_["bags_and_padding"];
    const Buffer& rows = machines_["bags_before_padding"];
    const size_t row_bytes = rows.rows == 0 ? 0 : rows.bytes.size() / static_cast<size_t>(rows.rows);
    for (size_t bag = 0; bag < ends.size(); ++bag) {
      checks_.expect(std::equal(rows.bytes.begin() + static_cast<std::ptrdiff_t>(bag * row_bytes),
                                rows.bytes.begin() + static_cast<std::ptrdiff_t>((bag + 1) * row_bytes),
                                apart_rows.bytes.begin() + static_cast<std::ptrdiff_t>(2 * bag * row_bytes)),
                     where_ + ": a bag with padding behind it differs from one without");
    }
  }

  void erase() {
    const auto digests = machines_["digests"].as<Digest>();
    std::vector<Slot> slots = written_slots(0.4);
    std::erase_if(slots, [&](Slot slot) {
      return slot >= 0 && slot < form_.buckets * kLanes && digests[static_cast<size_t>(slot)] == kEmpty;
    });
    machines_.set("erased_slots", Buffer::of(slots));
    call<EraseSlots>({}, {{"slots", "erased_slots"}});
  }

  // What holds of every table, whoever wrote it.
  void check_state() {
    const auto digests = machines_["digests"].as<Digest>();
    const auto keys = machines_["keys"].as<Words>();
    const auto occupancy = machines_["occupancy"].as<int32_t>();
    std::vector<Key> present;
    for (int64_t bucket = 0; bucket < form_.buckets; ++bucket) {
      int32_t entries = 0;
      for (int64_t slot = bucket * kLanes; slot < (bucket + 1) * kLanes; ++slot) {
        const auto at = static_cast<size_t>(slot);
        if (digests[at] == kEmpty) continue;
        ++entries;
        present.push_back(keys[at].value());
        const uint64_t hash = hash_of(keys[at].value());
        const bool is_at_home = bucket == first_bucket(hash, form_.buckets) ||
                                (form_.choices == 2 && bucket == second_bucket(hash, form_.buckets));
        checks_.expect(is_at_home && digests[at] == digest_of(hash), where_ + ": a key is out of place");
      }
      checks_.expect(entries == occupancy[static_cast<size_t>(bucket)], where_ + ": occupancy");
    }
    check_oldest();
    std::sort(present.begin(), present.end());
    const bool is_distinct = std::adjacent_find(present.begin(), present.end()) == present.end();
    checks_.expect(is_distinct, where_ + ": a key is in two slots");
  }

  // Who is listed and has not been written since goes before all others of the bucket, in that order.
  void check_oldest() {
    const auto digests = machines_["digests"].as<Digest>();
    const auto scores = machines_["scores"].as<Words>();
    const auto oldest = machines_["oldest"].as<Oldest>();
    for (size_t bucket = 0; bucket < oldest.size(); ++bucket) {
      const size_t first = bucket * kLanes;
      std::vector<std::pair<Score, size_t>> entries, listed;
      for (size_t lane = 0; lane < kLanes; ++lane) {
        if (digests[first + lane] != kEmpty) entries.emplace_back(scores[first + lane].value(), lane);
      }
      std::sort(entries.begin(), entries.end());
      for (int place = 0; place < Oldest::kMost; ++place) {
        if (oldest[bucket].lane(place) < 0) continue;
        const auto lane = static_cast<size_t>(oldest[bucket].lane(place));
        const Score score = scores[first + lane].value();
        if (digests[first + lane] != kEmpty && score < oldest[bucket].time) listed.emplace_back(score, lane);
      }
      const bool is_first =
          listed.size() <= entries.size() && std::equal(listed.begin(), listed.end(), entries.begin());
      checks_.expect(is_first, where_ + ": the oldest of bucket " + std::to_string(bucket));
    }
  }

  Together& machines_;
  Checks& checks_;
  const Form form_;
  Random random_;
  int round_ = 0;
  std::string where_;
};

// Copied by 16 or 4 bytes, by 2 or 4, by 1 or 4.
inline const std::vector<int64_t> kNarrow = {8, 1, 5};
// Of several blocks of a tile, or some and a rest.
inline const std::vector<int64_t> kWide = {64, 44, 131};

// Every policy with one and two choices; row types and widths take turns, others for each size.
inline std::vector<Form> all_forms(int64_t buckets, int64_t universe, const std::vector<int64_t>& widths) {
  constexpr RowType kTypes[] = {RowType::kFloat32, RowType::kBfloat16, RowType::kFloat16, RowType::kOther};
  std::vector<Form> forms;
  for (Policy policy : {Policy::kLru, Policy::kLfu, Policy::kEpochLru, Policy::kEpochLfu, Policy::kCustom}) {
    for (int64_t choices : {1, 2}) {
      const size_t turn = forms.size() + static_cast<size_t>(buckets);
      forms.push_back({policy, choices, buckets, kTypes[turn % std::size(kTypes)],
                       widths[turn % widths.size()], universe});
    }
  }
  return forms;
}

// Of all forms every policy but one, with one candidate and with two.
inline std::vector<Form> some_of(const std::vector<Form>& forms) {
  std::vector<Form> some;
  for (size_t i = 0; i < forms.size(); i += 3) some.push_back(forms[i]);
  return some;
}

// Twelve buckets; two batches that fill them, then some new keys for each, or just too few or enough for
// victims to be found for all buckets (Upsert::notes_victims).
inline std::vector<Form> full_forms() {
  return {{Policy::kLru, 2, 12, RowType::kFloat32, 4, 100000, true},
          {Policy::kCustom, 2, 12, RowType::kFloat32, 4, 100000, true},
          {Policy::kEpochLfu, 1, 12, RowType::kFloat32, 4, 100000, true},
          {Policy::kLru, 1, 12, RowType::kFloat32, 4, 100000, true}};
}
inline std::vector<int64_t> full_batches(int64_t count) {
  constexpr int64_t kSizes[] = {40, 5, 6};
  std::vector<int64_t> batches = {2500, 2500};
  for (int64_t i = 2; i < count; ++i)
    batches.push_back(kSizes[static_cast<size_t>(i - 2) % std::size(kSizes)]);
  return batches;
}

// Many more keys than the bucket has lanes: most are refused, those of the third batch for their scores, by
// the stretch.
inline std::vector<Form> crowded_forms() {
  return {{Policy::kCustom, 1, 1, RowType::kFloat32, 4, 50000, true}};
}
inline const std::vector<int64_t> kCrowdedBatches = {700, 40, 1300};

inline void run_scenarios(Together& machines, Checks& checks, const std::vector<Form>& forms,
                          const std::vector<int64_t>& batches, uint64_t seed) {
  for (const Form& form : forms) {
    Scenario scenario(machines, checks, form, seed++);
    for (int64_t n : batches) scenario.round(n);
  }
}

}  // namespace hkv::testing
