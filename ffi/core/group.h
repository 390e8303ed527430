// A group of workers that share one bucket or one row: a single thread, or a tile of a warp.
// Algorithms are written over the concept Group; all members call the same functions with the same
// arguments and get the same results.
#pragma once

#include "core/types.h"

#if defined(__SSE2__) && !defined(__CUDACC__)
#include <emmintrin.h>
#endif

namespace hkv {

// A set of lanes of one bucket.
struct LaneMask {
  uint64_t words[2] = {0, 0};

  HKV_HOST_DEVICE bool any() const { return (words[0] | words[1]) != 0; }
  HKV_HOST_DEVICE int lowest() const {
    return words[0] ? count_trailing_zeros(words[0]) : 64 + count_trailing_zeros(words[1]);
  }
  HKV_HOST_DEVICE bool has(int lane) const { return ((lane < 64 ? words[0] : words[1]) >> (lane & 63)) & 1; }
  HKV_HOST_DEVICE void add(int lane) { add_from(lane, 1); }
  HKV_HOST_DEVICE void remove(int lane) {
    words[0] &= ~(lane < 64 ? bit(lane) : 0);
    words[1] &= ~(lane < 64 ? 0 : bit(lane));
  }
  // Adds up to 32 consecutive lanes of one word: the bits of `lanes`, counted from `first`. (Words are
  // chosen by a comparison: an index that is known only at run time would put them into memory.)
  HKV_HOST_DEVICE void add_from(int first, uint32_t lanes) {
    const uint64_t bits = uint64_t{lanes} << (first & 63);
    words[0] |= first < 64 ? bits : 0;
    words[1] |= first < 64 ? 0 : bits;
  }

 private:
  static HKV_HOST_DEVICE uint64_t bit(int lane) { return uint64_t{1} << (lane & 63); }
};

// An entry by its rank among victims: the lowest (score, lane) goes first; lane -1: none.
struct Candidate {
  Score score = ~Score{0};
  int lane = -1;

  HKV_HOST_DEVICE bool goes_before(const Candidate& other) const {
    if (lane < 0 || other.lane < 0) return lane >= 0;
    return score < other.score || (score == other.score && lane < other.lane);
  }
};

template <class G>
concept Group = requires(const G group, const Digest* line, const Words* words, LaneMask mask, void* to,
                         const void* from, int64_t size) {
  { group.rank() };                                     // this member
  { group.size() };                                     // members
  { group.match(line, Digest{0}) };                     // the lanes whose digest is the given one
  { group.find(line, words, Digest{0}, Key{0}) };       // the lane of the key with this digest, or -1
  { group.lowest_score(words, mask) };                  // the first victim outside the mask
  { group.copy(to, from, size) };                       // bytes, shared among the members
  { group.sync() };
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
    const __m128i codes = _mm_set1_epi8(static_cast<char>(code));
    for (int part = 0; part < kLanes / kVector; ++part) {
      const __m128i lanes = _mm_load_si128(reinterpret_cast<const __m128i*>(line) + part);
      const auto bits =
          static_cast<uint64_t>(static_cast<uint32_t>(_mm_movemask_epi8(_mm_cmpeq_epi8(lanes, codes))));
      mask.words[part >> 2] |= bits << ((part & 3) * kVector);
    }
#else
    for (int lane = 0; lane < kLanes; ++lane) {
      mask.words[lane >> 6] |= uint64_t{line[lane] == code} << (lane & 63);
    }
#endif
    return mask;
  }

  static HKV_HOST_DEVICE int find(const Digest* line, const Words* keys, Digest code, Key key) {
    LaneMask matches = match(line, code);
    while (matches.any()) {
      const int lane = matches.lowest();
      if (keys[lane].value() == key) return lane;
      matches.remove(lane);
    }
    return -1;
  }

  static HKV_HOST_DEVICE Candidate lowest_score(const Words* scores, const LaneMask& excluded) {
    Candidate best;
    for (int word = 0; word < 2; ++word) {
      for (uint64_t left = ~excluded.words[word]; left != 0; left &= left - 1) {
        const int lane = word * 64 + count_trailing_zeros(left);
        const Score score = scores[lane].value();
        if (best.lane < 0 || score < best.score) best = {score, lane};
      }
    }
    return best;
  }

  static HKV_HOST_DEVICE void copy(void* to, const void* from, int64_t bytes) {
    memcpy(to, from, static_cast<size_t>(bytes));
  }

  template <class Term>
  static HKV_HOST_DEVICE uint64_t saturating_sum(int64_t count, Term term) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < count; ++i) sum = saturating_add(sum, term(i));
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

  HKV_HOST_DEVICE LaneMask match(const Digest* line, Digest code) const {
    LaneMask mask;
    mask.add_from(rank() * kShare, own_matches(line, code));
    for (int step = kSize / 2; step > 0; step /= 2) {
      mask.words[0] |= lane.exchange(mask.words[0], step);
      mask.words[1] |= lane.exchange(mask.words[1], step);
    }
    return mask;
  }

  // Each member compares the keys of its own lanes: one has the key, or none.
  HKV_HOST_DEVICE int find(const Digest* line, const Words* keys, Digest code, Key key) const {
    int found = -1;
    for (uint32_t left = own_matches(line, code); left != 0; left &= left - 1) {
      const int candidate = rank() * kShare + count_trailing_zeros(left);
      if (keys[candidate].value() == key) found = candidate;
    }
    const uint32_t finders = lane.ballot(found >= 0);
    return finders == 0 ? -1 : lane.broadcast(found, count_trailing_zeros(finders));
  }

  HKV_HOST_DEVICE Candidate lowest_score(const Words* scores, const LaneMask& excluded) const {
    Candidate best;
    for (int candidate = rank(); candidate < kLanes; candidate += kSize) {
      if (excluded.has(candidate)) continue;
      const Candidate found{scores[candidate].value(), candidate};
      if (found.goes_before(best)) best = found;
    }
    for (int step = kSize / 2; step > 0; step /= 2) {
      Candidate other;
      other.score = lane.exchange(best.score, step);
      other.lane = lane.exchange(best.lane, step);
      if (other.goes_before(best)) best = other;
    }
    return best;
  }

  HKV_HOST_DEVICE void copy(void* to, const void* from, int64_t bytes) const {
    const auto alignment =
        reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | static_cast<uintptr_t>(bytes);
    if (alignment % sizeof(Vector) == 0) {
      copy_as<Vector>(to, from, bytes);
    } else if (alignment % 4 == 0) {
      copy_as<uint32_t>(to, from, bytes);
    } else {
      copy_as<uint8_t>(to, from, bytes);
    }
  }

  template <class Term>
  HKV_HOST_DEVICE uint64_t saturating_sum(int64_t count, Term term) const {
    uint64_t sum = 0;
    for (int64_t i = rank(); i < count; i += kSize) sum = saturating_add(sum, term(i));
    for (int step = kSize / 2; step > 0; step /= 2) {
      sum = saturating_add(sum, lane.exchange(sum, step));
    }
    return sum;
  }

 private:
  struct alignas(16) Vector {
    uint32_t words[4];
  };

  template <class Unit>
  HKV_HOST_DEVICE void copy_as(void* to, const void* from, int64_t bytes) const {
    const auto units = bytes / static_cast<int64_t>(sizeof(Unit));
    for (int64_t i = rank(); i < units; i += kSize) {
      static_cast<Unit*>(to)[i] = static_cast<const Unit*>(from)[i];
    }
  }

  static constexpr int kShare = kLanes / kSize;  // consecutive lanes of a bucket for each member
  struct alignas(kShare) Share {
    uint32_t words[kShare / 4];
  };

  // One bit for each lane of this member's share whose digest is the given one.
  HKV_HOST_DEVICE uint32_t own_matches(const Digest* line, Digest code) const {
    const Share share = reinterpret_cast<const Share*>(line)[rank()];
    uint32_t bits = 0;
    for (int word = 0; word < kShare / 4; ++word) bits |= equal_bytes(share.words[word], code) << (4 * word);
    return bits;
  }

  // One bit for each of the four bytes of a word, set where the byte is the code. Bytes that differ from
  // it carry into their highest bit; the product moves the four highest bits, inverted, side by side.
  static HKV_HOST_DEVICE uint32_t equal_bytes(uint32_t word, Digest code) {
    constexpr uint32_t kLow = 0x7f7f7f7f;
    const uint32_t difference = word ^ (uint32_t{0x01010101} * code);
    const uint32_t equal = ~(((difference & kLow) + kLow) | difference | kLow);
    return (equal * uint32_t{0x00204081}) >> 28;
  }
};

}  // namespace hkv
