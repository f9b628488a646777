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

// t[rank] = the 16 outputs' factors of that rank, of 16 ranks.
static inline void transpose_16x16(const bf16* b, int64_t stride, Floats* t) {
  Words v[8];
  transpose_outputs(b, stride, first(16), v);
  for (int i = 0; i < 8; i++) {
    t[2 * i] = evens(v[i]);
    t[2 * i + 1] = odds(v[i]);
  }
}

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

static inline void gather_all_pairs(const bf16* b, int64_t stride, int num_pairs, float* t) {
  for (int p = 0; p < num_pairs; p++) {
    const Words pair = gather_pairs(b + 2 * p, stride);
    store_aligned(t + 2 * p * 16, evens(pair));
    store_aligned(t + (2 * p + 1) * 16, odds(pair));
  }
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

template <>
[[maybe_unused]] inline void transpose_part<bf16>(const bf16* b, int64_t stride, int num_outputs, int rank, float* t) {
  const int pairs = num_outputs < 16 ? 0 : rank / 2;
  gather_all_pairs(b, stride, pairs, t);
  transpose_any(b + 2 * pairs, stride, num_outputs, rank - 2 * pairs, t + 2 * pairs * 16);
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

template <class D>
static void expand_rows(const float* h, int64_t h_stride, int m, const typename D::T* b, int rank, int num_outputs,
                        bool adds, float* c, int64_t c_stride, int64_t c_panel) {
  typedef typename D::T T;
  const int kBytesAhead = 2048;  // the factors are read as one stream, but too little at once for the CPU to notice
  alignas(64) float t[16 * 16];
  for (int o = 0; o < num_outputs; o += 16) {
    const int outputs = num_outputs - o < 16 ? num_outputs - o : 16;
    const Part mask = first(outputs);
    const T* block = b + (int64_t)o * rank;
    for (int i = 0; i < 16 * rank * (int)sizeof(T); i += 64) fetch((const char*)block + kBytesAhead + i);
    for (int at = 0; at < rank; at += 16) {
      const int part = rank - at < 16 ? rank - at : 16;
      const bool whole = sizeof(T) == 2 && part == 16 && outputs == 16;
      Floats registers[16];
      if (whole)
        transpose_16x16((const bf16*)block + at, rank, registers);
      else
        transpose_part<T>(block + at, rank, outputs, part, t);
      for (int row = 0; row < m; row++) {
        const float* inner = h + row * h_stride + at;
        float* to = c + row * c_stride + o / 16 * c_panel;
        if (whole)
          add_ranks(inner, 16, adds || at > 0, to, mask, [&](int r) { return registers[r]; });
        else
          add_ranks(inner, part, adds || at > 0, to, mask, [&](int r) { return load_aligned(t + r * 16); });
      }
    }
  }
}

#ifndef __AVX512F__
// --- by sums of eight pairs --------------------------------------------------------------------------------------------

// Up to so many rows multiply factors as they lie; for more of them, these are transposed first. The sums are the same.
#ifdef LP_EXPANDS_LYING
static const int kRowsAsTheyLie = 2;
#else
static const int kRowsAsTheyLie = 0;
#endif

// Of 16 outputs with factors t[16 ranks][16 outputs]: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)).
static inline Floats expand_transposed(const float* t, const float* h) {
  const auto pair = [=](int i) {
    return fmadd(load_aligned(t + (2 * i + 1) * 16), all(h[2 * i + 1]), mul(load_aligned(t + 2 * i * 16), all(h[2 * i])));
  };
  const Floats low = add(add(pair(0), pair(1)), add(pair(2), pair(3)));
  return add(low, add(add(pair(4), pair(5)), add(pair(6), pair(7))));
}

// t[16 ranks][16 outputs]
static inline void transpose_floats(const bf16* b, int64_t stride, float* t) {
  Words pairs[8];
  transpose_outputs(b, stride, first(16), pairs);
  for (int i = 0; i < 8; i++) {
    store_aligned(t + 2 * i * 16, evens(pairs[i]));
    store_aligned(t + (2 * i + 1) * 16, odds(pairs[i]));
  }
}

static void expand_eights(const float* h, int64_t h_stride, int m, const bf16* b, int rank, int num_outputs, bool adds, float* c,
                          int64_t c_stride, int64_t c_panel) {
  alignas(64) bf16 last[16 * 16];
  alignas(64) float t[16 * 16], whole[16];
  for (int at = 0; at < rank; at += 16, adds = true) {
    const int num_ranks = rank - at < 16 ? rank - at : 16;
    const auto terms = [&](int row) {  // of a row, with zeros where ranks are none
      const float* all = h + row * h_stride + at;
      if (num_ranks == 16) return all;
      for (int r = 0; r < 16; r++) whole[r] = r < num_ranks ? all[r] : 0.0f;
      return (const float*)whole;
    };
    for (int o = 0; o < num_outputs; o += 16) {
      const bf16* block = b + (int64_t)o * rank + at;
      int64_t stride = rank;
      const int outputs = num_outputs - o < 16 ? num_outputs - o : 16;
      if (outputs < 16 || num_ranks < 16) {
        for (int i = 0; i < 16; i++)
          for (int r = 0; r < 16; r++) last[16 * i + r] = i < outputs && r < num_ranks ? block[i * rank + r] : 0;
        block = last, stride = 16;
      }
      if (m > kRowsAsTheyLie) transpose_floats(block, stride, t);
      const Part part = first(outputs);
      for (int row = 0; row < m; row++) {
        const float* inner = terms(row);
#ifdef LP_EXPANDS_LYING
        const Floats sums = m > kRowsAsTheyLie ? expand_transposed(t, inner) : expand_lying(block, stride, EvensOdds(inner));
#else
        const Floats sums = expand_transposed(t, inner);
#endif
        float* to = c + row * c_stride + o / 16 * c_panel;
        store(to, adds ? add(load(to, part), sums) : sums, part);
      }
    }
  }
}
#endif

#ifdef LP_FAST_PAIRS
// --- by products of pairs ----------------------------------------------------------------------------------------------

// Up to so many rows multiply factors as they lie; for more of them, these are transposed first. The sums are the same.
static const int kRowsAsTheyLie = 2;

// Terms of 16 inner products, and how much further a row's second ones are.
struct Terms {
  const bf16* rows;
  int64_t row_stride, low;
};

// The sum of 16 ranks' products for 16 outputs: of eight pairs, ((0 + 2) + (1 + 3)) + ((4 + 6) + (5 + 7)). Factors as they lie,
// and a row's terms twice.
static inline Floats lying_sums(const Words* factors, Words high, Words low) {
  Floats pairs[8];
  for (int i = 0; i < 8; i++) pairs[i] = dot_pairs(dot_pairs(zeros(), factors[i], high), factors[i], low);
  return sums_of_eights(pairs);
}

// The same of transposed factors and a row's terms, of which the second ones are `low` behind the first.
static inline Floats transposed_sums(const Words* factors, const bf16* terms, int64_t low) {
  Floats pairs[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    int32_t high, lower;
    __builtin_memcpy(&high, terms + 2 * i, 4);
    __builtin_memcpy(&lower, terms + low + 2 * i, 4);
    pairs[i] = dot_pairs(dot_pairs(zeros(), factors[i], all_words(high)), factors[i], all_words(lower));
  }
  return add(add(add(pairs[0], pairs[2]), add(pairs[1], pairs[3])), add(add(pairs[4], pairs[6]), add(pairs[5], pairs[7])));
}

// c[m][outputs] = (adds ? c : 0) + the rows' sums.
static inline void expand_as_they_lie(const Terms& h, int m, const bf16* b, int64_t stride, Part ranks, bool adds, float* c,
                                      int64_t c_stride, Part outputs) {
  Words factors[8];
  load_outputs(b, stride, ranks, factors);
  for (int row = 0; row < m; row++) {
    const Words high = load_twice(h.rows + row * h.row_stride, ranks);
    const Words low = load_twice(h.rows + row * h.row_stride + h.low, ranks);
    const Floats sums = lying_sums(factors, high, low);
    float* to = c + row * c_stride;
    store(to, adds ? add(load(to, outputs), sums) : sums, outputs);
  }
}

// The same of rows whose terms are whole: ranks that are none are zeros.
static inline void expand_transposed(const Terms& h, int m, const bf16* b, int64_t stride, Part ranks, bool adds, float* c,
                                     int64_t c_stride, Part outputs) {
  Words factors[8];
  transpose_outputs(b, stride, ranks, factors);
  for (int row = 0; row < m; row++) {
    const Floats sums = transposed_sums(factors, h.rows + row * h.row_stride, h.low);
    float* to = c + row * c_stride;
    store(to, adds ? add(load(to, outputs), sums) : sums, outputs);
  }
}

static void expand_pairs(const bf16* h, int64_t low, int m, const bf16* b, int rank, int num_outputs, bool adds, float* c,
                         int64_t c_stride, int64_t c_panel) {
  const int kTerms = 32;  // rows whose terms are filled up with zeros at once
  alignas(64) bf16 whole[kTerms * 32], last[16 * 16];
  for (int at = 0; at < rank; at += 16, adds = true) {
    const int num_ranks = rank - at < 16 ? rank - at : 16;
    const Part ranks = first(num_ranks);
    for (int row = 0; row < m; row += kTerms) {
      const int rows = m - row < kTerms ? m - row : kTerms;
      Terms terms = {h + 2 * row * low + at, 2 * low, low};
      if (num_ranks < 16 && rows > kRowsAsTheyLie) {
        for (int r = 0; r < rows; r++) {
          store_words(whole + 32 * r, join_halves(load_half(terms.rows + r * terms.row_stride, ranks),
                                                  load_half(terms.rows + r * terms.row_stride + low, ranks)));
        }
        terms = {whole, 32, 16};
      }
      for (int o = 0; o < num_outputs; o += 16) {
        const bf16* block = b + (int64_t)o * rank + at;
        int64_t stride = rank;
        const int outputs = num_outputs - o < 16 ? num_outputs - o : 16;
        if (outputs < 16) {
          for (int i = 0; i < 16; i++)
            for (int r = 0; r < 16; r++) last[16 * i + r] = i < outputs && r < num_ranks ? block[i * rank + r] : 0;
          block = last, stride = 16;
        }
        float* to = c + row * c_stride + o / 16 * c_panel;
        if (rows <= kRowsAsTheyLie)
          expand_as_they_lie(terms, rows, block, stride, ranks, adds, to, c_stride, first(outputs));
        else
          expand_transposed(terms, rows, block, stride, ranks, adds, to, c_stride, first(outputs));
      }
    }
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
#ifndef __AVX512F__
  expand_eights(h, h_stride, m, rest, rank, num_outputs - done, adds, c + done / 16 * c_panel, c_stride, c_panel);
#elif defined(LP_FAST_PAIRS)
  expand_pairs((const bf16*)h, h_stride, m, rest, rank, num_outputs - done, adds, c + done / 16 * c_panel, c_stride, c_panel);
#else
  expand_rows<BF16>(h, h_stride, m, rest, rank, num_outputs - done, adds, c + done / 16 * c_panel, c_stride, c_panel);
#endif
}

// --- an adapter's update at once ---------------------------------------------------------------------------------------

// `add_at_once`: c[m][num_outputs] += the update by one adapter, of a rank that is known when this is compiled. The sums of
// `expand` without what its general form takes for each call, which for one row and 16 outputs is as long as the sums take.
// num_outputs is a multiple of 16.

static inline void add_sums(Floats sums, float* c) { store(c, add(load(c), sums)); }

#if defined(LP_FAST_PAIRS) && !defined(__AMX_BF16__)
// Of more rows, other ranks' terms lie otherwise, or are filled up with zeros.
static bool adds_at_once(DType dtype, int rank, int m) {
  return dtype == DType::BF16 && (rank == 16 || ((rank == 8 || rank == 32 || rank == 64) && m <= kRowsAsTheyLie));
}

template <int Rank>
static inline void add_of_rank(const void* inner, int64_t low, int m, const bf16* b, int num_outputs, float* c,
                               int64_t c_stride) {
  const Part ranks = first(Rank < 16 ? Rank : 16);
  const bf16* h = (const bf16*)inner;
  Words factors[8];
  if (m > kRowsAsTheyLie && Rank == 16) {
    for (int o = 0; o < num_outputs; o += 16) {
      transpose_outputs(b + Rank * o, Rank, ranks, factors);
      for (int row = 0; row < m; row++)
        add_sums(transposed_sums(factors, h + 2 * row * low, low), c + row * c_stride + o);
    }
    return;
  }
  for (int row = 0; row < m; row++, h += 2 * low, c += c_stride)
    for (int o = 0; o < num_outputs; o += 16) {
      Floats update;
      for (int at = 0; at < Rank; at += 16) {
        load_outputs(b + Rank * o + at, Rank, ranks, factors);
        const Floats sums = lying_sums(factors, load_twice(h + at, ranks), load_twice(h + low + at, ranks));
        update = at == 0 ? sums : add(update, sums);
      }
      add_sums(update, c + o);
    }
}

static void add_at_once(int rank, const void* inner, int64_t low, int m, const bf16* b, int num_outputs, float* c,
                        int64_t c_stride) {
  switch (rank) {
    case 8: add_of_rank<8>(inner, low, m, b, num_outputs, c, c_stride); break;
    case 16: add_of_rank<16>(inner, low, m, b, num_outputs, c, c_stride); break;
    case 32: add_of_rank<32>(inner, low, m, b, num_outputs, c, c_stride); break;
    default: add_of_rank<64>(inner, low, m, b, num_outputs, c, c_stride);
  }
}
#elif defined(LP_EXPANDS_LYING)
static bool adds_at_once(DType dtype, int rank, int) { return dtype == DType::BF16 && rank == 16; }

static void add_at_once(int, const void* inner, int64_t h_stride, int m, const bf16* b, int num_outputs, float* c,
                        int64_t c_stride) {
  const float* h = (const float*)inner;
  if (m > kRowsAsTheyLie) {
    alignas(64) float t[16 * 16];
    for (int o = 0; o < num_outputs; o += 16) {
      transpose_floats(b + 16 * o, 16, t);
      for (int row = 0; row < m; row++) add_sums(expand_transposed(t, h + row * h_stride), c + row * c_stride + o);
    }
    return;
  }
  for (int row = 0; row < m; row++, h += h_stride, c += c_stride) {
    const EvensOdds terms(h);
    for (int o = 0; o < num_outputs; o += 16) add_sums(expand_lying(b + 16 * o, 16, terms), c + o);
  }
}
#else
static bool adds_at_once(DType, int, int) { return false; }
static void add_at_once(int, const void*, int64_t, int, const bf16*, int, float*, int64_t) {}
#endif

static void expand_uses(DType dtype, const Use* uses, int num_uses, int64_t h_stride, int row, int m, int64_t output,
                        int num_outputs, float* c, int64_t c_stride) {
  const int kFloats = 256 * kRows;
  alignas(64) float update[kFloats];  // of as many rows as there is room for
  const int width = (num_outputs + kPanel - 1) / kPanel * kPanel, most = kFloats / width;
  for (const Use *use = uses, *end = uses + num_uses; use < end;) {
    const Use* next = use + 1;
    while (next < end && next->adds) next++;
    const int first = use->start > row ? use->start : row, last = use->end < row + m ? use->end : row + m;
    if (first < last && next == use + 1 && num_outputs % 16 == 0 && adds_at_once(dtype, use->rank, last - first)) {
      add_at_once(use->rank, (const float*)use->h + (first - use->start) * h_stride, h_stride, last - first,
                  (const bf16*)use->b + output * use->rank, num_outputs, c + (first - row) * c_stride, c_stride);
      use = next;
      continue;
    }
    for (int at = first; at < last; at += most) {
      const int rows = last - at < most ? last - at : most;
      for (const Use* one = use; one < next; one++) {
        asm volatile("" : : : "memory");  // loads of tiles do not say that they read memory
        expand(dtype, (const float*)one->h + (at - one->start) * h_stride, h_stride, rows,
               (const char*)one->b + output * one->rank * item_bytes(dtype), one->rank, num_outputs, one->adds, update, width,
               kPanel);
      }
      add_rows(DType::F32, update, width, rows, num_outputs, c + (at - row) * c_stride, c_stride);
    }
    use = next;
  }
}

}  // namespace LP_ISA
}  // namespace lp
