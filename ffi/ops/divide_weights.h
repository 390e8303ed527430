// A weight over what its bag's combiner divides by (docs/semantics.md, section 8): the division and the root
// are correctly rounded, which those that XLA compiles for a GPU are not.
#pragma once

#include "ops/operation.h"

namespace hkv {

struct DivideWeights {
  static constexpr const char* kName = "divide_weights";
  static constexpr bool kPerPosition = true;

  int64_t root = 0;  // of the divisor first: the square root
  Array<float> weights;
  Array<float> divisors;
  Array<float> quotients;

  template <class Binder>
  void describe(Binder& binder) {
    binder.attribute("root", root);
    binder.in("weights", weights, "n");
    binder.in("divisors", divisors, "n");
    binder.out("quotients", quotients, "n");
  }

  struct Step {
    static constexpr int kGroup = 1;
    bool root;
    const float* weights;
    const float* divisors;
    float* quotients;

    HKV_HOST_DEVICE void operator()(const SerialGroup&, int64_t i) const {
      const float divisor = root ? square_root(divisors[i]) : divisors[i];
      quotients[i] = divisor == 0.0f ? 0.0f : same_nan(weights[i] / divisor);
    }
  };

  template <class Executor>
  void run(Executor& executor) const {
    executor.each(weights.rows, Step{root != 0, weights.data, divisors.data, quotients.data});
  }
};

}  // namespace hkv
