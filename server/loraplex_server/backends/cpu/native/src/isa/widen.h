// Weights of few bits become those that products read, each a small number times a scale, which is exact.
#pragma once

#include "../kernels.h"
#include "product.h"
#include "tiles.h"
#include "vector.h"

namespace lp {
namespace LP_ISA {

// --- pairs of inputs ---------------------------------------------------------------------------------------------------

// How far ahead of what is read lines are fetched. Widening takes long enough for the processor's own fetching to fall short.
constexpr int64_t kAhead = 4096;

template <Format format>
struct Panel;

// Calls visit(number, pair) for the 16 pairs of a block's panel, or visit(number, pair, pair of the other panel).
template <>
struct Panel<Format::INT8> {
  template <class Visit>
  static inline void each_pair(const uint8_t* block, int panel, const Visit& visit) {
    const Scales of(block + panel * kPanel);
    const uint8_t* values = block + kBand + panel * 512;
#pragma GCC unroll 8
    for (int number = 0; number < 16; number += 2, values += 64) {
      fetch((const char*)values + kAhead);
      const Int8Group group(values);
      visit(number, Int8Pair<0>{group, of});
      visit(number + 1, Int8Pair<1>{group, of});
    }
  }

  template <class Visit>
  static inline void each_pair_of_both(const uint8_t* block, const Visit& visit) {
    const Scales of(block), of_other(block + kPanel);
    const uint8_t* values = block + kBand;
#pragma GCC unroll 8
    for (int number = 0; number < 16; number += 2, values += 64) {
      fetch((const char*)values + kAhead), fetch((const char*)values + 512 + kAhead);
      const Int8Group group(values), other(values + 512);
      visit(number, Int8Pair<0>{group, of}, Int8Pair<0>{other, of_other});
      visit(number + 1, Int8Pair<1>{group, of}, Int8Pair<1>{other, of_other});
    }
  }
};

template <>
struct Panel<Format::INT4> {
  template <class Visit>
  static inline void each_pair(const uint8_t* block, int panel, const Visit& visit) {
    const Int4Scales of(block + panel * kPanel);
    const uint8_t* values = block + kBand + panel * 64 * kInt4Groups;
    if (panel == 0) fetch((const char*)block + kAhead);
#pragma GCC unroll 4
    for (int number = 0; number < 4 * kInt4Groups; number += 4, values += 64) {
      fetch((const char*)values + kAhead);
      const Int4Group group(values);
      visit(number, Int4Pair<0>{group, of});
      visit(number + 1, Int4Pair<1>{group, of});
      visit(number + 2, Int4Pair<2>{group, of});
      visit(number + 3, Int4Pair<3>{group, of});
    }
  }

  template <class Visit>
  static inline void each_pair_of_both(const uint8_t* block, const Visit& visit) {
    const Int4Scales of(block), of_other(block + kPanel);
    const uint8_t* values = block + kBand;
    fetch((const char*)block + kAhead);
#pragma GCC unroll 4
    for (int number = 0; number < 4 * kInt4Groups; number += 4, values += 64) {
      const uint8_t* others = values + 64 * kInt4Groups;
      fetch((const char*)values + kAhead), fetch((const char*)others + kAhead);
      const Int4Group group(values), other(others);
      visit(number, Int4Pair<0>{group, of}, Int4Pair<0>{other, of_other});
      visit(number + 1, Int4Pair<1>{group, of}, Int4Pair<1>{other, of_other});
      visit(number + 2, Int4Pair<2>{group, of}, Int4Pair<2>{other, of_other});
      visit(number + 3, Int4Pair<3>{group, of}, Int4Pair<3>{other, of_other});
    }
  }
};

// --- widening ----------------------------------------------------------------------------------------------------------

template <Format format>
static inline void widen_block(const uint8_t* block, int64_t k, float* band) {
  for (int panel = 0; panel < 2; panel++)
    Panel<format>::each_pair(block, panel, [&](int number, const auto& pair) {
      float* to = band + 2 * number * kBand + panel * kPanel;
      if (2 * number < k) store(to, pair.even());
      if (2 * number + 1 < k) store(to + kBand, pair.odd());
    });
}

template <Format format>
static inline void widen_block(const uint8_t* block, int64_t, bf16* band) {
  for (int panel = 0; panel < 2; panel++)
    Panel<format>::each_pair(
        block, panel, [&](int number, const auto& pair) { store_words(band + panel * 512 + 32 * number, pair.words()); });
}

template <Format format, class T>
static void widen_blocks(const uint8_t* blocks, int64_t k, T* band) {
  for (int64_t i = 0; i < k; i += kBlock, blocks += block_bytes(format), band += kBlock * kBand)
    widen_block<format>(blocks, k - i, band);
}

static void widen(DType dtype, Format format, const void* blocks, int64_t k, void* band) {
  const uint8_t* from = (const uint8_t*)blocks;
  if (dtype == DType::F32) {
    if (format == Format::INT8)
      widen_blocks<Format::INT8>(from, k, (float*)band);
    else
      widen_blocks<Format::INT4>(from, k, (float*)band);
  } else if (format == Format::INT8) {
    widen_blocks<Format::INT8>(from, k, (bf16*)band);
  } else {
    widen_blocks<Format::INT4>(from, k, (bf16*)band);
  }
}

// --- products of few rows ----------------------------------------------------------------------------------------------

// Rows that multiply with weights as soon as these are widened.
#ifdef __AVX512F__
static const int kFewNarrow = 8;
#else
static const int kFewNarrow = kFewProducts;
#endif

// Whether so many rows add the pairs of both panels in turns, so that a sum has time until its next pair. That takes registers
// which AVX-512 alone has. Eight bits of few rows are bound by memory, and prefetchers do not follow two panels: in turns one
// row takes 1.8 of the time on Zen 4, eight rows take 0.86. With four bits one row takes 0.89, eight take 0.69.
template <Format format>
constexpr bool takes_both([[maybe_unused]] int num_rows) {
#ifdef __AVX512F__
  return format == Format::INT4 || num_rows > 6;
#else
  return false;
#endif
}

#ifdef LP_DOTS_PAIRS
template <int M, class Pair>
static inline void add_pair(const bf16* x, int64_t x_stride, const Pair& pair, Floats* acc) {
  const Words b = pair.words();
  for (int r = 0; r < M; r++) {
    int32_t two;
    __builtin_memcpy(&two, x + r * x_stride, 4);
    acc[r] = dot_pairs(acc[r], all_words(two), b);
  }
}
#endif

template <int M, class Pair>
static inline void add_pair(const float* x, int64_t x_stride, const Pair& pair, Floats* acc) {
  const Floats even = pair.even();
  for (int r = 0; r < M; r++) acc[r] = fmadd(all(x[r * x_stride]), even, acc[r]);
  const Floats odd = pair.odd();
  for (int r = 0; r < M; r++) acc[r] = fmadd(all(x[r * x_stride + 1]), odd, acc[r]);
}

// `k`: a multiple of kBlock. Each output is the same sum in the same order as that of `product` with the widened weights.
template <Format format, int M, class T>
static void narrow_rows(const T* x, int64_t x_stride, const uint8_t* blocks, int64_t k, bool adds, float* c,
                        int64_t c_stride) {
  Floats sums[2][M];
  for (int p = 0; p < 2; p++)
    for (int r = 0; r < M; r++) sums[p][r] = adds ? load(c + r * c_stride + 16 * p) : zeros();
  for (int64_t i = 0; i < k; i += kBlock, blocks += block_bytes(format)) {
    if (takes_both<format>(M)) {
      Panel<format>::each_pair_of_both(blocks, [&](int number, const auto& pair, const auto& other) __attribute__((always_inline)) {
        add_pair<M>(x + i + 2 * number, x_stride, pair, sums[0]);
        add_pair<M>(x + i + 2 * number, x_stride, other, sums[1]);
      });
      continue;
    }
    for (int p = 0; p < 2; p++) {
      Floats acc[M];
      for (int r = 0; r < M; r++) acc[r] = sums[p][r];
      Panel<format>::each_pair(blocks, p, [&](int number, const auto& pair) {
        add_pair<M>(x + i + 2 * number, x_stride, pair, acc);
      });
      for (int r = 0; r < M; r++) sums[p][r] = acc[r];
    }
  }
  for (int p = 0; p < 2; p++)
    for (int r = 0; r < M; r++) store(c + r * c_stride + 16 * p, sums[p][r]);
}

template <Format format, class T>
static void few_narrow_rows(const T* x, int64_t x_stride, int m, const uint8_t* blocks, int64_t k, bool adds, float* c,
                            int64_t c_stride) {
  switch (m) {
    case 1: narrow_rows<format, 1>(x, x_stride, blocks, k, adds, c, c_stride); break;
    case 2: narrow_rows<format, 2>(x, x_stride, blocks, k, adds, c, c_stride); break;
#ifdef __AVX512F__
    case 3: narrow_rows<format, 3>(x, x_stride, blocks, k, adds, c, c_stride); break;
    case 4: narrow_rows<format, 4>(x, x_stride, blocks, k, adds, c, c_stride); break;
    case 5: narrow_rows<format, 5>(x, x_stride, blocks, k, adds, c, c_stride); break;
    case 6: narrow_rows<format, 6>(x, x_stride, blocks, k, adds, c, c_stride); break;
    case 7: narrow_rows<format, 7>(x, x_stride, blocks, k, adds, c, c_stride); break;
#endif
    default: narrow_rows<format, kFewNarrow>(x, x_stride, blocks, k, adds, c, c_stride);
  }
}

// As much as a multiple of kBlock leaves is left.
template <Format format>
static int64_t few_rows_f32(const float* x, int64_t x_stride, int m, const uint8_t* blocks, int64_t k, float* c,
                            int64_t c_stride) {
  const int64_t done = k / kBlock * kBlock;
  few_narrow_rows<format>(x, x_stride, m, blocks, done, false, c, c_stride);
  return done;
}

template <Format format>
static void few_rows_bf16(const bf16* x, int64_t x_stride, int m, const uint8_t* blocks, int64_t k, float* c,
                          int64_t c_stride) {
#ifdef LP_DOTS_PAIRS
  few_narrow_rows<format>(x, x_stride, m, blocks, k, false, c, c_stride);
#else
  static const int kWide = 512;  // inputs of the rows at once, as floats
  alignas(64) float wide[kFewNarrow * kWide];
  for (int64_t i = 0; i < k; i += kWide) {
    const int64_t inputs = k - i < kWide ? k - i : kWide;
    for (int r = 0; r < m; r++)
      for (int64_t j = 0; j < inputs; j += 16) store_aligned(wide + r * kWide + j, load(x + r * x_stride + i + j));
    few_narrow_rows<format>(wide, kWide, m, blocks + i / kBlock * block_bytes(format), inputs, i > 0, c, c_stride);
  }
#endif
}

// --- products ----------------------------------------------------------------------------------------------------------

#ifdef __AMX_BF16__
// Calls multiply(widened, i) for each block, of which the next one is widened meanwhile: so weights are read all the time,
// and vectors work beside the tiles.
template <Format format, class Multiply>
static inline void each_block(const uint8_t* blocks, int64_t k, const Multiply& multiply) {
  alignas(64) bf16 widened[2][kBlock * kBand];
  widen_block<format>(blocks, kBlock, widened[0]);
  int turn = 0;
  for (int64_t i = kBlock; i < k; i += kBlock, turn ^= 1) {
    widen_block<format>(blocks + i / kBlock * block_bytes(format), kBlock, widened[turn ^ 1]);
    multiply(widened[turn], i - kBlock);
  }
  multiply(widened[turn], k - kBlock);
}

template <Format format>
static void tiles_narrow(const bf16* x, int64_t x_stride, int m, const uint8_t* blocks, int64_t k, float* c,
                         int64_t c_stride) {
  const int64_t x_bytes = x_stride * 2, c_bytes = c_stride * 4;
  configure(m);
  _tile_zero(0);
  _tile_zero(1);
  if (m <= 16) {
    each_block<format>(blocks, k, [&](const bf16* band, int64_t i) { rows16<0>(x + i, x_bytes, band, kBlock, nullptr); });
  } else {
    _tile_zero(2);
    _tile_zero(3);
    each_block<format>(blocks, k, [&](const bf16* band, int64_t i) { rows32<0>(x + i, x_bytes, band, kBlock, nullptr); });
    _tile_stored(2, c + 16 * c_stride, c_bytes);
    _tile_stored(3, c + 16 * c_stride + 16, c_bytes);
  }
  _tile_stored(0, c, c_bytes);
  _tile_stored(1, c + 16, c_bytes);
}
#endif

template <Format format>
static void product_of(DType dtype, const void* x, int64_t x_stride, int m, const uint8_t* blocks, int64_t k, float* c,
                       int64_t c_stride) {
#ifdef __AMX_BF16__
  if (dtype == DType::BF16) {
    tiles_narrow<format>((const bf16*)x, x_stride, m, blocks, k, c, c_stride);
    return;
  }
#endif
  int64_t done = 0;
  if (m <= kFewNarrow && dtype == DType::BF16) {
    few_rows_bf16<format>((const bf16*)x, x_stride, m, blocks, k, c, c_stride);
    return;
  }
  if (m <= kFewNarrow) done = few_rows_f32<format>((const float*)x, x_stride, m, blocks, k, c, c_stride);
  constexpr int kPart = 4 * kBlock;
  alignas(64) float part[kPart * kBand];
  Prefetch nothing;
  for (int64_t i = done; i < k; i += kPart) {
    const int64_t inputs = k - i < kPart ? k - i : kPart;
    widen(dtype, format, blocks + i / kBlock * block_bytes(format), inputs, part);
    product(dtype, (const char*)x + i * item_bytes(dtype), x_stride, m, part, inputs, i > 0, c, c_stride, &nothing);
  }
}

static void product_narrow(DType dtype, Format format, const void* x, int64_t x_stride, int m, const void* band, int64_t k,
                           float* c, int64_t c_stride) {
  if (format == Format::INT8)
    product_of<Format::INT8>(dtype, x, x_stride, m, (const uint8_t*)band, k, c, c_stride);
  else
    product_of<Format::INT4>(dtype, x, x_stride, m, (const uint8_t*)band, k, c, c_stride);
}

}  // namespace LP_ISA
}  // namespace lp
