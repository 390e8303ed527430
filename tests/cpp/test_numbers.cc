// Numbers: conversions, sums, first values, scores, and the subnormal mode of the CPU's workers.
#include <cmath>
#include <functional>
#include <limits>
#include <new>
#include <vector>

#include "backends/cpu_executor.h"
#include "checks.h"
#include "ops/combine_rows.h"
#include "random.h"
#include "thread_pool.h"

namespace {

using namespace hkv;
using namespace hkv::testing;

// A 16-bit floating-point format by its bit fields, in double precision, which holds all its values
// and the midpoints between them.
struct HalfFormat {
  int mantissa_bits;
  int bias;
  uint16_t (*from_float)(float);
  float (*to_float)(uint16_t);
  const char* name;

  int exponent_of(uint16_t bits) const { return (bits & 0x7fff) >> mantissa_bits; }
  int mantissa_of(uint16_t bits) const { return bits & ((1 << mantissa_bits) - 1); }
  int infinite_exponent() const { return (1 << (15 - mantissa_bits)) - 1; }
  uint16_t infinity() const { return static_cast<uint16_t>(infinite_exponent() << mantissa_bits); }
  bool is_nan(uint16_t bits) const { return (bits & 0x7fff) > infinity(); }
  uint16_t quiet_nan(uint16_t sign) const {
    return static_cast<uint16_t>(sign | infinity() | (1 << (mantissa_bits - 1)));
  }

  // Of a number that is not negative; infinity counts as the next power of two.
  double value(uint16_t bits) const {
    const int exponent = exponent_of(bits);
    const double fraction = std::ldexp(mantissa_of(bits), -mantissa_bits);
    if (exponent == 0) return std::ldexp(fraction, 1 - bias);
    return std::ldexp(1.0 + fraction, exponent - bias);
  }
};

void widening(Checks& checks, const HalfFormat& format) {
  for (uint32_t code = 0; code < 0x10000; ++code) {
    const auto bits = static_cast<uint16_t>(code);
    const float wide = format.to_float(bits);
    const std::string what = std::string(format.name) + " " + std::to_string(code);
    checks.expect(std::signbit(wide) == (bits >> 15 != 0), what + ": sign");
    if (format.is_nan(bits)) {
      checks.expect(std::isnan(wide) && format.from_float(wide) == format.quiet_nan(bits & 0x8000), what);
    } else if ((bits & 0x7fff) == format.infinity()) {
      checks.expect(std::isinf(wide) && format.from_float(wide) == bits, what);
    } else {
      checks.expect(std::fabs(double{wide}) == format.value(bits & 0x7fff), what + ": widened");
      checks.expect(format.from_float(wide) == bits, what + ": round trip");
    }
  }
}

// To nearest, ties to even, between every two neighbours: a number is nearer to the neighbour on its
// side of the midpoint.
void rounding(Checks& checks, const HalfFormat& format) {
  constexpr float kUp = std::numeric_limits<float>::infinity();
  for (uint16_t low = 0; low < format.infinity(); ++low) {
    const auto high = static_cast<uint16_t>(low + 1);
    const auto middle = static_cast<float>((format.value(low) + format.value(high)) / 2);
    const uint16_t even = low % 2 == 0 ? low : high;
    const std::string what = std::string(format.name) + " above " + std::to_string(low);
    for (const uint16_t sign : {uint16_t{0}, uint16_t{0x8000}}) {
      const float factor = sign ? -1.0f : 1.0f;
      const auto rounds_to = [&](float x, uint16_t expected) {
        checks.expect(format.from_float(factor * x) == (sign | expected), what);
      };
      rounds_to(middle, even);
      rounds_to(std::nextafter(middle, 0.0f), low);
      rounds_to(std::nextafter(middle, kUp), high);
    }
  }
  checks.expect(format.from_float(kUp) == format.infinity(), std::string(format.name) + ": infinity");
  checks.expect(format.from_float(std::numeric_limits<float>::max()) == format.infinity(),
                "the greatest float");
}

// Section 8 of docs/semantics.md, by recursion.
float tree_sum(const std::vector<float>& terms) {
  if (terms.size() == 1) return terms[0];
  constexpr size_t kChunk = 32;
  std::vector<float> sums;
  for (size_t begin = 0; begin < terms.size(); begin += kChunk) {
    float sum = terms[begin];
    for (size_t i = begin + 1; i < terms.size() && i < begin + kChunk; ++i) sum += terms[i];
    sums.push_back(sum);
  }
  return tree_sum(sums);
}

// The sums of keys whose occurrences are consecutive positions; position i has term i, repeated.
std::vector<float> combine(const std::vector<float>& terms, const std::vector<int32_t>& ends) {
  const auto n = static_cast<int64_t>(ends.back());
  std::vector<float> rows, sums(static_cast<size_t>(n));
  std::vector<int32_t> inverse, order, offsets(ends);
  for (int32_t key = 0; key + 1 < static_cast<int32_t>(ends.size()); ++key) {
    for (int32_t i = ends[key]; i < ends[key + 1]; ++i) {
      rows.push_back(terms[i % terms.size()]);
      order.push_back(i);
      inverse.push_back(key);
    }
  }
  offsets.resize(static_cast<size_t>(n) + 1, ends.back());
  auto count = static_cast<int32_t>(ends.size()) - 1;
  const auto view = [n](std::vector<float>& data) {
    return RowsView{reinterpret_cast<char*>(data.data()), RowType::kFloat32, n, 1, sizeof(float)};
  };
  CombineRows operation;
  operation.tree.count = {&count, 1};
  operation.tree.inverse = {inverse.data(), n};
  operation.tree.order = {order.data(), n};
  operation.tree.offsets = {offsets.data(), n + 1};
  operation.tree.rows = view(rows);
  operation.sums = view(sums);
  ThreadPool pool(2);
  CpuExecutor<ThreadPool> executor(pool);
  Arena sizes;
  operation.reserve<CpuExecutor<ThreadPool>>(sizes);
  std::vector<char> workspace(sizes.used());
  Arena arena(workspace.data());
  operation.reserve<CpuExecutor<ThreadPool>>(arena);
  operation.run(executor);
  return sums;
}

void sums(Checks& checks) {
  Random random(1);
  std::vector<float> terms;
  for (int i = 0; i < 70000; ++i) terms.push_back(static_cast<float>(random.real() - 0.5));
  std::vector<size_t> sizes = {1023, 1024, 1025, 32767, 32768, 32769, 65536, 70000};
  for (size_t size = 1; size < 200; ++size) sizes.push_back(size);
  // Keys of these sizes stand in one batch, one behind the other.
  std::vector<int32_t> offsets = {0};
  for (const size_t size : sizes) offsets.push_back(offsets.back() + static_cast<int32_t>(size));
  const std::vector<float> combined = combine(terms, offsets);
  for (size_t key = 0; key < sizes.size(); ++key) {
    std::vector<float> own;
    for (int32_t i = offsets[key]; i < offsets[key + 1]; ++i) own.push_back(terms[i % terms.size()]);
    const bool is_same = bit_cast<uint32_t>(combined[key]) == bit_cast<uint32_t>(tree_sum(own));
    checks.expect(is_same, "the sum of " + std::to_string(sizes[key]));
  }
}

// A single term, without a weight, is its sum in every bit: with a sign, and of a NaN what it carries.
void single_terms(Checks& checks) {
  for (const uint32_t bits : {0xffc12345u, 0x80000000u, 0x7f800000u, 0x00000001u}) {
    const std::vector<float> combined = combine({bit_cast<float>(bits)}, {0, 1});
    checks.expect(bit_cast<uint32_t>(combined[0]) == bits, "a sum of one term " + std::to_string(bits));
  }
}

// The fixed sequences of operations are what they are named after, to float32's accuracy.
void first_values(Checks& checks) {
  // The mantissa from which on it is halved.
  checks.expect(fixed_log(0x1.6a09e6p-29f) == -0x1.3c133ap+4f, "log of 2^-28.5, rounded");
  for (int i = 1; i < 4096; ++i) {
    const auto y = static_cast<float>(i) / 4096.0f;
    const double error = std::fabs(fixed_log(y) - std::log(double{y}));
    checks.expect(error <= 2e-7 * std::max(1.0, std::fabs(std::log(double{y}))),
                  "log of " + std::to_string(y));
    const float x[] = {2.0f * y - 1.0f};
    float inverse[1];
    fixed_erfinv(x, inverse);
    checks.expect(std::fabs(std::erf(double{inverse[0]}) - x[0]) <= 4e-7,
                  "erfinv of " + std::to_string(x[0]));
  }
  for (int kind = 0; kind < 4; ++kind) {
    const Initializer initializer{static_cast<Initializer::Kind>(kind), -0.5f, 1.0f, 7};
    for (Key key = 0; key < 2000; ++key) {
      float block[16];
      initializer.elements(initializer.base(key), 5, 16, block);
      for (int c = 0; c < 16; ++c) {
        float alone[1];
        initializer.elements(initializer.base(key), 5 + c, 1, alone);
        checks.expect(bit_cast<uint32_t>(block[c]) == bit_cast<uint32_t>(alone[0]), "alone as in a block");
      }
    }
  }
  const Initializer uniform{Initializer::Kind::kUniform, -0.5f, 0.5f, 7};
  const Initializer truncated{Initializer::Kind::kTruncatedNormal, 0.0f, 1.0f, 7};
  for (Key key = 0; key < 1000; ++key) {
    float u[1];
    uniform.elements(uniform.base(key), 3, 1, u);
    checks.expect(u[0] >= -0.5f && u[0] < 0.5f, "uniform");
    truncated.elements(truncated.base(key), 3, 1, u);
    checks.expect(std::fabs(u[0]) <= 2.0f, "truncated normal");
  }
}

void places(Checks& checks) {
  Random random(2);
  for (int i = 0; i < 10000; ++i) {
    const uint64_t hash = hash_of(random.word());
    const int64_t buckets = 1 + random.below(i % 2 ? 4 : int64_t{1} << 24);
    const int64_t first = first_bucket(hash, buckets);
    const int64_t second = second_bucket(hash, buckets);
    checks.expect(first >= 0 && first < buckets && second >= 0 && second < buckets, "a bucket exists");
    checks.expect((first == second) == (buckets == 1), "two candidates differ");
    checks.expect(digest_of(hash) != kEmpty, "no key has the digest of an empty lane");
  }
}

void scores(Checks& checks) {
  constexpr uint64_t kMost = ~uint64_t{0};
  constexpr uint64_t kMost32 = 0xffffffff;
  const auto scoring = [](Policy policy) { return Scoring{policy, (uint64_t{5} << 32) | 9, 2}; };
  const uint64_t epoch = uint64_t{2} << 32;
  checks.expect(scoring(Policy::kLru).of_hit(3, 0) == ((uint64_t{5} << 32) | 9), "LRU");
  checks.expect(scoring(Policy::kLfu).of_new(4) == 4, "LFU, new");
  checks.expect(scoring(Policy::kLfu).of_hit(kMost - 1, 4) == kMost, "LFU saturates");
  checks.expect(scoring(Policy::kEpochLru).of_hit(3, 0) == (epoch | 9), "EpochLRU");
  checks.expect(scoring(Policy::kEpochLfu).of_new(kMost) == (epoch | kMost32), "EpochLFU saturates");
  checks.expect(scoring(Policy::kEpochLfu).of_hit((uint64_t{1} << 32) | 6, 1) == (epoch | 7),
                "EpochLFU, hit");
  checks.expect(scoring(Policy::kCustom).of_hit(8, 3) == 3, "Custom may fall");
}

#if defined(__SSE2__)
uint64_t mode() { return _mm_getcsr(); }
void set_mode(uint64_t mode) { _mm_setcsr(static_cast<uint32_t>(mode)); }
constexpr uint64_t kFlush = 0x8040;
#elif defined(__aarch64__)
uint64_t mode() {
  uint64_t mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
void set_mode(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
constexpr uint64_t kFlush = uint64_t{1} << 24;
#else
uint64_t mode() { return 0; }
void set_mode(uint64_t) {}
constexpr uint64_t kFlush = 0;
#endif

// Tasks keep subnormal numbers, and the caller's mode is what it was.
void subnormals(Checks& checks) {
  const uint64_t before = mode();
  for (const int threads : {1, 2}) {
    set_mode(before | kFlush);  // and that of the threads that are made
    ThreadPool pool(threads);
    const Workers<ThreadPool> workers(pool);
    volatile float tiny = 1e-38f;
    std::vector<float> halves(4);
    workers.run(4, [&](int64_t i) { halves[static_cast<size_t>(i)] = tiny * 0.25f; });
    checks.expect((mode() & kFlush) == kFlush, "the mode is restored");
    set_mode(before);
    for (const float half : halves) checks.expect(bit_cast<uint32_t>(half) != 0, "a subnormal is kept");
  }
}

// Each index is worked on once, by fewer threads, where there is no memory to ask all of them.
void few_helpers(Checks& checks) {
  struct Pool {
    ThreadPool& threads;
    int left;
    int64_t num_threads() const { return 4; }
    void Schedule(std::function<void()> task) {
      if (left-- == 0) throw std::bad_alloc();
      threads.Schedule(std::move(task));
    }
  };
  ThreadPool threads(3);
  for (const int helpers : {0, 1, 2}) {
    Pool pool{threads, helpers};
    std::vector<int> visits(1000);
    Workers<Pool>(pool).run(1000, [&](int64_t i) { ++visits[static_cast<size_t>(i)]; });
    checks.expect(visits == std::vector<int>(1000, 1), "every index, once");
    checks.expect(pool.left == -1, "nobody is asked after the pool has failed");
  }
}

}  // namespace

int main() {
  Checks checks;
  const HalfFormat formats[] = {{10, 15, to_float16, from_float16, "float16"},
                                {7, 127, to_bfloat16, from_bfloat16, "bfloat16"}};
  for (const HalfFormat& format : formats) {
    widening(checks, format);
    rounding(checks, format);
  }
  sums(checks);
  single_terms(checks);
  first_values(checks);
  places(checks);
  scores(checks);
  subnormals(checks);
  few_helpers(checks);
  return checks.finish();
}
