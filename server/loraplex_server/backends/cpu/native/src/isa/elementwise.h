// Norms, rotary positions, activations, and the ways of results into the model's dtype.
#pragma once

#include "../kernels.h"
#include "vector.h"

namespace lp {
namespace LP_ISA {

template <class D>
static inline Floats normed(Floats x, Floats factor, const typename D::T* weight, float offset, bool narrows, Part part) {
  const Floats v = mul(x, factor);
  return mul(add(load(weight, part), all(offset)), narrows ? D::round(v) : v);
}

static inline Floats rms_factor(Floats squares, int64_t n, float eps) {
  const float mean = sum(squares) / (float)n + eps;
  return all(1.0f / __builtin_sqrtf(mean));
}

template <class D>
static void norm_row(const typename D::T* x, const typename D::T* weight, int64_t n, float eps, float offset,
                     bool narrows, typename D::T* y) {
  Floats squares = zeros();
  for (int64_t i = 0; i < n; i += 16) {
    Floats v = load(x + i, first((int)(n - i > 16 ? 16 : n - i)));
    squares = fmadd(v, v, squares);
  }
  const Floats factor = rms_factor(squares, n, eps);
  for (int64_t i = 0; i < n; i += 16) {
    Part part = first((int)(n - i > 16 ? 16 : n - i));
    store(y + i, normed<D>(load(x + i, part), factor, weight + i, offset, narrows, part), part);
  }
}

static void rms_norm(DType dtype, const void* x, const void* weight, int64_t n, float eps, float offset, bool narrows,
                     void* y) {
  if (dtype == DType::F32)
    norm_row<F32>((const float*)x, (const float*)weight, n, eps, offset, narrows, (float*)y);
  else
    norm_row<BF16>((const bf16*)x, (const bf16*)weight, n, eps, offset, narrows, (bf16*)y);
}

template <class D>
static void layer_norm_row(const typename D::T* x, const typename D::T* weight, const typename D::T* bias, int64_t n, float eps,
                           float offset, typename D::T* y) {
  Floats total = zeros();
  for (int64_t i = 0; i < n; i += 16) total = add(load(x + i, first((int)(n - i > 16 ? 16 : n - i))), total);
  const Floats mean = all(sum(total) / (float)n);
  Floats squares = zeros();
  for (int64_t i = 0; i < n; i += 16) {
    const Part part = first((int)(n - i > 16 ? 16 : n - i));
    const Floats v = select(zeros(), lanes(part), sub(load(x + i, part), mean));
    squares = fmadd(v, v, squares);
  }
  const Floats factor = rms_factor(squares, n, eps);
  for (int64_t i = 0; i < n; i += 16) {
    const Part part = first((int)(n - i > 16 ? 16 : n - i));
    const Floats v = mul(sub(load(x + i, part), mean), factor), scale = add(load(weight + i, part), all(offset));
    store(y + i, bias == nullptr ? mul(v, scale) : fmadd(v, scale, load(bias + i, part)), part);
  }
}

static void layer_norm(DType dtype, const void* x, const void* weight, const void* bias, int64_t n, float eps, float offset,
                       void* y) {
  if (dtype == DType::F32)
    layer_norm_row<F32>((const float*)x, (const float*)weight, (const float*)bias, n, eps, offset, (float*)y);
  else
    layer_norm_row<BF16>((const bf16*)x, (const bf16*)weight, (const bf16*)bias, n, eps, offset, (bf16*)y);
}

template <class D>
static void norm_head(float* x, const typename D::T* weight, int64_t n, float eps, float offset, bool narrows) {
  Floats squares = zeros();
  for (int64_t i = 0; i < n; i += 16) {
    Floats v = D::round(load(x + i, first((int)(n - i))));
    squares = fmadd(v, v, squares);
  }
  const Floats factor = rms_factor(squares, n, eps);
  for (int64_t i = 0; i < n; i += 16) {
    const Part part = first((int)(n - i));
    store(x + i, normed<D>(D::round(load(x + i, part)), factor, weight + i, offset, narrows, part), part);
  }
}

static void rms_norm_f32(DType dtype, float* x, const void* weight, int64_t n, float eps, float offset, bool narrows) {
  if (dtype == DType::F32)
    norm_head<F32>(x, (const float*)weight, n, eps, offset, narrows);
  else
    norm_head<BF16>(x, (const bf16*)weight, n, eps, offset, narrows);
}

static void rotate(float* x, const float* cos, const float* sin, int dim) {
  const int half = dim / 2;
  for (int i = 0; i < half; i += 16) {
    const Part part = first(half - i);
    Floats low = load(x + i, part), high = load(x + half + i, part);
    Floats a = mul(low, load(cos + i, part)), b = mul(high, load(cos + half + i, part));
    store(x + i, fnmadd(high, load(sin + i, part), a), part);
    store(x + half + i, fmadd(low, load(sin + half + i, part), b), part);
  }
}

static void rotate_pairs(float* x, const float* cos, const float* sin, int dim) {
  for (int i = 0; i < dim / 2; i++) {
    const float first = x[2 * i], second = x[2 * i + 1];
    x[2 * i] = first * cos[i] - second * sin[i];
    x[2 * i + 1] = second * cos[i] + first * sin[i];
  }
}

static inline Floats silu(Floats x) {
  const Floats one = all(1.0f);
  return div(x, add(one, exp_ps(sub(zeros(), x))));
}

static inline Floats sigmoid(Floats x) {
  const Floats one = all(1.0f);
  return div(one, add(one, exp_ps(sub(zeros(), x))));
}

// The norm of x times silu(gate), or, where the gate goes first, the norm of x times silu(gate). X: x's and y's dtype.
template <class X, class D>
static void gated_norm_row(const typename X::T* x, const typename D::T* gate, const typename D::T* weight, int64_t n, float eps,
                           bool gates_first, typename X::T* y) {
  const auto part_at = [n](int64_t i) { return first((int)(n - i > 16 ? 16 : n - i)); };
  const auto value = [&](int64_t i, Part part) {
    const Floats v = load(x + i, part);
    return gates_first ? mul(v, silu(load(gate + i, part))) : v;
  };
  Floats squares = zeros();
  for (int64_t i = 0; i < n; i += 16) {
    const Floats v = value(i, part_at(i));
    squares = fmadd(v, v, squares);
  }
  const Floats factor = rms_factor(squares, n, eps);
  for (int64_t i = 0; i < n; i += 16) {
    const Part part = part_at(i);
    const Floats v = mul(load(weight + i, part), X::round(mul(value(i, part), factor)));
    store(y + i, gates_first ? v : mul(X::round(v), silu(load(gate + i, part))), part);
  }
}

static void gated_norm(DType x_dtype, DType dtype, const void* x, const void* gate, const void* weight, int64_t n, float eps,
                       bool gates_first, void* y) {
  if (dtype == DType::F32)
    gated_norm_row<F32, F32>((const float*)x, (const float*)gate, (const float*)weight, n, eps, gates_first, (float*)y);
  else if (x_dtype == DType::F32)
    gated_norm_row<F32, BF16>((const float*)x, (const bf16*)gate, (const bf16*)weight, n, eps, gates_first, (float*)y);
  else
    gated_norm_row<BF16, BF16>((const bf16*)x, (const bf16*)gate, (const bf16*)weight, n, eps, gates_first, (bf16*)y);
}

static inline Floats gelu_tanh(Floats x) {
  const Floats cube = mul(x, mul(x, x));
  const Floats inner = mul(all(0.79788456f), fmadd(cube, all(0.044715f), x));
  return mul(mul(all(0.5f), x), add(all(1.0f), tanh_ps(inner)));
}

static inline Floats activated(int act, Floats x) {
  return act == kSilu ? silu(x) : act == kGeluTanh ? gelu_tanh(x) : sigmoid(x);
}

template <class D, class T>
static void gated_row(int act, const T* gate, const T* up, int n, typename D::T* out) {
  for (int i = 0; i < n; i += 16) {
    Part part = first(n - i);
    Floats g = D::round(load(gate + i, part)), u = D::round(load(up + i, part));
    store(out + i, mul(D::round(activated(act, g)), u), part);
  }
}

static void gated(DType dtype, int act, const float* gate, const float* up, int n, void* out) {
  if (dtype == DType::F32)
    gated_row<F32>(act, gate, up, n, (float*)out);
  else
    gated_row<BF16>(act, gate, up, n, (bf16*)out);
}

static void gate_row(DType dtype, int act, const void* gate, const void* up, int n, void* out) {
  if (dtype == DType::F32)
    gated_row<F32>(act, (const float*)gate, (const float*)up, n, (float*)out);
  else
    gated_row<BF16>(act, (const bf16*)gate, (const bf16*)up, n, (bf16*)out);
}

// A whole line of the cache at once, which then needs not be read before it is written.
static void stream_gated(int act, const float* c, bf16* out) {
  alignas(64) bf16 line[2 * kPanel];
  for (int i = 0; i < 2; i++) gated_row<BF16>(act, c + i * kBand, c + i * kBand + kPanel, kPanel, line + i * kPanel);
  stream_line(out, line);
}

static void gated_bands(DType dtype, int act, const float* c, int64_t stride, int m, int n, void* out, int64_t out_stride,
                        bool streams) {
  const bool lines = dtype == DType::BF16 && n == 2 * kPanel && ((uintptr_t)out | (uintptr_t)out_stride * 2) % 64 == 0;
  for (int64_t r = 0; r < m; r++, c += stride)
    if (streams && lines)
      stream_gated(act, c, (bf16*)out + r * out_stride);
    else
      for (int i = 0; i < n; i += kPanel)
        gated(dtype, act, c + 2 * i, c + 2 * i + kPanel, n - i < kPanel ? n - i : kPanel,
              (char*)out + (r * out_stride + i) * item_bytes(dtype));
}

template <class D>
static void store_row(const float* c, int n, typename D::T* out) {
  for (int i = 0; i < n; i += 16) {
    Part part = first(n - i);
    store(out + i, load(c + i, part), part);
  }
}

static void store(DType dtype, const float* c, int n, void* out) {
  if (dtype == DType::F32)
    store_row<F32>(c, n, (float*)out);
  else
    store_row<BF16>(c, n, (bf16*)out);
}

template <class D>
static void add_row(const float* c, int n, typename D::T* inout) {
  for (int i = 0; i < n; i += 16) {
    Part part = first(n - i);
    Floats sum = add(load(inout + i, part), D::round(load(c + i, part)));
    store(inout + i, sum, part);
  }
}

static void add_to(DType dtype, const float* c, int n, void* inout) {
  if (dtype == DType::F32)
    add_row<F32>(c, n, (float*)inout);
  else
    add_row<BF16>(c, n, (bf16*)inout);
}

static void add_rows(DType dtype, const float* c, int64_t stride, int m, int n, void* inout, int64_t inout_stride) {
  for (int64_t r = 0; r < m; r++, c += stride)
    if (dtype == DType::F32)
      add_row<F32>(c, n, (float*)inout + r * inout_stride);
    else
      add_row<BF16>(c, n, (bf16*)inout + r * inout_stride);
}

template <class D>
static void add_part_of_row(const typename D::T* x, int64_t n, float factor, typename D::T* inout) {
  for (int64_t i = 0; i < n; i += 16) {
    Part part = first((int)(n - i > 16 ? 16 : n - i));
    store(inout + i, add(load(inout + i, part), D::round(mul(load(x + i, part), all(factor)))), part);
  }
}

static void add_part(DType dtype, const void* x, int64_t n, float factor, void* inout) {
  if (dtype == DType::F32)
    add_part_of_row<F32>((const float*)x, n, factor, (float*)inout);
  else
    add_part_of_row<BF16>((const bf16*)x, n, factor, (bf16*)inout);
}

template <class D>
static void bias_row(const typename D::T* bias, int n, float* c) {
  for (int i = 0; i < n; i += 16) {
    Part part = first(n - i);
    store(c + i, add(load(c + i, part), load(bias + i, part)), part);
  }
}

static void add_bias(DType dtype, const void* bias, int n, float* c) {
  if (dtype == DType::F32)
    bias_row<F32>((const float*)bias, n, c);
  else
    bias_row<BF16>((const bf16*)bias, n, c);
}

template <class D>
static void weighted_sum_of_rows(const typename D::T* rows, const float* weights, int num_rows, int64_t n, typename D::T* out) {
  for (int64_t i = 0; i < n; i += 16) {
    const Part part = first((int)(n - i > 16 ? 16 : n - i));
    Floats sum = zeros();
    for (int64_t row = 0; row < num_rows; row++) sum = fmadd(load(rows + row * n + i, part), all(weights[row]), sum);
    store(out + i, sum, part);
  }
}

static void weighted_sum(DType dtype, const void* rows, const float* weights, int num_rows, int64_t n, void* out) {
  if (dtype == DType::F32)
    weighted_sum_of_rows<F32>((const float*)rows, weights, num_rows, n, (float*)out);
  else
    weighted_sum_of_rows<BF16>((const bf16*)rows, weights, num_rows, n, (bf16*)out);
}

// Those of 16 values whose bit is set, the lowest first, and infinity taken from the others.
static inline Floats allowed_of(Floats v, const uint8_t* bits) {
  uint16_t set;
  __builtin_memcpy(&set, bits, sizeof(set));
  return select(sub(v, all(__builtin_inff())), lanes_of_bits(set), v);
}

template <class D>
static void argmax_row(const typename D::T* x, int64_t n, const uint8_t* allowed, float* best, int64_t* at) {
  Floats top = all(-__builtin_inff());
  Words where = no_words();
  Mask nan = nowhere();
  for (int64_t i = 0; i < n; i += 16) {
    const Part part = first((int)(n - i > 16 ? 16 : n - i));
    Floats v = load(x + i, part);
    if (allowed != nullptr) v = allowed_of(v, allowed + i / 8);
    nan = either(nan, is_nan(v));
    const Mask larger = is_larger(lanes(part), v, top);
    top = select(top, larger, v);
    where = select_numbers(where, larger, (int)i);
  }
  const float found = largest(top);
  *best = any(nan) ? __builtin_nanf("") : found;
  *at = any(nan) ? 0 : smallest(equals(top, all(found)), where);
}

static void argmax(DType dtype, const void* x, int64_t n, const uint8_t* allowed, float* best, int64_t* at) {
  if (dtype == DType::F32)
    argmax_row<F32>((const float*)x, n, allowed, best, at);
  else
    argmax_row<BF16>((const bf16*)x, n, allowed, best, at);
}

}  // namespace LP_ISA
}  // namespace lp
