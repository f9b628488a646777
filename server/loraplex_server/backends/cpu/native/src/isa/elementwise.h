// Norms, rotary positions, activations, and the ways of results into the model's dtype.
#pragma once

#include "../kernels.h"
#include "vector.h"

namespace lp {
namespace LP_ISA {

template <class D>
static inline __m512 scaled(__m512 x, __m512 factor, const typename D::T* weight, __mmask16 mask) {
  // The model's own code rounds x / rms before it multiplies by the weight.
  return _mm512_mul_ps(D::load(weight, mask), D::round(_mm512_mul_ps(x, factor)));
}

static inline __m512 rms_factor(__m512 squares, int64_t n, float eps) {
  const float mean = _mm512_reduce_add_ps(squares) / (float)n + eps;
  float root;
  _mm_store_ss(&root, _mm_sqrt_ss(_mm_set_ss(mean)));
  return _mm512_set1_ps(1.0f / root);
}

template <class D>
static void norm_row(const typename D::T* x, const typename D::T* weight, int64_t n, float eps, typename D::T* y) {
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < n; i += 16) {
    __m512 v = D::load(x + i, first((int)(n - i > 16 ? 16 : n - i)));
    squares = _mm512_fmadd_ps(v, v, squares);
  }
  const __m512 factor = rms_factor(squares, n, eps);
  for (int64_t i = 0; i < n; i += 16) {
    __mmask16 mask = first((int)(n - i > 16 ? 16 : n - i));
    D::store(y + i, scaled<D>(D::load(x + i, mask), factor, weight + i, mask), mask);
  }
}

static void rms_norm(DType dtype, const void* x, const void* weight, int64_t n, float eps, void* y) {
  if (dtype == DType::F32)
    norm_row<F32>((const float*)x, (const float*)weight, n, eps, (float*)y);
  else
    norm_row<BF16>((const bf16*)x, (const bf16*)weight, n, eps, (bf16*)y);
}

template <class D>
static void norm_head(float* x, const typename D::T* weight, int64_t n, float eps) {
  __m512 squares = _mm512_setzero_ps();
  for (int64_t i = 0; i < n; i += 16) {
    __m512 v = D::round(_mm512_loadu_ps(x + i));
    squares = _mm512_fmadd_ps(v, v, squares);
  }
  const __m512 factor = rms_factor(squares, n, eps);
  for (int64_t i = 0; i < n; i += 16)
    _mm512_storeu_ps(x + i, scaled<D>(D::round(_mm512_loadu_ps(x + i)), factor, weight + i, (__mmask16)0xffff));
}

static void rms_norm_f32(DType dtype, float* x, const void* weight, int64_t n, float eps) {
  if (dtype == DType::F32)
    norm_head<F32>(x, (const float*)weight, n, eps);
  else
    norm_head<BF16>(x, (const bf16*)weight, n, eps);
}

static void rotate(float* x, const float* cos, const float* sin, int dim) {
  const int half = dim / 2;
  for (int i = 0; i < half; i += 16) {
    __m512 low = _mm512_loadu_ps(x + i), high = _mm512_loadu_ps(x + half + i);
    __m512 a = _mm512_mul_ps(low, _mm512_loadu_ps(cos + i)), b = _mm512_mul_ps(high, _mm512_loadu_ps(cos + half + i));
    _mm512_storeu_ps(x + i, _mm512_fnmadd_ps(high, _mm512_loadu_ps(sin + i), a));
    _mm512_storeu_ps(x + half + i, _mm512_fmadd_ps(low, _mm512_loadu_ps(sin + half + i), b));
  }
}

static inline __m512 silu(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  return _mm512_div_ps(x, _mm512_add_ps(one, exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

static inline __m512 gelu_tanh(__m512 x) {
  const __m512 cube = _mm512_mul_ps(x, _mm512_mul_ps(x, x));
  const __m512 inner = _mm512_mul_ps(_mm512_set1_ps(0.79788456f), _mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x));
  return _mm512_mul_ps(_mm512_mul_ps(_mm512_set1_ps(0.5f), x), _mm512_add_ps(_mm512_set1_ps(1.0f), tanh_ps(inner)));
}

template <class D>
static void gated_row(int act, const float* gate, const float* up, int n, typename D::T* out) {
  for (int i = 0; i < n; i += 16) {
    __mmask16 mask = first(n - i);
    __m512 g = D::round(_mm512_maskz_loadu_ps(mask, gate + i)), u = D::round(_mm512_maskz_loadu_ps(mask, up + i));
    D::store(out + i, _mm512_mul_ps(D::round(act == 0 ? silu(g) : gelu_tanh(g)), u), mask);
  }
}

static void gated(DType dtype, int act, const float* gate, const float* up, int n, void* out) {
  if (dtype == DType::F32)
    gated_row<F32>(act, gate, up, n, (float*)out);
  else
    gated_row<BF16>(act, gate, up, n, (bf16*)out);
}

// A whole line of the cache at once, which then needs not be read before it is written.
static void stream_gated(int act, const float* c, bf16* out) {
  alignas(64) bf16 line[2 * kPanel];
  for (int i = 0; i < 2; i++) gated_row<BF16>(act, c + i * kBand, c + i * kBand + kPanel, kPanel, line + i * kPanel);
  _mm512_stream_si512((__m512i*)out, _mm512_load_si512(line));
}

static void gated_bands(DType dtype, int act, const float* c, int64_t stride, int m, int n, void* out, int64_t out_stride,
                        bool streams) {
  const bool lines = dtype == DType::BF16 && n == 2 * kPanel && ((uintptr_t)out | (uintptr_t)out_stride * 2) % 64 == 0;
  for (int64_t r = 0; r < m; r++, c += stride)
    if (streams && lines)
      stream_gated(act, c, (bf16*)out + r * out_stride);
    else
      for (int i = 0; i < n; i += kPanel)
        gated(dtype, act, c + 2 * i, c + 2 * i + kPanel, n - i < kPanel ? n - i : kPanel,
              (char*)out + (r * out_stride + i) * item_bytes(dtype));
}

template <class D>
static void store_row(const float* c, int n, typename D::T* out) {
  for (int i = 0; i < n; i += 16) {
    __mmask16 mask = first(n - i);
    D::store(out + i, _mm512_maskz_loadu_ps(mask, c + i), mask);
  }
}

static void store(DType dtype, const float* c, int n, void* out) {
  if (dtype == DType::F32)
    store_row<F32>(c, n, (float*)out);
  else
    store_row<BF16>(c, n, (bf16*)out);
}

template <class D>
static void add_row(const float* c, int n, typename D::T* inout) {
  for (int i = 0; i < n; i += 16) {
    __mmask16 mask = first(n - i);
    __m512 sum = _mm512_add_ps(D::load(inout + i, mask), D::round(_mm512_maskz_loadu_ps(mask, c + i)));
    D::store(inout + i, sum, mask);
  }
}

static void add_to(DType dtype, const float* c, int n, void* inout) {
  if (dtype == DType::F32)
    add_row<F32>(c, n, (float*)inout);
  else
    add_row<BF16>(c, n, (bf16*)inout);
}

static void add_rows(DType dtype, const float* c, int64_t stride, int m, int n, void* inout, int64_t inout_stride) {
  for (int64_t r = 0; r < m; r++, c += stride)
    if (dtype == DType::F32)
      add_row<F32>(c, n, (float*)inout + r * inout_stride);
    else
      add_row<BF16>(c, n, (bf16*)inout + r * inout_stride);
}

template <class D>
static void bias_row(const typename D::T* bias, int n, float* c) {
  for (int i = 0; i < n; i += 16) {
    __mmask16 mask = first(n - i);
    _mm512_mask_storeu_ps(c + i, mask, _mm512_add_ps(_mm512_maskz_loadu_ps(mask, c + i), D::load(bias + i, mask)));
  }
}

static void add_bias(DType dtype, const void* bias, int n, float* c) {
  if (dtype == DType::F32)
    bias_row<F32>((const float*)bias, n, c);
  else
    bias_row<BF16>((const bf16*)bias, n, c);
}

template <class D>
static void argmax_row(const typename D::T* x, int64_t n, float* best, int64_t* at) {
  __m512 top = _mm512_set1_ps(-__builtin_inff());
  __m512i where = _mm512_setzero_si512();
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __mmask16 nan = 0;
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 mask = first((int)(n - i > 16 ? 16 : n - i));
    const __m512 v = D::load(x + i, mask);
    nan |= _mm512_mask_cmp_ps_mask(mask, v, v, _CMP_UNORD_Q);
    const __mmask16 larger = _mm512_mask_cmp_ps_mask(mask, v, top, _CMP_GT_OQ);
    top = _mm512_mask_mov_ps(top, larger, v);
    where = _mm512_mask_add_epi32(where, larger, lanes, _mm512_set1_epi32((int)i));
  }
  const float found = _mm512_reduce_max_ps(top);
  *best = nan ? __builtin_nanf("") : found;
  const __mmask16 winners = _mm512_cmp_ps_mask(top, _mm512_set1_ps(found), _CMP_EQ_OQ);
  *at = nan ? 0 : _mm512_mask_reduce_min_epi32(winners, where);
}

static void argmax(DType dtype, const void* x, int64_t n, float* best, int64_t* at) {
  if (dtype == DType::F32)
    argmax_row<F32>((const float*)x, n, best, at);
  else
    argmax_row<BF16>((const bf16*)x, n, best, at);
}

}  // namespace LP_ISA
}  // namespace lp
