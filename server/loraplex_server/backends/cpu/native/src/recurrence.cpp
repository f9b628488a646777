// The C interface of recurrences over the states of a step: shares out chains of pieces, heads and channels.
#include <vector>

#include "parallel.h"

#define LP_API __attribute__((visibility("default")))

namespace {

constexpr int kChannels = 512;  // of a chunk's convolution
constexpr int kScanned = 64;    // of a chunk's scan

struct Scratch {
  std::vector<lp::Line> lines;

  float* floats(int64_t n) {
    const size_t needed = size_t(n + 15) / 16;
    if (lines.size() < needed) lines.resize(needed);
    return lines[0].floats;
  }
};

}  // namespace

extern "C" {

// Pieces of texts: [start, length, source, target] each, target -1 where the state is not kept. Those of a chain follow each
// other, each from the state behind the one before.
struct LpPieces {
  int32_t num_chains;
  const int32_t* chains;  // [num_chains + 1] first piece
  const int64_t* pieces;  // [num_pieces][4]
};

// states [places][num_heads][k_dim][v_dim]; q, k [num_tokens][num_keys][k_dim], v [num_tokens][num_heads][v_dim] with
// strides between tokens; decay [num_tokens][num_heads] or [..][k_dim], beta [num_tokens][num_heads], out [..][v_dim].
// Where a is given, [num_tokens][num_heads] like b, which may be null, decay and beta are made of them (see LinearTask).
// skips [num_heads]: the part of v that is added to the output; null: none
struct LpLinear {
  const void *q, *k, *v;
  const float *decay, *beta;
  const void *a, *b;
  const float *rates, *biases, *skips;
  void* out;
  float* states;
  int64_t q_stride, k_stride, v_stride;
  int32_t num_heads, num_keys, k_dim, v_dim;
  int32_t decay_by_channel, is_delta, normalizes;
  float scale, least, most;
  int32_t rounds;  // out is of the dtype, else floats
};

LP_API void lp_attend_linearly(lp::Pool* pool, int dtype, const LpLinear* linear,
                                const LpPieces* pieces) {
  const auto turn = pool->take_turn();
  const lp::Kernels& kernels = *lp::current_kernels();
  const lp::DType type = lp::DType(dtype);
  const LpLinear& a = *linear;
  const int64_t size = int64_t(a.k_dim) * a.v_dim, of_decay = a.decay_by_channel ? a.k_dim : 1;
  const int num_chunks = pieces->num_chains * a.num_heads;
  const auto source = [&](const int64_t* piece, int head) { return a.states + (piece[2] * a.num_heads + head) * size; };
  const bool is_in_lines = reinterpret_cast<uintptr_t>(a.states) % sizeof(lp::Line) == 0;
  const bool streams = is_in_lines && num_chunks * size * int64_t(sizeof(float)) > lp::kStreamedBytes;
  pool->run(num_chunks, [&](int chunk, int thread) {
    static thread_local Scratch scratch;
    const int chain = chunk / a.num_heads, head = chunk % a.num_heads, key = head / (a.num_heads / a.num_keys);
    for (int32_t at = pieces->chains[chain]; at < pieces->chains[chain + 1]; at++) {
      const int64_t *piece = pieces->pieces + 4 * at, start = piece[0];
      lp::LinearTask t;
      t.q = lp::at(a.q, start * a.q_stride + int64_t(key) * a.k_dim, type);
      t.k = lp::at(a.k, start * a.k_stride + int64_t(key) * a.k_dim, type);
      t.v = lp::at(a.v, start * a.v_stride + int64_t(head) * a.v_dim, type);
      const int64_t gate = start * a.num_heads + head;
      if (a.a != nullptr) {
        t.a = lp::at(a.a, gate, type), t.b = a.b != nullptr ? lp::at(a.b, gate, type) : nullptr;
        t.rate = a.rates[head], t.bias = a.biases[head], t.least = a.least, t.most = a.most;
      } else {
        t.decay = a.decay + gate * of_decay;
      }
      t.beta = a.beta != nullptr ? a.beta + gate : nullptr;
      if (a.skips != nullptr) t.skip = a.skips[head];
      t.out = lp::at(a.out, gate * a.v_dim, a.rounds ? type : lp::DType::F32);
      t.rounds = a.rounds != 0;
      t.q_stride = a.q_stride, t.k_stride = a.k_stride, t.v_stride = a.v_stride;
      t.decay_stride = a.num_heads * of_decay, t.beta_stride = a.num_heads;
      t.out_stride = int64_t(a.num_heads) * a.v_dim;
      t.num_tokens = piece[1];
      t.state_stride = a.v_dim, t.k_dim = a.k_dim, t.v_dim = a.v_dim;
      t.decay_by_channel = a.decay_by_channel != 0, t.is_delta = a.is_delta != 0, t.normalizes = a.normalizes != 0;
      t.scale = a.scale;
      const bool is_kept = piece[3] >= 0, is_last = at + 1 == pieces->chains[chain + 1];
      t.streams = streams && is_kept && is_last;
      if (const int next = pool->follower(chunk, thread, num_chunks); is_last && next >= 0)
        t.next = source(pieces->pieces + 4 * pieces->chains[next / a.num_heads], next % a.num_heads);
      float* to = is_kept ? a.states + (piece[3] * a.num_heads + head) * size : scratch.floats(size);
      kernels.attend_linearly(type, t, source(piece, head), to);
    }
  });
}

// states [places][width - 1][channels], x and out [num_tokens][channels] of the dtype, weight [width][channels]
LP_API void lp_convolve(lp::Pool* pool, int dtype, const void* x, int64_t x_stride, const float* weight, const float* bias,
                        int width, int64_t channels, int is_activated, void* states, void* out, const LpPieces* pieces) {
  const auto turn = pool->take_turn();
  const lp::Kernels& kernels = *lp::current_kernels();
  const lp::DType type = lp::DType(dtype);
  const int num_parts = lp::ceil_div(channels, kChannels);
  const int64_t size = int64_t(width - 1) * channels;
  pool->run(pieces->num_chains * num_parts, [&](int chunk, int) {
    const int64_t first = int64_t(chunk % num_parts) * kChannels;
    const int chain = chunk / num_parts;
    for (int32_t at = pieces->chains[chain]; at < pieces->chains[chain + 1]; at++) {
      const int64_t* piece = pieces->pieces + 4 * at;
      lp::ConvTask t;
      t.x = lp::at(x, piece[0] * x_stride + first, type);
      t.out = lp::at(out, piece[0] * channels + first, type);
      t.weight = weight + first, t.bias = bias != nullptr ? bias + first : nullptr;
      t.x_stride = x_stride, t.out_stride = channels, t.num_tokens = piece[1];
      t.channels = channels, t.num_channels = std::min<int64_t>(kChannels, channels - first);
      t.width = width, t.is_activated = is_activated != 0;
      kernels.convolve(type, t, lp::at(states, piece[2] * size + first, type),
                       piece[3] >= 0 ? lp::at(states, piece[3] * size + first, type) : nullptr);
    }
  });
}

// states [places][channels][n]; x, step, out [num_tokens][channels], b, c [num_tokens][n], a [channels][n], all in float32
LP_API void lp_scan(lp::Pool* pool, const float* x, const float* step, const float* a, const float* b, const float* c,
                    int64_t channels, int64_t n, float* states, float* out, const LpPieces* pieces) {
  const auto turn = pool->take_turn();
  const lp::Kernels& kernels = *lp::current_kernels();
  const int num_parts = lp::ceil_div(channels, kScanned);
  pool->run(pieces->num_chains * num_parts, [&](int chunk, int) {
    static thread_local Scratch scratch;
    const int64_t first = int64_t(chunk % num_parts) * kScanned;
    const int chain = chunk / num_parts;
    for (int32_t at = pieces->chains[chain]; at < pieces->chains[chain + 1]; at++) {
      const int64_t *piece = pieces->pieces + 4 * at, start = piece[0];
      lp::ScanTask t;
      t.x = x + start * channels + first, t.step = step + start * channels + first;
      t.b = b + start * n, t.c = c + start * n;
      t.a = a + first * n, t.out = out + start * channels + first;
      t.x_stride = t.step_stride = t.out_stride = channels;
      t.b_stride = t.c_stride = n;
      t.num_tokens = piece[1], t.n = n, t.num_channels = std::min<int64_t>(kScanned, channels - first);
      float* to = piece[3] >= 0 ? states + (piece[3] * channels + first) * n : scratch.floats(kScanned * n);
      kernels.scan(t, states + (piece[2] * channels + first) * n, to);
    }
  });
}
}
