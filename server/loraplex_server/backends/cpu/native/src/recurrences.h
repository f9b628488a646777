// Recurrences over the states of a step: shares out chains of pieces, heads and channels.
#pragma once

#include <vector>

#include "parallel.h"

extern "C" {

// Pieces of texts: [start, length, source, target] each, target -1 where the state is not kept. Those of a chain follow each
// other, each from the state behind the one before.
struct LpPieces {
  int32_t num_chains;
  const int32_t* chains;  // [num_chains + 1] first piece
  const int64_t* pieces;  // [num_pieces][4]
};

// states [places][num_heads][k_dim][v_dim]; q, k [num_tokens][num_keys][k_dim], v [num_tokens][num_heads][v_dim] with
// strides between tokens; decay [num_tokens][num_heads] or [..][k_dim], beta [num_tokens][num_heads], out
// [num_tokens][num_heads][v_dim]. Where a is given, [num_tokens][num_heads] like b, which may be null, decay and beta are made
// of them (see LinearTask). skips [num_heads]: the part of v that is added to the output; null: none
struct LpLinear {
  const void *q, *k, *v;
  const float *decay, *beta;
  const void *a, *b;
  const float *rates, *biases, *skips;
  void* out;
  float* states;
  int64_t q_stride, k_stride, v_stride, gate_stride, out_stride;  // that of gates: of a and b
  int32_t num_heads, num_keys, k_dim, v_dim;
  int32_t decay_by_channel, is_delta, normalizes;
  float scale, least, most;
  int32_t rounds;  // out is of the dtype, else floats
};
}

namespace lp {

// Memory of the thread for a state that nobody keeps.
inline float* dropped_state(int64_t num_floats) {
  static thread_local std::vector<Line> lines;
  const size_t needed = size_t(num_floats + 15) / 16;
  if (lines.size() < needed) lines.resize(needed);
  return lines[0].floats;
}

// epilogue(head, first token, number of tokens): behind a head's outputs of a piece.
template <class Epilogue>
void attend_linearly_all(Pool& pool, const Kernels& kernels, DType dtype, const LpLinear& a, const LpPieces& pieces,
                         const Epilogue& epilogue) {
  const int64_t size = int64_t(a.k_dim) * a.v_dim, of_decay = a.decay_by_channel ? a.k_dim : 1;
  const int num_chunks = pieces.num_chains * a.num_heads;
  const auto source = [&](const int64_t* piece, int head) { return a.states + (piece[2] * a.num_heads + head) * size; };
  const bool is_in_lines = reinterpret_cast<uintptr_t>(a.states) % sizeof(Line) == 0;
  const bool streams = is_in_lines && num_chunks * size * int64_t(sizeof(float)) > kStreamedBytes;
  const DType out_dtype = a.rounds ? dtype : DType::F32;
  pool.run(num_chunks, [&](int chunk, int thread) {
    const int chain = chunk / a.num_heads, head = chunk % a.num_heads, key = head / (a.num_heads / a.num_keys);
    for (int32_t i = pieces.chains[chain]; i < pieces.chains[chain + 1]; i++) {
      const int64_t *piece = pieces.pieces + 4 * i, start = piece[0];
      LinearTask t;
      t.q = at(a.q, start * a.q_stride + int64_t(key) * a.k_dim, dtype);
      t.k = at(a.k, start * a.k_stride + int64_t(key) * a.k_dim, dtype);
      t.v = at(a.v, start * a.v_stride + int64_t(head) * a.v_dim, dtype);
      const int64_t gate = start * a.num_heads + head;
      t.decay_stride = a.num_heads * of_decay, t.beta_stride = a.num_heads;
      if (a.a != nullptr) {
        const int64_t own = start * a.gate_stride + head;
        t.a = at(a.a, own, dtype), t.b = a.b != nullptr ? at(a.b, own, dtype) : nullptr;
        t.rate = a.rates[head], t.bias = a.biases[head], t.least = a.least, t.most = a.most;
        t.decay_stride = a.gate_stride;
      } else {
        t.decay = a.decay + gate * of_decay;
      }
      t.beta = a.beta != nullptr ? a.beta + gate : nullptr;
      if (a.skips != nullptr) t.skip = a.skips[head];
      t.out = at(a.out, start * a.out_stride + int64_t(head) * a.v_dim, out_dtype);
      t.rounds = a.rounds != 0;
      t.q_stride = a.q_stride, t.k_stride = a.k_stride, t.v_stride = a.v_stride, t.out_stride = a.out_stride;
      t.num_tokens = piece[1];
      t.k_dim = a.k_dim, t.v_dim = a.v_dim;
      t.decay_by_channel = a.decay_by_channel != 0, t.is_delta = a.is_delta != 0, t.normalizes = a.normalizes != 0;
      t.scale = a.scale;
      const bool is_kept = piece[3] >= 0, is_last = i + 1 == pieces.chains[chain + 1];
      t.streams = streams && is_kept && is_last;
      if (const int next = pool.follower(chunk, thread, num_chunks); is_last && next >= 0)
        t.next = source(pieces.pieces + 4 * pieces.chains[next / a.num_heads], next % a.num_heads);
      float* to = is_kept ? a.states + (piece[3] * a.num_heads + head) * size : dropped_state(size);
      kernels.attend_linearly(dtype, t, source(piece, head), to);
      epilogue(head, start, piece[1]);
    }
  });
}

// states [places][width - 1][channels], x [num_tokens][channels] with a stride between tokens, and out without, of the dtype,
// weight [width][channels]
inline void convolve_all(Pool& pool, const Kernels& kernels, DType dtype, const void* x, int64_t x_stride, const float* weight,
                         const float* bias, int width, int64_t channels, bool is_activated, void* states, void* out,
                         const LpPieces& pieces) {
  constexpr int kChannels = 512;  // of a chunk
  const int num_parts = ceil_div(channels, kChannels);
  const int64_t size = int64_t(width - 1) * channels;
  pool.run(pieces.num_chains * num_parts, [&](int chunk, int) {
    const int64_t first = int64_t(chunk % num_parts) * kChannels;
    const int chain = chunk / num_parts;
    for (int32_t i = pieces.chains[chain]; i < pieces.chains[chain + 1]; i++) {
      const int64_t* piece = pieces.pieces + 4 * i;
      ConvTask t;
      t.x = at(x, piece[0] * x_stride + first, dtype);
      t.out = at(out, piece[0] * channels + first, dtype);
      t.weight = weight + first, t.bias = bias != nullptr ? bias + first : nullptr;
      t.x_stride = x_stride, t.out_stride = channels, t.num_tokens = piece[1];
      t.channels = channels, t.num_channels = std::min<int64_t>(kChannels, channels - first);
      t.width = width, t.is_activated = is_activated;
      kernels.convolve(dtype, t, at(states, piece[2] * size + first, dtype),
                       piece[3] >= 0 ? at(states, piece[3] * size + first, dtype) : nullptr);
    }
  });
}

}  // namespace lp
