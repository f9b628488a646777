// Products of a few rows with a band of packed weights in 16 registers of 8 floats, or 32 of 4. (SVE has 32 of 8.)
//
// Each output is one sum over the inputs in their order, with a rounding for each: the same in every kernel here, however
// many rows there are.
#pragma once

#include "../kernels.h"
#include "product_prefetch.h"
#include "vector.h"

namespace lp {
namespace LP_ISA {

static const int kSlab = 64;       // inputs whose weights, widened, stay in the first cache with x's
static const int kFewProducts = 3;  // rows whose sums for a whole band stay in registers
static const int kManyRows = 5;    // rows whose sums for half of it do

// --- weights as they lie -----------------------------------------------------------------------------------------------

// Rows of a band in address order, which is what the CPU's own prefetching follows.
template <int M>
static inline void band_rows(const float* x, int64_t x_stride, const float* band, int64_t k, Floats (*acc)[2]) {
  for (int64_t i = 0; i < k; i++, band += kBand)
    for (int p = 0; p < 2; p++) {
      const Floats b = load(band + 16 * p);
      for (int r = 0; r < M; r++) acc[r][p] = fmadd(all(x[r * x_stride + i]), b, acc[r][p]);
    }
}

template <int M>
static inline void band_rows(const float* x, int64_t x_stride, const bf16* band, int64_t k, Floats (*acc)[2]) {
  for (int64_t i = 0; i < k; i += 32)
    for (int p = 0; p < 2; p++)
#pragma GCC unroll 4
      for (int pair = 0; pair < 16; pair++, band += 32) {
        const Words b = load_words(band);
        for (int r = 0; r < M; r++) {
          const float* two = x + r * x_stride + i + 2 * pair;
          acc[r][p] = fmadd(all(two[0]), evens(b), acc[r][p]);
          acc[r][p] = fmadd(all(two[1]), odds(b), acc[r][p]);
        }
      }
}

#ifdef LP_DOTS_PAIRS
static inline Words broadcast_pair(const bf16* x) {
  int32_t two;
  __builtin_memcpy(&two, x, 4);
  return all_words(two);
}

template <int M>
static inline void band_rows(const bf16* x, int64_t x_stride, const bf16* band, int64_t k, Floats (*acc)[2]) {
  for (int64_t i = 0; i < k; i += 32)
    for (int p = 0; p < 2; p++)
#pragma GCC unroll 4
      for (int pair = 0; pair < 16; pair++, band += 32) {
        const Words b = load_words(band);
        for (int r = 0; r < M; r++) acc[r][p] = dot_pairs(acc[r][p], broadcast_pair(x + r * x_stride + i + 2 * pair), b);
      }
}
#endif

template <int M, class X, class T>
static inline void few_rows(const X* x, int64_t x_stride, const T* band, int64_t k, bool adds, float* c,
                            int64_t c_stride) {
  Floats acc[M][2];
  for (int r = 0; r < M; r++)
    for (int p = 0; p < 2; p++) acc[r][p] = adds ? load(c + r * c_stride + 16 * p) : zeros();
  band_rows<M>(x, x_stride, band, k, acc);
  for (int r = 0; r < M; r++)
    for (int p = 0; p < 2; p++) store(c + r * c_stride + 16 * p, acc[r][p]);
}

// --- half a band -------------------------------------------------------------------------------------------------------

template <int M>
static inline void panel_rows(const float* x, int64_t x_stride, const float* band, int64_t k, bool, Floats* acc) {
  for (int64_t i = 0; i < k; i++, band += kBand) {
    const Floats b = load(band);
    for (int r = 0; r < M; r++) acc[r] = fmadd(all(x[r * x_stride + i]), b, acc[r]);
  }
}

// `fetches`: what lies a slab ahead.
template <int M>
static inline void panel_rows(const float* x, int64_t x_stride, const bf16* band, int64_t k, bool fetches, Floats* acc) {
  for (int64_t i = 0; i < k; i += 32, band += 512)
    for (int pair = 0; pair < 16; pair++, band += 32) {
      if (fetches) fetch(band + kSlab * kBand);
      const Floats even = evens(load_words(band));
      for (int r = 0; r < M; r++) acc[r] = fmadd(all(x[r * x_stride + i + 2 * pair]), even, acc[r]);
      asm volatile("" : : : "memory");  // or both halves are widened at once, and sums leave the registers
      const Floats odd = odds(load_words(band));
      for (int r = 0; r < M; r++) acc[r] = fmadd(all(x[r * x_stride + i + 2 * pair + 1]), odd, acc[r]);
    }
}

#ifdef LP_DOTS_PAIRS
template <int M>
static inline void panel_rows(const bf16* x, int64_t x_stride, const bf16* band, int64_t k, bool fetches, Floats* acc) {
  for (int64_t i = 0; i < k; i += 32, band += 512)
    for (int pair = 0; pair < 16; pair++, band += 32) {
      if (fetches) fetch(band + kSlab * kBand);
      const Words b = load_words(band);
      for (int r = 0; r < M; r++) acc[r] = dot_pairs(acc[r], broadcast_pair(x + r * x_stride + i + 2 * pair), b);
    }
}
#endif

template <int M, class X, class T>
static inline void half_band(const X* x, int64_t x_stride, const T* panel, int64_t k, bool adds, bool fetches, float* c,
                             int64_t c_stride) {
  Floats acc[M];
  for (int r = 0; r < M; r++) acc[r] = adds ? load(c + r * c_stride) : zeros();
  panel_rows<M>(x, x_stride, panel, k, fetches, acc);
  for (int r = 0; r < M; r++) store(c + r * c_stride, acc[r]);
}

static inline int num_many_blocks(int m) { return (m + kManyRows - 1) / kManyRows; }

template <class X, class T>
static inline void many_rows(const X* x, int64_t x_stride, int m, const T* band, int64_t panel, int64_t k, bool adds,
                             float* c, int64_t c_stride, TurnPrefetch& fetches) {
  const int num_blocks = num_many_blocks(m);
  for (int p = 0; p < 2; p++, band += panel, c += kPanel)
    for (int block = 0; block < num_blocks; block++) {
      const int row = block * m / num_blocks, rows = (block + 1) * m / num_blocks - row;
      const X* at = x + row * x_stride;
      float* to = c + row * c_stride;
      switch (rows) {
        case 1: half_band<1>(at, x_stride, band, k, adds, block == 0, to, c_stride); break;
        case 2: half_band<2>(at, x_stride, band, k, adds, block == 0, to, c_stride); break;
        case 3: half_band<3>(at, x_stride, band, k, adds, block == 0, to, c_stride); break;
        case 4: half_band<4>(at, x_stride, band, k, adds, block == 0, to, c_stride); break;
        default: half_band<5>(at, x_stride, band, k, adds, block == 0, to, c_stride);
      }
      fetches.take_weights();
      fetches.take_others();
    }
}

// --- slabs -------------------------------------------------------------------------------------------------------------

template <class X, class T>
static inline void slab_rows(const X* x, int64_t x_stride, int m, const T* band, int64_t panel, int64_t k, bool adds,
                             float* c, int64_t c_stride, TurnPrefetch& fetches) {
  switch (m) {
    case 1: few_rows<1>(x, x_stride, band, k, adds, c, c_stride); break;
    case 2: few_rows<2>(x, x_stride, band, k, adds, c, c_stride); break;
    case 3: few_rows<3>(x, x_stride, band, k, adds, c, c_stride); break;
    default: many_rows(x, x_stride, m, band, panel, k, adds, c, c_stride, fetches);
  }
}

// `panel`: elements from one half of a band to the other.
template <class T>
static inline void product_of_slabs(const T* x, int64_t x_stride, int m, const T* band, int64_t panel, int64_t k, bool adds,
                                    float* c, int64_t c_stride, TurnPrefetch& fetches) {
  const int64_t slab = m > kFewProducts ? kSlab : k;
  for (int64_t i = 0; i < k; i += slab)
    slab_rows(x + i, x_stride, m, band + i * kBand, panel, k - i < slab ? k - i : slab, adds || i > 0, c, c_stride,
              fetches);
}

static void product_f32(const float* x, int64_t x_stride, int m, const float* band, int64_t k, bool adds, float* c,
                        int64_t c_stride, TurnPrefetch& fetches) {
  product_of_slabs(x, x_stride, m, band, kPanel, k, adds, c, c_stride, fetches);
}

static void product_bf16(const bf16* x, int64_t x_stride, int m, const bf16* band, int64_t k, bool adds, float* c,
                         int64_t c_stride, TurnPrefetch& fetches) {
#ifdef LP_DOTS_PAIRS
  product_of_slabs(x, x_stride, m, band, 512, k, adds, c, c_stride, fetches);
#else
  static const int kWide = 512;  // inputs of few rows at once
  alignas(64) float wide[kRows * kSlab];
  const int64_t slab = m > kFewProducts ? kSlab : kWide;
  static_assert(kFewProducts * kWide <= kRows * kSlab, "few rows must fit as well");
  for (int64_t i = 0; i < k; i += slab) {
    const int64_t inputs = k - i < slab ? k - i : slab;
    for (int r = 0; r < m; r++)
      for (int64_t j = 0; j < inputs; j += 16) store_aligned(wide + r * slab + j, load(x + r * x_stride + i + j));
    slab_rows(wide, slab, m, band + i * kBand, 512, inputs, adds || i > 0, c, c_stride, fetches);
  }
#endif
}

// Rows of half a slab are a turn.
static inline TurnPrefetch turns_of(const Prefetch* prefetch, int m, int64_t k) {
  const int64_t num_turns = (k + kSlab - 1) / kSlab * 2 * num_many_blocks(m);
  return TurnPrefetch(prefetch == nullptr ? Prefetch::Range{nullptr, 0} : prefetch->weights, prefetch, num_turns);
}

static void product(DType dtype, const void* x, int64_t x_stride, int m, const void* band, int64_t k, bool adds, float* c,
                    int64_t c_stride, const Prefetch* prefetch) {
  TurnPrefetch fetches = turns_of(prefetch, m, k);
  if (dtype == DType::F32)
    product_f32((const float*)x, x_stride, m, (const float*)band, k, adds, c, c_stride, fetches);
  else
    product_bf16((const bf16*)x, x_stride, m, (const bf16*)band, k, adds, c, c_stride, fetches);
}

#ifndef LP_DOTS_PAIRS
#define LP_WIDENS_ROWS 1

static void widen_rows(const void* x, int64_t x_stride, int m, int64_t k, int64_t tile_stride, float* tiles) {
  for (int64_t i = 0; i < k; i += kWideInputs, tiles += tile_stride) {
    const int64_t inputs = k - i < kWideInputs ? k - i : kWideInputs;
    for (int r = 0; r < m; r++)
      for (int64_t j = 0; j < inputs; j += 16)
        store_aligned(tiles + r * kWideInputs + j, load((const bf16*)x + r * x_stride + i + j));
  }
}

static void product_of_wide(const float* tiles, int64_t tile_stride, int m, const void* band, int64_t k, bool adds, float* c,
                            int64_t c_stride, const Prefetch* prefetch) {
  static_assert(kSlab == kWideInputs, "a slab must be a tile");
  TurnPrefetch fetches = turns_of(prefetch, m, k);
  for (int64_t i = 0; i < k; i += kSlab, tiles += tile_stride)
    slab_rows(tiles, kSlab, m, (const bf16*)band + i * kBand, 512, k - i < kSlab ? k - i : kSlab, adds || i > 0, c, c_stride,
              fetches);
}
#endif

// Rows as floats are twice as large: in parts of 64, 128 and 256 of them prompts take 0.96, 0.98 and 1.00 of the time with AVX2
// on AMD's Zen 4.
static Blocking blocking([[maybe_unused]] DType dtype) {
#ifdef LP_WIDENS_ROWS
  if (dtype == DType::BF16) return {9, 1 << 16, 64, 8, 1, true, 8};
#endif
  return {9, 1 << 16, 256, 8, 1, true, 8};
}

}  // namespace LP_ISA
}  // namespace lp
