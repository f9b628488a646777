// Attention in bfloat16 with tiles: blocks of keys from a fixed grid, each for all of a task's queries, and sums that go
// on from one block to the next. A row of a tile knows nothing of the others, and what a block adds to a row that must not
// see it is exactly nothing; so a query's bits do not depend on which queries it is computed with.
#pragma once

#include "../kernels.h"
#include "pages.h"
#include "softmax_tiles.h"
#include "tiles.h"
#include "vector.h"

#ifdef __AMX_BF16__

namespace lp {
namespace LP_ISA {

static const int kTile = 16 * 32;  // elements of a tile: 16 rows of 64 bytes, one behind the other

// A task's memory, of whole dims. Rows are queries times heads, in tiles of 16. Of the last tile N = 4 or 8 are computed, where it
// has no more: a text's next token has as many rows as a KV head has queries.
struct TileMemory {
  bf16 *q, *k, *v, *p, *other_v;
  float *sums, *scores, *top, *total, *other_sums;

  TileMemory(float* scratch, int dim) {
    float* next = (float*)(((uintptr_t)scratch + 63) & ~(uintptr_t)63);
    const auto take = [&](int64_t floats) { return next += floats, next - floats; };
    q = (bf16*)take(kAttendRows * dim / 2);        // by tile: [dim / 32][16 pairs][16 rows][2]
    k = (bf16*)take(kAttendKeys * dim / 2);        // [16 keys at a time][dim / 32][16 keys][32]
    v = (bf16*)take(kAttendKeys * dim / 2);        // [32 keys at a time][dim / 16][16 pairs of keys][16][2], see take_values
    other_v = (bf16*)take(kAttendKeys * dim / 2);
    p = (bf16*)take(kAttendKeys * 16 / 2);         // [32 keys at a time][16 rows][32 keys]
    scores = take(kAttendKeys * 16);               // [keys][N rows]
    sums = take(kAttendRows * dim);                // [rows][dim], whose columns lie as those of v
    other_sums = take(32 * dim);
    top = take(kAttendRows);                       // by row: the largest score
    total = take(kAttendRows);                     // and the sum of the weights
  }
};

static void take_queries(const AttendTask& t, bf16* q) {
  const int num_rows = t.num_tokens * t.group;
  for (int tile = 0; tile * 16 < num_rows; tile++)
    for (int c = 0; c < t.dim; c += 32, q += kTile) {
      __m512i v[16];
      for (int r = 0; r < 16; r++) {
        const int row = tile * 16 + r;
        const bf16* from = (const bf16*)t.q + row / t.group * t.q_token_stride + row % t.group * t.dim + c;
        v[r] = row < num_rows ? load_first(from, t.dim - c) : _mm512_setzero_si512();
      }
      transpose_words(v);
      for (int r = 0; r < 16; r++) _mm512_store_si512(q + r * 32, v[r]);
    }
}

// A block's keys and values as tiles.
struct Block {
  const bf16* keys[kAttendKeys / 16];  // by 16 keys: where they begin; the next 32 elements of them are `column` further
  int64_t key_bytes, column;           // between keys
  bool is_whole;                       // all queries see all keys
  bool is_finite;                      // all values are; of a whole block, nobody asks
};

// Values of `count` positions from `from` on, in pairs of keys, filled up with zeros to 32; of each 32 columns the first of
// two tiles has 0-3, 8-11, 16-19 and 24-27, in lanes of 128 bits. Whether all are finite, where that is asked.
template <bool kChecks>
static bool take_values(const AttendTask& t, int64_t from, int count, bf16* v) {
  const __m512i zero = _mm512_setzero_si512(), exponent = _mm512_set1_epi16(0x7f80);
  const int whole = t.v_dim & ~31;
  const int64_t of_keys = whole_dim(t.v_dim) / 16 * kTile;  // 32 of them
  __m512i largest = zero;  // exponents
  const auto join = [&](__m512i a, __m512i b, bf16* to) {
    if (kChecks) {
      largest = _mm512_max_epu16(largest, _mm512_and_si512(a, exponent));
      largest = _mm512_max_epu16(largest, _mm512_and_si512(b, exponent));
    }
    _mm512_store_si512(to, _mm512_unpacklo_epi16(a, b));
    _mm512_store_si512(to + kTile, _mm512_unpackhi_epi16(a, b));
  };
  for (int i = 0; i < count || (i & 31); i += 16) {
    bf16* to = v + i / 32 * of_keys + i % 32 * 16;
    if (t.block_size % 16 == 0 && i + 16 <= count && whole == t.v_dim) {  // in one page
      const bf16* row = Cursor<BF16>::of_values(t, from + i).next();
      for (int j = 0; j < 16; j += 2, row += 2 * t.v_token_stride, to += 32)
        for (int c = 0; c < whole; c += 32)
          join(_mm512_loadu_si512(row + c), _mm512_loadu_si512(row + t.v_token_stride + c), to + c / 16 * kTile);
      continue;
    }
    auto value = Cursor<BF16>::of_values(t, i < count ? from + i : from);
    for (int j = i; j < i + 16; j += 2, to += 32) {
      const bf16* one = j < count ? value.next() : nullptr;
      const bf16* other = j + 1 < count ? value.next() : nullptr;
      const auto words = [&](const bf16* row, int c) { return row != nullptr ? load_first(row + c, t.v_dim - c) : zero; };
      for (int c = 0; c < t.v_dim; c += 32) join(words(one, c), words(other, c), to + c / 16 * kTile);
    }
  }
  return _mm512_cmpeq_epi16_mask(largest, exponent) == 0;
}

// A copy of the keys, which lie far apart in their pages.
static void take_keys(const AttendTask& t, int64_t from, int count, bf16* k) {
  auto key = Cursor<BF16>::of_keys(t, from);
  for (int i = 0; i < count || (i & 31); i++) {
    bf16* to = k + i / 16 * (whole_dim(t.dim) / 32 * kTile) + i % 16 * 32;
    const bf16* row = i < count ? key.next() : nullptr;
    for (int c = 0; c < t.dim; c += 32, to += kTile)
      _mm512_store_si512(to, row != nullptr ? load_first(row + c, t.dim - c) : _mm512_setzero_si512());
  }
}

// `copies`: keys are read so often that they had better lie together. Else they are read where they are, 16 in one page;
// what follows the last one there is read too, and hidden.
static Block take_block(const AttendTask& t, int64_t from, int count, bool copies, const TileMemory& m) {
  Block block;
  block.key_bytes = copies ? 64 : t.token_stride * 2;
  block.column = copies ? kTile : 32;
  for (int i = 0; i < ((count + 31) & ~31); i += 16) {
    const bf16* first = Cursor<BF16>::of_keys(t, from + (i < count ? i : 0)).next();
    block.keys[i / 16] = copies ? m.k + i * whole_dim(t.dim) : first;
  }
  if (copies) take_keys(t, from, count, m.k);
  block.is_whole = sees_all(t, from);
  block.is_finite = block.is_whole ? take_values<false>(t, from, count, m.v) : take_values<true>(t, from, count, m.v);
  return block;
}

// scores[W times 16 keys][N] = k . q
template <int N, int W>
static inline void score_keys(const bf16* q, const bf16* const* keys, int64_t key_bytes, int64_t column, int dim, float* scores) {
  _tile_zero(0);
  _tile_zero(1);
  if (W == 4) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int c = 0; c < dim; c += 32, q += kTile) {
    const int64_t at = c / 32 * column;
    _tile_loadd(6, q, 64);
    _tile_loadd(4, keys[0] + at, key_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, keys[1] + at, key_bytes);
    _tile_dpbf16ps(1, 5, 6);
    if (W == 4) {
      _tile_loadd(4, keys[2] + at, key_bytes);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(5, keys[3] + at, key_bytes);
      _tile_dpbf16ps(3, 5, 6);
    }
  }
  _tile_stored(0, scores, 4 * N);
  _tile_stored(1, scores + 16 * N, 4 * N);
  if (W == 4) {
    _tile_stored(2, scores + 32 * N, 4 * N);
    _tile_stored(3, scores + 48 * N, 4 * N);
  }
}

// scores[num_keys][N] = k . q, of keys in 32s. Few rows leave no tiles for 64 keys at a time.
template <int N>
static void score_tile(const bf16* q, const Block& block, int dim, int num_keys, float* scores) {
  int i = 0;
  for (; N == 16 && i + 64 <= num_keys; i += 64)
    score_keys<N, 4>(q, block.keys + i / 16, block.key_bytes, block.column, dim, scores + i * N);
  for (; i < num_keys; i += 32)
    score_keys<N, 2>(q, block.keys + i / 16, block.key_bytes, block.column, dim, scores + i * N);
}

// sums[16][dim], of which W tiles' columns are done, += p . v
template <int W>
static inline void weigh_columns(const bf16* p, const bf16* v, int dim, int num_keys, float* sums) {
  const int64_t stride = dim * 4;
  _tile_loadd(0, sums, stride);
  _tile_loadd(1, sums + 16, stride);
  if (W == 4) {
    _tile_loadd(2, sums + 32, stride);
    _tile_loadd(3, sums + 48, stride);
  }
  for (int i = 0; i < num_keys; i += 32, p += kTile, v += dim / 16 * kTile) {
    _tile_loadd(4, p, 64);
    _tile_loadd(5, v, 64);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, v + kTile, 64);
    _tile_dpbf16ps(1, 4, 6);
    if (W == 4) {
      _tile_loadd(7, v + 2 * kTile, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, v + 3 * kTile, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, sums, stride);
  _tile_stored(1, sums + 16, stride);
  if (W == 4) {
    _tile_stored(2, sums + 32, stride);
    _tile_stored(3, sums + 48, stride);
  }
}

static void weigh_all_rows(const bf16* p, const bf16* v, int dim, int num_keys, float* sums) {
  int column = 0;
  for (; column + 64 <= dim; column += 64) weigh_columns<4>(p, v + column / 16 * kTile, dim, num_keys, sums + column);
  if (column < dim) weigh_columns<2>(p, v + column / 16 * kTile, dim, num_keys, sums + column);
}

// The same of few rows.
static void weigh_few_rows(const bf16* p, const bf16* v, int dim, int num_keys, float* sums) {
  const int64_t stride = dim * 4;
  for (int column = 0; column < dim; column += 32) {
    const bf16* tiles = v + column / 16 * kTile;
    _tile_loadd(2, sums + column, stride);
    _tile_loadd(3, sums + column + 16, stride);
    for (int i = 0; i < num_keys; i += 32, tiles += dim / 16 * kTile) {
      _tile_loadd(7, p + i * 16, 64);
      _tile_loadd(4, tiles, 64);
      _tile_dpbf16ps(2, 7, 4);
      _tile_loadd(5, tiles + kTile, 64);
      _tile_dpbf16ps(3, 7, 5);
    }
    _tile_stored(2, sums + column, stride);
    _tile_stored(3, sums + column + 16, stride);
  }
}

template <int N>
static void weigh_tile(const bf16* p, const bf16* v, int dim, int num_keys, float* sums) {
  N == 16 ? weigh_all_rows(p, v, dim, num_keys, sums) : weigh_few_rows(p, v, dim, num_keys, sums);
}

// The same where values are not finite: a weight of 0 does not keep them from a row that must not see them, so every row
// gets values of its own, without those.
template <int N>
static void weigh_apart(const TileMemory& m, const Sight& sight, int dim, float* sums) {
  float *before = m.other_sums, *now = before + 16 * dim;
  __builtin_memcpy(before, sums, sizeof(float) * N * (size_t)dim);
  for (int r = 0; r < N; r++) {
    __builtin_memcpy(m.other_v, m.v, sizeof(bf16) * (size_t)(sight.num_keys * dim));
    for (int i = 0; i < sight.num_keys; i++) {
      if (sight.first[r] <= i && i < sight.last[r]) continue;
      bf16* at = m.other_v + i / 32 * (dim / 16 * kTile) + i % 32 / 2 * 32 + i % 2;
      for (int c = 0; c < dim; c++) at[c / 16 * kTile + c % 16 * 2] = 0;
    }
    __builtin_memcpy(now, before, sizeof(float) * N * (size_t)dim);
    weigh_tile<N>(m.p, m.other_v, dim, sight.num_keys, now);
    __builtin_memcpy(sums + r * dim, now + r * dim, sizeof(float) * (size_t)dim);
  }
}

// `shrinks`: of the first N rows, in the first lanes.
template <int N>
static inline void shrink_sums(__m512 shrinks, int dim, float* sums) {
  alignas(64) float factors[16];
  _mm512_store_ps(factors, shrinks);
  for (int rest = _mm512_cmp_ps_mask(shrinks, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ) & ((1 << N) - 1); rest != 0; rest &= rest - 1) {
    const int r = __builtin_ctz((unsigned)rest);
    float* row = sums + r * dim;
    for (int c = 0; c < dim; c += 16)
      _mm512_store_ps(row + c, _mm512_mul_ps(_mm512_load_ps(row + c), _mm512_set1_ps(factors[r])));
  }
}

// Tiles take the smallest numbers for 0, and a sum of nothing may lose the sign of a zero: neither is to be seen.
static inline __m512 without_traces(__m512 x) {
  const __mmask16 is_tiny = _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(2.3509887e-38f), _CMP_LT_OQ);
  return _mm512_mask_mov_ps(x, is_tiny, _mm512_setzero_ps());
}

// What a block adds to a tile's rows.
template <int N>
static void attend_tile(const AttendTask& t, const Block& block, int tile, int64_t from, const TileMemory& m) {
  const int dim = whole_dim(t.dim), v_dim = whole_dim(t.v_dim);
  const Sight sight = block.is_whole ? Sight() : sight_of<N>(t, tile, from);
  if (sight.num_keys == 0) return;
  const bf16* q = m.q + tile * 16 * dim;
  float* sums = m.sums + tile * 16 * v_dim;
  N == 16 ? configure(kRows) : configure_few_rows(N);
  score_tile<N>(q, block, dim, sight.num_keys, m.scores);
  const __m512 shrinks = soften_tile<N>(t, sight, tile, from, m.scores, m.top + tile * 16, m.total + tile * 16, m.p);
  shrink_sums<N>(shrinks, v_dim, sums);
  if (block.is_finite || sight.is_whole)
    weigh_tile<N>(m.p, m.v, v_dim, sight.num_keys, sums);
  else
    weigh_apart<N>(m, sight, v_dim, sums);
}

static void attend_by_tiles(const AttendTask& t, float* scratch) {
  const int dim = whole_dim(t.dim), v_dim = whole_dim(t.v_dim);
  const TileMemory m(scratch, dim);
  const int num_rows = t.num_tokens * t.group, num_tiles = (num_rows + 15) / 16;
  const int64_t last = t.first_position + t.num_tokens;
  const bool copies = num_tiles > 2 || t.block_size % 16 != 0 || t.dim != dim;
  take_queries(t, m.q);
  for (int i = 0; i < num_tiles * 16; i++) m.top[i] = -__builtin_inff(), m.total[i] = 0;
  if (t.sinks != nullptr)  // one score that is there before all others; scores are kept without their factor
    for (int i = 0; i < num_rows; i++)
      m.top[i] = t.sinks[i % t.group] / (is_scaled_early(t) ? 1.0f : t.scaling), m.total[i] = 1;
  __builtin_memset(m.sums, 0, sizeof(float) * (size_t)(num_tiles * 16 * v_dim));
  int64_t begin = first_key<true>(t, t.first_position);
  begin = begin < 0 ? 0 : begin / kAttendKeys * kAttendKeys;
  for (int64_t from = begin; from < last; from += kAttendKeys) {
    const int count = (int)(last - from < kAttendKeys ? last - from : kAttendKeys);
    const Block block = take_block(t, from, count, copies, m);
    for (int tile = 0; tile < num_tiles; tile++) {
      const int rows = num_rows - tile * 16;
      if (rows <= 4)
        attend_tile<4>(t, block, tile, from, m);
      else if (rows <= 8)
        attend_tile<8>(t, block, tile, from, m);
      else
        attend_tile<16>(t, block, tile, from, m);
    }
  }
  end_products();
  // Sums lie as the values' columns do.
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  for (int row = 0; row < num_rows; row++) {
    bf16* out = (bf16*)t.out + row / t.group * t.out_token_stride + row % t.group * t.v_dim;
    const __m512 inverse = _mm512_set1_ps(1.0f / m.total[row]);
    for (int c = 0; c < t.v_dim; c += 32) {
      const float* sums = m.sums + row * v_dim + c;
      const __m512 a = without_traces(_mm512_mul_ps(_mm512_load_ps(sums), inverse));
      const __m512 b = without_traces(_mm512_mul_ps(_mm512_load_ps(sums + 16), inverse));
      store(out + c, _mm512_permutex2var_ps(a, low, b), first(t.v_dim - c));
      if (c + 16 < t.v_dim) store(out + c + 16, _mm512_permutex2var_ps(a, high, b), first(t.v_dim - c - 16));
    }
  }
}

}  // namespace LP_ISA
}  // namespace lp
#endif
