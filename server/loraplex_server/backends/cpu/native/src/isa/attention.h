// Attention of a block of queries of one span and one KV head over its pages: scores, softmax, values.
#pragma once

#include "../kernels.h"
#include "attention_pairs.h"
#include "attention_scores.h"
#include "attention_tiles.h"
#include "pages.h"
#include "vector.h"

namespace lp {
namespace LP_ISA {

// A row's largest score so far, and the sum of its weights, which are relative to that score.
struct Softmax {
  float top, total;
};

// Turns a row's scores of keys [from, to) of a block into weights; all others become 0. Returns by how much what was added
// up before them shrinks. `bias`: of the keys from the first score on.
template <class D, bool kSpecial>
static float soften(float* scores, int64_t from, int64_t to, int64_t length, float softcap, const float* bias,
                    Softmax& row) {
  const Floats none = all(-__builtin_inff());
  const bool changes = softcap != 0.0f || (kSpecial && bias != nullptr);
  Floats top = none;
  for (int64_t i = from & ~15; i < to; i += 16) {
    Floats s = load(scores + i);
    if (changes || i < from || i + 16 > to) {
      if (softcap != 0.0f) s = mul(tanh_ps(div(s, all(softcap))), all(softcap));
      if (kSpecial && bias != nullptr) s = add(s, load(bias + i));
      s = select(none, between(from, to, i), s);
      store(scores + i, s);
    }
    top = max(top, s);
  }
  float highest = largest(top);
  if (row.top > highest) highest = row.top;
  // Before the first block that counts nothing has been added up.
  const float shrinks = row.top == highest ? 1.0f : largest(exp_ps(all(row.top - highest)));
  const Floats peak = all(highest);
  const bool nothing = highest == -__builtin_inff();  // but for NaN, which a maximum may lose
  Floats total = zeros();
  auto* weights = (typename Multiplied<D>::T*)scores;  // none reaches a score that is still read
  int64_t i = 0;
  for (; i < (from & ~15); i += 16) store(weights + i, zeros());
  for (; i < to; i += 16) {
    const Floats s = load(scores + i);
    const Floats e = nothing ? select(zeros(), is_nan(s), s) : exp_ps(sub(s, peak));
    store(weights + i, e);
    total = add(total, e);  // keeps NaN
  }
  for (; i < length; i += 16) store(weights + i, zeros());
  row.top = highest;
  row.total = row.total * shrinks + sum(total);
  return shrinks;
}

// out[4][C * 16] of values at columns `column`, of which the last may not be there.
template <class D, int C, bool kWhole = true>
static void weigh(const AttendTask& t, const float* weights, int64_t stride, int64_t begin, int64_t end, int column,
                  float* out) {
  Floats acc[4][C];
  for (int r = 0; r < 4; r++)
    for (int c = 0; c < C; c++) acc[r][c] = zeros();
  const Part last = first(kWhole ? 16 : t.v_dim - column);
  auto row = Cursor<D>::of_values(t, begin);
  for (int64_t at = begin; at < end; at++) {
    const typename D::T* v = row.next() + column;
    Floats values[C];
    for (int c = 0; c < C; c++) values[c] = kWhole ? load(v + 16 * c) : load(v + 16 * c, last);
    for (int r = 0; r < 4; r++) {
      const Floats p = all(weights[r * stride + (at - begin)]);
      for (int c = 0; c < C; c++) acc[r][c] = fmadd(p, values[c], acc[r][c]);
    }
  }
  for (int r = 0; r < 4; r++)
    for (int c = 0; c < C; c++) store(out + r * whole_dim(t.v_dim) + column + 16 * c, acc[r][c]);
}

// out[4][whole v_dim] = weights[4] . values of keys [from, to); weights are of the keys from `begin` on.
template <class D>
static void weigh_rows(const AttendTask& t, const typename Multiplied<D>::T* weights, int64_t stride, int64_t begin, int64_t from,
                       int64_t to, float* out) {
#ifdef LP_ATTENDS_BY_PAIRS
  if constexpr (sizeof(typename D::T) == 2) {
    weigh_rows_by_pairs(t, weights, stride, begin, from, to, out);
    return;
  }
#endif
  weights += from - begin;
  int column = 0;
  for (const int width = 16 * kWeighColumns; column + width <= t.v_dim; column += width)
    weigh<D, kWeighColumns>(t, (const float*)weights, stride, from, to, column, out);
  for (; column + 32 <= t.v_dim; column += 32) weigh<D, 2>(t, (const float*)weights, stride, from, to, column, out);
  if (column + 16 <= t.v_dim) weigh<D, 1>(t, (const float*)weights, stride, from, to, column, out), column += 16;
  if (column < t.v_dim) weigh<D, 1, false>(t, (const float*)weights, stride, from, to, column, out);
}

static inline bool is_finite(const float* x, int n) {
  Mask wild = nowhere();
  for (int i = 0; i < n; i += 16) wild = either(wild, is_wild(load(x + i)));
  return !any(wild);
}

// Keys [from, to) of a block that a query sees, counted from the block's first.
struct Seen {
  int64_t from, to;
};

template <bool kSpecial>
static inline Seen seen_by(const AttendTask& t, int64_t position, int64_t begin, int64_t length) {
  int64_t from = t.window > 0 || kSpecial ? first_key<kSpecial>(t, position) - begin : 0, to = position + 1 - begin;
  if (from < 0) from = 0;
  if (to > length) to = length;
  return {from, to};
}

// A task's memory; `rows` is kVectorRows, `dim` is whole.
template <class D>
struct VectorMemory {
  float *scores, *sums, *part, *alone;  // [rows][kVectorKeys], [rows][dim], [4][dim], [4][dim]
  typename Multiplied<D>::T *q, *keys;  // [rows][dim], [dim][16]

  VectorMemory(float* scratch, int dim)
      : scores(scratch), sums(scores + kVectorRows * kVectorKeys), part(sums + kVectorRows * dim), alone(part + 4 * dim),
        q((typename Multiplied<D>::T*)(alone + 4 * dim)), keys((typename Multiplied<D>::T*)(alone + (4 + kVectorRows) * dim)) {}
};

// Goes through the keys in blocks from a fixed grid, whose scores stay in a core's caches, and whose sums go on from one
// block to the next. What a block adds to a row depends on that row alone, and a row that sees nothing of it is left as
// it is: a query's bits do not depend on which queries it is computed with.
template <class D, bool kSpecial>
static void attend_block(const AttendTask& t, float* scratch) {
  typedef typename D::T T;
  const int num_rows = t.num_tokens * t.group, padded = (num_rows + 3) & ~3;  // at most kVectorRows
  const int64_t last = t.first_position + t.num_tokens;
  const int dim = whole_dim(t.dim), v_stride = whole_dim(t.v_dim), v_dim = (t.v_dim + 15) & ~15;
  const VectorMemory<D> m(scratch, dim);
  Softmax rows[kVectorRows];
  for (int r = 0; r < padded; r++) {
    const int from = r < num_rows ? r : 0;
    const T* q = (const T*)t.q + (from / t.group) * t.q_token_stride + (from % t.group) * t.dim;
    for (int i = 0; i < dim; i += 16) store(m.q + r * dim + i, i < t.dim ? load(q + i, first(t.dim - i)) : zeros());
    rows[r] = {-__builtin_inff(), 0.0f};
    if (kSpecial && t.sinks != nullptr) rows[r] = {t.sinks[from % t.group], 1.0f};  // as if seen before all others
  }
  __builtin_memset(m.sums, 0, sizeof(float) * (size_t)(padded * v_stride));
  int64_t begin = first_key<kSpecial>(t, t.first_position);
  begin = begin < 0 ? 0 : begin / kVectorKeys * kVectorKeys;
  const int64_t stride = kVectorKeys * (int)(sizeof(float) / sizeof(typename Multiplied<D>::T));  // weights lie where scores did
  const auto* weights = (const typename Multiplied<D>::T*)m.scores;
  for (; begin < last; begin += kVectorKeys) {
    const int64_t length = last - begin < kVectorKeys ? last - begin : kVectorKeys;
    score<D>(t, m.q, padded, begin, begin + length, m.keys, m.scores, kVectorKeys);
    for (int first = 0; first < padded; first += 4) {
      Seen seen[4];
      float shrinks[4];
      int64_t to = 0;
      for (int r = first; r < first + 4; r++) {
        const int from = r < num_rows ? r : 0, head = from % t.group;
        seen[r - first] = seen_by<kSpecial>(t, t.first_position + from / t.group, begin, length);
        const Seen& one = seen[r - first];
        const float* bias = kSpecial && t.key_bias != nullptr ? t.key_bias + head * t.bias_stride + begin : nullptr;
        float* scores = m.scores + r * kVectorKeys;
        if (one.from < one.to) {
          shrinks[r - first] = soften<D, kSpecial>(scores, one.from, one.to, (length + 15) & ~15, t.softcap, bias, rows[r]);
          if (one.to > to) to = one.to;
        } else {
          __builtin_memset(scores, 0, sizeof(float) * kVectorKeys);
        }
      }
      if (to == 0) continue;
      weigh_rows<D>(t, weights + first * stride, stride, begin, begin, begin + to, m.part);
      for (int r = first; r < first + 4 && r < num_rows; r++) {
        const Seen& one = seen[r - first];
        if (one.from >= one.to) continue;
        float *sums = m.sums + r * v_stride, *part = m.part + (r - first) * v_stride;
        if (!is_finite(part, v_dim)) {
          // A weight of 0 does not keep out what is not finite: once more, of what the row sees and nothing else.
          weigh_rows<D>(t, weights + r * stride, 0, begin, begin + one.from, begin + one.to, m.alone);
          part = m.alone;
        }
        const Floats shrink = all(shrinks[r - first]);
        for (int i = 0; i < v_dim; i += 16) store(sums + i, fmadd(load(sums + i), shrink, load(part + i)));
      }
    }
  }
  for (int r = 0; r < num_rows; r++) {
    T* out = (T*)t.out + (r / t.group) * t.out_token_stride + (r % t.group) * t.v_dim;
    const Floats inverse = all(1.0f / rows[r].total);
    for (int i = 0; i < t.v_dim; i += 16) store(out + i, mul(load(m.sums + r * v_stride + i), inverse), first(t.v_dim - i));
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
  return kVectorRows;
}

}  // namespace LP_ISA
}  // namespace lp
