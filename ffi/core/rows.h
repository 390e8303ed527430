// Rows: their element types and their first values (docs/semantics.md, section 5).
#pragma once

#include "core/types.h"

namespace hkv {

enum class RowType : int32_t { kFloat32, kBfloat16, kFloat16, kOther };

// An array whose leading axis is the slot (or the position): `count` rows of `width` elements.
struct RowsView {
  char* data = nullptr;
  RowType type = RowType::kOther;
  int64_t count = 0;
  int64_t width = 0;
  int64_t row_bytes = 0;

  HKV_HOST_DEVICE char* row(int64_t index) const { return data + index * row_bytes; }
};

HKV_HOST_DEVICE uint16_t to_bfloat16(float value) {
  const auto bits = bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(((bits >> 16) & 0x8000) | 0x7fc0);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

HKV_HOST_DEVICE float from_bfloat16(uint16_t value) {
  return bit_cast<float>(static_cast<uint32_t>(value) << 16);
}

// Round to nearest even, with float16's subnormals and infinities.
HKV_HOST_DEVICE uint16_t to_float16(float value) {
  const auto bits = bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // 65520 and above
  if (magnitude < 0x33000001) return static_cast<uint16_t>(sign);           // 2^-25 and below
  const bool subnormal = magnitude < 0x38800000;                             // below 2^-14
  const uint32_t exponent = magnitude >> 23;
  const uint32_t mantissa = (magnitude & 0x7fffff) | 0x800000;
  const uint32_t shift = subnormal ? 126 - exponent : 13;  // bits that float16 does not hold
  const uint32_t kept = mantissa >> shift;
  const uint32_t lost = mantissa & ((uint32_t{1} << shift) - 1);
  const uint32_t half = uint32_t{1} << (shift - 1);
  const uint32_t up = (lost > half || (lost == half && (kept & 1))) ? 1 : 0;
  const uint32_t base = subnormal ? 0 : (exponent - 113) << 10;  // the hidden bit adds the last one
  return static_cast<uint16_t>(sign | (base + kept + up));
}

HKV_HOST_DEVICE float from_float16(uint16_t value) {
  const uint32_t sign = static_cast<uint32_t>(value & 0x8000) << 16;
  const uint32_t exponent = (value >> 10) & 0x1f;
  const uint32_t mantissa = value & 0x3ff;
  if (exponent == 0x1f) return bit_cast<float>(sign | 0x7f800000 | (mantissa << 13));
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-08f;  // 2^-24
    return sign ? -magnitude : magnitude;
  }
  return bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

HKV_HOST_DEVICE float load_element(RowType type, const char* row, int64_t index) {
  switch (type) {
    case RowType::kFloat32: return reinterpret_cast<const float*>(row)[index];
    case RowType::kBfloat16: return from_bfloat16(reinterpret_cast<const uint16_t*>(row)[index]);
    case RowType::kFloat16: return from_float16(reinterpret_cast<const uint16_t*>(row)[index]);
    default: return 0.0f;
  }
}

HKV_HOST_DEVICE void store_element(RowType type, char* row, int64_t index, float value) {
  switch (type) {
    case RowType::kFloat32: reinterpret_cast<float*>(row)[index] = value; break;
    case RowType::kBfloat16: reinterpret_cast<uint16_t*>(row)[index] = to_bfloat16(value); break;
    case RowType::kFloat16: reinterpret_cast<uint16_t*>(row)[index] = to_float16(value); break;
    default: break;
  }
}

// What an element of the type holds of a value.
HKV_HOST_DEVICE float rounded(RowType type, float value) {
  switch (type) {
    case RowType::kBfloat16: return from_bfloat16(to_bfloat16(value));
    case RowType::kFloat16: return from_float16(to_float16(value));
    default: return value;
  }
}

// Elements `first` to first + columns - 1 of a row, zero behind them. The loops have constant bounds:
// compilers make vectors of them on the host and registers on the device.
// On the device 16 bytes are one instruction, where the address allows it.
template <int kBlock>
HKV_HOST_DEVICE bool goes_by_fours(const float* elements) {
#ifdef __CUDA_ARCH__
  return kBlock % 4 == 0 && reinterpret_cast<uintptr_t>(elements) % sizeof(float4) == 0;
#else
  (void)elements;
  return false;
#endif
}

template <int kBlock>
HKV_HOST_DEVICE void load_block(RowType type, const char* row, int64_t first, int columns,
                                float (&block)[kBlock]) {
  if (type == RowType::kFloat32 && columns == kBlock) {
    const float* elements = reinterpret_cast<const float*>(row) + first;
    if (goes_by_fours<kBlock>(elements)) {
      for (int c = 0; c < kBlock; c += 4) load_four(elements + c, block + c);
      return;
    }
    for (int c = 0; c < kBlock; ++c) block[c] = elements[c];
    return;
  }
  for (int c = 0; c < kBlock; ++c) block[c] = c < columns ? load_element(type, row, first + c) : 0.0f;
}

template <int kBlock>
HKV_HOST_DEVICE void store_block(RowType type, char* row, int64_t first, int columns,
                                 const float (&block)[kBlock]) {
  if (type == RowType::kFloat32 && columns == kBlock) {
    float* elements = reinterpret_cast<float*>(row) + first;
    if (goes_by_fours<kBlock>(elements)) {
      for (int c = 0; c < kBlock; c += 4) store_four(elements + c, block + c);
      return;
    }
    for (int c = 0; c < kBlock; ++c) elements[c] = block[c];
    return;
  }
  for (int c = 0; c < kBlock; ++c) {
    if (c < columns) store_element(type, row, first + c, block[c]);
  }
}

// log(y) for 0 < y <= 1 by float32 + - * / alone, so that every machine gets the same bits.
HKV_HOST_DEVICE float fixed_log(float y) {
  const auto bits = bit_cast<uint32_t>(y);
  int exponent = static_cast<int>(bits >> 23) - 127;
  float m = bit_cast<float>((bits & 0x7fffff) | 0x3f800000);
  if (m >= 1.41421356f) {
    m = m * 0.5f;
    ++exponent;
  }
  const float t = (m - 1.0f) / (m + 1.0f);
  const float s = t * t;
  float q = 0.111111111f;
  q = q * s + 0.142857143f;
  q = q * s + 0.2f;
  q = q * s + 0.333333333f;
  q = q * s + 1.0f;
  return static_cast<float>(exponent) * 0.693147181f + (t + t) * q;
}

// M. Giles: Approximating the erfinv function. GPU Computing Gems, Jade Edition, 2011.
HKV_HOST_DEVICE float fixed_erfinv(float x) {
  float w = -fixed_log((1.0f - x) * (1.0f + x));
  float r;
  if (w < 5.0f) {
    w = w - 2.5f;
    r = 2.81022636e-08f;
    r = r * w + 3.43273939e-07f;
    r = r * w + -3.5233877e-06f;
    r = r * w + -4.39150654e-06f;
    r = r * w + 0.00021858087f;
    r = r * w + -0.00125372503f;
    r = r * w + -0.00417768164f;
    r = r * w + 0.246640727f;
    r = r * w + 1.50140941f;
  } else {
    w = square_root(w) - 3.0f;
    r = -0.000200214257f;
    r = r * w + 0.000100950558f;
    r = r * w + 0.00134934322f;
    r = r * w + -0.00367342844f;
    r = r * w + 0.00573950773f;
    r = r * w + -0.0076224613f;
    r = r * w + 0.00943887047f;
    r = r * w + 1.00167406f;
    r = r * w + 2.83297682f;
  }
  return r * x;
}

// The first value of a row: a function of (seed, key) alone.
struct Initializer {
  enum class Kind : int64_t { kConstant, kUniform, kNormal, kTruncatedNormal };
  Kind kind = Kind::kConstant;
  float a = 0.0f;  // the constant; the lower bound; the mean
  float b = 0.0f;  // -; the upper bound; the standard deviation
  uint64_t seed = 0;

  HKV_HOST_DEVICE uint64_t base(Key key) const { return mix(key ^ mix(seed + kGolden)); }

  HKV_HOST_DEVICE float element(uint64_t base, int64_t index) const {
    if (kind == Kind::kConstant) return a;
    const uint64_t random = mix(base + static_cast<uint64_t>(index + 1) * kGolden) >> 40;  // 24 bits
    constexpr float kUnit = 5.9604644775390625e-08f;                                       // 2^-24
    if (kind == Kind::kUniform) return (static_cast<float>(random) * kUnit) * (b - a) + a;
    const auto odd = static_cast<int32_t>(2 * random + 1) - (int32_t{1} << 24);
    const float x = static_cast<float>(odd) * kUnit;  // symmetric, never -1 or 1
    constexpr float kSqrt2 = 1.41421356f;
    if (kind == Kind::kNormal) return (kSqrt2 * fixed_erfinv(x)) * b + a;
    constexpr float kErfSqrt2 = 0.9544997361f;  // P(|z| < 2)
    float t = kSqrt2 * fixed_erfinv(x * kErfSqrt2);
    t = t < -2.0f ? -2.0f : t;
    t = t > 2.0f ? 2.0f : t;
    return t * b + a;
  }
};

// The one NaN that sums have: machines differ in the sign and the payload of theirs.
HKV_HOST_DEVICE float same_nan(float value) {
  return value == value ? value : bit_cast<float>(uint32_t{0x7fc00000});
}

}  // namespace hkv
