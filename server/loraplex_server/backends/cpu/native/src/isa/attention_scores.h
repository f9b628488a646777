// Scores of queries with keys. Keys lie transposed, in sixteens, so that a score is a sum in one lane.
#pragma once

#include "../kernels.h"
#include "pages.h"
#include "vector.h"

namespace lp {
namespace LP_ISA {

static const int kKeys = 16;  // whose scores are computed at once

// In what queries, keys and weights are multiplied.
template <class D>
struct Multiplied {
#ifdef LP_ATTENDS_BY_PAIRS
  typedef typename D::T T;
#else
  typedef float T;
#endif
};

// Rows of M queries times keys, [dim][kKeys]. Each score is a sum of sums of 16: one long sum would be less exact. `dim` is a
// multiple of 16, `q_stride` is between rows.
template <int M>
static inline void score_rows(const float* q, int64_t q_stride, int dim, const float* keys, Floats scaling, float* scores, int64_t stride) {
  Floats total[M];
  for (int r = 0; r < M; r++) total[r] = zeros();
  for (int c = 0; c < dim; c += 16) {
    Floats acc[M];
    for (int r = 0; r < M; r++) acc[r] = zeros();
    for (int i = c; i < c + 16; i++, keys += kKeys) {
      const Floats one = load(keys);
      for (int r = 0; r < M; r++) acc[r] = fmadd(one, all(q[r * q_stride + i]), acc[r]);
    }
    for (int r = 0; r < M; r++) total[r] = add(total[r], acc[r]);
  }
  for (int r = 0; r < M; r++) store(scores + r * stride, mul(total[r], scaling));
}

// The same of pairs, [dim / 2][kKeys]. Each score is two sums, of the even and of the odd pairs.
template <int M>
static inline void score_rows(const bf16* q, int64_t q_stride, int dim, const bf16* keys, Floats scaling, float* scores, int64_t stride) {
  Floats even[M], odd[M];
  for (int r = 0; r < M; r++) even[r] = odd[r] = zeros();
  for (int i = 0; i < dim; i += 4, keys += 4 * kKeys) {
    const Words one = load_words(keys), other = load_words(keys + 2 * kKeys);
    for (int r = 0; r < M; r++) {
      int32_t first, second;  // read apart: memory fills a vector, which a half of another register does not as fast
      __builtin_memcpy(&first, q + r * q_stride + i, 4);
      __builtin_memcpy(&second, q + r * q_stride + i + 2, 4);
      even[r] = dot_pairs(even[r], one, all_words(first));
      odd[r] = dot_pairs(odd[r], other, all_words(second));
    }
  }
  for (int r = 0; r < M; r++) store(scores + r * stride, mul(add(even[r], odd[r]), scaling));
}

// Words of 16 keys, [16], as they are multiplied: of floats, of pairs, and of pairs that become floats.
static inline void store_keys(const float*, Words words, float* to) { store_words(to, words); }
static inline void store_keys(const bf16*, Words words, bf16* to) { store_words(to, words); }
static inline void store_keys(const bf16*, Words words, float* to) {
  store(to, evens(words));
  store(to + kKeys, odds(words));
}

// keys[whole dim][kKeys] of `count` rows; the others are 0.
template <class T, class M>
static inline void transpose_keys(const T* const* rows, int count, int dim, M* keys) {
  const int per_word = 4 / (int)sizeof(T);
  for (int c = 0; c < dim; c += 16 * per_word) {
    Words v[kKeys];
    if (c + 16 * per_word <= dim)
      for (int i = 0; i < kKeys; i++) v[i] = i < count ? load_words(rows[i] + c) : no_words();
    else
      for (int i = 0; i < kKeys; i++) v[i] = i < count ? load_first(rows[i] + c, dim - c) : no_words();
    transpose_words(v);
    for (int i = 0; i < kKeys; i++) store_keys((const T*)nullptr, v[i], keys + (c + i * per_word) * kKeys);
  }
}

// scores[row][i] of the keys at begin + i, for rows [whole dim] in fours that see any of 16 keys. `keys`: memory of kKeys rows.
template <class D>
static void score(const AttendTask& t, const typename Multiplied<D>::T* q, int num_rows, int64_t begin, int64_t end,
                  typename Multiplied<D>::T* keys, float* scores, int64_t stride) {
  typedef typename D::T T;
  const int num_bytes = t.dim * (int)sizeof(T), v_bytes = t.v_dim * (int)sizeof(T);
  const int dim = (t.dim + 15) & ~15, q_stride = whole_dim(t.dim);
  const Floats scaling = all(t.scaling);
  auto key = Cursor<D>::of_keys(t, begin), early = Cursor<D>::of_keys(t, begin + kKeys < end ? begin + kKeys : begin);
  auto value = Cursor<D>::of_values(t, begin);
  for (int64_t at = begin; at < end; at += kKeys) {
    const int count = end - at < kKeys ? (int)(end - at) : kKeys;
    const T* rows[kKeys];
    for (int i = 0; i < count; i++) {
      rows[i] = key.next();
      fetch_early(value.next(), v_bytes);  // which is read only later
      if (at + i + kKeys < end) fetch_early(early.next(), num_bytes);
    }
    transpose_keys(rows, count, t.dim, keys);
    float* to = scores + (at - begin);
    const int64_t unseeing = (at - t.first_position) * t.group;  // the first rows, whose queries come before these keys
    int row = unseeing > 0 ? (int)(unseeing & ~3) : 0;
    for (; row + kScoreRows <= num_rows; row += kScoreRows)
      score_rows<kScoreRows>(q + row * q_stride, q_stride, dim, keys, scaling, to + row * stride, stride);
    for (; row < num_rows; row += 4) score_rows<4>(q + row * q_stride, q_stride, dim, keys, scaling, to + row * stride, stride);
  }
}

}  // namespace LP_ISA
}  // namespace lp
