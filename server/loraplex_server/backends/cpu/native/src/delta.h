// Gated DeltaNet (arXiv 2412.06464): a causal convolution of q, k and v with silu behind it, the delta rule, and a norm of each
// head's output, times silu(z). Decay and beta are made of a and b.
#pragma once

#include <initializer_list>

#include "recurrences.h"

extern "C" {

struct LpDelta {
  // Bands: q, k and v; z of each head; b; a; the latter two filled up to whole panels. Or, with `by_key_heads`, q, k, v and z of
  // each head of keys, and then b and a of each.
  const void* projection;
  const void* o;
  const float* conv_weight;  // [width][channels]
  const float* conv_bias;    // null: none
  const float* rates;        // [num_heads]; see LinearTask
  const float* biases;
  const void* norm;  // [v_dim]
  float norm_eps;
  float scale;  // of queries
  int32_t width, num_keys, num_heads, k_dim, v_dim, by_key_heads;
  // Of a step:
  void* conv_states;  // [places][width - 1][channels]
  float* states;      // [places][num_heads][k_dim][v_dim]
  void* projected;    // [num_tokens][q, k and v; z; b; a] that the caller reads; null: nobody does
  void* convolved;    // [num_tokens][channels]
};
}

namespace lp {

// Sizes of one, and where the outputs of its linears lie.
struct DeltaShape {
  const LpDelta& delta;
  const int64_t keys = int64_t(delta.num_keys) * delta.k_dim;     // features of all heads' keys
  const int64_t values = int64_t(delta.num_heads) * delta.v_dim;  // and of their values
  const int64_t channels = 2 * keys + values;                     // of the convolution
  const int64_t gates = ceil_div(delta.num_heads, kPanel) * kPanel;  // of b, or of a
  // Columns of what is projected: q, k and v first.
  const int64_t first_z = channels, first_b = first_z + values, first_a = first_b + gates, num_projected = first_a + gates;

  int num_linears() const { return delta.by_key_heads ? 2 : 4; }

  int64_t outputs_of(int linear) const {
    if (delta.by_key_heads) return linear == 0 ? first_b : 2 * delta.num_heads;
    return linear == 0 ? channels : linear == 1 ? values : delta.num_heads;
  }

  // Calls body(linear, its output, how many follow, the first one's place) for the outputs of linears among `num_outputs` packed
  // ones from `start` on. Places count from there.
  template <class Body>
  void each_linear(int64_t start, int64_t num_outputs, const Body& body) const {
    const int64_t firsts[] = {0, delta.by_key_heads ? first_b : first_z, first_b, first_a};
    for (int linear = 0; linear < num_linears(); linear++) {
      const int64_t first = std::max(start, firsts[linear]);
      const int64_t end = std::min(start + num_outputs, firsts[linear] + outputs_of(linear));
      if (first < end) body(linear, first - firsts[linear], int(end - first), int(first - start));
    }
  }

  // Calls body(column, how many follow) for the columns of what is projected in which a linear's outputs lie.
  template <class Body>
  void each_column(int linear, int64_t output, int width, const Body& body) const {
    if (!delta.by_key_heads) {
      const int64_t firsts[] = {0, first_z, first_b, first_a};
      return body(firsts[linear] + output, width);
    }
    const int64_t group = delta.num_heads / delta.num_keys, of_values = group * delta.v_dim;
    if (linear == 0)
      split_by_keys(output, width, {{0, delta.k_dim}, {keys, delta.k_dim}, {2 * keys, of_values}, {first_z, of_values}}, body);
    else
      split_by_keys(output, width, {{first_b, group}, {first_a, group}}, body);
  }

  // The delta rule over what is projected and convolved.
  LpLinear recurrence(DType dtype, const char* projected, const char* convolved, void* out, int64_t out_stride) const {
    LpLinear linear{};
    linear.q = convolved, linear.k = at(convolved, keys, dtype), linear.v = at(convolved, 2 * keys, dtype);
    linear.b = at(projected, first_b, dtype), linear.a = at(projected, first_a, dtype);
    linear.rates = delta.rates, linear.biases = delta.biases;
    linear.out = out, linear.states = delta.states;
    linear.q_stride = linear.k_stride = linear.v_stride = channels;
    linear.gate_stride = num_projected, linear.out_stride = out_stride;
    linear.num_heads = delta.num_heads, linear.num_keys = delta.num_keys, linear.k_dim = delta.k_dim, linear.v_dim = delta.v_dim;
    linear.is_delta = linear.normalizes = linear.rounds = 1;
    linear.scale = delta.scale;
    return linear;
  }

 private:
  // Outputs that a head of keys has in a part, whose column is `first` for the first head.
  struct Part {
    int64_t first, width;
  };

  // Outputs lie by heads of keys, and in these by parts.
  template <class Body>
  static void split_by_keys(int64_t output, int width, std::initializer_list<Part> parts, const Body& body) {
    int64_t of_key = 0;
    for (const Part& part : parts) of_key += part.width;
    for (const int64_t end = output + width; output < end;) {
      const int64_t key = output / of_key;
      int64_t place = output % of_key;
      auto part = parts.begin();
      for (; place >= part->width; part++) place -= part->width;
      const int64_t num_outputs = std::min(part->width - place, end - output);
      body(part->first + key * part->width + place, int(num_outputs));
      output += num_outputs;
    }
  }
};

}  // namespace lp
