// Weighted values of bfloat16 by products of pairs, of two keys' values.
#pragma once

#include "../kernels.h"
#include "pages.h"
#include "vector.h"

#ifdef LP_ATTENDS_BY_PAIRS
namespace lp {
namespace LP_ISA {

// out[4][column ..] = weights[4] . values of keys from `begin`, of which those in [from, to) count. Two keys of one pair
// are the same two whatever counts. Of columns that are not whole, the last are not there.
template <int C, bool kWhole = true>
static inline void weigh_pairs(const AttendTask& t, const bf16* weights, int64_t stride, int64_t begin, int64_t from,
                               int64_t to, int column, float* out) {
  Floats acc[4][2 * C];
  for (int r = 0; r < 4; r++)
    for (int c = 0; c < 2 * C; c++) acc[r][c] = zeros();
  const int64_t first = from - (from - begin) % 2;
  const auto words = [&](const bf16* values) {
    if (values == nullptr) return no_words();
    return kWhole ? load_words(values) : load_first(values, t.v_dim - column);
  };
  auto row = Cursor<BF16>::of_values(t, first);
  weights += first - begin;
  for (int64_t at = first; at < to; at += 2, weights += 2) {
    const bf16* first_row = row.next();
    const bf16* one = at >= from ? first_row + column : nullptr;
    const bf16* other = at + 1 < to ? row.next() + column : nullptr;
    Words values[2 * C];
    for (int c = 0; c < C; c++)
      join_rows(words(one == nullptr ? nullptr : one + 32 * c), words(other == nullptr ? nullptr : other + 32 * c),
                values[2 * c], values[2 * c + 1]);
    for (int r = 0; r < 4; r++) {
      int32_t pair;
      __builtin_memcpy(&pair, weights + r * stride, 4);
      const Words p = all_words(pair);
      for (int c = 0; c < 2 * C; c++) acc[r][c] = dot_pairs(acc[r][c], values[c], p);
    }
  }
  for (int r = 0; r < 4; r++)
    for (int c = 0; c < 2 * C; c++) store(out + r * whole_dim(t.v_dim) + column + 16 * c, acc[r][c]);
}

static void weigh_rows_by_pairs(const AttendTask& t, const bf16* weights, int64_t stride, int64_t begin, int64_t from,
                                int64_t to, float* out) {
  int column = 0;
  for (; column + 64 <= t.v_dim; column += 64) weigh_pairs<2>(t, weights, stride, begin, from, to, column, out);
  if (column + 32 <= t.v_dim) weigh_pairs<1>(t, weights, stride, begin, from, to, column, out), column += 32;
  if (column < t.v_dim) weigh_pairs<1, false>(t, weights, stride, begin, from, to, column, out);
}

}  // namespace LP_ISA
}  // namespace lp
#endif
