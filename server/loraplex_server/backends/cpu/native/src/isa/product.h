// Products of a few rows with a band of packed weights.
#pragma once

#include "../kernels.h"
#include "tiles.h"
#include "vector.h"

#ifndef __AVX512F__
#include "product_256.h"
#else

namespace lp {
namespace LP_ISA {

// Bytes that up to eight rows fetch ahead of the weights: from four rows on the CPU's own prefetchers do not run ahead. With
// none, 2048, 4096 and 8192 eight rows take 1.5, 1.29, 1.16 and 1.00 of the time on AMD's Zen 5.
static const int kFetchAhead = 8192;

static const int kSlab = 128;  // inputs whose weights stay in the first cache for several blocks of rows

// A caller with longer ones does not cut a band into slabs, so its weights lie in memory.
static inline bool is_slab(int64_t k) { return k <= 2 * kSlab; }

// --- float32 -----------------------------------------------------------------------------------------------------------

template <int M>
static inline void rows_f32(const float* x, int64_t x_stride, const float* band, int64_t k, bool adds, bool fetches,
                            float* c, int64_t c_stride) {
  Floats acc[M][2];
  for (int r = 0; r < M; r++)
    for (int p = 0; p < 2; p++) acc[r][p] = adds ? load(c + r * c_stride + 16 * p) : zeros();
  for (int64_t i = 0; i < k; i++, band += kBand) {
    Floats b0 = load(band), b1 = load(band + 16);
    if (fetches) {
      _mm_prefetch((const char*)band + kFetchAhead, _MM_HINT_T1);
      _mm_prefetch((const char*)band + kFetchAhead + 64, _MM_HINT_T1);
    }
    for (int r = 0; r < M; r++) {
      Floats a = all(x[r * x_stride + i]);
      acc[r][0] = fmadd(a, b0, acc[r][0]);
      acc[r][1] = fmadd(a, b1, acc[r][1]);
    }
  }
  for (int r = 0; r < M; r++) {
    store(c + r * c_stride, acc[r][0]);
    store(c + r * c_stride + 16, acc[r][1]);
  }
}

static void product_f32(const float* x, int64_t x_stride, int m, const float* band, int64_t k, bool adds, float* c,
                        int64_t c_stride) {
  for (int r = 0; r < m; r += 8, x += 8 * x_stride, c += 8 * c_stride) {
    const bool fetches = r == 0 && !is_slab(k);
    switch (m - r) {
      case 1: rows_f32<1>(x, x_stride, band, k, adds, fetches, c, c_stride); break;
      case 2: rows_f32<2>(x, x_stride, band, k, adds, fetches, c, c_stride); break;
      case 3: rows_f32<3>(x, x_stride, band, k, adds, fetches, c, c_stride); break;
      case 4: rows_f32<4>(x, x_stride, band, k, adds, fetches, c, c_stride); break;
      case 5: rows_f32<5>(x, x_stride, band, k, adds, fetches, c, c_stride); break;
      case 6: rows_f32<6>(x, x_stride, band, k, adds, fetches, c, c_stride); break;
      case 7: rows_f32<7>(x, x_stride, band, k, adds, fetches, c, c_stride); break;
      default: rows_f32<8>(x, x_stride, band, k, adds, fetches, c, c_stride);
    }
  }
}

#ifndef __AMX_BF16__
// --- bfloat16 with vectors ---------------------------------------------------------------------------------------------

// The next weights, which the blocks of rows prefetch together while they multiply with these.
struct NextWeights {
  const char* at;  // null: nothing
  int num_lines;   // for each 32 inputs
};

// Prefetches ranges evenly, in so many turns: a turn is 32 inputs of a block of rows.
struct Prefetcher {
  const Prefetch::Range* range = nullptr;
  const char* at = nullptr;
  int64_t num_left = 0;  // lines of the range
  int num_ranges = 0;    // with this one
  int num_lines = 0;     // in a turn

  Prefetcher() = default;
  Prefetcher(const Prefetch* prefetch, int64_t num_turns) {
    if (prefetch == nullptr || prefetch->num_ranges == 0) return;
    int64_t all = 0;
    for (int i = 0; i < prefetch->num_ranges; i++) all += prefetch->ranges[i].num_lines;
    range = prefetch->ranges, at = range->begin, num_left = range->num_lines, num_ranges = prefetch->num_ranges;
    num_lines = (int)((all + num_turns - 1) / num_turns);
  }

  void take_turn() {
    for (int line = 0; line < num_lines; line++, at += 64, num_left--) {
      if (num_left == 0) {
        if (--num_ranges == 0) {
          num_lines = 0;
          return;
        }
        range++, at = range->begin, num_left = range->num_lines;
      }
      _mm_prefetch(at, _MM_HINT_T1);
    }
  }
};

static const int kLines = 32 * kBand * sizeof(bf16) / 64;  // of the weights of 32 inputs
static const int kBlockRows = 8;                          // rows whose sums stay in registers

// `in_order`: the band is read in address order, which the prefetchers of some CPUs demand; else it is in a cache, and one
// vector of x serves both panels. Each output is the same sum in the same order.
template <int M, bool in_order>
static inline void rows_bf16(const bf16* x, int64_t x_stride, const bf16* band, int64_t k, bool adds, float* c,
                            int64_t c_stride, NextWeights next, Prefetcher& prefetcher) {
  Floats acc[M][2];
  for (int r = 0; r < M; r++)
    for (int p = 0; p < 2; p++) acc[r][p] = adds ? load(c + r * c_stride + 16 * p) : zeros();
  for (int64_t i = 0; i < k; i += 32, band += 32 * kBand) {
#pragma GCC unroll 2
    for (int p = 0; p < (in_order ? 2 : 1); p++) {
#pragma GCC unroll 16
      for (int pair = 0; pair < 16; pair++) {
        const Words b0 = load_words(band + 512 * p + pair * 32);
        const Words b1 = in_order ? b0 : load_words(band + 512 + pair * 32);
        for (int r = 0; r < M; r++) {
          int32_t two;
          __builtin_memcpy(&two, x + r * x_stride + i + 2 * pair, 4);
          const Words a = all_words(two);
          acc[r][p] = dot_pairs(acc[r][p], a, b0);
          if (!in_order) acc[r][1] = dot_pairs(acc[r][1], a, b1);
        }
      }
      if (in_order) asm volatile("" : : : "memory");  // or what x has for the second panel is kept on the stack
    }
    for (int line = 0; line < next.num_lines; line++, next.at += 64) _mm_prefetch(next.at, _MM_HINT_T1);
    prefetcher.take_turn();
  }
  for (int r = 0; r < M; r++) {
    store(c + r * c_stride, acc[r][0]);
    store(c + r * c_stride + 16, acc[r][1]);
  }
}

template <bool in_order>
static inline void block_bf16(const bf16* x, int64_t x_stride, int m, const bf16* band, int64_t k, bool adds, float* c,
                              int64_t c_stride, NextWeights next, Prefetcher& prefetcher) {
  switch (m) {
    case 1: rows_bf16<1, in_order>(x, x_stride, band, k, adds, c, c_stride, next, prefetcher); break;
    case 2: rows_bf16<2, in_order>(x, x_stride, band, k, adds, c, c_stride, next, prefetcher); break;
    case 3: rows_bf16<3, in_order>(x, x_stride, band, k, adds, c, c_stride, next, prefetcher); break;
    case 4: rows_bf16<4, in_order>(x, x_stride, band, k, adds, c, c_stride, next, prefetcher); break;
    case 5: rows_bf16<5, in_order>(x, x_stride, band, k, adds, c, c_stride, next, prefetcher); break;
    case 6: rows_bf16<6, in_order>(x, x_stride, band, k, adds, c, c_stride, next, prefetcher); break;
    case 7: rows_bf16<7, in_order>(x, x_stride, band, k, adds, c, c_stride, next, prefetcher); break;
    default: rows_bf16<8, in_order>(x, x_stride, band, k, adds, c, c_stride, next, prefetcher);
  }
}

// Rows by blocks, which together fetch `num_lines` for each 32 inputs from `next` on.
static inline void blocks_bf16(const bf16* x, int64_t x_stride, int m, const bf16* band, int64_t k, bool adds, float* c,
                               int64_t c_stride, const char* next, int num_lines, Prefetcher& prefetcher) {
  const int num_blocks = (m + kBlockRows - 1) / kBlockRows, share = (num_lines + num_blocks - 1) / num_blocks;
  for (int block = 0; block < num_blocks; block++) {
    const int row = block * kBlockRows, rows = m - row < kBlockRows ? m - row : kBlockRows;
    const bool fetches = next != nullptr && block * share < num_lines;
    const NextWeights part = fetches ? NextWeights{next + block * share * (k / 32) * 64, share} : NextWeights{nullptr, 0};
    block_bf16<false>(x + row * x_stride, x_stride, rows, band, k, adds, c + row * c_stride, c_stride, part, prefetcher);
  }
}

static void product_bf16(const bf16* x, int64_t x_stride, int m, const bf16* band, int64_t k, bool adds, float* c,
                         int64_t c_stride, const Prefetch* prefetch) {
  if (m <= kBlockRows) {
    const NextWeights ahead = is_slab(k) ? NextWeights{nullptr, 0} : NextWeights{(const char*)band + kFetchAhead, kLines};
    Prefetcher none;
    block_bf16<true>(x, x_stride, m, band, k, adds, c, c_stride, ahead, none);
    return;
  }
  if (is_slab(k)) {
    Prefetcher none;
    const char* next = prefetch == nullptr ? nullptr : prefetch->ranges[0].begin;
    blocks_bf16(x, x_stride, m, band, k, adds, c, c_stride, next, kLines / kFetches, none);
    return;
  }
  // The blocks take a slab in turns and fetch the next, so that memory is waited for while all of them multiply.
  Prefetcher prefetcher(prefetch, k / 32 * ((m + kBlockRows - 1) / kBlockRows));
  for (int64_t i = 0; i < k; i += kSlab) {
    const int64_t inputs = k - i < kSlab ? k - i : kSlab;
    const char* next = i + inputs < k ? (const char*)(band + (i + inputs) * kBand) : nullptr;
    blocks_bf16(x + i, x_stride, m, band + i * kBand, inputs, adds || i > 0, c, c_stride, next, kLines, prefetcher);
  }
}

#else
// --- bfloat16 with tiles -----------------------------------------------------------------------------------------------

// Of weights in memory, bytes that are fetched ahead into the second cache. Without it the tiles wait for memory: with none,
// 2048, 4096 and 8192, 32 rows take 1.00, 0.91, 0.87 and 0.90 of the time on a Xeon with AMX.
static const int kTilesFetchAhead = 4096;
static const int kTileBytes = 32 * kBand * sizeof(bf16);  // of the weights of 32 inputs

// `Fetches`: bytes that are prefetched from `next` for each 32 inputs.
template <int Fetches>
static inline void rows16(const bf16* x, int64_t x_bytes, const bf16* band, int64_t k, const char* next) {
  for (int64_t i = 0; i < k; i += 32, band += 32 * kBand, next += Fetches) {
    _tile_loadd(4, x + i, x_bytes);
    _tile_loadd(6, band, 64);
    _tile_loadd(7, band + 512, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    for (int line = 0; line < Fetches; line += 64) _mm_prefetch(next + line, _MM_HINT_T1);
  }
}

template <int Fetches>
static inline void rows32(const bf16* x, int64_t x_bytes, const bf16* band, int64_t k, const char* next) {
  const bf16* lower = x + 8 * x_bytes;
  for (int64_t i = 0; i < k; i += 32, band += 32 * kBand, next += Fetches) {
    _tile_loadd(6, band, 64);
    _tile_loadd(4, x + i, x_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, band + 512, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, lower + i, x_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    for (int line = 0; line < Fetches; line += 64) _mm_prefetch(next + line, _MM_HINT_T1);
  }
}

static void tiles_bf16(const bf16* x, int64_t x_stride, int m, const bf16* band, int64_t k, bool adds, float* c,
                       int64_t c_stride, const Prefetch* prefetch) {
  const int64_t x_bytes = x_stride * 2, c_bytes = c_stride * 4;
  float* lower = c + 16 * c_stride;
  configure(m);
  if (adds) {
    _tile_loadd(0, c, c_bytes);
    _tile_loadd(1, c + 16, c_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  const char* ahead = is_slab(k) ? nullptr : (const char*)band + kTilesFetchAhead;
  if (m <= 16) {
    if (ahead != nullptr)
      rows16<kTileBytes>(x, x_bytes, band, k, ahead);
    else
      rows16<0>(x, x_bytes, band, k, nullptr);
  } else {
    if (adds) {
      _tile_loadd(2, lower, c_bytes);
      _tile_loadd(3, lower + 16, c_bytes);
    } else {
      _tile_zero(2);
      _tile_zero(3);
    }
    if (prefetch != nullptr)
      rows32<kTileBytes / kFetches>(x, x_bytes, band, k, prefetch->ranges[0].begin);
    else if (ahead != nullptr)
      rows32<kTileBytes>(x, x_bytes, band, k, ahead);
    else
      rows32<0>(x, x_bytes, band, k, nullptr);
    _tile_stored(2, lower, c_bytes);
    _tile_stored(3, lower + 16, c_bytes);
  }
  _tile_stored(0, c, c_bytes);
  _tile_stored(1, c + 16, c_bytes);
}
#endif

static void product(DType dtype, const void* x, int64_t x_stride, int m, const void* band, int64_t k, bool adds, float* c,
                    int64_t c_stride, const Prefetch* prefetch) {
  if (dtype == DType::F32) {
    product_f32((const float*)x, x_stride, m, (const float*)band, k, adds, c, c_stride);
    return;
  }
#ifdef __AMX_BF16__
  tiles_bf16((const bf16*)x, x_stride, m, (const bf16*)band, k, adds, c, c_stride, prefetch);
#else
  product_bf16((const bf16*)x, x_stride, m, (const bf16*)band, k, adds, c, c_stride, prefetch);
#endif
}

static int compute_bound_rows([[maybe_unused]] DType dtype) {
#ifdef __AMX_BF16__
  return 0;
#else
  return dtype == DType::BF16 ? kBlockRows + 1 : 0;
#endif
}

}  // namespace LP_ISA
}  // namespace lp
#endif
