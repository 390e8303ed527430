// What differs between host and device compilers, and nothing else.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define HKV_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define HKV_HOST_DEVICE inline __attribute__((always_inline))
#endif

// Of a lambda: a part of what calls it, where compilers would make a function of it.
#ifdef __CUDACC__
#define HKV_INLINE
#else
#define HKV_INLINE __attribute__((always_inline))
#endif

// Before a loop: no turn of it writes what another one reads.
#if defined(__CUDACC__)
#define HKV_INDEPENDENT
#elif defined(__clang__)
#define HKV_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define HKV_INDEPENDENT _Pragma("GCC ivdep")
#endif

// Before a loop: its turns' arrays belong into registers, however much a turn does.
#ifdef __CUDA_ARCH__
#define HKV_UNROLLED _Pragma("unroll")
#else
#define HKV_UNROLLED
#endif

// Before a loop: what a turn does is enough for the machine to be busy with.
#ifdef __CUDA_ARCH__
#define HKV_ROLLED _Pragma("unroll 1")
#else
#define HKV_ROLLED
#endif

namespace hkv {

// Adds to a counter that other workers add to as well. Addition of integers commutes, so the final
// value does not depend on their order.
template <class Number>
HKV_HOST_DEVICE void atomic_add(Number* address, Number amount) {
#ifdef __CUDA_ARCH__
  atomicAdd(address, amount);
#else
  __atomic_fetch_add(address, amount, __ATOMIC_RELAXED);
#endif
}

// Sets bits in a word that other workers set bits in as well; what it was.
HKV_HOST_DEVICE uint32_t atomic_or(uint32_t* address, uint32_t bits) {
#ifdef __CUDA_ARCH__
  return atomicOr(address, bits);
#else
  return __atomic_fetch_or(address, bits, __ATOMIC_RELAXED);
#endif
}

// A word that other workers may be writing to.
template <class Number>
HKV_HOST_DEVICE Number atomic_read(const Number* address) {
#ifdef __CUDA_ARCH__
  return __ldcg(address);
#else
  return __atomic_load_n(address, __ATOMIC_RELAXED);
#endif
}

// Writes `value` if the word is `expected`; what it was.
HKV_HOST_DEVICE uint64_t atomic_compare_and_swap(uint64_t* address, uint64_t expected, uint64_t value) {
#ifdef __CUDA_ARCH__
  return atomicCAS(reinterpret_cast<unsigned long long*>(address), expected, value);
#else
  __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
#endif
}

HKV_HOST_DEVICE void atomic_max(uint32_t* address, uint32_t value) {
#ifdef __CUDA_ARCH__
  atomicMax(address, value);
#else
  uint32_t found = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (found < value &&
         !__atomic_compare_exchange_n(address, &found, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
#endif
}

// The high 64 bits of the 128-bit product.
HKV_HOST_DEVICE uint64_t multiply_high(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
#endif
}

// The number of zeros below the lowest set bit; the argument is not zero.
HKV_HOST_DEVICE int count_trailing_zeros(uint64_t bits) {
#ifdef __CUDA_ARCH__
  return __ffsll(static_cast<long long>(bits)) - 1;
#else
  return __builtin_ctzll(bits);
#endif
}

HKV_HOST_DEVICE int count_ones(uint64_t bits) {
#ifdef __CUDA_ARCH__
  return __popcll(bits);
#else
  return __builtin_popcountll(bits);
#endif
}

inline constexpr bool kToWrite = true;

// Hints that a cache line will be read soon, or written: another thread may have it, and a store would wait
// for that one to give it up. The device hides latency by other warps. What calls it must be always inline
// too: GCC 12 drops calls of a function that does nothing but hint.
template <bool kIsToWrite = false>
HKV_HOST_DEVICE void prefetch(const void* address) {
#if defined(__CUDA_ARCH__)
  (void)address;
#elif defined(__x86_64__) && !defined(__CUDACC__)
  // Compilers know this instruction for newer processors only; old ones pass it over.
  if constexpr (kIsToWrite) {
    asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(address)));
  } else {
    __builtin_prefetch(address);
  }
#else
  __builtin_prefetch(address, kIsToWrite ? 1 : 0);
#endif
}

template <class To, class From>
HKV_HOST_DEVICE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// Words of 4 bytes from and to memory: on the device 4 of them are one access where the address allows it,
// or 2 if there are no more.
template <int kCount, class Word>
HKV_HOST_DEVICE void load_words(const Word* from, Word* to) {
  static_assert(sizeof(Word) == 4 && (kCount == 2 || kCount % 4 == 0));
#ifdef __CUDA_ARCH__
  const auto address = reinterpret_cast<uintptr_t>(from);
  if constexpr (kCount == 2) {
    if (address % sizeof(uint2) == 0) {
      const uint2 two = *reinterpret_cast<const uint2*>(from);
      to[0] = bit_cast<Word>(two.x);
      to[1] = bit_cast<Word>(two.y);
      return;
    }
  } else if (address % sizeof(uint4) == 0) {
    for (int i = 0; i < kCount; i += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(from + i);
      to[i] = bit_cast<Word>(four.x);
      to[i + 1] = bit_cast<Word>(four.y);
      to[i + 2] = bit_cast<Word>(four.z);
      to[i + 3] = bit_cast<Word>(four.w);
    }
    return;
  }
#endif
  for (int i = 0; i < kCount; ++i) to[i] = from[i];
}
template <int kCount, class Word>
HKV_HOST_DEVICE void store_words(Word* to, const Word* from) {
  static_assert(sizeof(Word) == 4 && (kCount == 2 || kCount % 4 == 0));
#ifdef __CUDA_ARCH__
  const auto word = [from](int i) { return bit_cast<uint32_t>(from[i]); };
  const auto address = reinterpret_cast<uintptr_t>(to);
  if constexpr (kCount == 2) {
    if (address % sizeof(uint2) == 0) {
      *reinterpret_cast<uint2*>(to) = make_uint2(word(0), word(1));
      return;
    }
  } else if (address % sizeof(uint4) == 0) {
    for (int i = 0; i < kCount; i += 4) {
      *reinterpret_cast<uint4*>(to + i) = make_uint4(word(i), word(i + 1), word(i + 2), word(i + 3));
    }
    return;
  }
#endif
  for (int i = 0; i < kCount; ++i) to[i] = from[i];
}

// The same of 16 bits.
template <int kCount>
HKV_HOST_DEVICE void load_halves(const uint16_t* from, uint16_t* to) {
#ifdef __CUDA_ARCH__
  if (reinterpret_cast<uintptr_t>(from) % sizeof(uint32_t) == 0) {
    uint32_t words[kCount / 2];
    load_words<kCount / 2>(reinterpret_cast<const uint32_t*>(from), words);
    memcpy(to, words, sizeof(words));
    return;
  }
#endif
  for (int i = 0; i < kCount; ++i) to[i] = from[i];
}
template <int kCount>
HKV_HOST_DEVICE void store_halves(uint16_t* to, const uint16_t* from) {
#ifdef __CUDA_ARCH__
  if (reinterpret_cast<uintptr_t>(to) % sizeof(uint32_t) == 0) {
    uint32_t words[kCount / 2];
    memcpy(words, from, sizeof(words));
    return store_words<kCount / 2>(reinterpret_cast<uint32_t*>(to), words);
  }
#endif
  for (int i = 0; i < kCount; ++i) to[i] = from[i];
}

// Correctly rounded square root: sqrtf is, on the host and (without -use_fast_math) on the device.
HKV_HOST_DEVICE float square_root(float x) {
#ifdef __CUDA_ARCH__
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

}  // namespace hkv
