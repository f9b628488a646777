// The second half of a low-rank update, for rows of one adapter: from inner products to outputs. Factors are read where they
// lie.
#pragma once

#include "../kernels.h"
#include "elementwise.h"
#include "shrink.h"
#include "tiles.h"
#include "vector.h"

namespace lp {
namespace LP_ISA {

static inline float value(float x) { return x; }
static inline float value(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}

template <class T>
static inline void transpose_any(const T* b, int64_t stride, int num_outputs, int rank, float* t) {
  for (int r = 0; r < rank; r++)
    for (int o = 0; o < 16; o++) t[r * 16 + o] = o < num_outputs ? value(b[o * stride + r]) : 0.0f;
}

static inline void gather_floats(const float* b, int64_t stride, int rank, float* t) {
  for (int r = 0; r < rank; r++) store_aligned(t + r * 16, gather(b + r, stride));
}

// t[rank][16] of up to 16 ranks, in any dtype and of any number of outputs up to 16.
template <class T>
static inline void transpose_part(const T* b, int64_t stride, int num_outputs, int rank, float* t);

template <>
[[maybe_unused]] inline void transpose_part<float>(const float* b, int64_t stride, int num_outputs, int rank, float* t) {
  if (num_outputs < 16)
    transpose_any(b, stride, num_outputs, rank, t);
  else
    gather_floats(b, stride, rank, t);
}

// The same of 16 outputs.
static inline void transpose_floats(const bf16* b, int64_t stride, int rank, float* t) {
  Words pairs[8];
  transpose_outputs(b, stride, first(rank), pairs);
  for (int i = 0; i < 8; i++) {
    store_aligned(t + 2 * i * 16, evens(pairs[i]));
    store_aligned(t + (2 * i + 1) * 16, odds(pairs[i]));
  }
}

// Not inlined: what multiplies whole factors would get slower by it.
template <>
[[maybe_unused, gnu::noinline]] inline void transpose_part<bf16>(const bf16* b, int64_t stride, int num_outputs, int rank,
                                                                 float* t) {
  if (num_outputs < 16)
    transpose_any(b, stride, num_outputs, rank, t);
  else
    transpose_floats(b, stride, rank, t);
}

// c[16] = (adds ? c : 0) + h[rank] . t[rank][16]: two sums, so that one's latency hides the other's.
template <class Get>
static inline void add_ranks(const float* h, int rank, bool adds, float* c, Part part, const Get& get) {
  Floats even = adds ? load(c, part) : zeros(), odd = zeros();
  int r = 0;
  for (; r + 2 <= rank; r += 2) {
    even = fmadd(all(h[r]), get(r), even);
    odd = fmadd(all(h[r + 1]), get(r + 1), odd);
  }
  if (r < rank) even = fmadd(all(h[r]), get(r), even);
  store(c, add(even, odd), part);
}

// --- inner products ----------------------------------------------------------------------------------------------------

// Whether inner products in bfloat16 become two terms: where both halves of an update go by products of pairs.
#ifdef LP_FAST_PAIRS
static const bool kHasTerms = true;
#else
static const bool kHasTerms = false;
#endif

static int term_bytes(DType dtype) { return kHasTerms && dtype == DType::BF16 ? 2 : 4; }

static void split(DType dtype, const float* h, int64_t h_stride, int m, int rank, void* out, int64_t out_stride) {
  for (int row = 0; row < m; row++)
    for (int i = 0; i < rank; i += 16) {
      const Part part = first(rank - i);
      const Floats product = load(h + row * h_stride + i, part);
      float* to = (float*)out + row * out_stride;
      if (term_bytes(dtype) == 4) {
        store(to + i, product, part);
        continue;
      }
      const Floats high = BF16::round(product);
      store((bf16*)to + i, high, part);
      store((bf16*)to + out_stride + i, sub(product, high), part);
    }
}

// --- by vectors --------------------------------------------------------------------------------------------------------

// c[m][16] = (adds ? c : 0) + h[m][Rank] . factors, which stay in registers: of 16 outputs, `stride` apart.
template <int Rank>
static inline void expand_whole(const float* h, int64_t h_stride, int m, const bf16* b, int64_t stride, bool adds, float* c,
                                int64_t c_stride) {
  Words pairs[8];
  Floats factors[16];
  transpose_outputs(b, stride, first(Rank), pairs);
  for (int i = 0; i < Rank / 2; i++) {
    factors[2 * i] = evens(pairs[i]);
    factors[2 * i + 1] = odds(pairs[i]);
  }
  for (int row = 0; row < m; row++)
    add_ranks(h + row * h_stride, Rank, adds, c + row * c_stride, first(16), [&](int r) { return factors[r]; });
}

template <class D>
static void expand_rows(const float* h, int64_t h_stride, int m, const typename D::T* b, int rank, int num_outputs,
                        bool adds, float* c, int64_t c_stride, int64_t c_panel) {
  typedef typename D::T T;
  const int kBytesAhead = 2048;  // the factors are read as one stream, but too little at once for the CPU to notice
  alignas(64) float t[16 * 16];
  for (int o = 0; o < num_outputs; o += 16) {
    const int outputs = num_outputs - o < 16 ? num_outputs - o : 16;
    const T* block = b + (int64_t)o * rank;
    float* to = c + o / 16 * c_panel;
    for (int i = 0; i < 16 * rank * (int)sizeof(T); i += 64) fetch((const char*)block + kBytesAhead + i);
    for (int at = 0; at < rank; at += 16) {
      const int part = rank - at < 16 ? rank - at : 16;
      const bool whole = sizeof(T) == 2 && outputs == 16;
      const float* inner = h + at;
      if (whole && part == 16) {
        expand_whole<16>(inner, h_stride, m, (const bf16*)block + at, rank, adds || at > 0, to, c_stride);
      } else if (whole && part == 8) {
        expand_whole<8>(inner, h_stride, m, (const bf16*)block + at, rank, adds || at > 0, to, c_stride);
      } else {
        transpose_part<T>(block + at, rank, outputs, part, t);
        for (int row = 0; row < m; row++)
          add_ranks(inner + row * h_stride, part, adds || at > 0, to + row * c_stride, first(outputs),
                    [&](int r) { return load_aligned(t + r * 16); });
      }
    }
  }
}

#if !defined(__AVX512F__) || defined(LP_FAST_PAIRS)
#define LP_EXPANDS_BY_PAIRS 1
#ifndef __AMX_BF16__
#define LP_ADDS_UPDATES 1
#endif
// --- by pairs ----------------------------------------------------------------------------------------------------------

// Of up to so many ranks an output has eight sums: each is of every eighth pair. Then these are added up.
static const int kSumRanks = 64;
// Up to so many rows multiply factors as they lie; for more of them, these are transposed first. The sums are the same.
#if defined(LP_FAST_PAIRS) || defined(LP_EXPANDS_LYING)
static const int kRowsAsTheyLie = 2;
#else
static const int kRowsAsTheyLie = 0;
#endif
// Their number of ranks is a multiple of this one.
#ifdef LP_FAST_PAIRS
static const int kLyingRanks = 1;
#else
static const int kLyingRanks = 8;
#endif

#ifdef LP_FAST_PAIRS
// A row's inner products: first terms, and how much further the second ones are.
struct Inner {
  typedef bf16 T;
  static const int per_row = 2;  // times as many are a row's as there are ranks
  const bf16* terms;
  int64_t low;

  Inner(const bf16* first, int64_t stride) : terms(first), low(stride) {}
};

// Of M rows and 16 outputs, which lie `stride` apart.
template <int Rank, int M>
static inline void lying_sums(const bf16* b, int64_t stride, int rank, const Inner* h, Floats* sums) {
  Floats pairs[M][8];
  if (Rank == 8) {
    for (int i = 0; i < 4; i++) {
      const Words factors = load_words(b + 32 * i);
      for (int row = 0; row < M; row++)
        pairs[row][i] = dot_pairs(dot_pairs(zeros(), factors, four_times(h[row].terms)), factors, four_times(h[row].terms + h[row].low));
    }
    for (int row = 0; row < M; row++) sums[row] = sums_of_fours(pairs[row]);
    return;
  }
  for (auto& row : pairs)
    for (Floats& pair : row) pair = zeros();
#pragma GCC unroll 4
  for (int at = 0; at < rank; at += 16) {
    const Part ranks = first(rank - at);
    Words factors[8];
    load_outputs(b + at, stride, ranks, factors);
    for (int row = 0; row < M; row++) {
      const Words high = load_twice(h[row].terms + at, ranks), low = load_twice(h[row].terms + h[row].low + at, ranks);
      for (int i = 0; i < 8; i++) pairs[row][i] = dot_pairs(dot_pairs(pairs[row][i], factors[i], high), factors[i], low);
    }
  }
  for (int row = 0; row < M; row++) sums[row] = sums_of_eights(pairs[row]);
}

// Of 16 outputs: a pair of ranks is one vector.
struct Transposed {
  Words pairs[kSumRanks / 2];

  void read(const bf16* b, int64_t stride, int rank) {
#pragma GCC unroll 4
    for (int at = 0; at < rank; at += 16) transpose_outputs(b + at, stride, first(rank - at), pairs + at / 2);
  }

  Floats sums(Inner h, int rank) const {
    const auto sum = [&](int i) {
      Floats made = zeros();
      for (int pair = i; 2 * pair < rank; pair += 8) {
        int32_t high, low;
        __builtin_memcpy(&high, h.terms + 2 * pair, 4);
        __builtin_memcpy(&low, h.terms + h.low + 2 * pair, 4);
        made = dot_pairs(dot_pairs(made, pairs[pair], all_words(high)), pairs[pair], all_words(low));
      }
      return made;
    };
    const Floats lower = add(add(sum(0), sum(2)), add(sum(1), sum(3)));
    return add(lower, rank <= 8 ? zeros() : add(add(sum(4), sum(6)), add(sum(5), sum(7))));
  }
};
#else
// A row's inner products.
struct Inner {
  typedef float T;
  static const int per_row = 1;
  const float* terms;

  Inner(const float* first, int64_t) : terms(first) {}
};

#ifdef LP_EXPANDS_LYING
template <int Rank, int M>
static inline void lying_sums(const bf16* b, int64_t stride, int rank, const Inner* h, Floats* sums) {
  for (int row = 0; row < M; row++)
    sums[row] = Rank == 8 ? expand_lying_of_8(b, h[row].terms) : expand_lying(b, stride, rank, h[row].terms);
}
#endif

// Of 16 outputs: a rank is one vector.
struct Transposed {
  alignas(64) float ranks[kSumRanks * 16];

  void read(const bf16* b, int64_t stride, int rank) {
    for (int at = 0; at < rank; at += 16) transpose_floats(b + at, stride, rank - at, ranks + at * 16);
  }

  Floats sums(Inner h, int rank) const {
    const auto sum = [&](int i) {
      Floats made = zeros();
      for (int pair = i; 2 * pair < rank; pair += 8) {
        made = fmadd(load_aligned(ranks + 2 * pair * 16), all(h.terms[2 * pair]), made);
        made = fmadd(load_aligned(ranks + (2 * pair + 1) * 16), all(h.terms[2 * pair + 1]), made);
      }
      return made;
    };
    const Floats lower = add(add(sum(0), sum(1)), add(sum(2), sum(3)));
    return add(lower, rank <= 8 ? zeros() : add(add(sum(4), sum(5)), add(sum(6), sum(7))));
  }
};
#endif

// c[m][num_outputs] = (adds ? c : 0) + the sums of up to kSumRanks ranks; of outputs there are 16, 32 and so on. `Rank`: what
// this is compiled for, 0: any. Factors that are transposed multiply pairs: behind the terms of odd ranks a zero must be.
template <int Rank>
static inline void expand_part(const typename Inner::T* h, int64_t h_stride, int m, const bf16* b, int64_t stride, int num_ranks,
                               int num_outputs, bool adds, float* c, int64_t c_stride, int64_t c_panel) {
  const int rank = Rank > 0 ? Rank : num_ranks;
  const auto inner = [=](int row) { return Inner(h + row * Inner::per_row * h_stride, h_stride); };
  for (int o = 0; o < num_outputs; o += 16) {
    const bf16* block = b + (int64_t)o * stride;
    float* to = c + o / 16 * c_panel;
    const auto put = [&](int row, Floats sums) {
      float* at = to + row * c_stride;
      store(at, adds ? add(load(at), sums) : sums);
    };
#if defined(LP_FAST_PAIRS) || defined(LP_EXPANDS_LYING)
    if (m <= kRowsAsTheyLie && rank % kLyingRanks == 0) {
      const Inner rows[2] = {inner(0), inner(m - 1)};
      Floats sums[2];
      m == 1 ? lying_sums<Rank, 1>(block, stride, rank, rows, sums) : lying_sums<Rank, 2>(block, stride, rank, rows, sums);
      for (int row = 0; row < m; row++) put(row, sums[row]);
      continue;
    }
#endif
    Transposed factors;
    factors.read(block, stride, rank);
    for (int row = 0; row < m; row++) put(row, factors.sums(inner(row), rank));
  }
}

template <class... Rest>
static inline void expand_by_rank(const typename Inner::T* h, int64_t h_stride, int m, const bf16* b, int64_t stride, int rank,
                                  Rest... rest) {
  switch (stride == rank ? rank : 0) {
    case 8: expand_part<8>(h, h_stride, m, b, 8, 8, rest...); break;
    case 16: expand_part<16>(h, h_stride, m, b, 16, 16, rest...); break;
    case 32: expand_part<32>(h, h_stride, m, b, 32, 32, rest...); break;
    case 64: expand_part<64>(h, h_stride, m, b, 64, 64, rest...); break;
    default: expand_part<0>(h, h_stride, m, b, stride, rank, rest...);
  }
}

// The same of any number of ranks and outputs: what lacks is zeros.
static void expand_filled(const Inner::T* h, int64_t h_stride, int m, const bf16* b, int64_t stride, int rank, int num_outputs,
                          bool adds, float* c, int64_t c_stride, int64_t c_panel) {
  const int kFilled = 32;  // rows at once
  alignas(64) Inner::T terms[kFilled * Inner::per_row * kSumRanks];
  alignas(64) bf16 factors[16 * kSumRanks];
  alignas(64) float sums[kFilled * 16];
  const int whole = num_outputs / 16 * 16, filled = rank + rank % 2;
  for (int o = whole; o < whole + 16 && whole < num_outputs; o++)
    for (int r = 0; r < filled; r++) factors[(o - whole) * kSumRanks + r] = o < num_outputs && r < rank ? b[o * stride + r] : 0;
  const Part outputs = first(num_outputs - whole);
  for (int row = 0; row < m; row += kFilled, h += kFilled * Inner::per_row * h_stride, c += kFilled * c_stride) {
    const int rows = m - row < kFilled ? m - row : kFilled;
    for (int i = 0; i < rows * Inner::per_row; i++)
      for (int r = 0; r < filled; r++) terms[i * kSumRanks + r] = r < rank ? h[i * h_stride + r] : 0;
    if (whole > 0) expand_part<0>(terms, kSumRanks, rows, b, stride, rank, whole, adds, c, c_stride, c_panel);
    if (whole == num_outputs) continue;
    expand_part<0>(terms, kSumRanks, rows, factors, kSumRanks, filled, 16, false, sums, 16, 16);
    for (int i = 0; i < rows; i++) {
      float* to = c + i * c_stride + whole / 16 * c_panel;
      const Floats update = load_aligned(sums + 16 * i);
      store(to, adds ? add(load(to, outputs), update) : update, outputs);
    }
  }
}

static void expand_pairs(const Inner::T* h, int64_t h_stride, int m, const bf16* b, int rank, int num_outputs, bool adds, float* c,
                         int64_t c_stride, int64_t c_panel) {
  for (int at = 0; at < rank; at += kSumRanks, adds = true) {
    const int ranks = rank - at < kSumRanks ? rank - at : kSumRanks;
    const bool lies = ranks % 2 == 0 || (kLyingRanks == 1 && m <= kRowsAsTheyLie);
    const int whole = lies ? num_outputs / 16 * 16 : 0;
    if (whole > 0) expand_by_rank(h + at, h_stride, m, b + at, rank, ranks, whole, adds, c, c_stride, c_panel);
    if (whole < num_outputs)
      expand_filled(h + at, h_stride, m, b + (int64_t)whole * rank + at, rank, ranks, num_outputs - whole, adds,
                    c + whole / 16 * c_panel, c_stride, c_panel);
  }
}
#endif

// --- by tiles ----------------------------------------------------------------------------------------------------------

#ifdef __AMX_BF16__
// 16 outputs and up to 32 ranks at once. Of few rows the factors are the left tile, which is read as it lies, of many the
// right one: the sums are the same.
static const int kTileRanks = 32;

// Of one row. Tile 0: 16 outputs, 4: their factors, 6, 7: the inner products' terms, as columns of pairs.
static inline void configure_expand_row(int num_pairs) {
  if (configured == -100 - num_pairs) return;
  configured = -100 - num_pairs;
  alignas(64) TileConfig config = {};
  config.palette = 1;
  config.rows[0] = config.rows[4] = 16;
  config.rows[6] = config.rows[7] = (uint8_t)num_pairs;
  config.bytes[0] = config.bytes[6] = config.bytes[7] = 4;
  config.bytes[4] = (uint16_t)(num_pairs * 4);
  load(config);
}

static void expand_row(const bf16* h, int64_t low, const bf16* b, int64_t stride, int num_pairs, int num_outputs, bool adds,
                       float* c, int64_t c_panel) {
  configure_expand_row(num_pairs);
  _tile_loadd(6, h, 4);
  _tile_loadd(7, h + low, 4);
  for (int o = 0; o < num_outputs; o += 16) {
    if (adds)
      _tile_loadd(0, c + o / 16 * c_panel, 4);
    else
      _tile_zero(0);
    _tile_loadd(4, b + o * stride, stride * 2);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(0, 4, 7);
    _tile_stored(0, c + o / 16 * c_panel, 4);
  }
}

// Of up to 16 rows. Tile 0: 16 outputs, 4, 5: the rows' inner products' terms, 6: the outputs' factors.
static inline void configure_expand(int m, int num_pairs) {
  const int key = (num_pairs << 8) + m;
  if (configured == key) return;
  configured = key;
  alignas(64) TileConfig config = {};
  config.palette = 1;
  config.rows[0] = config.rows[4] = config.rows[5] = (uint8_t)m;
  config.rows[6] = (uint8_t)num_pairs;
  config.bytes[0] = config.bytes[6] = 64;
  config.bytes[4] = config.bytes[5] = (uint16_t)(num_pairs * 4);
  load(config);
}

static void expand_tiles(const bf16* h, int64_t low, int m, const bf16* b, int64_t stride, int num_pairs, int num_outputs,
                         bool adds, float* c, int64_t c_stride, int64_t c_panel) {
  alignas(64) bf16 t[16 * 32];
  for (int o = 0; o < num_outputs; o += 16) {
    for (int p = 0; p < num_pairs; p += 8) {
      __m512i v[8];
      transpose_outputs(b + o * stride + 2 * p, stride, first(2 * (num_pairs - p)), v);
      for (int i = 0; i < 8; i++) _mm512_store_si512(t + (p + i) * 32, v[i]);
    }
    asm volatile("" : : "r"(t) : "memory");  // loads of tiles do not say that they read memory
    for (int row = 0; row < m; row += 16) {
      const bf16* terms = h + 2 * low * row;
      float* to = c + row * c_stride + o / 16 * c_panel;
      configure_expand(m - row < 16 ? m - row : 16, num_pairs);
      _tile_loadd(6, t, 64);
      _tile_loadd(4, terms, low * 4);
      _tile_loadd(5, terms + low, low * 4);
      if (adds)
        _tile_loadd(0, to, c_stride * 4);
      else
        _tile_zero(0);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(0, 5, 6);
      _tile_stored(0, to, c_stride * 4);
    }
  }
}

// rank is even, num_outputs a multiple of 16.
static void expand_by_tiles(const float* h, int64_t h_stride, int m, const bf16* b, int rank, int num_outputs, bool adds,
                            float* c, int64_t c_stride, int64_t c_panel) {
  for (int at = 0; at < rank; at += kTileRanks, adds = true) {
    const int pairs = (rank - at < kTileRanks ? rank - at : kTileRanks) / 2;
    if (m > kFewRows)
      expand_tiles((const bf16*)h + at, h_stride, m, b + at, rank, pairs, num_outputs, adds, c, c_stride, c_panel);
    else
      for (int row = 0; row < m; row++)
        expand_row((const bf16*)(h + row * h_stride) + at, h_stride, b + at, rank, pairs, num_outputs, adds,
                   c + row * c_stride, c_panel);
  }
}
#endif

// What does not fill tiles goes by vectors, whatever the number of rows is.
static void expand(DType dtype, const void* inner, int64_t h_stride, int m, const void* b, int rank, int num_outputs, bool adds,
                   float* c, int64_t c_stride, int64_t c_panel) {
  const float* h = (const float*)inner;
  if (dtype == DType::F32) {
    expand_rows<F32>(h, h_stride, m, (const float*)b, rank, num_outputs, adds, c, c_stride, c_panel);
    return;
  }
  int done = 0;
#ifdef __AMX_BF16__
  if (rank % 2 == 0) done = num_outputs / 16 * 16;
  if (done > 0) expand_by_tiles(h, h_stride, m, (const bf16*)b, rank, done, adds, c, c_stride, c_panel);
#endif
  if (done == num_outputs) return;
  const bf16* rest = (const bf16*)b + (int64_t)done * rank;
#ifdef LP_EXPANDS_BY_PAIRS
  expand_pairs((const Inner::T*)h, h_stride, m, rest, rank, num_outputs - done, adds, c + done / 16 * c_panel, c_stride, c_panel);
#else
  expand_rows<BF16>(h, h_stride, m, rest, rank, num_outputs - done, adds, c + done / 16 * c_panel, c_stride, c_panel);
#endif
}

// --- updates of uses ---------------------------------------------------------------------------------------------------

// Whether `add_update` knows such an update, which is an adapter's whole one.
static bool adds_update([[maybe_unused]] DType dtype, [[maybe_unused]] int rank, [[maybe_unused]] int num_outputs) {
#ifdef LP_ADDS_UPDATES
  return dtype == DType::BF16 && rank % 2 == 0 && rank <= kSumRanks && num_outputs % 16 == 0;
#else
  return false;
#endif
}

// c[m][num_outputs] += the update, the sums of which `expand` makes too.
static void add_update([[maybe_unused]] const void* h, [[maybe_unused]] int64_t h_stride, [[maybe_unused]] int m,
                       [[maybe_unused]] const void* b, [[maybe_unused]] int rank, [[maybe_unused]] int num_outputs,
                       [[maybe_unused]] float* c, [[maybe_unused]] int64_t c_stride) {
#ifdef LP_ADDS_UPDATES
  expand_by_rank((const Inner::T*)h, h_stride, m, (const bf16*)b, rank, rank, num_outputs, true, c, c_stride, 16);
#endif
}

static void expand_uses(DType dtype, const Use* uses, int num_uses, int64_t h_stride, int row, int m, int64_t output,
                        int num_outputs, float* c, int64_t c_stride) {
  const int kFloats = 256 * kRows;
  alignas(64) float update[kFloats];  // of as many rows as there is room for
  const int width = (num_outputs + kPanel - 1) / kPanel * kPanel, most = kFloats / width;
  for (const Use *use = uses, *end = uses + num_uses; use < end;) {
    const Use* next = use + 1;
    while (next < end && next->adds) next++;
    const int first = use->start > row ? use->start : row, last = use->end < row + m ? use->end : row + m;
    const bool at_once = next == use + 1 && adds_update(dtype, use->rank, num_outputs);
    const auto h = [=](const Use* one, int at) { return (const float*)one->h + (at - one->start) * h_stride; };
    const auto b = [=](const Use* one) { return (const char*)one->b + output * one->rank * item_bytes(dtype); };
    if (at_once && first < last)
      add_update(h(use, first), h_stride, last - first, b(use), use->rank, num_outputs, c + (first - row) * c_stride, c_stride);
    for (int at = first; at < last && !at_once; at += most) {
      const int rows = last - at < most ? last - at : most;
      for (const Use* one = use; one < next; one++) {
        asm volatile("" : : : "memory");  // loads of tiles do not say that they read memory
        expand(dtype, h(one, at), h_stride, rows, b(one), one->rank, num_outputs, one->adds, update, width, kPanel);
      }
      add_rows(DType::F32, update, width, rows, num_outputs, c + (at - row) * c_stride, c_stride);
    }
    use = next;
  }
}

}  // namespace LP_ISA
}  // namespace lp
