// Rounding of weights to INT4, bit for bit as layers/quantization.py does it.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "parallel.h"

#define LP_API __attribute__((visibility("default")))

namespace lp {
namespace {

constexpr int kTried = 3;         // scales
constexpr float kOuter = 27.51f;  // of the scale: what is larger becomes the last level
constexpr uint32_t kSmallest = (127 - kInt4Bias) << 23;

const int8_t kLevels[16] = {LP_INT4_LEVELS};

float scale_of(int code) {
  const uint32_t bits = (uint32_t(code) << 21) + kSmallest;
  float scale;
  std::memcpy(&scale, &bits, 4);
  return scale;
}

// The largest scale that is not larger.
int code_of(float scale) {
  int32_t bits;
  std::memcpy(&bits, &scale, 4);
  return std::clamp((bits - int32_t(kSmallest)) >> 21, 0, 255);
}

struct Block {
  float squares[kBlock];
  int32_t numbers[kBlock];
  float values[kBlock];  // of the levels, times the scale

  void quantize(const float* weights, int code) {
    const float scale = scale_of(code);
    float ratios[kBlock];
    for (int i = 0; i < kBlock; i++) ratios[i] = weights[i] / scale;
    for (int i = 0; i < kBlock; i++) numbers[i] = 0;
    for (int level = 0; level < 15; level++) {
      const float middle = 0.5f * float(kLevels[level] + kLevels[level + 1]);
      for (int i = 0; i < kBlock; i++) numbers[i] += ratios[i] > middle ? 1 : 0;
    }
    for (int i = 0; i < kBlock; i++) values[i] = float(kLevels[numbers[i]]) * scale;
    for (int i = 0; i < kBlock; i++) squares[i] = (values[i] - weights[i]) * (values[i] - weights[i]);
  }

  // By halves, whose order is that of the tensor operations.
  float error() {
    asm volatile("" : : "r"(squares) : "memory");  // squares are rounded before they are added
    for (int half = kBlock / 2; half > 0; half /= 2)
      for (int i = 0; i < half; i++) squares[i] += squares[i + half];
    return squares[0];
  }
};

// One row [k], in place of which its rounded weights come; `values` and `codes` may be null, or else get what these are.
template <class T>
void round_row(T* row, int64_t k, bool rounds, int8_t* values, uint8_t* codes) {
  for (int64_t first = 0; first < k; first += kBlock) {
    const int width = int(std::min<int64_t>(kBlock, k - first));
    float weights[kBlock] = {};
    for (int i = 0; i < width; i++) {
      if constexpr (sizeof(T) == 4) {
        std::memcpy(&weights[i], &row[first + i], 4);
      } else {
        const uint32_t bits = uint32_t(row[first + i]) << 16;
        std::memcpy(&weights[i], &bits, 4);
      }
    }
    float largest = 0;
    for (int i = 0; i < kBlock; i++) largest = std::max(largest, std::fabs(weights[i]));
    const int most = code_of(largest / kOuter);
    Block best, tried;
    best.quantize(weights, most);
    float best_error = best.error();
    int best_code = most;
    for (int step = 1; step < kTried && best_error > 0; step++) {
      const int code = std::max(most - step, 0);
      tried.quantize(weights, code);
      const float error = tried.error();
      if (error < best_error) best = tried, best_error = error, best_code = code;
    }
    for (int i = 0; rounds && i < width; i++) {
      uint32_t bits;
      std::memcpy(&bits, &best.values[i], 4);
      row[first + i] = sizeof(T) == 4 ? T(bits) : T(bits >> 16);
    }
    for (int i = 0; values != nullptr && i < width; i++) values[first + i] = int8_t(best.numbers[i]);
    if (codes != nullptr) codes[first / kBlock] = uint8_t(best_code);
  }
}

}  // namespace
}  // namespace lp

extern "C" {

// weight [num_outputs][k] to INT4: numbers of levels [num_outputs][k] and codes of scales [num_outputs][blocks], either of which
// may be null; `rounds`: the weight becomes what these stand for, too.
LP_API void lp_round_int4(lp::Pool* pool, int dtype, void* weight, int64_t num_outputs, int64_t k, int rounds, int8_t* values,
                          uint8_t* codes) {
  const auto turn = pool->take_turn();
  constexpr int64_t kChunk = 16;
  const int64_t num_blocks = lp::ceil_div(k, lp::kBlock);
  pool->run(lp::ceil_div(num_outputs, kChunk), [&](int chunk, int) {
    for (int64_t row = chunk * kChunk; row < std::min(num_outputs, (chunk + 1) * kChunk); row++) {
      int8_t* own_values = values == nullptr ? nullptr : values + row * k;
      uint8_t* own_codes = codes == nullptr ? nullptr : codes + row * num_blocks;
      if (lp::DType(dtype) == lp::DType::F32)
        lp::round_row(static_cast<uint32_t*>(weight) + row * k, k, rounds != 0, own_values, own_codes);
      else
        lp::round_row(static_cast<uint16_t*>(weight) + row * k, k, rounds != 0, own_values, own_codes);
    }
  });
}
}
