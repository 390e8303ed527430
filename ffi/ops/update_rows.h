// One step of an optimizer on the rows of a batch (section 10): the gradients of each distinct key are
// summed and meet its row and its optimizer rows at once. A rule is what an optimizer does to one
// element; everything else is the same for all of them.
#pragma once

#include <limits>

#include "ops/combine_rows.h"
#include "ops/verify_slots.h"

namespace hkv {

inline constexpr int kMostStates = 2;

// Steps are counted from 1. decay^step by repeated squaring, in double: the same bits everywhere.
HKV_HOST_DEVICE double power_of(double decay, uint32_t step) {
  double power = 1.0;
  for (double square = decay; step != 0; step >>= 1, square = square * square) {
    if ((step & 1) != 0) power = power * square;
  }
  return power;
}

// What a rule may derive from the step, once for all elements.
struct StepScales {
  float first = 1.0f;
  float second = 1.0f;
};
template <class Rule>
inline constexpr bool kHasScales = requires(const Rule rule) { rule.scales(uint32_t{}); };
// Whether the last state of a rule is one number a row, which grows by the row's mean squared gradient before
// the elements are asked.
template <class Rule>
inline constexpr bool kHasRowState = requires(const Rule rule) { rule.row_state(0.0f, 0.0f); };

// Plain gradient descent.
struct SgdRule {
  static constexpr const char* kName = "update_sgd";
  static constexpr int kStates = 0;

  template <class Binder>
  void describe(Binder&) {}

  HKV_HOST_DEVICE void operator()(float& row, float*, float gradient, float rate, const StepScales&) const {
    row = row - rate * gradient;
  }
};

// Polyak: Some methods of speeding up the convergence of iteration methods, 1964; Nesterov's variant
// after Sutskever et al.: On the importance of initialization and momentum in deep learning, 2013.
struct MomentumRule {
  static constexpr const char* kName = "update_momentum";
  static constexpr int kStates = 1;
  double momentum = 0.0;
  int64_t nesterov = 0;

  template <class Binder>
  void describe(Binder& binder) {
    binder.attribute("momentum", momentum);
    binder.attribute("nesterov", nesterov);
  }

  HKV_HOST_DEVICE void operator()(float& row, float* trace, float gradient, float rate,
                                  const StepScales&) const {
    const auto decay = static_cast<float>(momentum);
    trace[0] = gradient + decay * trace[0];
    const float direction = nesterov != 0 ? gradient + decay * trace[0] : trace[0];
    row = row - rate * direction;
  }
};

// Duchi, Hazan, Singer: Adaptive subgradient methods for online learning and stochastic optimization,
// 2011; as optax.adagrad does it.
struct AdagradRule {
  static constexpr const char* kName = "update_adagrad";
  static constexpr int kStates = 1;
  double eps = 0.0;

  template <class Binder>
  void describe(Binder& binder) {
    binder.attribute("eps", eps);
  }

  HKV_HOST_DEVICE void operator()(float& row, float* sum, float gradient, float rate,
                                  const StepScales&) const {
    sum[0] = sum[0] + gradient * gradient;
    const float moved = row - rate * (gradient / square_root(sum[0] + static_cast<float>(eps)));
    row = sum[0] <= 0.0f ? row : moved;  // computed in any case, or compilers make no vectors of it
  }
};

// Kingma, Ba: Adam: a method for stochastic optimization, 2015; the decay of weights is decoupled, as
// Loshchilov, Hutter: Decoupled weight decay regularization, 2019.
struct AdamRule {
  static constexpr const char* kName = "update_adam";
  static constexpr int kStates = 2;
  double b1 = 0.0;
  double b2 = 0.0;
  double eps = 0.0;
  double eps_root = 0.0;
  double weight_decay = 0.0;

  template <class Binder>
  void describe(Binder& binder) {
    binder.attribute("b1", b1);
    binder.attribute("b2", b2);
    binder.attribute("eps", eps);
    binder.attribute("eps_root", eps_root);
    binder.attribute("weight_decay", weight_decay);
  }

  HKV_HOST_DEVICE StepScales scales(uint32_t step) const {
    return {static_cast<float>(1.0 / (1.0 - power_of(b1, step))),
            static_cast<float>(1.0 / (1.0 - power_of(b2, step)))};
  }
  HKV_HOST_DEVICE void operator()(float& row, float* moments, float gradient, float rate,
                                  const StepScales& scales) const {
    moments[1] = second_moment(moments[1], gradient * gradient);
    step(row, moments, gradient, rate, scales);
  }

 protected:
  HKV_HOST_DEVICE float second_moment(float old, float square) const {
    return static_cast<float>(b2) * old + static_cast<float>(1.0 - b2) * square;
  }
  // With the second moment of this step.
  HKV_HOST_DEVICE void step(float& row, float* moments, float gradient, float rate,
                            const StepScales& scales) const {
    moments[0] = static_cast<float>(b1) * moments[0] + static_cast<float>(1.0 - b1) * gradient;
    const float root = square_root(moments[1] * scales.second + static_cast<float>(eps_root));
    const float direction = (moments[0] * scales.first) / (root + static_cast<float>(eps));
    row = row - rate * (direction + static_cast<float>(weight_decay) * row);
  }
};

// Adam with one second moment a row, of the mean of its squared gradients (FBGEMM's PARTIAL_ROWWISE_ADAM).
struct RowwiseAdamRule : AdamRule {
  static constexpr const char* kName = "update_rowwise_adam";

  HKV_HOST_DEVICE float row_state(float old, float mean_square) const {
    return second_moment(old, mean_square);
  }
  HKV_HOST_DEVICE void operator()(float& row, float* moments, float gradient, float rate,
                                  const StepScales& scales) const {
    step(row, moments, gradient, rate, scales);
  }
};

// McMahan et al.: Ad click prediction: a view from the trenches, 2013.
struct FtrlRule {
  static constexpr const char* kName = "update_ftrl";
  static constexpr int kStates = 2;
  double l1 = 0.0;
  double l2 = 0.0;
  double beta = 0.0;

  template <class Binder>
  void describe(Binder& binder) {
    binder.attribute("l1", l1);
    binder.attribute("l2", l2);
    binder.attribute("beta", beta);
  }

  HKV_HOST_DEVICE void operator()(float& row, float* state, float gradient, float rate,
                                  const StepScales&) const {
    const float old_root = square_root(state[0]);
    state[0] = state[0] + gradient * gradient;
    const float root = square_root(state[0]);
    state[1] = state[1] + (gradient - ((root - old_root) / rate) * row);
    const float curvature = (static_cast<float>(beta) + root) / rate + static_cast<float>(l2);
    const auto bound = static_cast<float>(l1);
    const float signed_bound = state[1] < 0.0f ? -bound : bound;
    const float magnitude = state[1] < 0.0f ? -state[1] : state[1];
    const float moved = magnitude <= bound ? 0.0f : (signed_bound - state[1]) / curvature;
    row = curvature <= 0.0f ? row : moved;  // nothing has been seen
  }
};

// Adagrad with one accumulator a row: the mean of its squared gradients (Gupta et al.: Training
// recommender systems at scale, 2020; FBGEMM's exact row-wise Adagrad), and decoupled decay of weights.
struct RowwiseAdagradRule {
  static constexpr const char* kName = "update_rowwise_adagrad";
  static constexpr int kStates = 1;
  double eps = 0.0;
  double weight_decay = 0.0;

  template <class Binder>
  void describe(Binder& binder) {
    binder.attribute("eps", eps);
    binder.attribute("weight_decay", weight_decay);
  }

  HKV_HOST_DEVICE float row_state(float old, float mean_square) const { return old + mean_square; }
  HKV_HOST_DEVICE void operator()(float& row, float* sum, float gradient, float rate,
                                  const StepScales&) const {
    const float kept = (1.0f - rate * static_cast<float>(weight_decay)) * row;
    row = kept - (rate / (square_root(sum[0]) + static_cast<float>(eps))) * gradient;
  }
};

// Rounds up with the probability of what is cut off, which the random bits decide.
HKV_HOST_DEVICE uint16_t to_bfloat16_stochastic(float value, uint64_t random) {
  const auto bits = bit_cast<uint32_t>(value);
  if ((bits & 0x7f800000) == 0x7f800000) return to_bfloat16(value);
  return static_cast<uint16_t>((bits + static_cast<uint32_t>(random >> 48)) >> 16);
}

// By one of the workers that call it.
template <class Rule>
struct MakeScales {
  static constexpr int kGroup = 1;
  Rule rule;
  const uint32_t* steps;
  StepScales* scales;  // or null: each row has its own

  HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t i) const {
    if (i == 0 && scales != nullptr) *scales = rule.scales(*steps);
  }
};
struct NoScales {
  HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t) const {}
};

// What comes before an update by tiles, for every position of the batch, of which there are no fewer than
// places.
template <class Scales>
struct PrepareUpdate {
  static constexpr int kGroup = 1;
  Scales make_scales;
  CountOnDevice count;
  HeldSlots held;
  Slot* verified;
  int32_t* owners;
  int64_t places;

  HKV_HOST_DEVICE void operator()(const SerialGroup& group, int64_t i) const {
    make_scales(group, i);
    if (i < places) owners[i] = 0;
    if (i < count.value()) verified[i] = held.verified(i);
  }
};

template <class Rule>
struct UpdateRows {
  static constexpr const char* kName = Rule::kName;
  static constexpr bool kPerPosition = false;
  static constexpr bool kRowwise = kHasRowState<Rule>;
  static constexpr int kElementStates = Rule::kStates - (kRowwise ? 1 : 0);  // the row's is behind them

  Rule rule;
  int64_t stochastic = 0;
  int64_t seed = 0;  // the bits of the unsigned seed
  double max_gradient = std::numeric_limits<double>::infinity();
  IndexArrays index;
  RowsView values;
  RowsView states[kMostStates];
  Array<uint32_t> steps;  // of all rows, the present one included; or of each row, before it
  Array<uint32_t> stale;
  Array<Slot> slots;
  Array<Words> keys;
  Array<float> rate;
  SumTree gradients;
  StepScales* scales = nullptr;
  Slot* verified = nullptr;

  template <class Binder>
  void describe(Binder& binder) {
    static constexpr const char* kNames[kMostStates] = {"first_state", "second_state"};
    rule.describe(binder);
    binder.attribute("stochastic", stochastic);
    binder.attribute("seed", seed);
    binder.attribute("max_gradient", max_gradient);
    binder.inout("clock", index.clock, "2");
    binder.in("digests", index.digests, "B 128");
    binder.in("index_keys", index.keys, "B 128 2");
    binder.inout("values", values, "S ...");
    for (int i = 0; i < Rule::kStates; ++i) {
      binder.inout_floats(kNames[i], states[i], i < kElementStates ? "S ..." : "S");
    }
    binder.inout("steps", steps, "c");
    binder.inout("stale", stale, "1");
    binder.in("slots", slots, "n");
    binder.in("keys", keys, "n 2");
    binder.in("rate", rate, "1");
    gradients.describe(binder, "gradients", "n+1");
  }

  const char* complaint() const {
    const bool fits = steps.rows == 1 || steps.rows == values.count;
    return fits ? nullptr : "steps: expected one number, or one for every row of values";
  }

  struct Step {
    static constexpr int kGroup = 8;
    static constexpr int kBlocks = Rule::kStates > 1 ? 3 : 4;  // of a multiprocessor: states take registers
    static constexpr int64_t kGrain = 256;
    Rule rule;
    bool is_stochastic;
    bool counts_rows;
    uint64_t seed;
    double max_gradient;  // not yet float32: a thread of XLA's may flush subnormal numbers
    RowsView values;
    RowsView states[kMostStates];
    uint32_t* steps;
    HeldSlots held;
    const Slot* slots;  // of tiles: verified
    const float* rate;
    const StepScales* scales;
    SumTerms terms;

    HKV_HOST_DEVICE int64_t lines_ahead() const {
      int64_t lines = lines_of(values) + 1;
      for (int i = 0; i < Rule::kStates; ++i) lines += lines_of(states[i]);
      return lines;
    }
    HKV_HOST_DEVICE void prefetch_far(int64_t key) const {
      held.prefetch_far(key);
      prefetch_row(values, held.slots[key]);
      for (int i = 0; i < Rule::kStates; ++i) prefetch_row(states[i], held.slots[key]);
    }

    template <Group G>
    HKV_HOST_DEVICE void operator()(const G& group, int64_t key) const {
      // Before the first branch, so that all are on their way together.
      const Slot slot = slot_of<G>(key);
      const TermSpan span = terms.last_terms(key);
      if (slot < 0 || slot >= values.count) return;
      if (span.length == 0) return;  // no position says that it is to be updated
      const uint32_t before = counts_rows ? steps[slot] : 0;
      const uint32_t step = counts_rows ? before + (before != ~uint32_t{0} ? 1 : 0) : *steps;
      const StepScales scale = scales_at(step);
      const uint64_t random = is_stochastic ? random_base(held.batch[key].value(), step) : 0;
      const float learning_rate = *rate;
      const bool is_plain = has_float32_rows();
      float row_state = 0.0f;
      if constexpr (kRowwise) {
        const RowsView& own = states[kElementStates];
        row_state = rule.row_state(load_element(own.type, own.row(slot), 0), mean_square(group, key, span));
      }
      for_each_block<G>(group, values.width, [&]<int kBlock>(int64_t column, int columns) {
        if constexpr (G::size() == 1) {
          if (!is_stochastic && columns == kBlock) {
            return is_plain
                       ? in_place<kBlock, true>(key, span, slot, column, row_state, learning_rate, scale)
                       : in_place<kBlock, false>(key, span, slot, column, row_state, learning_rate, scale);
          }
        }
        float gradient[kBlock];
        float row[kBlock];
        float state[kMostStates][kBlock] = {};
        load_block(values.type, values.row(slot), column, columns, row);
        for (int i = 0; i < kElementStates; ++i) {
          load_block(states[i].type, states[i].row(slot), column, columns, state[i]);
        }
        // Last: the others are on their way meanwhile.
        terms.sum_of(key, span, column, columns, gradient);
        clip(gradient);
        for (int c = 0; c < kBlock; ++c) {
          float own[kMostStates] = {state[0][c], state[1][c]};
          if constexpr (kRowwise) own[kElementStates] = row_state;
          rule(row[c], own, gradient[c], learning_rate, scale);
          row[c] = same_nan(row[c]);
          state[0][c] = same_nan(own[0]);
          state[1][c] = same_nan(own[1]);
        }
        for (int i = 0; i < kElementStates; ++i) {
          store_block(states[i].type, states[i].row(slot), column, columns, state[i]);
        }
        if (is_stochastic) {
          store_stochastic(slot, column, columns, random, row);
        } else {
          store_block(values.type, values.row(slot), column, columns, row);
        }
      });
      group.sync();  // what belongs to the row has been read by all members
      if (group.rank() != 0) return;
      if constexpr (kRowwise) {
        const RowsView& own = states[kElementStates];
        store_element(own.type, own.row(slot), 0, same_nan(row_state));
      }
      if (counts_rows) steps[slot] = step;
    }

   private:
    template <Group G>
    HKV_HOST_DEVICE Slot slot_of(int64_t key) const {
      if constexpr (G::size() == 1) return held.verified(key);
      return slots[key];
    }

    HKV_HOST_DEVICE bool is_bounded() const { return max_gradient <= std::numeric_limits<float>::max(); }

    // As FBGEMM's max_gradient and optax.clip have it; a NaN stays. Not in the loop of the rule, which most
    // run without a bound.
    template <int kBlock>
    HKV_HOST_DEVICE void clip(float (&gradient)[kBlock]) const {
      if (!is_bounded()) return;
      const auto bound = static_cast<float>(max_gradient);
      for (float& element : gradient) {
        element = element < -bound ? -bound : element;
        element = element > bound ? bound : element;
      }
    }

    HKV_HOST_DEVICE StepScales scales_at(uint32_t step) const {
      if constexpr (kHasScales<Rule>) {
        return counts_rows ? rule.scales(step) : *scales;
      } else {
        return {};
      }
    }

    HKV_HOST_DEVICE bool has_float32_rows() const {
      bool are = values.type == RowType::kFloat32;
      for (int i = 0; i < kElementStates; ++i) are = are && states[i].type == RowType::kFloat32;
      return are;
    }

    // A whole block, which compilers turn into vector instructions from memory to memory. Plain: of float32
    // rows.
    template <int kBlock, bool kIsPlain>
    HKV_HOST_DEVICE void in_place(int64_t key, const TermSpan& span, Slot slot, int64_t column,
                                  float row_state, float learning_rate, const StepScales& scale) const {
      float sum[kBlock];
      const float* gradient = terms.only_term(span);
      if (gradient != nullptr && !is_bounded()) {
        gradient += column;
      } else {
        terms.sum_of(key, span, column, kBlock, sum);
        clip(sum);
        gradient = sum;
      }
      const auto type_of = [](const RowsView& rows) { return kIsPlain ? RowType::kFloat32 : rows.type; };
      BlockInMemory<kBlock> row(type_of(values), values.row(slot), column);
      BlockInMemory<kBlock> first(type_of(states[0]), kElementStates > 0 ? states[0].row(slot) : nullptr,
                                  column);
      BlockInMemory<kBlock> second(type_of(states[1]), kElementStates > 1 ? states[1].row(slot) : nullptr,
                                   column);
      float* const row_elements = row.elements();
      float* const state[kMostStates] = {first.elements(), second.elements()};
      HKV_INDEPENDENT
      for (int c = 0; c < kBlock; ++c) {
        float own[kMostStates] = {};
        if constexpr (kRowwise) own[kElementStates] = row_state;
        for (int i = 0; i < kElementStates; ++i) own[i] = state[i][c];
        float element = row_elements[c];
        rule(element, own, gradient[c], learning_rate, scale);
        row_elements[c] = same_nan(element);
        for (int i = 0; i < kElementStates; ++i) state[i][c] = same_nan(own[i]);
      }
      row.store();
      first.store();
      second.store();
    }

    HKV_HOST_DEVICE uint64_t random_base(Key key, uint32_t step) const {
      return mix(mix(key ^ mix(seed + kGolden)) ^ mix(step + kGolden));
    }

    template <int kBlock>
    HKV_HOST_DEVICE void store_stochastic(Slot slot, int64_t column, int columns, uint64_t random,
                                          const float (&row)[kBlock]) const {
      auto* elements = reinterpret_cast<uint16_t*>(values.row(slot)) + column;
      for (int c = 0; c < kBlock; ++c) {
        if (c >= columns) continue;
        const uint64_t bits = mix(random + static_cast<uint64_t>(column + c + 1) * kGolden);
        elements[c] = to_bfloat16_stochastic(row[c], bits);
      }
    }

    template <Group G>
    HKV_HOST_DEVICE float mean_square(const G& group, int64_t key, const TermSpan& span) const {
      const auto clipped = [this](auto& gradient) { this->clip(gradient); };
      return terms.square_of<1>(group, key, span, clipped) / static_cast<float>(values.width);
    }
  };

  // Of rows that are wide, by tiles that ask for more of one at once.
  static constexpr int64_t kWide = 64;
  struct WideStep : Step {
    static constexpr int kGroup = 16;
  };

  template <class Executor>
  void reserve(Arena& arena) {
    gradients.reserve<Executor>(arena);
    scales = arena.take<StepScales>(kHasScales<Rule> ? 1 : 0);
    verified = arena.take<Slot>(Executor::kHasTiles ? slots.rows : 0);
  }

  template <class Executor>
  void run(Executor& executor) const {
    const bool counts_rows = steps.rows > 1;
    const CountOnDevice count{gradients.count.data, slots.rows};
    const HeldSlots held{index.view(1), keys.data, slots.data, stale.data};
    auto make_scales = scaling(counts_rows ? nullptr : scales);
    if constexpr (Executor::kHasTiles) {
      executor.each(slots.rows, PrepareUpdate<decltype(make_scales)>{make_scales, count, held, verified,
                                                                     gradients.owners, gradients.places()});
      gradients.sum(executor);
    } else {
      if constexpr (kHasScales<Rule>) executor.each(counts_rows ? 0 : 1, make_scales);
      gradients.run(executor);
    }
    Step step{rule,
              stochastic != 0,
              counts_rows,
              static_cast<uint64_t>(seed),
              max_gradient,
              values,
              {},
              steps.data,
              held,
              verified,
              rate.data,
              scales,
              gradients.terms()};
    for (int i = 0; i < Rule::kStates; ++i) step.states[i] = states[i];
    if constexpr (Executor::kHasTiles) {
      if (values.width >= kWide) return executor.each(count, WideStep{step});
    }
    executor.each(count, step);
  }

 private:
  auto scaling(StepScales* to) const {
    if constexpr (kHasScales<Rule>) {
      return MakeScales<Rule>{rule, steps.data, to};
    } else {
      return NoScales{};
    }
  }
};

}  // namespace hkv
