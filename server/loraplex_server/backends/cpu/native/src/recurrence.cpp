// The C interface of recurrences over the states of a step.
#include "recurrences.h"

#define LP_API __attribute__((visibility("default")))

namespace {

constexpr int kScanned = 64;  // channels of a chunk's scan

}  // namespace

extern "C" {

LP_API void lp_attend_linearly(lp::Pool* pool, int dtype, const LpLinear* linear, const LpPieces* pieces) {
  const auto turn = pool->take_turn();
  lp::attend_linearly_all(*pool, *lp::current_kernels(), lp::DType(dtype), *linear, *pieces, [](int, int64_t, int64_t) {});
}

// See convolve_all.
LP_API void lp_convolve(lp::Pool* pool, int dtype, const void* x, int64_t x_stride, const float* weight, const float* bias,
                        int width, int64_t channels, int is_activated, void* states, void* out, const LpPieces* pieces) {
  const auto turn = pool->take_turn();
  lp::convolve_all(*pool, *lp::current_kernels(), lp::DType(dtype), x, x_stride, weight, bias, width, channels,
                   is_activated != 0, states, out, *pieces);
}

// states [places][channels][n]; x, step, out [num_tokens][channels], b, c [num_tokens][n], a [channels][n], all in float32
LP_API void lp_scan(lp::Pool* pool, const float* x, const float* step, const float* a, const float* b, const float* c,
                    int64_t channels, int64_t n, float* states, float* out, const LpPieces* pieces) {
  const auto turn = pool->take_turn();
  const lp::Kernels& kernels = *lp::current_kernels();
  const int num_parts = lp::ceil_div(channels, kScanned);
  pool->run(pieces->num_chains * num_parts, [&](int chunk, int) {
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
      float* to = piece[3] >= 0 ? states + (piece[3] * channels + first) * n : lp::dropped_state(kScanned * n);
      kernels.scan(t, states + (piece[2] * channels + first) * n, to);
    }
  });
}
}
