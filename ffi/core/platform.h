// What differs between host and device compilers, and nothing else.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define HKV_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define HKV_HOST_DEVICE inline __attribute__((always_inline))
#endif

// Before a loop: no turn of it writes what another one reads.
#if defined(__CUDACC__)
#define HKV_INDEPENDENT
#elif defined(__clang__)
#define HKV_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define HKV_INDEPENDENT _Pragma("GCC ivdep")
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
HKV_HOST_DEVICE void atomic_add(int32_t* address, int32_t amount) {
#ifdef __CUDA_ARCH__
  atomicAdd(address, amount);
#else
  __atomic_fetch_add(address, amount, __ATOMIC_RELAXED);
#endif
}

// Sets bits in a word that other workers set bits in as well.
HKV_HOST_DEVICE void atomic_or(uint32_t* address, uint32_t bits) {
#ifdef __CUDA_ARCH__
  atomicOr(address, bits);
#else
  __atomic_fetch_or(address, bits, __ATOMIC_RELAXED);
#endif
}

// A word that other workers may be writing to.
HKV_HOST_DEVICE uint32_t atomic_read(const uint32_t* address) {
#ifdef __CUDA_ARCH__
  return __ldcg(address);
#else
  return __atomic_load_n(address, __ATOMIC_RELAXED);
#endif
}

// Writes `value` if the word is `expected`; what it was.
HKV_HOST_DEVICE uint32_t atomic_compare_and_swap(uint32_t* address, uint32_t expected, uint32_t value) {
#ifdef __CUDA_ARCH__
  return atomicCAS(address, expected, value);
#else
  __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
#endif
}

HKV_HOST_DEVICE void atomic_max(uint32_t* address, uint32_t value) {
#ifdef __CUDA_ARCH__
  atomicMax(address, value);
#else
  uint32_t found = atomic_read(address);
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

// Hints that a cache line will be read (or written) soon. The device hides latency by other warps. What
// calls it must be always inline too: GCC 12 drops calls of a function that does nothing but hint.
HKV_HOST_DEVICE void prefetch(const void* address) {
#ifndef __CUDA_ARCH__
  __builtin_prefetch(address);
#else
  (void)address;
#endif
}

// Four floats from or to an address that is a multiple of 16.
HKV_HOST_DEVICE void load_four(const float* from, float* to) {
#ifdef __CUDA_ARCH__
  const float4 four = *reinterpret_cast<const float4*>(from);
  to[0] = four.x;
  to[1] = four.y;
  to[2] = four.z;
  to[3] = four.w;
#else
  memcpy(to, from, 4 * sizeof(float));
#endif
}
HKV_HOST_DEVICE void store_four(float* to, const float* from) {
#ifdef __CUDA_ARCH__
  *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
#else
  memcpy(to, from, 4 * sizeof(float));
#endif
}

// Correctly rounded square root: sqrtf is, on the host and (without -use_fast_math) on the device.
HKV_HOST_DEVICE float square_root(float x) {
#ifdef __CUDA_ARCH__
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

template <class To, class From>
HKV_HOST_DEVICE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

}  // namespace hkv
