// Vectors of 16 floats: loads and stores of both dtypes, sums, exp.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace lp {
namespace LP_ISA {

typedef uint16_t bf16;

static inline __m512 widen(__m256i halves) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

// Round to nearest even; NaN stays NaN. (The instruction makes 0 of what is smaller than the smallest normal number.)
static inline __m256i narrow(__m512 x) {
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  __m512i bits = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}

static inline __mmask16 first(int n) { return n >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << n) - 1); }

// The model's dtype, as a template argument.
struct F32 {
  typedef float T;
  static inline __m512 load(const T* p) { return _mm512_loadu_ps(p); }
  static inline __m512 load(const T* p, __mmask16 m) { return _mm512_maskz_loadu_ps(m, p); }
  static inline void store(T* p, __m512 x) { _mm512_storeu_ps(p, x); }
  static inline void store(T* p, __m512 x, __mmask16 m) { _mm512_mask_storeu_ps(p, m, x); }
  static inline __m512 round(__m512 x) { return x; }
};

struct BF16 {
  typedef bf16 T;
  static inline __m512 load(const T* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
  static inline __m512 load(const T* p, __mmask16 m) { return widen(_mm256_maskz_loadu_epi16(m, p)); }
  static inline void store(T* p, __m512 x) { _mm256_storeu_si256((__m256i*)p, narrow(x)); }
  static inline void store(T* p, __m512 x, __mmask16 m) { _mm256_mask_storeu_epi16(p, m, narrow(x)); }
  static inline __m512 round(__m512 x) { return widen(narrow(x)); }
};

// Sums of products of 32 pairs of bfloat16, two to a lane.
static inline __m512 dot_pairs(__m512 acc, __m512i a, __m512i b) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
#else
  const __m512i high = _mm512_set1_epi32(0xffff0000);
  acc = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), acc);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, high)), _mm512_castsi512_ps(_mm512_and_si512(b, high)), acc);
#endif
}

// The sum of each of 16 vectors, as one vector.
static inline __m512 sums16(const __m512* v) {
  __m512 a[8], b[4];
  for (int i = 0; i < 8; i++)  // lanes of 4: v[2i] 0+2, v[2i+1] 0+2, v[2i] 1+3, v[2i+1] 1+3
    a[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
  for (int i = 0; i < 4; i++)
    b[i] = _mm512_add_ps(
        _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a[2 * i]), _mm512_castps_pd(a[2 * i + 1]))),
        _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a[2 * i]), _mm512_castps_pd(a[2 * i + 1]))));
  // b[i]: in each of four quarters the partial sums of v[4i .. 4i+3]
  __m512 c = _mm512_add_ps(_mm512_shuffle_f32x4(b[0], b[1], 0x88), _mm512_shuffle_f32x4(b[0], b[1], 0xdd));
  __m512 d = _mm512_add_ps(_mm512_shuffle_f32x4(b[2], b[3], 0x88), _mm512_shuffle_f32x4(b[2], b[3], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xdd));
}

// In each quarter of 4 vectors of pairs, columns become rows.
template <int N>
static inline void transpose_fours(__m512i* v) {
  __m512i w[N];
  for (int i = 0; i < N; i += 2) {
    w[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    w[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < N; i += 4) {
    v[i] = _mm512_unpacklo_epi64(w[i], w[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(w[i], w[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(w[i + 1], w[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(w[i + 1], w[i + 3]);
  }
}

// exp(x): range reduction by ln 2 in two parts, then a polynomial; relative error below 2e-7. Where it would be smaller
// than the smallest normal number it is 0, so too of -inf: one such number takes longer than all the rest of a row.
static inline __m512 exp_ps(__m512 x) {
  const __m512 low = _mm512_set1_ps(-87.3f), high = _mm512_set1_ps(88.7f);
  const __mmask16 counts = _mm512_cmp_ps_mask(x, low, _CMP_NLT_UQ);
  x = _mm512_min_ps(high, _mm512_max_ps(low, x));  // of NaN both return the second operand, which keeps it
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_maskz_scalef_ps(counts, p, n);
}

// tanh(x) = 1 - 2 / (exp(2x) + 1)
static inline __m512 tanh_ps(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f), two = _mm512_set1_ps(2.0f);
  return _mm512_sub_ps(one, _mm512_div_ps(two, _mm512_add_ps(exp_ps(_mm512_mul_ps(two, x)), one)));
}

}  // namespace LP_ISA
}  // namespace lp
