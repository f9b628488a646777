// Recurrences of one text: convolution, linear attention with and without the delta rule, selective scan.
//
// Tokens go one after the other, so that a text's bits do not depend on where it is cut. The state before is read where it
// lies, and the one behind is written to another place.
#pragma once

#include "../kernels.h"
#include "elementwise.h"
#include "vector.h"

namespace lp {
namespace LP_ISA {

static inline float root_of(float x) {
  return __builtin_sqrtf(x);
}

static inline float first_of(Floats x) {
  alignas(64) float lanes[16];
  store(lanes, x);
  return lanes[0];
}

static inline float exp_one(float x) { return first_of(exp_ps(all(x))); }

// Beyond 20 it is x itself, as torch has it.
static inline float softplus(float x) {
  return x > 20.0f ? x : __builtin_log1pf(__builtin_expf(x));
}

template <class D>
static inline float rounded(float x) {
  return first_of(D::round(all(x)));
}

struct Gate {
  float decay, beta;
};

template <class D>
static inline Gate gate_of(const LinearTask& t, int64_t at) {
  typedef typename D::T T;
  const float a = first_of(load((const T*)t.a + at, first(1)));
  if (t.b != nullptr) {
    const float b = first_of(load((const T*)t.b + at, first(1)));
    return {t.rate * softplus(a + t.bias), rounded<D>(1.0f / (1.0f + __builtin_expf(-b)))};
  }
  const float soft = rounded<D>(softplus(rounded<D>(a + t.bias)));
  const float step = soft < t.least ? t.least : soft > t.most ? t.most : soft;
  return {t.rate * step, step};
}

static inline Part part_at(int64_t i, int64_t n) { return first((int)(n - i > 16 ? 16 : n - i)); }

// --- linear attention ---------------------------------------------------------------------------------------------------

static const int kStateTokens = 8;  // that are computed while columns of a state are in the first cache

// to[n] = x[n] as floats, times what makes them `scale` long where `normalizes`, else times `scale`.
template <class D>
static void read_row(const typename D::T* x, int n, bool normalizes, float scale, float* to) {
  Floats squares = zeros();
  for (int i = 0; i < n; i += 16) {
    const Floats v = load(x + i, part_at(i, n));
    squares = fmadd(v, v, squares);
    store(to + i, v);
  }
  if (normalizes) scale /= root_of(sum(squares) + 1e-6f);
  if (scale != 1.0f)
    for (int i = 0; i < n; i += 16) store(to + i, mul(load(to + i), all(scale)));
}

// A token's numbers of a head, as floats.
struct TokenRow {
  alignas(64) float q[kMaxStateDim], k[kMaxStateDim], v[kMaxStateDim], decay[kMaxStateDim];
  alignas(64) float decayed[kMaxStateDim];  // k times decay, of the delta rule
  float beta;
};

// Some columns of a state.
template <class T>
struct Columns {
  T* at;
  int64_t stride;
};

// What a token's key finds in `C` * 16 columns of the state before it.
template <int C>
static inline void find(const TokenRow& token, int k_dim, const Columns<const float>& state, Floats* found) {
  Floats even[C], odd[C];
  for (int c = 0; c < C; c++) even[c] = odd[c] = zeros();
  const float* row = state.at;
  for (int i = 0; i + 1 < k_dim; i += 2, row += 2 * state.stride) {
    const Floats a = all(token.decayed[i]), b = all(token.decayed[i + 1]);
    for (int c = 0; c < C; c++) {
      even[c] = fmadd(a, load(row + 16 * c), even[c]);
      odd[c] = fmadd(b, load(row + state.stride + 16 * c), odd[c]);
    }
  }
  if (k_dim & 1)
    for (int c = 0; c < C; c++) even[c] = fmadd(all(token.decayed[k_dim - 1]), load(row + 16 * c), even[c]);
  for (int c = 0; c < C; c++) found[c] = add(even[c], odd[c]);
}

// A token's change of `C` * 16 columns by `added`, its output, and, where there is a `next` token, what its key finds.
template <int C, bool kStreams, bool kFinds>
static inline void change(const LinearTask& t, const TokenRow& token, const TokenRow* next, const Floats* added,
                          const Columns<const float>& from, const Columns<float>& to, const float* ahead, float* out,
                          Floats* found) {
  Floats sums[2][C], finds[2][C];
  for (int c = 0; c < C; c++) sums[0][c] = sums[1][c] = finds[0][c] = finds[1][c] = zeros();
  const auto row = [&](int i, Floats* sum, Floats* find) {
    const Floats decay = all(token.decay[i]), key = all(token.k[i]), query = all(token.q[i]);
    const Floats next_key = kFinds ? all(next->decayed[i]) : zeros();
    for (int c = 0; c < C; c++) {
      const Floats s = fmadd(key, added[c], mul(decay, load(from.at + i * from.stride + 16 * c)));
      if (kStreams)
        stream(to.at + i * to.stride + 16 * c, s);
      else
        store(to.at + i * to.stride + 16 * c, s);
      sum[c] = fmadd(query, s, sum[c]);
      if (kFinds) find[c] = fmadd(next_key, s, find[c]);
      if (ahead != nullptr) fetch(ahead + i * t.v_dim + 16 * c);
    }
  };
  int i = 0;
  for (; i + 1 < t.k_dim; i += 2) row(i, sums[0], finds[0]), row(i + 1, sums[1], finds[1]);
  if (i < t.k_dim) row(i, sums[0], finds[0]);
  for (int c = 0; c < C; c++) {
    store(out + 16 * c, add(sums[0][c], sums[1][c]));
    if (kFinds) found[c] = add(finds[0][c], finds[1][c]);
  }
}

// `C` * 16 columns of the state behind some tokens, and their outputs. Between two tokens the columns lie in the first
// cache, one behind the other, and a token's change and what the next one finds are one pass over them.
template <int C>
static void attend_columns(const LinearTask& t, const TokenRow* tokens, int num_tokens, int column, const float* from, float* to,
                           bool streams, const float* next_state, float (*out)[kMaxStateDim]) {
  alignas(64) float between[kMaxStateDim * 16 * C];
  Columns<const float> before{from + column, t.v_dim};
  Floats found[C], added[C];
  if (t.is_delta) find<C>(tokens[0], t.k_dim, before, found);
  for (int j = 0; j < num_tokens; j++) {
    const TokenRow& token = tokens[j];
    for (int c = 0; c < C; c++) {
      const Floats v = load(token.v + column + 16 * c);
      added[c] = mul(t.is_delta ? sub(v, found[c]) : v, all(token.beta));
    }
    const bool is_last = j + 1 == num_tokens;
    const Columns<float> behind = is_last ? Columns<float>{to + column, t.v_dim} : Columns<float>{between, 16 * C};
    const float* ahead = is_last && next_state != nullptr ? next_state + column : nullptr;
    float* of_token = out[j] + column;
    if (!is_last && t.is_delta)
      change<C, false, true>(t, token, &tokens[j + 1], added, before, behind, ahead, of_token, found);
    else if (is_last && streams)
      change<C, true, false>(t, token, nullptr, added, before, behind, ahead, of_token, found);
    else
      change<C, false, false>(t, token, nullptr, added, before, behind, ahead, of_token, found);
    before = {behind.at, behind.stride};
  }
}

template <class D>
static void read_token(const LinearTask& t, int64_t at, TokenRow& token) {
  typedef typename D::T T;
  read_row<D>((const T*)t.q + at * t.q_stride, t.k_dim, t.normalizes, t.scale, token.q);
  read_row<D>((const T*)t.k + at * t.k_stride, t.k_dim, t.normalizes, 1.0f, token.k);
  read_row<D>((const T*)t.v + at * t.v_stride, t.v_dim, false, 1.0f, token.v);
  const Gate gate = t.a != nullptr ? gate_of<D>(t, at * t.decay_stride) : Gate();
  token.beta = t.a != nullptr ? gate.beta : t.beta != nullptr ? t.beta[at * t.beta_stride] : 1.0f;
  Floats one = zeros();
  if (!t.decay_by_channel) one = all(exp_one(t.a != nullptr ? gate.decay : t.decay[at * t.decay_stride]));
  for (int i = 0; i < t.k_dim; i += 16) {
    const Floats decay = t.decay_by_channel ? exp_ps(load(t.decay + at * t.decay_stride + i, part_at(i, t.k_dim))) : one;
    store(token.decay + i, decay);
    if (t.is_delta) store(token.decayed + i, mul(load(token.k + i), decay));
  }
}

template <class D>
static void attend_piece(const LinearTask& t, const float* from, float* to) {
  TokenRow tokens[kStateTokens];
  alignas(64) float out[kStateTokens][kMaxStateDim];
  for (int64_t first = 0; first < t.num_tokens; first += kStateTokens) {
    const int num_tokens = (int)(t.num_tokens - first < kStateTokens ? t.num_tokens - first : kStateTokens);
    for (int j = 0; j < num_tokens; j++) read_token<D>(t, first + j, tokens[j]);
    const bool is_last = first + num_tokens == t.num_tokens;
    const bool streams = is_last && t.streams;
    const float* next = is_last ? t.next : nullptr;
    int column = 0;
    for (; column + 16 * kStateColumns <= t.v_dim; column += 16 * kStateColumns)
      attend_columns<kStateColumns>(t, tokens, num_tokens, column, from, to, streams, next, out);
    for (; column < t.v_dim; column += 16)
      attend_columns<1>(t, tokens, num_tokens, column, from, to, streams, next, out);
    for (int j = 0; j < num_tokens; j++) {
      const int64_t at = (first + j) * t.out_stride;
      if (t.skip != 0.0f)
        for (int i = 0; i < t.v_dim; i += 16) store(out[j] + i, fmadd(load(tokens[j].v + i), all(t.skip), load(out[j] + i)));
      if (t.rounds)
        store_row<D>(out[j], t.v_dim, (typename D::T*)t.out + at);
      else
        store_row<F32>(out[j], t.v_dim, (float*)t.out + at);
    }
    from = to;
  }
}

static void attend_linearly(DType dtype, const LinearTask& t, const float* from, float* to) {
  if (dtype == DType::F32)
    attend_piece<F32>(t, from, to);
  else
    attend_piece<BF16>(t, from, to);
}

// --- convolution --------------------------------------------------------------------------------------------------------

// out[tokens][n] of channels 0..n, and the state behind them.
template <class D>
static void convolve_piece(const ConvTask& t, const typename D::T* from, typename D::T* to) {
  typedef typename D::T T;
  const T* x = (const T*)t.x;
  T* out = (T*)t.out;
  const int before = t.width - 1;
  for (int64_t i = 0; i < t.num_channels; i += 16) {
    const Part part = part_at(i, t.num_channels);
    Floats w[kMaxConvWidth];
    for (int j = 0; j < t.width; j++) w[j] = load(t.weight + j * t.channels + i, part);
    const Floats bias = t.bias != nullptr ? load(t.bias + i, part) : zeros();
    Floats seen[kMaxConvWidth];  // the inputs before a token, and its own
    for (int j = 0; j < before; j++) seen[j] = load(from + j * t.channels + i, part);
    for (int64_t token = 0; token < t.num_tokens; token++) {
      seen[before] = load(x + token * t.x_stride + i, part);
      Floats acc = bias;
      for (int j = 0; j < t.width; j++) acc = fmadd(w[j], seen[j], acc);
      if (t.is_activated) acc = silu(D::round(acc));
      store(out + token * t.out_stride + i, acc, part);
      for (int j = 0; j < before; j++) seen[j] = seen[j + 1];
    }
    if (to != nullptr)
      for (int j = 0; j < before; j++) store(to + j * t.channels + i, seen[j], part);
  }
}

static void convolve(DType dtype, const ConvTask& t, const void* from, void* to) {
  if (dtype == DType::F32)
    convolve_piece<F32>(t, (const float*)from, (float*)to);
  else
    convolve_piece<BF16>(t, (const bf16*)from, (bf16*)to);
}

// --- selective scan -----------------------------------------------------------------------------------------------------

static void scan(const ScanTask& t, const float* from, float* to) {
  for (int64_t token = 0; token < t.num_tokens; token++) {
    const float *x = t.x + token * t.x_stride, *step = t.step + token * t.step_stride;
    const float *b = t.b + token * t.b_stride, *c = t.c + token * t.c_stride;
    for (int64_t channel = 0; channel < t.num_channels; channel++) {
      const Floats d = all(step[channel]), added = all(step[channel] * x[channel]);
      Floats total = zeros();
      for (int64_t i = 0; i < t.n; i += 16) {
        const Part part = part_at(i, t.n);
        const int64_t at = channel * t.n + i;
        const Floats s = fmadd(added, load(b + i, part), mul(exp_ps(mul(load(t.a + at, part), d)), load(from + at, part)));
        store(to + at, s, part);
        total = fmadd(s, load(c + i, part), total);
      }
      t.out[token * t.out_stride + channel] = sum(total);
    }
    from = to;
  }
}

}  // namespace LP_ISA
}  // namespace lp
