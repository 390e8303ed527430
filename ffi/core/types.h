// The words of the table's language, and where a key may be (docs/semantics.md, sections 1, 2 and 12).
#pragma once

#include "core/platform.h"

namespace hkv {

using Key = uint64_t;
using Score = uint64_t;
using Digest = uint8_t;
using Slot = int32_t;

inline constexpr int kLanes = 128;         // lanes of a bucket: its digests fill one 128-byte line
inline constexpr Digest kEmpty = 0;        // the digest of a lane without an entry
inline constexpr Slot kNoSlot = -1;
inline constexpr uint64_t kGolden = 0x9e3779b97f4a7c15;  // 2^64 / golden ratio (SplitMix64)

enum class Status : int32_t { kMissing, kFound, kInserted, kEvicted, kRefused };
enum class Policy : int64_t { kLru, kLfu, kEpochLru, kEpochLfu, kCustom };

// A 64-bit number as it lies in a uint32[..., 2] array: (low, high). XLA's buffers are aligned to more
// than 8 bytes, so that one access reads or writes both.
struct alignas(8) Words {
  uint32_t low;
  uint32_t high;

  HKV_HOST_DEVICE uint64_t value() const { return (static_cast<uint64_t>(high) << 32) | low; }
  HKV_HOST_DEVICE static Words of(uint64_t value) {
    return {static_cast<uint32_t>(value), static_cast<uint32_t>(value >> 32)};
  }
};
static_assert(sizeof(Words) == 8, "two uint32 words, as in the arrays");

// Of a bucket under LRU: entries that were its oldest at a time, oldest first. Whose score is lower than that
// time has not been written since, so that none outside of the list goes before it; who has been written is
// no longer meant. Four uint32 in an array; zeros: nobody.
struct alignas(16) Oldest {
  static constexpr int kMost = 8;
  static constexpr uint32_t kTooOld =
      (1 << 25) - 1;  // ticks; of a bucket with such an entry nobody is listed
  uint64_t time;
  uint64_t lanes;  // a byte for each: its lane + 1, or 0

  HKV_HOST_DEVICE int count() const {
    int count = 0;
    for (int place = 0; place < kMost; ++place) count += lane(place) < 0 ? 0 : 1;
    return count;
  }
  HKV_HOST_DEVICE int first() const { return count_trailing_zeros(lanes) / 8; }  // if there is one
  // Below kLanes whatever the array holds, which a caller may have made; -1: none.
  HKV_HOST_DEVICE int lane(int place) const {
    const auto number = static_cast<int>(lanes >> 8 * place & 0xff);
    return (number < kLanes ? number : kLanes) - 1;
  }
  HKV_HOST_DEVICE void put(int place, int lane) { lanes |= static_cast<uint64_t>(lane + 1) << 8 * place; }
  HKV_HOST_DEVICE void drop(int place) { lanes &= ~(uint64_t{0xff} << 8 * place); }
};
static_assert(sizeof(Oldest) == 16);

// The finaliser of SplitMix64 (Stafford's variant 13): a bijection of the 64-bit words.
HKV_HOST_DEVICE uint64_t mix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9;
  x ^= x >> 27;
  x *= 0x94d049bb133111eb;
  x ^= x >> 31;
  return x;
}

HKV_HOST_DEVICE uint64_t hash_of(Key key) { return mix(key + kGolden); }

// 1 to 255; kEmpty is no key's digest.
HKV_HOST_DEVICE Digest digest_of(uint64_t hash) {
  return static_cast<Digest>(1 + (((hash & 0xffff) * 255) >> 16));
}

HKV_HOST_DEVICE int64_t first_bucket(uint64_t hash, int64_t buckets) {
  return static_cast<int64_t>(multiply_high(hash, static_cast<uint64_t>(buckets)));
}

// Differs from the first, unless there is one bucket only.
HKV_HOST_DEVICE int64_t second_bucket(uint64_t hash, int64_t buckets) {
  const int64_t first = first_bucket(hash, buckets);
  if (buckets == 1) return first;
  const auto other =
      static_cast<int64_t>(multiply_high(mix(hash + kGolden), static_cast<uint64_t>(buckets - 1)));
  return other + (other >= first ? 1 : 0);
}

// Which of the devices that share a table keeps the key: by a hash of its own, so that the keys of one
// device spread over all buckets.
HKV_HOST_DEVICE int64_t owner_of(Key key, int64_t devices) {
  const uint64_t hash = mix(hash_of(key) + 2 * kGolden);
  return static_cast<int64_t>(multiply_high(hash, static_cast<uint64_t>(devices)));
}

HKV_HOST_DEVICE uint64_t saturating_add(uint64_t a, uint64_t b) {
  const uint64_t sum = a + b;
  return sum < a ? ~uint64_t{0} : sum;
}

}  // namespace hkv
