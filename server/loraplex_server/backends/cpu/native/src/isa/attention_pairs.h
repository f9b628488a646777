// Scores and weighted values of bfloat16 by products of pairs: of two elements of keys, and of two keys' values.
#pragma once

#include "../kernels.h"
#include "pages.h"
#include "vector.h"

#ifdef LP_ATTENDS_BY_PAIRS
namespace lp {
namespace LP_ISA {

static const int kKeys = 16;  // whose scores are computed at once

// Rows of M queries times a block of keys, [dim / 2][kKeys] pairs. Each score is two sums, of the even and of the odd pairs.
template <int M>
static inline void score_rows(const bf16* q, int dim, const bf16* keys, Floats scaling, float* scores, int64_t stride) {
  Floats even[M], odd[M];
  for (int r = 0; r < M; r++) even[r] = odd[r] = zeros();
  for (int i = 0; i < dim; i += 4, keys += 4 * kKeys) {
    const Words one = load_words(keys), other = load_words(keys + 2 * kKeys);
    for (int r = 0; r < M; r++) {
      int32_t pairs[2];
      __builtin_memcpy(pairs, q + r * dim + i, 8);
      even[r] = dot_pairs(even[r], one, all_words(pairs[0]));
      odd[r] = dot_pairs(odd[r], other, all_words(pairs[1]));
    }
  }
  for (int r = 0; r < M; r++) store(scores + r * stride, mul(add(even[r], odd[r]), scaling));
}

// scores[row][i] of the keys at begin + i, for rows in fours, and of zeros up to a multiple of 16 keys. `keys`: memory for
// kKeys of them.
static void score_pairs(const AttendTask& t, const bf16* q, int num_rows, int64_t begin, int64_t end, bf16* keys,
                        float* scores, int64_t stride) {
  Cursor<BF16> key(t.k, t, begin), early(t.k, t, begin + kKeys < end ? begin + kKeys : begin), value(t.v, t, begin);
  const Floats scaling = all(t.scaling);
  for (int64_t at = begin; at < end; at += kKeys) {
    const int count = end - at < kKeys ? (int)(end - at) : kKeys;
    const bf16* rows[kKeys];
    for (int i = 0; i < count; i++) {
      rows[i] = key.row();
      key.next();
      fetch_early(value.row(), t.dim * 2);  // which is read only later
      value.next();
      if (at + i + kKeys < end) fetch_early(early.row(), t.dim * 2), early.next();
    }
    for (int c = 0; c < t.dim; c += 32) {
      Words v[kKeys];
      for (int i = 0; i < kKeys; i++) v[i] = i < count ? load_words(rows[i] + c) : no_words();
      transpose_pairs(v);
      for (int i = 0; i < kKeys; i++) store_words(keys + (c / 2 + i) * 2 * kKeys, v[i]);
    }
    int row = 0;
    for (; row + 8 <= num_rows; row += 8)
      score_rows<8>(q + row * t.dim, t.dim, keys, scaling, scores + row * stride + (at - begin), stride);
    if (row < num_rows) score_rows<4>(q + row * t.dim, t.dim, keys, scaling, scores + row * stride + (at - begin), stride);
  }
}

// out[4][column ..] = weights[4] . values of keys from `begin`, of which those in [from, to) count. Two keys of one pair
// are the same two whatever counts.
template <int C>
static inline void weigh_pairs(const AttendTask& t, const bf16* weights, int64_t stride, int64_t begin, int64_t from,
                               int64_t to, int column, float* out) {
  Floats acc[4][2 * C];
  for (int r = 0; r < 4; r++)
    for (int c = 0; c < 2 * C; c++) acc[r][c] = zeros();
  const int64_t first = from - (from - begin) % 2;
  Cursor<BF16> row(t.v, t, first);
  weights += first - begin;
  for (int64_t at = first; at < to; at += 2, weights += 2) {
    const bf16* one = at >= from ? row.row() + column : nullptr;
    row.next();
    const bf16* other = at + 1 < to ? row.row() + column : nullptr;
    if (at + 2 < to) row.next();
    Words values[2 * C];
    for (int c = 0; c < C; c++)
      join_rows(one == nullptr ? no_words() : load_words(one + 32 * c),
                other == nullptr ? no_words() : load_words(other + 32 * c), values[2 * c], values[2 * c + 1]);
    for (int r = 0; r < 4; r++) {
      int32_t pair;
      __builtin_memcpy(&pair, weights + r * stride, 4);
      const Words p = all_words(pair);
      for (int c = 0; c < 2 * C; c++) acc[r][c] = dot_pairs(acc[r][c], values[c], p);
    }
  }
  for (int r = 0; r < 4; r++)
    for (int c = 0; c < 2 * C; c++) store(out + r * t.dim + column + 16 * c, acc[r][c]);
}

static void weigh_rows_by_pairs(const AttendTask& t, const bf16* weights, int64_t stride, int64_t begin, int64_t from,
                                int64_t to, float* out) {
  int column = 0;
  for (; column + 64 <= t.dim; column += 64) weigh_pairs<2>(t, weights, stride, begin, from, to, column, out);
  if (column < t.dim) weigh_pairs<1>(t, weights, stride, begin, from, to, column, out);
}

}  // namespace LP_ISA
}  // namespace lp
#endif
