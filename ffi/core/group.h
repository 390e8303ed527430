// A group of workers: a single thread, or a tile of a warp. Algorithms are written over the concept Group;
// all members call the same functions. Where they share one bucket or one key, they give the same arguments
// and get the same results; where every member brings its own, the work is shared and each gets its result.
#pragma once

#include "core/types.h"

#if defined(__SSE2__) && !defined(__CUDACC__)
#include <emmintrin.h>
#elif defined(__aarch64__) && !defined(__CUDACC__)
#include <arm_neon.h>
#endif

namespace hkv {

// A set of lanes of one bucket. (Words are chosen by a comparison: an index that is known only at run time
// would put them into memory.) Read and written at once.
struct alignas(16) LaneMask {
  uint64_t words[2] = {0, 0};

  HKV_HOST_DEVICE bool any() const { return (words[0] | words[1]) != 0; }
  HKV_HOST_DEVICE bool has(int lane) const { return ((lane < 64 ? words[0] : words[1]) & bit(lane)) != 0; }
  HKV_HOST_DEVICE int lowest() const {
    return words[0] ? count_trailing_zeros(words[0]) : 64 + count_trailing_zeros(words[1]);
  }
  HKV_HOST_DEVICE int count() const { return count_ones(words[0]) + count_ones(words[1]); }
  HKV_HOST_DEVICE LaneMask others() const { return {{~words[0], ~words[1]}}; }
  HKV_HOST_DEVICE void add(int lane) {
    words[0] |= lane < 64 ? bit(lane) : 0;
    words[1] |= lane < 64 ? 0 : bit(lane);
  }
  HKV_HOST_DEVICE void add(const LaneMask& lanes) {
    words[0] |= lanes.words[0];
    words[1] |= lanes.words[1];
  }
  HKV_HOST_DEVICE void remove(int lane) {
    words[0] &= ~(lane < 64 ? bit(lane) : 0);
    words[1] &= ~(lane < 64 ? 0 : bit(lane));
  }

 private:
  static HKV_HOST_DEVICE uint64_t bit(int lane) { return uint64_t{1} << (lane & 63); }
};

// An entry by its rank among victims: the lowest (score, lane) goes first; lane -1: none. Lanes of a second
// bucket follow those of the first.
struct Candidate {
  Score score = ~Score{0};
  int lane = -1;

  // Between highest scores it means nothing: lowest_score looks at the masks then. Without branches,
  // which members of a tile would have to come back from.
  HKV_HOST_DEVICE bool goes_before(const Candidate& other) const {
    return (score < other.score) | ((score == other.score) & (lane < other.lane));
  }
};

// A key that a member looks for in a bucket.
struct Probe {
  bool is_wanted = false;  // else nothing is looked for
  int64_t bucket = 0;
  Digest code = kEmpty;
  Key key = 0;
};

template <class G>
concept Group = requires(const G group, const Digest* line, const Words* words,
                         const typename G::Scores (&scores)[2], const LaneMask (&masks)[2], const Probe probe,
                         char* to, const char* from, Slot row, int64_t bytes) {
  { group.rank() };                   // this member
  { group.size() };                   // members
  { group.sync() };                   // what members wrote before it, all read after it
  { group.ballot(true) };             // one bit for each member: what it brings
  { group.broadcast(0, 0) };          // what one member brings
  { group.minimum(0) };               // the least of what they bring
  { group.maximum(Score{0}) };        // the greatest
  { group.scores_of(words) };         // a bucket's scores, read
  { group.lowest_score(scores, masks) };  // of one or more buckets, the first victim outside the masks
  { group.oldest_of(scores[0], masks[0], Score{0}) };  // outside a mask, those of lower scores
  { group.match_each(line, probe) };  // every member's own bucket: the lanes of the digest
  { group.find_each(line, words, probe) };         // every member's own key: its lane in its bucket, or -1
  { group.copy_each(to, row, from, row, bytes) };  // every member's own row: from one number to another
};

// One thread.
struct SerialGroup {
  static constexpr HKV_HOST_DEVICE int rank() { return 0; }
  static constexpr HKV_HOST_DEVICE int size() { return 1; }
  static HKV_HOST_DEVICE void sync() {}

  static HKV_HOST_DEVICE LaneMask match(const Digest* line, Digest code) {
    LaneMask mask;
#if defined(__SSE2__) && !defined(__CUDACC__)
    constexpr int kVector = 16;
    // Not _mm_set1_epi8: GCC 12 reads four bytes of the stack right after one of them was written.
    const __m128i codes = _mm_set1_epi32(static_cast<int>(uint32_t{code} * 0x01010101u));
    for (int part = 0; part < kLanes / kVector; ++part) {
      const __m128i lanes = _mm_load_si128(reinterpret_cast<const __m128i*>(line) + part);
      const auto bits =
          static_cast<uint64_t>(static_cast<uint32_t>(_mm_movemask_epi8(_mm_cmpeq_epi8(lanes, codes))));
      mask.words[part >> 2] |= bits << ((part & 3) * kVector);
    }
#elif defined(__aarch64__) && !defined(__CUDACC__)
    // Of eight neighbours each equal one leaves another bit, and sums of neighbours join them.
    constexpr Digest kBits[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint8x16_t bits = vld1q_u8(kBits);
    const uint8x16_t codes = vdupq_n_u8(code);
    const auto equal = [&](int part) { return vandq_u8(vceqq_u8(vld1q_u8(line + 16 * part), codes), bits); };
    for (int word = 0; word < kLanes / 64; ++word) {
      const uint8x16_t low = vpaddq_u8(equal(4 * word), equal(4 * word + 1));
      const uint8x16_t high = vpaddq_u8(equal(4 * word + 2), equal(4 * word + 3));
      const uint8x16_t pairs = vpaddq_u8(low, high);
      mask.words[word] = vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(pairs, pairs)), 0);
    }
#else
    for (int lane = 0; lane < kLanes; ++lane) {
      mask.words[lane >> 6] |= uint64_t{line[lane] == code} << (lane & 63);
    }
#endif
    return mask;
  }

  static HKV_HOST_DEVICE uint32_t ballot(bool flag) { return flag ? 1 : 0; }
  static HKV_HOST_DEVICE int broadcast(int value, int) { return value; }
  static HKV_HOST_DEVICE int minimum(int value) { return value; }
  static HKV_HOST_DEVICE Score maximum(Score value) { return value; }

  static HKV_HOST_DEVICE LaneMask match_each(const Digest* digests, const Probe& probe) {
    return probe.is_wanted ? match(digests + probe.bucket * kLanes, probe.code) : LaneMask{};
  }

  // The lane of a key among some of its bucket, or -1.
  static HKV_HOST_DEVICE int find(const Words* keys, LaneMask lanes, Key key) {
    while (lanes.any()) {
      const int lane = lanes.lowest();
      if (keys[lane].value() == key) return lane;
      lanes.remove(lane);
    }
    return -1;
  }

  static HKV_HOST_DEVICE int find_each(const Digest* digests, const Words* keys, const Probe& probe) {
    return find(keys + probe.bucket * kLanes, match_each(digests, probe), probe.key);
  }

  using Scores = const Words*;
  static HKV_HOST_DEVICE Scores scores_of(const Words* scores) { return scores; }

  template <int kBuckets>
  static HKV_HOST_DEVICE Candidate lowest_score(const Scores (&scores)[kBuckets],
                                                const LaneMask (&excluded)[kBuckets]) {
    Candidate best;
    for (int bucket = 0; bucket < kBuckets; ++bucket) {
      for (int word = 0; word < 2; ++word) {
        for (uint64_t left = excluded[bucket].others().words[word]; left != 0; left &= left - 1) {
          const int lane = word * 64 + count_trailing_zeros(left);
          const Score score = scores[bucket][lane].value();
          if (best.lane < 0 || score < best.score) best = {score, bucket * kLanes + lane};
        }
      }
    }
    return best;
  }

  // In one pass: most lanes are higher than the last of the lowest ones so far.
  static HKV_HOST_DEVICE Oldest oldest_of(Scores scores, const LaneMask& excluded, Score time) {
    Candidate lowest[Oldest::kMost + 1];
    int count = 0;
    for (int word = 0; word < 2; ++word) {
      for (uint64_t left = excluded.others().words[word]; left != 0; left &= left - 1) {
        const int lane = word * 64 + count_trailing_zeros(left);
        const Score score = scores[lane].value();
        if (score >= (count < Oldest::kMost ? time : lowest[Oldest::kMost - 1].score)) continue;
        if (time - score >= Oldest::kTooOld) return {time, 0};
        int place = count;
        for (; place > 0 && score < lowest[place - 1].score; --place) lowest[place] = lowest[place - 1];
        lowest[place] = {score, lane};
        count += count < Oldest::kMost ? 1 : 0;
      }
    }
    Oldest oldest = {time, 0};
    for (int place = 0; place < count; ++place) oldest.put(place, lowest[place].lane);
    return oldest;
  }

  static HKV_HOST_DEVICE void copy_each(char* to, Slot target, const char* from, Slot source, int64_t bytes) {
    if (target < 0 || source < 0) return;
    memcpy(to + target * bytes, from + source * bytes, static_cast<size_t>(bytes));
  }

  template <class Term>
  static HKV_HOST_DEVICE uint64_t saturating_sum(int64_t count, Term term) {
    uint64_t sum = 0;
    HKV_ROLLED for (int64_t i = 0; i < count; ++i) sum = saturating_add(sum, term(i));
    return sum;
  }
};

// A tile of kSize threads of a warp. Lane gives the rank and what members tell each other; on the
// device it is shuffles and votes, in tests/cpp it is host threads.
template <int kSize, class Lane>
struct TileGroup {
  static_assert(kSize >= 4 && kSize <= 32 && (kSize & (kSize - 1)) == 0,
                "the digest line is cut into words of 4 bytes and more");
  Lane lane;

  HKV_HOST_DEVICE int rank() const { return lane.rank(); }
  static constexpr HKV_HOST_DEVICE int size() { return kSize; }
  HKV_HOST_DEVICE void sync() const { lane.sync(); }

  HKV_HOST_DEVICE uint32_t ballot(bool flag) const { return lane.ballot(flag); }
  HKV_HOST_DEVICE int broadcast(int value, int from) const { return lane.broadcast(value, from); }
  HKV_HOST_DEVICE int minimum(int value) const {
    return joined(value, [](int a, int b) { return b < a ? b : a; });
  }
  HKV_HOST_DEVICE Score maximum(Score value) const {
    return joined(value, [](Score a, Score b) { return b > a ? b : a; });
  }

  // The matches of every member's own probe. A bucket's digests are compared by all members, a share each;
  // so every member holds a share of every member's matches, and they exchange them: blocks of a square
  // are transposed, halves of it at first, then halves of those.
  HKV_HOST_DEVICE LaneMask match_each(const Digest* digests, const Probe& probe) const {
    const uint32_t wanted = ballot(probe.is_wanted);
    if (wanted == 0) return {};
    // A table has fewer than 2^24 buckets (slots are int32). Who wants nothing repeats another's probe.
    const auto packed = static_cast<int>(static_cast<uint32_t>(probe.bucket) << 8 | probe.code);
    const int own = lane.broadcast(packed, probe.is_wanted ? rank() : count_trailing_zeros(wanted));
    int asked[kSize];
    Share shares[kSize];
    for (int member = 0; member < kSize; ++member) {
      asked[member] = lane.broadcast(own, member);
      shares[member] =
          share_of(digests + static_cast<int64_t>(static_cast<uint32_t>(asked[member]) >> 8) * kLanes);
    }
    uint32_t words[kLanes / kWord] = {};
    for (int member = 0; member < kSize; ++member) {
      const uint32_t matches = matches_in(shares[member], static_cast<Digest>(asked[member] & 0xff));
      words[member * kShare / kWord] |= matches << (member * kShare % kWord);
    }
    transpose<kSize / 2>(words);
    if (!probe.is_wanted) return {};
    return {{words[0] | uint64_t{words[1]} << kWord, words[2] | uint64_t{words[3]} << kWord}};
  }

  // All buckets' digests are on their way at once; then each member compares the keys of its own bucket,
  // two at a time, since a second one matches in every third full bucket.
  HKV_HOST_DEVICE int find_each(const Digest* digests, const Words* keys, const Probe& probe) const {
    LaneMask matches = match_each(digests, probe);
    const Words* own = keys + probe.bucket * kLanes;
    int found = -1;
    while (found < 0 && matches.any()) {
      const int first = matches.lowest();
      matches.remove(first);
      const int second = matches.any() ? matches.lowest() : first;
      matches.remove(second);
      const Key first_key = own[first].value();
      const Key second_key = own[second].value();
      if (first_key == probe.key) found = first;
      if (second_key == probe.key) found = second;
    }
    return found;
  }

  // Scores that lie side by side, read at once; a bucket's are on their way together.
  struct alignas(16) Pair {
    Words scores[2];
  };
  struct Scores {
    Pair pairs[kLanes / kSize / 2];
  };

  HKV_HOST_DEVICE Scores scores_of(const Words* scores) const {
    Scores own;
    for (int pair = 0; pair < kLanes / kSize / 2; ++pair) {
      own.pairs[pair] = reinterpret_cast<const Pair*>(scores)[pair * kSize + rank()];
    }
    return own;
  }

  template <int kBuckets>
  HKV_HOST_DEVICE Candidate lowest_score(const Scores (&scores)[kBuckets],
                                         const LaneMask (&excluded)[kBuckets]) const {
    const int own = 2 * rank();  // this member's lanes: those and the next, and again 2 kSize further
    Candidate best;              // of lanes that come in order: the first of equal scores stays
    for (int bucket = 0; bucket < kBuckets; ++bucket) {
      const uint64_t outside[2] = {excluded[bucket].words[0] >> own, excluded[bucket].words[1] >> own};
      for (int pair = 0; pair < kLanes / kSize / 2; ++pair) {
        for (int half = 0; half < 2; ++half) {
          const int lane_of = 2 * pair * kSize + half;
          const auto bits = static_cast<uint32_t>(outside[lane_of / 64] >> (lane_of % 64 & 32));
          const bool is_in = (bits & uint32_t{1} << lane_of % 32) == 0;
          const Score score = scores[bucket].pairs[pair].scores[half].value();
          const bool is_lower = is_in & (score < best.score);
          best.score = is_lower ? score : best.score;
          best.lane = is_lower ? bucket * kLanes + lane_of : best.lane;
        }
      }
    }
    best.lane += own;  // where there is none: a lane that nobody looks at
    for (int step = kSize / 2; step > 0; step /= 2) {
      Candidate other;
      other.score = lane.exchange(best.score, step);
      other.lane = lane.exchange(best.lane, step);
      const bool is_better = other.goes_before(best);
      best.score = is_better ? other.score : best.score;
      best.lane = is_better ? other.lane : best.lane;
    }
    return best.score == Candidate{}.score ? first_outside(excluded) : best;
  }

  // By ranks of 32 bits, age and lane, of which none is like another: who comes next has a lower one. The
  // highest of each part of a member's is kept, so that few are compared again.
  HKV_HOST_DEVICE Oldest oldest_of(const Scores& scores, const LaneMask& excluded, Score time) const {
    constexpr uint32_t kTooHigh = Oldest::kTooOld * kLanes;
    const int own = 2 * rank();
    const uint64_t outside[2] = {excluded.words[0] >> own, excluded.words[1] >> own};
    uint32_t ranks[kLanes / kSize];
    for (int pair = 0; pair < kLanes / kSize / 2; ++pair) {
      for (int half = 0; half < 2; ++half) {
        const int lane_of = 2 * pair * kSize + half;
        const auto bits = static_cast<uint32_t>(outside[lane_of / 64] >> (lane_of % 64 & 32));
        const Score score = scores.pairs[pair].scores[half].value();
        const bool is_in = ((bits & uint32_t{1} << lane_of % 32) == 0) & (score < time);
        const uint64_t age = time - score;
        const uint32_t place =
            (age < Oldest::kTooOld ? static_cast<uint32_t>(age) : Oldest::kTooOld) * kLanes;
        ranks[2 * pair + half] = is_in ? place + static_cast<uint32_t>(kLanes - 1 - lane_of - own) : 0;
      }
    }
    const auto higher = [](uint32_t a, uint32_t b) { return b > a ? b : a; };
    constexpr int kParts = 4, kOfPart = kLanes / kSize / kParts;
    uint32_t highest[kParts] = {};
    for (int i = 0; i < kLanes / kSize; ++i) highest[i / kOfPart] = higher(highest[i / kOfPart], ranks[i]);
    Oldest oldest = {time, 0};
    HKV_ROLLED for (int place = 0; place < Oldest::kMost; ++place) {
      const uint32_t own_next = higher(higher(highest[0], highest[1]), higher(highest[2], highest[3]));
      const uint32_t next = joined(own_next, higher);
      if (next == 0 || next >= kTooHigh) break;
      oldest.put(place, kLanes - 1 - static_cast<int>(next % kLanes));
      for (int part = 0; part < kParts; ++part) {
        if (highest[part] != next) continue;
        highest[part] = 0;
        for (uint32_t* rank = ranks + part * kOfPart; rank != ranks + (part + 1) * kOfPart; ++rank) {
          if (*rank == next) *rank = 0;
          highest[part] = higher(highest[part], *rank);
        }
      }
    }
    return oldest;
  }

  // 2^this many members share a row of so many units: as many as it has, or a few more, so that narrow rows
  // go side by side.
  static HKV_HOST_DEVICE int sharing(int64_t units) {
    int shift = 0;
    while ((2 << shift) <= kSize && (1 << shift) < units) ++shift;
    return shift;
  }

  HKV_HOST_DEVICE void copy_each(char* to, Slot target, const char* from, Slot source, int64_t bytes) const {
    if (ballot(target >= 0 && source >= 0) == 0) return;
    const auto alignment =
        reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | static_cast<uintptr_t>(bytes);
    if (alignment % sizeof(Vector) == 0) {
      copy_each_as<Vector>(to, target, from, source, bytes);
    } else if (alignment % 4 == 0) {
      copy_each_as<uint32_t>(to, target, from, source, bytes);
    } else if (alignment % 2 == 0) {
      copy_each_as<uint16_t>(to, target, from, source, bytes);
    } else {
      copy_each_as<uint8_t>(to, target, from, source, bytes);
    }
  }

  // Every member's own row, in so many units, of whatever the move makes: several rows are read before the
  // first of them is written.
  template <int kInFlight, class Move>
  HKV_HOST_DEVICE void move_each(const Move& move, Slot target, Slot source, int64_t units) const {
    const int shift = sharing(units);
    const int rows = kSize >> shift;
    HKV_ROLLED for (int begin = 0; begin < kSize; begin += kInFlight * rows) {
      decltype(move.source(source)) sources[kInFlight];
      decltype(move.target(target)) targets[kInFlight];
      for (int k = 0; k < kInFlight; ++k) {
        const int member = begin + k * rows + (rank() >> shift);
        const int own_source = lane.broadcast(source, member % kSize);
        const int own_target = lane.broadcast(target, member % kSize);
        const bool exists = member < kSize && own_source >= 0 && own_target >= 0;
        sources[k] = exists ? move.source(own_source) : nullptr;
        targets[k] = move.target(own_target);
      }
      const int64_t step = int64_t{1} << shift;
      HKV_ROLLED for (int64_t unit = rank() & (step - 1); unit < units; unit += step) {
        typename Move::Held held[kInFlight];
        for (int k = 0; k < kInFlight; ++k) {
          if (sources[k] != nullptr) held[k] = move.load(sources[k], unit);
        }
        for (int k = 0; k < kInFlight; ++k) {
          if (sources[k] != nullptr) move.store(targets[k], unit, held[k]);
        }
      }
    }
  }

  template <class Term>
  HKV_HOST_DEVICE uint64_t saturating_sum(int64_t count, Term term) const {
    uint64_t sum = 0;
    HKV_ROLLED for (int64_t i = rank(); i < count; i += kSize) sum = saturating_add(sum, term(i));
    return joined(sum, [](uint64_t a, uint64_t b) { return saturating_add(a, b); });
  }

 private:
  // Of all members' values one, the same for each.
  template <class Value, class Join>
  HKV_HOST_DEVICE Value joined(Value value, Join join) const {
    for (int step = kSize / 2; step > 0; step /= 2) value = join(value, lane.exchange(value, step));
    return value;
  }

  struct alignas(16) Vector {
    uint32_t words[4];
  };

  template <class Unit>
  struct CopyUnits {
    using Held = Unit;
    char* to;
    const char* from;
    int64_t bytes;

    HKV_HOST_DEVICE const Unit* source(Slot row) const {
      return reinterpret_cast<const Unit*>(from + row * bytes);
    }
    HKV_HOST_DEVICE Unit* target(Slot row) const { return reinterpret_cast<Unit*>(to + row * bytes); }
    HKV_HOST_DEVICE Unit load(const Unit* row, int64_t unit) const { return row[unit]; }
    HKV_HOST_DEVICE void store(Unit* row, int64_t unit, const Unit& held) const { row[unit] = held; }
  };

  template <class Unit>
  HKV_HOST_DEVICE void copy_each_as(char* to, Slot target, const char* from, Slot source,
                                    int64_t bytes) const {
    constexpr int kInFlight = sizeof(Unit) == sizeof(Vector) ? 4 : 1;
    move_each<kInFlight>(CopyUnits<Unit>{to, from, bytes}, target, source,
                         bytes / static_cast<int64_t>(sizeof(Unit)));
  }

  // Where all scores are the highest, or excluded.
  template <int kBuckets>
  static HKV_HOST_DEVICE Candidate first_outside(const LaneMask (&excluded)[kBuckets]) {
    Candidate first;
    for (int bucket = kBuckets - 1; bucket >= 0; --bucket) {
      const LaneMask rest = excluded[bucket].others();
      if (rest.any()) first.lane = bucket * kLanes + rest.lowest();
    }
    return first;
  }

  static constexpr int kShare = kLanes / kSize;  // consecutive lanes of a bucket for each member
  struct alignas(kShare) Share {
    uint32_t words[kShare / 4];
  };

  // This member's share of a bucket's digests.
  HKV_HOST_DEVICE Share share_of(const Digest* line) const {
    return reinterpret_cast<const Share*>(line)[rank()];
  }

  static constexpr int kWord = 32;  // bits

  // From one member's share of everyone's matches to everyone's share of one member's matches. (A recursion,
  // since the compiler leaves a loop over steps rolled up and divides in it.)
  template <int kStep>
  HKV_HOST_DEVICE void transpose(uint32_t (&words)[kLanes / kWord]) const {
    if constexpr (kStep > 0) {
      const bool is_upper = (rank() & kStep) != 0;
      constexpr int kHalf = kStep * kShare;  // bits
      if constexpr (kHalf >= kWord) {
        constexpr int kStride = kHalf / kWord;
        for (int word = 0; word < kLanes / kWord; ++word) {
          if (word & kStride) continue;
          const uint32_t got = lane.exchange(is_upper ? words[word] : words[word + kStride], kStep);
          words[word] = is_upper ? got : words[word];
          words[word + kStride] = is_upper ? words[word + kStride] : got;
        }
      } else {
        constexpr uint32_t kLow = ~uint32_t{0} / ((uint32_t{1} << kHalf) + 1);  // lower halves of a word
        for (int word = 0; word < kLanes / kWord; word += 2) {
          const uint32_t a = words[word];
          const uint32_t b = words[word + 1];
          const uint32_t given =
              is_upper ? (a & kLow) | (b & kLow) << kHalf : (a >> kHalf & kLow) | (b & ~kLow);
          const uint32_t got = lane.exchange(given, kStep);
          words[word] = is_upper ? (a & ~kLow) | (got & kLow) : (a & kLow) | (got & kLow) << kHalf;
          words[word + 1] = is_upper ? (b & ~kLow) | (got >> kHalf & kLow) : (b & kLow) | (got & ~kLow);
        }
      }
      transpose<kStep / 2>(words);
    }
  }

  // One bit for each lane of a share whose digest is the given one.
  static HKV_HOST_DEVICE uint32_t matches_in(const Share& share, Digest code) {
    uint32_t bits = 0;
    for (int word = 0; word < kShare / 4; ++word) bits |= equal_bytes(share.words[word], code) << (4 * word);
    return bits;
  }

  // One bit for each of the four bytes of a word, set where the byte is the code. Bytes that differ from
  // it carry into their highest bit; the product moves the four highest bits, inverted, side by side.
  static HKV_HOST_DEVICE uint32_t equal_bytes(uint32_t word, Digest code) {
    constexpr uint32_t kSeven = 0x7f7f7f7f;
    const uint32_t difference = word ^ (uint32_t{0x01010101} * code);
    const uint32_t equal = ~(((difference & kSeven) + kSeven) | difference | kSeven);
    return (equal * uint32_t{0x00204081}) >> 28;
  }
};

}  // namespace hkv
