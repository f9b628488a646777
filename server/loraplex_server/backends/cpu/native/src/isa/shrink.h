// The first half of a low-rank update, for rows of one adapter: inner products. Factors are read where they lie.
#pragma once

#include "../kernels.h"
#include "tiles.h"
#include "vector.h"

namespace lp {
namespace LP_ISA {

template <class D>
struct Dot;

template <>
struct Dot<F32> {
  static const int step = 16;
  static inline Floats add(const float* a, const float* b, Floats acc, int64_t n) {
    if (n >= 16) return fmadd(load(a), load(b), acc);
    const Part part = first((int)n);
    return fmadd(load(a, part), load(b, part), acc);
  }
};

template <>
struct Dot<BF16> {
  static const int step = 32;
  static inline Floats add(const bf16* a, const bf16* b, Floats acc, int64_t n) {
    if (n >= 32) return dot_pairs(acc, load_words(a), load_words(b));
    return dot_pairs(acc, load_words(a, n), load_words(b, n));
  }
};

// h[M][R] = alpha * x[M] . a[R]
template <class D, int M, int R>
static inline void shrink_block(const typename D::T* x, int64_t x_stride, const typename D::T* a, int64_t k, float alpha,
                                float* h, int64_t h_stride) {
  Floats acc[16];
  for (int i = 0; i < 16; i++) acc[i] = zeros();
  int64_t i = 0;
  for (; i + Dot<D>::step <= k; i += Dot<D>::step)
    for (int m = 0; m < M; m++)
      for (int r = 0; r < R; r++)
        acc[m * R + r] = Dot<D>::add(x + m * x_stride + i, a + r * k + i, acc[m * R + r], Dot<D>::step);
  if (i < k)
    for (int m = 0; m < M; m++)
      for (int r = 0; r < R; r++)
        acc[m * R + r] = Dot<D>::add(x + m * x_stride + i, a + r * k + i, acc[m * R + r], k - i);
  alignas(64) float sums[16];
  store_aligned(sums, mul(sums16(acc), all(alpha)));
  for (int m = 0; m < M; m++)
    for (int r = 0; r < R; r++) h[m * h_stride + r] = sums[m * R + r];
}

template <class D>
static void shrink_rows(const typename D::T* x, int64_t x_stride, int m, const typename D::T* a, int64_t k, int rank,
                        float alpha, float* h, int64_t h_stride) {
  int row = 0;
  for (; row + kShrinkRows <= m; row += kShrinkRows) {
    const typename D::T* at = x + row * x_stride;
    float* to = h + row * h_stride;
    int r = 0;
    for (; r + kShrinkRanks <= rank; r += kShrinkRanks)
      shrink_block<D, kShrinkRows, kShrinkRanks>(at, x_stride, a + r * k, k, alpha, to + r, h_stride);
    for (; r < rank; r++) shrink_block<D, kShrinkRows, 1>(at, x_stride, a + r * k, k, alpha, to + r, h_stride);
  }
  for (; row < m; row++) {
    const typename D::T* at = x + row * x_stride;
    float* to = h + row * h_stride;
    int r = 0;
    for (; r + kShrinkRanksOfOne <= rank; r += kShrinkRanksOfOne)
      shrink_block<D, 1, kShrinkRanksOfOne>(at, x_stride, a + r * k, k, alpha, to + r, h_stride);
    for (; r < rank; r++) shrink_block<D, 1, 1>(at, x_stride, a + r * k, k, alpha, to + r, h_stride);
  }
}

#ifdef __AMX_BF16__
// The same with tiles, whatever the number of rows is, so that a row's sums are the same among any others: the products of
// a pair of tiles are added up in one order, whichever of them is which. At most 16 ranks; k is a multiple of 32.
//
// Of few rows, the factors are the left tile, which is read as it lies, and a row of x is the right one.
static void shrink_row(const bf16* x, const bf16* a, int64_t k, int rank, float alpha, float* h) {
  alignas(64) float c[16];
  configure_row(rank);
  _tile_zero(0);
  for (int64_t i = 0; i < k; i += 32) {
    _tile_loadd(4, a + i, k * 2);
    _tile_loadd(6, x + i, 4);
    _tile_dpbf16ps(0, 4, 6);
  }
  _tile_stored(0, c, 4);
  _mm512_mask_storeu_ps(h, first(rank), _mm512_mul_ps(_mm512_load_ps(c), _mm512_set1_ps(alpha)));
}

// Of up to kRows rows, x is the left tile, and factors are transposed to be the right one.
static void shrink_tiles(const bf16* x, int64_t x_stride, int m, const bf16* a, int64_t k, int rank, float alpha, float* h,
                         int64_t h_stride) {
  const int kSteps = 4;  // that are transposed ahead of their products
  alignas(64) bf16 b[kSteps][16 * 32];
  alignas(64) float c[kRows * 16];
  configure(m);
  _tile_zero(0);
  if (m > 16) _tile_zero(2);
  for (int64_t i = 0; i < k; i += 32 * kSteps) {
    const int steps = k - i < 32 * kSteps ? (int)(k - i) / 32 : kSteps;
    for (int s = 0; s < steps; s++) {
      __m512i v[16];
      for (int r = 0; r < 16; r++)
        v[r] = r < rank ? _mm512_loadu_si512(a + r * k + i + 32 * s) : _mm512_setzero_si512();
      transpose_words(v);
      for (int r = 0; r < 16; r++) _mm512_store_si512(b[s] + r * 32, v[r]);
    }
    for (int s = 0; s < steps; s++) {
      _tile_loadd(6, b[s], 64);
      _tile_loadd(4, x + i + 32 * s, x_stride * 2);
      _tile_dpbf16ps(0, 4, 6);
      if (m <= 16) continue;
      _tile_loadd(5, x + 16 * x_stride + i + 32 * s, x_stride * 2);
      _tile_dpbf16ps(2, 5, 6);
    }
  }
  _tile_stored(0, c, 64);
  if (m > 16) _tile_stored(2, c + 16 * 16, 64);
  for (int row = 0; row < m; row++)
    _mm512_mask_storeu_ps(h + row * h_stride, first(rank),
                          _mm512_mul_ps(_mm512_load_ps(c + row * 16), _mm512_set1_ps(alpha)));
}

static const int kFewRows = 4;

static void shrink_by_tiles(const bf16* x, int64_t x_stride, int m, const bf16* a, int64_t k, int rank, float alpha, float* h,
                            int64_t h_stride) {
  const int at_once = m > kFewRows ? kRows : 1;
  for (int r = 0; r < rank; r += 16) {
    const int part = rank - r < 16 ? rank - r : 16;
    const bf16* factors = a + r * k;
    for (int row = 0; row < m; row += at_once) {
      if (m > kFewRows)
        shrink_tiles(x + row * x_stride, x_stride, m - row < kRows ? m - row : kRows, factors, k, part, alpha,
                     h + row * h_stride + r, h_stride);
      else
        shrink_row(x + row * x_stride, factors, k, part, alpha, h + row * h_stride + r);
    }
  }
}
#endif

static void shrink(DType dtype, const void* x, int64_t x_stride, int m, const void* a, int64_t k, int rank, float alpha,
                   float* h, int64_t h_stride) {
#ifdef __AMX_BF16__
  if (dtype == DType::BF16 && k % 32 == 0) {
    shrink_by_tiles((const bf16*)x, x_stride, m, (const bf16*)a, k, rank, alpha, h, h_stride);
    return;
  }
#endif
  if (dtype == DType::F32)
    shrink_rows<F32>((const float*)x, x_stride, m, (const float*)a, k, rank, alpha, h, h_stride);
  else
    shrink_rows<BF16>((const bf16*)x, x_stride, m, (const bf16*)a, k, rank, alpha, h, h_stride);
}

}  // namespace LP_ISA
}  // namespace lp
