// Mixers with recurrences in attention's place: a causal convolution of q, k and v with silu behind it, gated linear attention, and
// a norm of its output with a gate z. Gated DeltaNet (arXiv 2412.06464) norms each head, and scales by silu(z); Mamba 2 (arXiv
// 2405.21060), whose v, k and q are its x, B and C, norms groups of heads behind the gate.
#pragma once

#include <initializer_list>

#include "recurrences.h"

extern "C" {

struct LpNorm {
  const void* weight;       // null: there is no such norm, and values stay as they are
  const int64_t* own_ptrs;  // adapters' own weights by slot, 0: none; null: no adapters
  const void* bias;         // of a layer norm; null: none
};

struct LpMixer {
  const void* projection;  // bands of the outputs of the linears that `layout` names, each filled up to whole panels
  const void* o;
  const float* conv_weight;  // [width][channels]
  const float* conv_bias;    // null: none
  LpNorm norm;               // [num_heads * v_dim]
  float norm_eps;
  int32_t norm_size;    // features of one norm
  int32_t gates_first;  // the norm is of what the gate has scaled
  int32_t width;
  int32_t layout;         // lp::Layout
  LpLinear recurrence;    // its sizes and form; what is left is of a step
  // Of a step:
  void* conv_states;  // [places][width - 1][channels]
  void* projected;    // [num_tokens][channels; z; b; a] that the caller reads, see MixerShape; null: nobody does
  void* convolved;    // [num_tokens][channels]
};
}

namespace lp {

// The outputs of a mixer's linears, as `Layout` in layers/mixers.py.
enum Layout : int32_t {
  APART,         // q, k and v; z; b; a: a linear each
  BY_KEY_HEADS,  // q, k, v and z of each head of keys; b and a of each
  TOGETHER       // z, v, k, q and a are one linear
};

// Sizes of one, and where the outputs of its linears lie.
struct MixerShape {
  const LpMixer& mixer;
  const LpLinear& heads = mixer.recurrence;
  const bool is_together = mixer.layout == TOGETHER;
  const int64_t keys = int64_t(heads.num_keys) * heads.k_dim;     // features of all heads' keys
  const int64_t values = int64_t(heads.num_heads) * heads.v_dim;  // and of their values
  const int64_t channels = 2 * keys + values;                     // of the convolution
  const int64_t gates = ceil_div(heads.num_heads, kPanel) * kPanel;  // of b, or of a
  // Columns of what is projected: the channels first.
  const int64_t first_z = channels, first_b = first_z + values, first_a = first_b + (is_together ? 0 : gates);
  const int64_t num_projected = first_a + gates;

  int num_linears() const { return is_together ? 1 : mixer.layout == BY_KEY_HEADS ? 2 : 4; }

  int64_t outputs_of(int linear) const {
    if (is_together) return first_a + heads.num_heads;
    if (mixer.layout == BY_KEY_HEADS) return linear == 0 ? first_b : 2 * heads.num_heads;
    return linear == 0 ? channels : linear == 1 ? values : heads.num_heads;
  }

  // Calls body(linear, its output, how many follow, the first one's place) for the outputs of linears among `num_outputs` packed
  // ones from `start` on. Places count from there.
  template <class Body>
  void each_linear(int64_t start, int64_t num_outputs, const Body& body) const {
    const int64_t firsts[] = {0, mixer.layout == BY_KEY_HEADS ? first_b : first_z, first_b, first_a};
    for (int linear = 0; linear < num_linears(); linear++) {
      const int64_t first = std::max(start, firsts[linear]);
      const int64_t end = std::min(start + num_outputs, firsts[linear] + outputs_of(linear));
      if (first < end) body(linear, first - firsts[linear], int(end - first), int(first - start));
    }
  }

  // Calls body(column, how many follow) for the columns of what is projected in which a linear's outputs lie.
  template <class Body>
  void each_column(int linear, int64_t output, int width, const Body& body) const {
    const int64_t group = heads.num_heads / heads.num_keys, of_values = group * heads.v_dim;
    if (is_together) {
      split(output, width, {{first_z, values}, {0, channels}, {first_a, heads.num_heads}}, body);
    } else if (mixer.layout == APART) {
      const int64_t firsts[] = {0, first_z, first_b, first_a};
      body(firsts[linear] + output, width);
    } else if (linear == 0) {
      split(output, width, {{0, heads.k_dim}, {keys, heads.k_dim}, {2 * keys, of_values}, {first_z, of_values}}, body);
    } else {
      split(output, width, {{first_b, group}, {first_a, group}}, body);
    }
  }

  // The recurrence over what is projected and convolved.
  LpLinear over(DType dtype, const char* projected, const char* convolved, void* out, int64_t out_stride) const {
    LpLinear linear = heads;
    const int64_t first_q = is_together ? values + keys : 0, first_k = is_together ? values : keys, first_v = is_together ? 0 : 2 * keys;
    linear.q = at(convolved, first_q, dtype), linear.k = at(convolved, first_k, dtype), linear.v = at(convolved, first_v, dtype);
    linear.a = at(projected, first_a, dtype), linear.b = is_together ? nullptr : at(projected, first_b, dtype);
    linear.q_stride = linear.k_stride = linear.v_stride = channels;
    linear.gate_stride = num_projected;
    linear.out = out, linear.out_stride = out_stride;
    return linear;
  }

 private:
  struct Part {
    int64_t first, width;
  };

  // Outputs lie group by group, each of a head of keys or, TOGETHER, a single one, and in a group part by part. The columns of
  // a part are those of the first group, then those of the second one.
  template <class Body>
  static void split(int64_t output, int width, std::initializer_list<Part> parts, const Body& body) {
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
