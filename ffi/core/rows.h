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
  const uint32_t nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // even, where two are as near
  const uint32_t nan = ((bits >> 16) & 0x8000) | 0x7fc0;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? nan : nearest);
}

HKV_HOST_DEVICE float from_bfloat16(uint16_t value) {
  return bit_cast<float>(static_cast<uint32_t>(value) << 16);
}

// Round to nearest even, with float16's subnormals and infinities. Here and below every case is computed and
// one is chosen: loops over elements become vectors.
HKV_HOST_DEVICE uint16_t to_float16(float value) {
  const auto bits = bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  // A float32 between 0.5 and 1 counts in steps of 2^-24, as a float16 below 2^-14 does: a sum rounds.
  const uint32_t small = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - bit_cast<uint32_t>(0.5f);
  uint32_t half = ((magnitude + 0xfff + ((magnitude >> 13) & 1)) >> 13) - (uint32_t{112} << 10);
  half = magnitude < 0x38800000 ? small : half;     // 2^-14
  half = magnitude >= 0x477ff000 ? 0x7c00 : half;  // 65520 and above
  half = magnitude > 0x7f800000 ? 0x7e00 : half;
  return static_cast<uint16_t>(sign | half);
}

HKV_HOST_DEVICE float from_float16(uint16_t value) {
  const uint32_t sign = static_cast<uint32_t>(value & 0x8000) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(value & 0x7fff) << 13;
  constexpr uint32_t kExponents = uint32_t{112} << 23;  // what the two types' exponents differ by
  constexpr float kNormal = 6.103515625e-05f;           // 2^-14, the least normal number
  const uint32_t small = bit_cast<uint32_t>(bit_cast<float>(magnitude + kExponents + (1 << 23)) - kNormal);
  uint32_t bits = magnitude + kExponents;
  bits = magnitude < (uint32_t{1} << 23) ? small : bits;
  bits = magnitude >= (uint32_t{0x1f} << 23) ? bits + kExponents : bits;  // infinite, or no number
  return bit_cast<float>(sign | bits);
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

// The loops have constant bounds: compilers make vectors of them on the host and registers on the device.
template <int kBlock>
HKV_HOST_DEVICE void decode_halves(RowType type, const uint16_t (&halves)[kBlock], float (&block)[kBlock]) {
  if (type == RowType::kBfloat16) {
    for (int c = 0; c < kBlock; ++c) block[c] = from_bfloat16(halves[c]);
  } else {
    for (int c = 0; c < kBlock; ++c) block[c] = from_float16(halves[c]);
  }
}
template <int kBlock>
HKV_HOST_DEVICE void encode_halves(RowType type, const float (&block)[kBlock], uint16_t (&halves)[kBlock]) {
  if (type == RowType::kBfloat16) {
    for (int c = 0; c < kBlock; ++c) halves[c] = to_bfloat16(block[c]);
  } else {
    for (int c = 0; c < kBlock; ++c) halves[c] = to_float16(block[c]);
  }
}

// Elements `first` to first + columns - 1 of a row, zero behind them.
template <int kBlock>
HKV_HOST_DEVICE void load_block(RowType type, const char* row, int64_t first, int columns,
                                float (&block)[kBlock]) {
  if (columns != kBlock || type == RowType::kOther) {
    for (int c = 0; c < kBlock; ++c) block[c] = c < columns ? load_element(type, row, first + c) : 0.0f;
  } else if (type == RowType::kFloat32) {
    load_words<kBlock>(reinterpret_cast<const float*>(row) + first, block);
  } else {
    uint16_t halves[kBlock];
    load_halves<kBlock>(reinterpret_cast<const uint16_t*>(row) + first, halves);
    decode_halves(type, halves, block);
  }
}

template <int kBlock>
HKV_HOST_DEVICE void store_block(RowType type, char* row, int64_t first, int columns,
                                 const float (&block)[kBlock]) {
  if (columns != kBlock || type == RowType::kOther) {
    for (int c = 0; c < kBlock; ++c) {
      if (c < columns) store_element(type, row, first + c, block[c]);
    }
  } else if (type == RowType::kFloat32) {
    store_words<kBlock>(reinterpret_cast<float*>(row) + first, block);
  } else {
    uint16_t halves[kBlock];
    encode_halves(type, block, halves);
    store_halves<kBlock>(reinterpret_cast<uint16_t*>(row) + first, halves);
  }
}

// A whole block as it lies in a row: what is asked for before it is looked at.
template <int kBlock>
struct RawBlock {
  float words[kBlock] = {};  // or two elements of 16 bits each, in the first half of them

  HKV_HOST_DEVICE void load(RowType type, const char* row, int64_t first) {
    if (type == RowType::kFloat32) {
      load_words<kBlock>(reinterpret_cast<const float*>(row) + first, words);
    } else {
      uint16_t halves[kBlock];
      load_halves<kBlock>(reinterpret_cast<const uint16_t*>(row) + first, halves);
      memcpy(words, halves, sizeof(halves));
    }
  }

  HKV_HOST_DEVICE void decode(RowType type, float (&block)[kBlock]) const {
    if (type == RowType::kFloat32) {
      memcpy(block, words, sizeof(block));
    } else {
      uint16_t halves[kBlock];
      memcpy(halves, words, sizeof(halves));
      decode_halves(type, halves, block);
    }
  }
};

// A whole block of a row as float32 in memory: the row's own, or a copy that `store` brings back. No row, no
// block.
template <int kBlock>
class BlockInMemory {
 public:
  HKV_HOST_DEVICE BlockInMemory(RowType type, char* row, int64_t first)
      : type_(type), row_(row), first_(first) {
    if (is_copy()) load_block(type, row, first, kBlock, copy_);
  }

  HKV_HOST_DEVICE float* elements() {
    if (row_ == nullptr) return nullptr;
    return is_copy() ? copy_ : reinterpret_cast<float*>(row_) + first_;
  }

  HKV_HOST_DEVICE void store() {
    if (is_copy()) store_block(type_, row_, first_, kBlock, copy_);
  }

 private:
  HKV_HOST_DEVICE bool is_copy() const { return row_ != nullptr && type_ != RowType::kFloat32; }

  RowType type_;
  char* row_;
  int64_t first_;
  float copy_[kBlock];
};

// log(y) for 0 < y <= 1 by float32 + - * / alone, so that every machine gets the same bits; without branches.
HKV_HOST_DEVICE float fixed_log(float y) {
  const auto bits = bit_cast<uint32_t>(y);
  const float mantissa = bit_cast<float>((bits & 0x7fffff) | 0x3f800000);
  const bool is_high = mantissa >= 1.41421356f;
  const int exponent = static_cast<int>(bits >> 23) - 127 + (is_high ? 1 : 0);
  const float m = is_high ? mantissa * 0.5f : mantissa;
  const float t = (m - 1.0f) / (m + 1.0f);
  const float s = t * t;
  float q = 0.111111111f;
  q = q * s + 0.142857143f;
  q = q * s + 0.2f;
  q = q * s + 0.333333333f;
  q = q * s + 1.0f;
  return static_cast<float>(exponent) * 0.693147181f + (t + t) * q;
}

// The inverse of the error function, of a block of numbers: what nearly all of them need is done for all, as
// vectors; the ends, beyond 0.9966, one by one.
// M. Giles: Approximating the erfinv function. GPU Computing Gems, Jade Edition, 2011.
template <int kBlock>
HKV_HOST_DEVICE void fixed_erfinv(const float (&x)[kBlock], float (&result)[kBlock]) {
  float logs[kBlock];
  HKV_INDEPENDENT for (int c = 0; c < kBlock; ++c) {
    logs[c] = -fixed_log((1.0f - x[c]) * (1.0f + x[c]));
    const float w = logs[c] - 2.5f;
    float r = 2.81022636e-08f;
    r = r * w + 3.43273939e-07f;
    r = r * w + -3.5233877e-06f;
    r = r * w + -4.39150654e-06f;
    r = r * w + 0.00021858087f;
    r = r * w + -0.00125372503f;
    r = r * w + -0.00417768164f;
    r = r * w + 0.246640727f;
    r = r * w + 1.50140941f;
    result[c] = r * x[c];
  }
  for (int c = 0; c < kBlock; ++c) {
    if (logs[c] < 5.0f) continue;
    const float w = square_root(logs[c]) - 3.0f;
    float r = -0.000200214257f;
    r = r * w + 0.000100950558f;
    r = r * w + 0.00134934322f;
    r = r * w + -0.00367342844f;
    r = r * w + 0.00573950773f;
    r = r * w + -0.0076224613f;
    r = r * w + 0.00943887047f;
    r = r * w + 1.00167406f;
    r = r * w + 2.83297682f;
    result[c] = r * x[c];
  }
}

// The first value of a row: a function of (seed, key) alone.
struct Initializer {
  enum class Kind : int64_t { kConstant, kUniform, kNormal, kTruncatedNormal };
  Kind kind = Kind::kConstant;
  float a = 0.0f;  // the constant; the lower bound; the mean
  float b = 0.0f;  // -; the upper bound; the standard deviation
  uint64_t seed = 0;

  HKV_HOST_DEVICE uint64_t base(Key key) const { return mix(key ^ mix(seed + kGolden)); }

  // Elements `first` to first + columns - 1 of a row; those behind them are anything.
  template <int kBlock>
  HKV_HOST_DEVICE void elements(uint64_t base, int64_t first, int columns, float (&block)[kBlock]) const {
    // A thread's block would cost a narrow row more than the row.
    if (kBlock > 4 && columns <= kBlock / 4) {
      float element[1];
      for (int c = 0; c < columns; ++c) {
        elements(base, first + c, element);
        block[c] = element[0];
      }
    } else {
      elements(base, first, block);
    }
  }

 private:
  template <int kBlock>
  HKV_HOST_DEVICE void elements(uint64_t base, int64_t first, float (&block)[kBlock]) const {
    constexpr float kUnit = 5.9604644775390625e-08f;  // 2^-24
    constexpr float kSqrt2 = 1.41421356f;
    constexpr float kErfSqrt2 = 0.9544997361f;  // P(|z| < 2)
    if (kind == Kind::kConstant) {
      for (float& element : block) element = a;
      return;
    }
    int32_t random[kBlock];  // 24 bits
    for (int c = 0; c < kBlock; ++c) {
      random[c] = static_cast<int32_t>(mix(base + static_cast<uint64_t>(first + c + 1) * kGolden) >> 40);
    }
    if (kind == Kind::kUniform) {
      for (int c = 0; c < kBlock; ++c) block[c] = (static_cast<float>(random[c]) * kUnit) * (b - a) + a;
      return;
    }
    const float within = kind == Kind::kTruncatedNormal ? kErfSqrt2 : 1.0f;
    float x[kBlock];
    for (int c = 0; c < kBlock; ++c) {
      const int32_t odd = 2 * random[c] + 1 - (int32_t{1} << 24);
      x[c] = static_cast<float>(odd) * kUnit * within;  // symmetric, never -1 or 1
    }
    fixed_erfinv(x, block);
    for (float& element : block) element = kSqrt2 * element;
    if (kind == Kind::kTruncatedNormal) {
      for (float& element : block) {
        element = element < -2.0f ? -2.0f : element;
        element = element > 2.0f ? 2.0f : element;
      }
    }
    for (float& element : block) element = element * b + a;
  }
};

// The one NaN that sums have: machines differ in the sign and the payload of theirs.
HKV_HOST_DEVICE float same_nan(float value) {
  return value == value ? value : bit_cast<float>(uint32_t{0x7fc00000});
}

}  // namespace hkv
