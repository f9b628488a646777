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

// One token's change of `C` * 16 columns of the state, and its output.
template <int C>
static void attend_columns(const LinearTask& t, const float* q, const float* k, const float* decay, const float* v, float beta,
                           const float* from, float* to, float* out) {
  Floats u[C];
  for (int c = 0; c < C; c++) u[c] = load(v + 16 * c);
  if (t.is_delta) {
    Floats even[C], odd[C];
    for (int c = 0; c < C; c++) even[c] = odd[c] = zeros();
    for (int i = 0; i + 1 < t.k_dim; i += 2) {
      const Floats a = all(k[i] * decay[i]), b = all(k[i + 1] * decay[i + 1]);
      const float* row = from + i * t.state_stride;
      for (int c = 0; c < C; c++) {
        even[c] = fmadd(a, load(row + 16 * c), even[c]);
        odd[c] = fmadd(b, load(row + t.state_stride + 16 * c), odd[c]);
      }
    }
    if (t.k_dim & 1) {
      const int i = t.k_dim - 1;
      for (int c = 0; c < C; c++) even[c] = fmadd(all(k[i] * decay[i]), load(from + i * t.state_stride + 16 * c), even[c]);
    }
    for (int c = 0; c < C; c++) u[c] = sub(u[c], add(even[c], odd[c]));
  }
  for (int c = 0; c < C; c++) u[c] = mul(u[c], all(beta));
  Floats even[C], odd[C];
  for (int c = 0; c < C; c++) even[c] = odd[c] = zeros();
  for (int i = 0; i < t.k_dim; i++) {
    const Floats g = all(decay[i]), key = all(k[i]), query = all(q[i]);
    const float* row = from + i * t.state_stride;
    float* changed = to + i * t.state_stride;
    for (int c = 0; c < C; c++) {
      const Floats s = fmadd(key, u[c], mul(g, load(row + 16 * c)));
      store(changed + 16 * c, s);
      if (i & 1)
        odd[c] = fmadd(query, s, odd[c]);
      else
        even[c] = fmadd(query, s, even[c]);
    }
  }
  for (int c = 0; c < C; c++) store(out + 16 * c, add(even[c], odd[c]));
}

template <class D>
static void attend_piece(const LinearTask& t, const float* from, float* to) {
  typedef typename D::T T;
  alignas(64) float q[kMaxStateDim], k[kMaxStateDim], decay[kMaxStateDim], v[kMaxStateDim];
  for (int64_t token = 0; token < t.num_tokens; token++) {
    read_row<D>((const T*)t.q + token * t.q_stride, t.k_dim, t.normalizes, t.scale, q);
    read_row<D>((const T*)t.k + token * t.k_stride, t.k_dim, t.normalizes, 1.0f, k);
    read_row<D>((const T*)t.v + token * t.v_stride, t.v_dim, false, 1.0f, v);
    const Gate gate = t.a != nullptr ? gate_of<D>(t, token * t.decay_stride) : Gate();
    if (t.decay_by_channel) {
      for (int i = 0; i < t.k_dim; i += 16)
        store(decay + i, exp_ps(load(t.decay + token * t.decay_stride + i, part_at(i, t.k_dim))));
    } else {
      const Floats one = all(exp_one(t.a != nullptr ? gate.decay : t.decay[token * t.decay_stride]));
      for (int i = 0; i < t.k_dim; i += 16) store(decay + i, one);
    }
    const float beta = t.a != nullptr ? gate.beta : t.beta != nullptr ? t.beta[token * t.beta_stride] : 1.0f;
    float* out = t.out + token * t.out_stride;
    int column = 0;
    for (; column + 64 <= t.v_dim; column += 64)
      attend_columns<4>(t, q, k, decay, v + column, beta, from + column, to + column, out + column);
    for (; column < t.v_dim; column += 16)
      attend_columns<1>(t, q, k, decay, v + column, beta, from + column, to + column, out + column);
    if (t.skip != 0.0f)
      for (int i = 0; i < t.v_dim; i += 16) store(out + i, fmadd(load(v + i), all(t.skip), load(out + i)));
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
