// Products of a few rows with a band of packed weights.
#pragma once

#include "../kernels.h"
#include "tiles.h"
#include "vector.h"

#ifndef __AVX512F__
#include "product_256.h"
#else
#include "product_prefetch.h"

namespace lp {
namespace LP_ISA {

// Bytes that up to eight rows fetch ahead of the weights: from four rows on the CPU's own prefetchers do not run ahead. With
// none, 2048, 4096 and 8192 eight rows take 1.5, 1.29, 1.16 and 1.00 of the time on AMD's Zen 5.
static const int kFetchAhead = 8192;

static const int kBlockRows = 8;  // rows whose sums stay in registers
static const int kTurn = 32;      // inputs behind which a block of rows prefetches

// Calls visit(row, num_rows, fetches) for blocks of about as many rows each.
template <class T, class Visit>
static inline void each_block(int m, const T* band, int64_t k, const Prefetch* prefetch, const Visit& visit) {
  const int num_blocks = (m + kBlockRows - 1) / kBlockRows;
  const int64_t num_turns = (k + kTurn - 1) / kTurn;
  // A band in memory is fetched ahead by its first block.
  const Prefetch::Range ahead = {(const char*)band + kFetchAhead, k * kBand * (int64_t)sizeof(T) / 64};
  TurnPrefetch fetches = prefetch == nullptr ? TurnPrefetch(ahead, nullptr, num_turns)
                                             : TurnPrefetch(prefetch->weights, prefetch, num_turns * num_blocks);
  for (int block = 0; block < num_blocks; block++) {
    const int row = block * m / num_blocks, end = (block + 1) * m / num_blocks;
    visit(row, end - row, fetches);
  }
}

// --- float32 -----------------------------------------------------------------------------------------------------------

template <int M>
static inline void rows_f32(const float* x, int64_t x_stride, const float* band, int64_t k, bool adds, float* c,
                            int64_t c_stride, TurnPrefetch& fetches) {
  Floats acc[M][2];
  for (int r = 0; r < M; r++)
    for (int p = 0; p < 2; p++) acc[r][p] = adds ? load(c + r * c_stride + 16 * p) : zeros();
  for (int64_t start = 0; start < k; start += kTurn) {
    const int64_t end = start + kTurn < k ? start + kTurn : k;
    for (int64_t i = start; i < end; i++, band += kBand) {
      Floats b0 = load(band), b1 = load(band + 16);
      for (int r = 0; r < M; r++) {
        Floats a = all(x[r * x_stride + i]);
        acc[r][0] = fmadd(a, b0, acc[r][0]);
        acc[r][1] = fmadd(a, b1, acc[r][1]);
      }
    }
    fetches.take_weights();
    fetches.take_others();
  }
  for (int r = 0; r < M; r++) {
    store(c + r * c_stride, acc[r][0]);
    store(c + r * c_stride + 16, acc[r][1]);
  }
}

static void product_f32(const float* x, int64_t x_stride, int m, const float* band, int64_t k, bool adds, float* c,
                        int64_t c_stride, const Prefetch* prefetch) {
  each_block(m, band, k, prefetch, [&](int row, int num_rows, TurnPrefetch& fetches) {
    const float* at = x + row * x_stride;
    float* to = c + row * c_stride;
    switch (num_rows) {
      case 1: rows_f32<1>(at, x_stride, band, k, adds, to, c_stride, fetches); break;
      case 2: rows_f32<2>(at, x_stride, band, k, adds, to, c_stride, fetches); break;
      case 3: rows_f32<3>(at, x_stride, band, k, adds, to, c_stride, fetches); break;
      case 4: rows_f32<4>(at, x_stride, band, k, adds, to, c_stride, fetches); break;
      case 5: rows_f32<5>(at, x_stride, band, k, adds, to, c_stride, fetches); break;
      case 6: rows_f32<6>(at, x_stride, band, k, adds, to, c_stride, fetches); break;
      case 7: rows_f32<7>(at, x_stride, band, k, adds, to, c_stride, fetches); break;
      default: rows_f32<8>(at, x_stride, band, k, adds, to, c_stride, fetches);
    }
  });
}

#ifndef __AMX_BF16__
// --- bfloat16 with vectors ---------------------------------------------------------------------------------------------

// `in_order`: the band lies in memory and is read in address order, which the prefetchers of some CPUs demand; else it is in
// a cache, and one vector of x serves both panels. Each output is the same sum in the same order.
template <int M, bool in_order>
static inline void rows_bf16(const bf16* x, int64_t x_stride, const bf16* band, int64_t k, bool adds, float* c,
                             int64_t c_stride, TurnPrefetch& fetches) {
  Floats acc[M][2];
  for (int r = 0; r < M; r++)
    for (int p = 0; p < 2; p++) acc[r][p] = adds ? load(c + r * c_stride + 16 * p) : zeros();
  for (int64_t i = 0; i < k; i += kTurn, band += kTurn * kBand) {
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
        if (pair == 7 && p == 0) fetches.take_others();
      }
      if (in_order) asm volatile("" : : : "memory");  // or what x has for the second panel is kept on the stack
    }
    fetches.take_weights();
  }
  for (int r = 0; r < M; r++) {
    store(c + r * c_stride, acc[r][0]);
    store(c + r * c_stride + 16, acc[r][1]);
  }
}

template <bool in_order>
static inline void block_bf16(const bf16* x, int64_t x_stride, int m, const bf16* band, int64_t k, bool adds, float* c,
                              int64_t c_stride, TurnPrefetch& fetches) {
  switch (m) {
    case 1: rows_bf16<1, in_order>(x, x_stride, band, k, adds, c, c_stride, fetches); break;
    case 2: rows_bf16<2, in_order>(x, x_stride, band, k, adds, c, c_stride, fetches); break;
    case 3: rows_bf16<3, in_order>(x, x_stride, band, k, adds, c, c_stride, fetches); break;
    case 4: rows_bf16<4, in_order>(x, x_stride, band, k, adds, c, c_stride, fetches); break;
    case 5: rows_bf16<5, in_order>(x, x_stride, band, k, adds, c, c_stride, fetches); break;
    case 6: rows_bf16<6, in_order>(x, x_stride, band, k, adds, c, c_stride, fetches); break;
    case 7: rows_bf16<7, in_order>(x, x_stride, band, k, adds, c, c_stride, fetches); break;
    default: rows_bf16<8, in_order>(x, x_stride, band, k, adds, c, c_stride, fetches);
  }
}

static const int kSlab = 256;  // inputs of a band in memory that all rows are multiplied with before the next ones are

static void product_bf16(const bf16* x, int64_t x_stride, int m, const bf16* band, int64_t k, bool adds, float* c,
                         int64_t c_stride, const Prefetch* prefetch) {
  if (prefetch == nullptr && m > kBlockRows) {
    Prefetch next;
    for (int64_t i = 0; i < k; i += kSlab) {
      const int64_t inputs = k - i < kSlab ? k - i : kSlab, left = k - i - inputs;
      next.weights = {(const char*)(band + (i + inputs) * kBand), (left < kSlab ? left : kSlab) * kBand * 2 / 64};
      product_bf16(x + i, x_stride, m, band + i * kBand, inputs, adds || i > 0, c, c_stride, &next);
    }
    return;
  }
  each_block(m, band, k, prefetch, [&](int row, int num_rows, TurnPrefetch& fetches) {
    if (prefetch == nullptr)
      block_bf16<true>(x, x_stride, num_rows, band, k, adds, c, c_stride, fetches);
    else
      block_bf16<false>(x + row * x_stride, x_stride, num_rows, band, k, adds, c + row * c_stride, c_stride, fetches);
  });
}

#else
// --- bfloat16 with tiles -----------------------------------------------------------------------------------------------

// Of weights in memory, bytes that are fetched ahead into the second cache. Without it the tiles wait for memory: with none,
// 2048, 4096 and 8192, 32 rows take 1.00, 0.91, 0.87 and 0.90 of the time on a Xeon with AMX.
static const int kTilesFetchAhead = 4096;
static const int kTileBytes = 32 * kBand * sizeof(bf16);  // of the weights of 32 inputs
static const int kFetches = 8;                            // products of many rows that fetch the next slab

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
  const char* ahead = prefetch != nullptr ? nullptr : (const char*)band + kTilesFetchAhead;
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
    if (prefetch != nullptr && prefetch->weights.num_lines > 0)
      rows32<kTileBytes / kFetches>(x, x_bytes, band, k, prefetch->weights.begin);
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
    product_f32((const float*)x, x_stride, m, (const float*)band, k, adds, c, c_stride, prefetch);
    return;
  }
#ifdef __AMX_BF16__
  tiles_bf16((const bf16*)x, x_stride, m, (const bf16*)band, k, adds, c, c_stride, prefetch);
#else
  product_bf16((const bf16*)x, x_stride, m, (const bf16*)band, k, adds, c, c_stride, prefetch);
#endif
}

static Blocking blocking([[maybe_unused]] DType dtype) {
#ifdef __AMX_BF16__
  // A slab has 1024 inputs, behind which sums leave their tiles. With 256 inputs and parts of 512 rows a prompt takes 1.2 times as
  // long on a Xeon with AMX.
  if (dtype == DType::BF16) return {2 * kRows + 1, 1 << 16, 256, 4, kFetches, false, 128};
#endif
  return {kBlockRows + 1, 1 << 16, 256, 8, 1, true, kBlockRows};
}

}  // namespace LP_ISA
}  // namespace lp
#endif
