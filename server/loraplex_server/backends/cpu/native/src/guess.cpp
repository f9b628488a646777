// What Medusa heads that share the model's own head guess: gather, residual blocks, head, most likely token.
#include "lora.h"
#include "parallel.h"

#define LP_API __attribute__((visibility("default")))

extern "C" {

// Rows [start, end) of a layer have one block: x += silu(x @ weight.T + bias).
struct LpBlock {
  int32_t start;
  int32_t end;
  const void* weight;  // [features][features], as it lies
  const void* bias;    // null: none
};

// How a batch of guesses lies; the same step after step.
struct LpGuesses {
  int32_t dtype;
  int32_t num_rows;
  int32_t num_layers;
  const int32_t* sources;     // [num_rows] of which hidden state
  const int32_t* num_blocks;  // [num_layers]
  const LpBlock* blocks;      // layer by layer
};

// The model's own head, packed.
struct LpHead {
  int64_t features;
  int64_t num_outputs;
  const void* packed;
  const void* bias;
  int32_t format;
};

// Memory for x and inner [num_rows][features] and logits [num_rows][num_outputs].
struct LpGuessScratch {
  void* x;
  void* inner;
  void* logits;
};

void lp_linear(lp::Pool* pool, int dtype, const void* x, int64_t x_stride, int num_rows, int64_t k, const void* packed,
               int format, int64_t num_outputs, const void* bias, void* y, int64_t y_stride);
void lp_argmax(lp::Pool* pool, int dtype, const void* x, int num_rows, int64_t n, const int32_t* masks,
               const uint32_t* bits, int64_t num_words, float* best, int64_t* where);
}

namespace lp {
namespace {

constexpr int kWidth = 64;  // outputs of a chunk

// inner = silu(x @ weight.T + bias) in the rows of each block, then x += inner.
void add_blocks(Pool& pool, const Kernels& kernels, DType dtype, const LpBlock* blocks, int num_blocks, int64_t n, void* x,
                void* inner) {
  const int num_columns = ceil_div(n, kWidth);
  pool.run(num_blocks * num_columns, [&](int chunk, int) {
    float c[kPieceRows * kWidth], ones[kWidth];
    std::fill(ones, ones + kWidth, 1.0f);
    const LpBlock& block = blocks[chunk / num_columns];
    const int64_t output = int64_t(chunk % num_columns) * kWidth;
    const int width = int(std::min<int64_t>(kWidth, n - output));
    for (int64_t row = block.start; row < block.end; row += kPieceRows) {
      const int m = int(std::min<int64_t>(kPieceRows, block.end - row));
      kernels.shrink(dtype, at(x, row * n, dtype), n, m, at(block.weight, output * n, dtype), n, width, 1.0f, c, kWidth);
      for (int64_t r = 0; r < m; r++) {
        if (block.bias != nullptr) kernels.add_bias(dtype, at(block.bias, output, dtype), width, c + r * kWidth);
        kernels.gated(dtype, kSilu, c + r * kWidth, ones, width, at(inner, (row + r) * n + output, dtype));
      }
    }
    kernels.end_products();
  });
  pool.run(num_blocks, [&](int chunk, int) {
    float c[kWidth];
    for (int64_t row = blocks[chunk].start; row < blocks[chunk].end; row++)
      for (int64_t output = 0; output < n; output += kWidth) {
        const int width = int(std::min<int64_t>(kWidth, n - output));
        std::memset(c, 0, sizeof(c));
        kernels.add_bias(dtype, at(inner, row * n + output, dtype), width, c);
        kernels.add_to(dtype, c, width, at(x, row * n + output, dtype));
      }
  });
}

}  // namespace
}  // namespace lp

extern "C" {

// Of each row of hidden [.][features] that is asked for the largest logit, NaN if one is, and its token.
LP_API void lp_guess(lp::Pool* pool, const LpGuesses* guesses, const LpHead* head, const void* hidden,
                     const LpGuessScratch* scratch, float* best, int64_t* where) {
  const lp::DType dtype = lp::DType(guesses->dtype);
  const int64_t n = head->features;
  const int num_rows = guesses->num_rows;
  {
    const auto turn = pool->take_turn();
    for (int64_t row = 0; row < num_rows; row++)
      std::memcpy(lp::at(scratch->x, row * n, dtype), lp::at(hidden, guesses->sources[row] * n, dtype),
                  size_t(n * lp::item_bytes(dtype)));
    const LpBlock* blocks = guesses->blocks;
    for (int layer = 0; layer < guesses->num_layers; blocks += guesses->num_blocks[layer++])
      lp::add_blocks(*pool, *lp::current_kernels(), dtype, blocks, guesses->num_blocks[layer], n, scratch->x,
                     scratch->inner);
  }
  lp_linear(pool, guesses->dtype, scratch->x, n, num_rows, n, head->packed, head->format, head->num_outputs,
            head->bias, scratch->logits, head->num_outputs);
  lp_argmax(pool, guesses->dtype, scratch->logits, num_rows, head->num_outputs, nullptr, nullptr, 0, best, where);
}
}
