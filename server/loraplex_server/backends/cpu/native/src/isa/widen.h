// Weights in eight bits become those that products read: a value times its block's power of two, which is exact.
#pragma once

#include "../kernels.h"
#include "product.h"
#include "tiles.h"
#include "vector.h"

namespace lp {
namespace LP_ISA {

static inline void widen_block_f32(const uint8_t* block, int64_t k, float* band) {
  const Scales first(block), second(block + 16);
  const uint8_t* values = block + kBand;
  for (int64_t i = 0; i < k; i++, values += kBand, band += kBand) {
    store(band, widen16(values, first));
    store(band + 16, widen16(values + 16, second));
  }
}

// How far ahead of what is read lines are fetched. Widening takes long enough for the processor's own fetching to fall short.
constexpr int64_t kAhead = 2 * (kBlock + 1) * kBand;

// Of a pair of inputs the even ones lie before the odd ones; in bfloat16 they are a float's lower and upper half. Nothing is
// cut off: eight bits are all there are.
static inline void widen_block_bf16(const uint8_t* block, bf16* band) {
  const uint8_t* values = block + kBand;
  for (int panel = 0; panel < 2; panel++) {
    const Scales of(block + panel * kPanel);
    for (int pair = 0; pair < 16; pair++, values += 32, band += 32) {
      if (pair % 2 == 0) fetch((const char*)values + kAhead);
      store_words(band, join_pairs(widen16(values, of), widen16(values + 16, of)));
    }
  }
}

static void widen(DType dtype, const void* blocks, int64_t k, void* band) {
  for (int64_t i = 0; i < k; i += kBlock) {
    const uint8_t* block = (const uint8_t*)blocks + int8_band_bytes(i);
    if (dtype == DType::F32)
      widen_block_f32(block, k - i < kBlock ? k - i : kBlock, (float*)band + i * kBand);
    else
      widen_block_bf16(block, (bf16*)band + i * kBand);
  }
}

// --- products ----------------------------------------------------------------------------------------------------------

#ifdef __AMX_BF16__
// Calls multiply(widened, i) for each block, of which the next one is widened meanwhile: so weights are read all the time,
// and vectors work beside the tiles.
template <class Multiply>
static inline void each_block(const uint8_t* blocks, int64_t k, const Multiply& multiply) {
  alignas(64) bf16 widened[2][kBlock * kBand];
  widen_block_bf16(blocks, widened[0]);
  int turn = 0;
  for (int64_t i = kBlock; i < k; i += kBlock, turn ^= 1) {
    widen_block_bf16(blocks + int8_band_bytes(i), widened[turn ^ 1]);
    multiply(widened[turn], i - kBlock);
  }
  multiply(widened[turn], k - kBlock);
}

static void tiles_int8(const bf16* x, int64_t x_stride, int m, const uint8_t* blocks, int64_t k, float* c,
                       int64_t c_stride) {
  const int64_t x_bytes = x_stride * 2, c_bytes = c_stride * 4;
  configure(m);
  _tile_zero(0);
  _tile_zero(1);
  if (m <= 16) {
    each_block(blocks, k, [&](const bf16* band, int64_t i) { rows16(x + i, x_bytes, band, kBlock); });
  } else {
    _tile_zero(2);
    _tile_zero(3);
    each_block(blocks, k, [&](const bf16* band, int64_t i) { rows32<0>(x + i, x_bytes, band, kBlock, nullptr); });
    _tile_stored(2, c + 16 * c_stride, c_bytes);
    _tile_stored(3, c + 16 * c_stride + 16, c_bytes);
  }
  _tile_stored(0, c, c_bytes);
  _tile_stored(1, c + 16, c_bytes);
}
#endif

static void product_int8(DType dtype, const void* x, int64_t x_stride, int m, const void* band, int64_t k, float* c,
                         int64_t c_stride) {
#ifdef __AMX_BF16__
  if (dtype == DType::BF16) {
    tiles_int8((const bf16*)x, x_stride, m, (const uint8_t*)band, k, c, c_stride);
    return;
  }
#endif
  constexpr int kPart = 4 * kBlock;
  alignas(64) float part[kPart * kBand];
  for (int64_t i = 0; i < k; i += kPart) {
    const int64_t inputs = k - i < kPart ? k - i : kPart;
    widen(dtype, (const char*)band + int8_band_bytes(i), inputs, part);
    product(dtype, (const char*)x + i * item_bytes(dtype), x_stride, m, part, inputs, i > 0, c, c_stride, nullptr);
  }
}

}  // namespace LP_ISA
}  // namespace lp
