// Attention in bfloat16 with tiles: blocks of keys from a fixed grid, each for all of a task's queries, and sums that go
// on from one block to the next. A row of a tile knows nothing of the others, and what a block adds to a row that must not
// see it is exactly nothing; so a query's bits do not depend on which queries it is computed with.
#pragma once

#include "../kernels.h"
#include "pages.h"
#include "tiles.h"
#include "vector.h"

#ifdef __AMX_BF16__

namespace lp {
namespace LP_ISA {

static const int kTile = 16 * 32;  // elements of a tile: 16 rows of 64 bytes, one behind the other

// 2^x, exactly 1 of 0, and 0 where that would be too small a number for tiles (of -inf too); relative error below 5e-5, a
// fiftieth of what rounding to bfloat16 adds. What is too small is not computed at all, for that takes the CPU very long.
static inline __m512 exp2_ps(__m512 x) {
  const __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-125.0f), _CMP_NLT_UQ);  // of NaN too
  const __m512 n = _mm512_roundscale_ps(x, 8), r = _mm512_sub_ps(x, n);
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(9.6181291e-3f), r, _mm512_set1_ps(5.5504109e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4022651e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9314718e-1f));
  return _mm512_maskz_scalef_ps(counts, _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f)), n);
}

// A task's memory, of whole dims. Rows are queries times heads, in tiles of 16.
struct TileMemory {
  bf16 *q, *k, *v, *p, *other_v;
  float *sums, *scores, *top, *total, *other_sums;

  TileMemory(float* scratch, int dim) {
    float* next = (float*)(((uintptr_t)scratch + 63) & ~(uintptr_t)63);
    const auto take = [&](int64_t floats) { return next += floats, next - floats; };
    q = (bf16*)take(kAttendRows * dim / 2);        // by tile: [dim / 32][16 pairs][16 rows][2]
    k = (bf16*)take(kAttendKeys * dim / 2);        // [16 keys at a time][dim / 32][16 keys][32]
    v = (bf16*)take(kAttendKeys * dim / 2);        // [32 keys at a time][dim / 16][16 pairs of keys][16][2]
    other_v = (bf16*)take(kAttendKeys * dim / 2);
    p = (bf16*)take(kAttendKeys * 16 / 2);         // [32 keys at a time][16 rows][32 keys]
    scores = take(kAttendKeys * 16);               // [keys][16 rows]
    sums = take(kAttendRows * dim);                // [rows][dim]
    other_sums = take(32 * dim);
    top = take(kAttendRows);                       // by row: the largest score
    total = take(kAttendRows);                     // and the sum of the weights
  }
};

// What a tile's rows see of a block: keys [first, last) of each row, counted from the block's first.
struct Sight {
  alignas(64) int32_t first[16], last[16];
  int num_keys;  // that any row sees, rounded up to 32
  bool is_whole;  // every row sees all of them
};

static Sight sight_of(const AttendTask& t, int tile, int64_t from) {
  const int num_rows = t.num_tokens * t.group;
  Sight sight;
  int lowest = kAttendKeys, highest = 0, most_first = 0, least_last = kAttendKeys;
  for (int r = 0; r < 16; r++) {
    const int row = tile * 16 + r < num_rows ? tile * 16 + r : num_rows - 1;
    const int64_t position = t.first_position + row / t.group - from;
    const int64_t first = t.window > 0 || t.chunk > 0 ? first_key<true>(t, position + from) - from : 0;
    sight.first[r] = (int32_t)(first < 0 ? 0 : first > kAttendKeys ? kAttendKeys : first);
    sight.last[r] = (int32_t)(position < 0 ? 0 : position >= kAttendKeys ? kAttendKeys : position + 1);
    if (sight.first[r] < lowest) lowest = sight.first[r];
    if (sight.first[r] > most_first) most_first = sight.first[r];
    if (sight.last[r] > highest) highest = sight.last[r];
    if (sight.last[r] < least_last) least_last = sight.last[r];
  }
  sight.num_keys = lowest < highest ? (highest + 31) & ~31 : 0;
  sight.is_whole = most_first == 0 && least_last == sight.num_keys;
  return sight;
}

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
  bool is_finite;                      // all values are
};

// Values of `count` positions from `from` on, in pairs of keys, filled up with zeros to 32. Whether all are finite. Keys
// that will be read in their pages are fetched on the way.
static bool take_values(const AttendTask& t, int64_t from, int count, bool copies, bf16* v) {
  const __m512i zero = _mm512_setzero_si512(), exponent = _mm512_set1_epi16(0x7f80);
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                       36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  const int ahead = 16, whole = t.v_dim & ~31;
  auto value = Cursor<BF16>::of_values(t, from), early = Cursor<BF16>::of_values(t, from + (ahead < count ? ahead : 0));
  auto key = Cursor<BF16>::of_keys(t, from);
  __m512i largest = zero;  // exponents
  const auto join = [&](__m512i a, __m512i b, bf16* to) {
    largest = _mm512_max_epu16(largest, _mm512_and_si512(a, exponent));
    largest = _mm512_max_epu16(largest, _mm512_and_si512(b, exponent));
    _mm512_store_si512(to, _mm512_permutex2var_epi16(a, low, b));
    _mm512_store_si512(to + kTile, _mm512_permutex2var_epi16(a, high, b));
  };
  const auto take = [&](int i) {
    if (!copies) fetch_early(key.next(), t.dim * 2);
    if (i + ahead < count) fetch_early(early.next(), t.v_dim * 2);
    return value.next();
  };
  for (int i = 0; i < count || (i & 31); i += 2) {
    bf16* to = v + i / 32 * (whole_dim(t.v_dim) / 16 * kTile) + i % 32 * 16;
    const bf16* one = i < count ? take(i) : nullptr;
    const bf16* other = i + 1 < count ? take(i + 1) : nullptr;
    for (int c = 0; c < whole; c += 32, to += 2 * kTile)
      join(one != nullptr ? _mm512_loadu_si512(one + c) : zero, other != nullptr ? _mm512_loadu_si512(other + c) : zero, to);
    if (whole < t.v_dim)
      join(one != nullptr ? load_first(one + whole, t.v_dim - whole) : zero,
           other != nullptr ? load_first(other + whole, t.v_dim - whole) : zero, to);
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
  block.is_finite = take_values(t, from, count, copies, m.v);
  return block;
}

// scores[32 or 64][16] = k . q, of W times 16 keys.
template <int W>
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
  _tile_stored(0, scores, 64);
  _tile_stored(1, scores + 256, 64);
  if (W == 4) {
    _tile_stored(2, scores + 512, 64);
    _tile_stored(3, scores + 768, 64);
  }
}

// scores[num_keys][16] = k . q, of keys in 32s.
static void score_tile(const bf16* q, const Block& block, int dim, int num_keys, float* scores) {
  int i = 0;
  for (; i + 64 <= num_keys; i += 64)
    score_keys<4>(q, block.keys + i / 16, block.key_bytes, block.column, dim, scores + i * 16);
  if (i < num_keys) score_keys<2>(q, block.keys + i / 16, block.key_bytes, block.column, dim, scores + i * 16);
}

// Whether scores get their factor before the softmax takes them: what else is done to them comes behind it.
static inline bool is_scaled_early(const AttendTask& t) { return t.softcap != 0.0f || t.key_bias != nullptr; }

// Biases of a tile's rows by the keys of a block.
struct Biases {
  const float* first;  // of the first row's head, at the block's first key; null: none
  __m512i heads;       // where those of each row's head are from there on
  bool is_one;         // all rows have one head

  Biases(const AttendTask& t, int tile, int64_t from)
      : first(t.key_bias == nullptr ? nullptr : t.key_bias + from), heads(_mm512_setzero_si512()), is_one(t.group == 1) {
    alignas(64) int32_t at[16];
    for (int r = 0; r < 16; r++) at[r] = (int32_t)((tile * 16 + r) % t.group * t.bias_stride);
    heads = _mm512_load_si512(at);
  }

  __m512 of(int key) const {
    return is_one ? _mm512_set1_ps(first[key]) : _mm512_i32gather_ps(heads, first + key, 4);
  }
};

// Scales, caps, biases and hides scores as needed, and returns each row's largest.
static __m512 largest_scores(const AttendTask& t, const Sight& sight, const Biases& biases, float* scores) {
  const bool is_changed = is_scaled_early(t) || !sight.is_whole;
  const __m512 none = _mm512_set1_ps(-__builtin_inff());
  const __m512i first = _mm512_load_si512(sight.first), last = _mm512_load_si512(sight.last);
  __m512 top[4] = {none, none, none, none};
  for (int i = 0; i < sight.num_keys; i += 4)
    for (int j = 0; j < 4; j++) {
      __m512 s = _mm512_load_ps(scores + (i + j) * 16);
      if (t.softcap != 0.0f) {
        const __m512 cap = _mm512_set1_ps(t.softcap);
        s = _mm512_mul_ps(tanh_ps(_mm512_div_ps(_mm512_mul_ps(s, _mm512_set1_ps(t.scaling)), cap)), cap);
      }
      if (biases.first != nullptr) {
        if (t.softcap == 0.0f) s = _mm512_mul_ps(s, _mm512_set1_ps(t.scaling));
        s = _mm512_add_ps(s, biases.of(i + j));
      }
      if (!sight.is_whole) {
        const __m512i key = _mm512_set1_epi32(i + j);
        s = _mm512_mask_mov_ps(none, _mm512_cmple_epi32_mask(first, key) & _mm512_cmpgt_epi32_mask(last, key), s);
      }
      if (is_changed) _mm512_store_ps(scores + (i + j) * 16, s);
      top[j] = _mm512_max_ps(top[j], s);
    }
  return _mm512_max_ps(_mm512_max_ps(top[0], top[1]), _mm512_max_ps(top[2], top[3]));
}

// Turns scores into weights p, relative to each row's largest score so far. Returns by how much what was added up before
// them shrinks.
static __m512 soften_tile(const AttendTask& t, const Sight& sight, const Biases& biases, float* scores, float* top,
                          float* total, bf16* p) {
  const __m512 none = _mm512_set1_ps(-__builtin_inff()), log2e = _mm512_set1_ps(1.44269504f);
  const __m512 factor = is_scaled_early(t) ? log2e : _mm512_mul_ps(log2e, _mm512_set1_ps(t.scaling));
  const __m512 before = _mm512_load_ps(top), now = _mm512_max_ps(before, largest_scores(t, sight, biases, scores));
  // A row that has seen nothing yet: its scores are all -inf, and no difference to that is a number.
  const __mmask16 is_new = _mm512_cmp_ps_mask(now, none, _CMP_EQ_OQ);
  const __m512 shift = _mm512_mask_mov_ps(_mm512_mul_ps(now, factor), is_new, _mm512_setzero_ps());
  const __m512 shrinks = exp2_ps(_mm512_sub_ps(_mm512_mul_ps(before, factor), shift));
  const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                         20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
  for (int i = 0; i < sight.num_keys; i += 32) {
    __m512i v[16];
    for (int j = 0; j < 16; j++) {
      const float* two = scores + (i + 2 * j) * 16;
      const __m512 a = exp2_ps(_mm512_fmsub_ps(_mm512_load_ps(two), factor, shift));
      const __m512 b = exp2_ps(_mm512_fmsub_ps(_mm512_load_ps(two + 16), factor, shift));
      even = _mm512_add_ps(even, a);
      odd = _mm512_add_ps(odd, b);
      v[j] = _mm512_permutexvar_epi16(pairs, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    }
    transpose_words(v);
    for (int r = 0; r < 16; r++) _mm512_store_si512(p + i * 16 + r * 32, v[r]);
  }
  _mm512_store_ps(top, now);
  _mm512_store_ps(total, _mm512_fmadd_ps(_mm512_load_ps(total), shrinks, _mm512_add_ps(even, odd)));
  return shrinks;
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

static void weigh_tile(const bf16* p, const bf16* v, int dim, int num_keys, float* sums) {
  int column = 0;
  for (; column + 64 <= dim; column += 64) weigh_columns<4>(p, v + column / 16 * kTile, dim, num_keys, sums + column);
  if (column < dim) weigh_columns<2>(p, v + column / 16 * kTile, dim, num_keys, sums + column);
}

// The same where values are not finite: a weight of 0 does not keep them from a row that must not see them, so every row
// gets values of its own, without those.
static void weigh_apart(const TileMemory& m, const Sight& sight, int dim, float* sums) {
  float *before = m.other_sums, *now = before + 16 * dim;
  __builtin_memcpy(before, sums, sizeof(float) * 16 * (size_t)dim);
  for (int r = 0; r < 16; r++) {
    __builtin_memcpy(m.other_v, m.v, sizeof(bf16) * (size_t)(sight.num_keys * dim));
    for (int i = 0; i < sight.num_keys; i++) {
      if (sight.first[r] <= i && i < sight.last[r]) continue;
      bf16* at = m.other_v + i / 32 * (dim / 16 * kTile) + i % 32 / 2 * 32 + i % 2;
      for (int c = 0; c < dim; c++) at[c / 16 * kTile + c % 16 * 2] = 0;
    }
    __builtin_memcpy(now, before, sizeof(float) * 16 * (size_t)dim);
    weigh_tile(m.p, m.other_v, dim, sight.num_keys, now);
    __builtin_memcpy(sums + r * dim, now + r * dim, sizeof(float) * (size_t)dim);
  }
}

static inline void shrink_sums(__m512 shrinks, int dim, float* sums) {
  alignas(64) float factors[16];
  _mm512_store_ps(factors, shrinks);
  for (int rest = _mm512_cmp_ps_mask(shrinks, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ); rest != 0; rest &= rest - 1) {
    const int r = __builtin_ctz(rest);
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

static void attend_by_tiles(const AttendTask& t, float* scratch) {
  const int dim = whole_dim(t.dim), v_dim = whole_dim(t.v_dim);
  const TileMemory m(scratch, dim);
  const int num_rows = t.num_tokens * t.group, num_tiles = (num_rows + 15) / 16;
  const int64_t last = t.first_position + t.num_tokens;
  int64_t begin = first_key<true>(t, t.first_position);
  begin = begin < 0 ? 0 : begin / kAttendKeys * kAttendKeys;
  const bool copies = num_tiles > 2 || t.block_size % 16 != 0 || t.dim != dim;
  take_queries(t, m.q);
  for (int i = 0; i < num_tiles * 16; i++) m.top[i] = -__builtin_inff(), m.total[i] = 0;
  if (t.sinks != nullptr)  // one score that is there before all others; scores are kept without their factor
    for (int i = 0; i < num_rows; i++)
      m.top[i] = t.sinks[i % t.group] / (is_scaled_early(t) ? 1.0f : t.scaling), m.total[i] = 1;
  __builtin_memset(m.sums, 0, sizeof(float) * (size_t)(num_tiles * 16 * v_dim));
  configure(kRows);
  for (int64_t from = begin; from < last; from += kAttendKeys) {
    const int count = (int)(last - from < kAttendKeys ? last - from : kAttendKeys);
    const Block block = take_block(t, from, count, copies, m);
    for (int tile = 0; tile < num_tiles; tile++) {
      const Sight sight = sight_of(t, tile, from);
      if (sight.num_keys == 0) continue;
      float* sums = m.sums + tile * 16 * v_dim;
      score_tile(m.q + tile * 16 * dim, block, dim, sight.num_keys, m.scores);
      const Biases biases(t, tile, from);
      shrink_sums(soften_tile(t, sight, biases, m.scores, m.top + tile * 16, m.total + tile * 16, m.p), v_dim, sums);
      if (block.is_finite || sight.is_whole)
        weigh_tile(m.p, m.v, v_dim, sight.num_keys, sums);
      else
        weigh_apart(m, sight, v_dim, sums);
    }
  }
  end_products();
  for (int row = 0; row < num_rows; row++) {
    bf16* out = (bf16*)t.out + row / t.group * t.out_token_stride + row % t.group * t.v_dim;
    const __m512 inverse = _mm512_set1_ps(1.0f / m.total[row]);
    for (int c = 0; c < t.v_dim; c += 16)
      store(out + c, without_traces(_mm512_mul_ps(_mm512_load_ps(m.sums + row * v_dim + c), inverse)), first(t.v_dim - c));
  }
}

}  // namespace LP_ISA
}  // namespace lp
#endif
