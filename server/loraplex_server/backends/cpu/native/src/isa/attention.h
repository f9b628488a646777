// Attention of a block of queries of one span and one KV head over its pages: scores, softmax, values.
#pragma once

#include "../kernels.h"
#include "attention_pairs.h"
#include "attention_tiles.h"
#include "pages.h"
#include "vector.h"

namespace lp {
namespace LP_ISA {

static inline Floats dot_dim(const float* a, const float* b, int dim, Floats acc) {
  for (int i = 0; i < dim; i += 16) acc = fmadd(load(a + i), load(b + i), acc);
  return acc;
}

static inline Floats dot_dim(const bf16* a, const bf16* b, int dim, Floats acc) {
  for (int i = 0; i < dim; i += 32) acc = dot_pairs(acc, load_words(a + i), load_words(b + i));
  return acc;
}

// scores[row][i] of the keys at begin + i, for rows in fours; keys in fours, the last ones repeated. `memory`: of 16 rows.
template <class D>
static void score(const AttendTask& t, const typename D::T* q, int num_rows, int64_t begin, int64_t end, void* memory,
                  float* scores, int64_t stride) {
#ifdef LP_ATTENDS_BY_PAIRS
  if constexpr (sizeof(typename D::T) == 2) {
    score_pairs(t, q, num_rows, begin, end, (bf16*)memory, scores, stride);
    return;
  }
#endif
  (void)memory;
  typedef typename D::T T;
  const int64_t ahead = begin + 16;  // keys that are fetched early; values all are: they are read only later
  Cursor<D> key(t.k, t, begin), early(t.k, t, ahead < end ? ahead : begin), value(t.v, t, begin);
  for (int64_t at = begin; at < end; at += 4) {
    const T* keys[4];
    for (int i = 0; i < 4; i++) {
      keys[i] = at + i < end ? key.row() : keys[i - 1];
      if (at + i >= end) continue;
      key.next();
      fetch_early(value.row(), t.dim * (int)sizeof(T));
      value.next();
      if (at + i + 16 < end) fetch_early(early.row(), t.dim * (int)sizeof(T)), early.next();
    }
    for (int row = 0; row < num_rows; row += 4) {
      Floats acc[16];
      for (int r = 0; r < 4; r++)
        for (int i = 0; i < 4; i++)
          acc[r * 4 + i] = dot_dim(q + (row + r) * t.dim, keys[i], t.dim, zeros());
      store_quarters(scores + row * stride + (at - begin), stride, mul(sums16(acc), all(t.scaling)));
    }
  }
}

// How weights lie where their scores did.
template <class D>
struct Weights {
#ifdef LP_ATTENDS_BY_PAIRS
  typedef typename D::T T;
#else
  typedef float T;
#endif
  static const int per_score = sizeof(float) / sizeof(T);
};

// Turns a row's scores of keys [from, to) into weights that sum to 1, with what a sink takes of it; all others become 0.
// `bias`: of the keys from the first score on.
template <class D, bool kSpecial>
static void soften(float* scores, int64_t from, int64_t to, int64_t length, float softcap, const float* sink,
                   const float* bias) {
  const Floats none = all(-__builtin_inff());
  Floats top = none;
  for (int64_t i = from & ~15; i < to; i += 16) {
    Floats s = load(scores + i);
    if (softcap != 0.0f)
      s = mul(tanh_ps(div(s, all(softcap))), all(softcap));
    if (kSpecial && bias != nullptr) s = add(s, load(bias + i));
    s = select(none, between(from, to, i), s);
    store(scores + i, s);
    // NaN must not be lost in a maximum: the second operand is returned where either is NaN.
    top = max(top, s);
  }
  float highest = largest(top);
  if (kSpecial && sink != nullptr && *sink > highest) highest = *sink;
  const Floats peak = all(highest);
  Floats total = zeros();
  for (int64_t i = from & ~15; i < to; i += 16) {
    Floats s = load(scores + i);
    Floats e = select(exp_ps(sub(s, peak)), equals(s, none), zeros());
    e = select(e, is_nan(s), s);
    store(scores + i, e);
    total = add(total, e);
  }
  float whole = sum(total);
  if (kSpecial && sink != nullptr) whole += largest(exp_ps(sub(all(*sink), peak)));
  const Floats inverse = all(1.0f / whole);
  auto* weights = (typename Weights<D>::T*)scores;  // none reaches a score that is still read
  int64_t i = 0;
  for (; i < (from & ~15); i += 16) store(weights + i, zeros());
  for (; i < to; i += 16) store(weights + i, mul(load(scores + i), inverse));
  for (; i < length; i += 16) store(weights + i, zeros());
}

// acc[4][C * 16] of values at columns `column`.
template <class D, int C>
static void weigh(const AttendTask& t, const float* weights, int64_t stride, int64_t begin, int64_t end, int column,
                  float* out) {
  Floats acc[4][C];
  for (int r = 0; r < 4; r++)
    for (int c = 0; c < C; c++) acc[r][c] = zeros();
  Cursor<D> row(t.v, t, begin);
  for (int64_t at = begin; at < end; at++, row.next()) {
    const typename D::T* v = row.row() + column;
    Floats values[C];
    for (int c = 0; c < C; c++) values[c] = load(v + 16 * c);
    for (int r = 0; r < 4; r++) {
      const Floats p = all(weights[r * stride + (at - begin)]);
      for (int c = 0; c < C; c++) acc[r][c] = fmadd(p, values[c], acc[r][c]);
    }
  }
  for (int r = 0; r < 4; r++)
    for (int c = 0; c < C; c++) store(out + r * t.dim + column + 16 * c, acc[r][c]);
}

// out[4][dim] = weights[4] . values of keys [from, to); weights are of the keys from `begin` on.
template <class D>
static void weigh_rows(const AttendTask& t, const typename Weights<D>::T* weights, int64_t stride, int64_t begin, int64_t from,
                       int64_t to, float* out) {
#ifdef LP_ATTENDS_BY_PAIRS
  if constexpr (sizeof(typename D::T) == 2) {
    weigh_rows_by_pairs(t, weights, stride, begin, from, to, out);
    return;
  }
#endif
  weights += from - begin;
  int column = 0;
  for (const int width = 16 * kWeighColumns; column + width <= t.dim; column += width)
    weigh<D, kWeighColumns>(t, (const float*)weights, stride, from, to, column, out);
  for (; column < t.dim; column += 32) weigh<D, 2>(t, (const float*)weights, stride, from, to, column, out);
}

static inline bool is_finite(const float* x, int n) {
  Mask wild = nowhere();
  for (int i = 0; i < n; i += 16) wild = either(wild, is_wild(load(x + i)));
  return !any(wild);
}

// The first key that a query sees, counted from `begin`, which is no later.
template <bool kSpecial>
static inline int64_t first_seen(const AttendTask& t, int64_t position, int64_t begin) {
  const int64_t from = t.window > 0 || kSpecial ? first_key<kSpecial>(t, position) - begin : 0;
  return from < 0 ? 0 : from;
}

template <class D, bool kSpecial>
static void attend_block(const AttendTask& t, float* scratch) {
  typedef typename D::T T;
  const int num_rows = t.num_tokens * t.group, padded = (num_rows + 3) & ~3;  // at most 16
  const int64_t last = t.first_position + t.num_tokens;
  int64_t begin = first_key<kSpecial>(t, t.first_position);
  if (begin < 0) begin = 0;
  // From a fixed grid, so that a row's sums fall into the same lanes whichever queries it is computed with.
  begin &= ~15;
  const int64_t length = last - begin, stride = (length + 15) & ~15;
  float* scores = scratch;
  float* sums = scratch + 16 * stride;  // [16][dim] and 4 more; before that the queries; then 16 rows of keys
  T* q = (T*)sums;
  for (int r = 0; r < padded; r++) {
    const int from = r < num_rows ? r : 0;
    const T* row = (const T*)t.q + (from / t.group) * t.q_token_stride + (from % t.group) * t.dim;
    __builtin_memcpy(q + r * t.dim, row, (size_t)t.dim * sizeof(T));
  }
  score<D>(t, q, padded, begin, last, sums + 20 * t.dim, scores, stride);
  for (int r = 0; r < padded; r++) {
    const int64_t position = t.first_position + (r < num_rows ? r / t.group : 0);
    const int head = kSpecial ? (r < num_rows ? r : 0) % t.group : 0;
    const float* sink = kSpecial && t.sinks != nullptr ? t.sinks + head : nullptr;
    const float* bias = kSpecial && t.key_bias != nullptr ? t.key_bias + head * t.bias_stride + begin : nullptr;
    soften<D, kSpecial>(scores + r * stride, first_seen<kSpecial>(t, position, begin), position + 1 - begin, stride, t.softcap,
                     sink, bias);
  }
  const auto* weights = (const typename Weights<D>::T*)scores;
  const int64_t weight_stride = stride * Weights<D>::per_score;
  for (int r = 0; r < padded; r += 4)
    weigh_rows<D>(t, weights + r * weight_stride, weight_stride, begin, begin, last, sums + r * t.dim);
  for (int r = 0; r < num_rows; r++) {
    if (is_finite(sums + r * t.dim, t.dim)) continue;
    // A weight of 0 does not keep out what is not finite: once more, of what the row sees and nothing else.
    const int64_t position = t.first_position + r / t.group, from = first_seen<kSpecial>(t, position, begin);
    float* alone = sums + 16 * t.dim;
    weigh_rows<D>(t, weights + r * weight_stride, 0, begin, begin + from, position + 1, alone);
    __builtin_memcpy(sums + r * t.dim, alone, (size_t)t.dim * sizeof(float));
  }
  for (int r = 0; r < num_rows; r++) {
    T* out = (T*)t.out + (r / t.group) * t.out_token_stride + (r % t.group) * t.dim;
    for (int i = 0; i < t.dim; i += 16) store(out + i, load(sums + r * t.dim + i));
  }
}

template <bool kSpecial>
static void attend_as(DType dtype, const AttendTask& t, float* scratch) {
  if (dtype == DType::F32)
    attend_block<F32, kSpecial>(t, scratch);
  else
#ifdef __AMX_BF16__
    attend_by_tiles(t, scratch);
#else
    attend_block<BF16, kSpecial>(t, scratch);
#endif
}

static void attend(DType dtype, const AttendTask& t, float* scratch) {
  if (is_special(t))
    attend_as<true>(dtype, t, scratch);
  else
    attend_as<false>(dtype, t, scratch);
}

static int attend_rows(DType dtype) {
#ifdef __AMX_BF16__
  if (dtype == DType::BF16) return kAttendRows;
#endif
  (void)dtype;
  return 16;
}

}  // namespace LP_ISA
}  // namespace lp
