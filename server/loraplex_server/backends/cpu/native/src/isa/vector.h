// Vectors of 16 floats: the primitives of the instruction set, and what is made of them: dtypes, exp, tanh.
#pragma once

#if defined(__AVX512F__)
#include "vector_512.h"
#elif __ARM_FEATURE_SVE_BITS == 256
#include "vector_sve256.h"
#elif defined(__aarch64__)
#include "vector_neon.h"
#else
#include "vector_256.h"
#endif

namespace lp {
namespace LP_ISA {

// The model's dtype, as a template argument.
struct F32 {
  typedef float T;
  static inline Floats round(Floats x) { return x; }
};

struct BF16 {
  typedef bf16 T;
  static inline Floats round(Floats x) { return rounded(x); }
};

// exp(x): range reduction by ln 2 in two parts, then a polynomial; relative error below 2e-7. Where it would be smaller
// than the smallest normal number it is 0, so too of -inf: one such number takes longer than all the rest of a row.
static inline Floats exp_ps(Floats x) {
  const Floats low = all(-87.3f), high = all(88.7f);
  const Mask counts = is_not_less(x, low);
  x = min(high, max(low, x));  // of NaN both return the second operand, which keeps it
  Floats n = nearest(mul(x, all(1.44269504f)));
  Floats r = fnmadd(n, all(0.693359375f), x);
  r = fnmadd(n, all(-2.12194440e-4f), r);
  Floats p = all(1.9875691500e-4f);
  p = fmadd(p, r, all(1.3981999507e-3f));
  p = fmadd(p, r, all(8.3334519073e-3f));
  p = fmadd(p, r, all(4.1665795894e-2f));
  p = fmadd(p, r, all(1.6666665459e-1f));
  p = fmadd(p, r, all(5.0000001201e-1f));
  p = fmadd(p, mul(r, r), add(r, all(1.0f)));
  return scale_by_power(counts, p, n);
}

// tanh(x) = 1 - 2 / (exp(2x) + 1)
static inline Floats tanh_ps(Floats x) {
  const Floats one = all(1.0f), two = all(2.0f);
  return sub(one, div(two, add(exp_ps(mul(two, x)), one)));
}

}  // namespace LP_ISA
}  // namespace lp
