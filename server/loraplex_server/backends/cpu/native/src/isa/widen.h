// Weights in eight bits become those that products read: a value times its block's power of two, which is exact.
#pragma once

#include "../kernels.h"
#include "product.h"
#include "tiles.h"
#include "vector.h"

namespace lp {
namespace LP_ISA {

// Of a block and 16 outputs.
struct Scales {
  __m512 scale, offset;

  explicit Scales(const void* exponents)
      : scale(_mm512_castsi512_ps(
            _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)exponents)), 23))),
        offset(_mm512_mul_ps(scale, _mm512_set1_ps(-32768.0f - 128.0f))) {}
};

// A byte in the second of a float's four that is 32768 otherwise makes it 32768 + byte: one shuffle in place of widening and
// converting. The product with a power of two and the difference are exact.
static inline __m512 widen16(const uint8_t* values, const Scales& of) {
  const __m512i bytes = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)values));
  const __m512i places = _mm512_set_epi32(0x0f00, 0x0e00, 0x0d00, 0x0c00, 0x0b00, 0x0a00, 0x0900, 0x0800, 0x0700, 0x0600,
                                          0x0500, 0x0400, 0x0300, 0x0200, 0x0100, 0x0000);
  const __m512i numbers = _mm512_mask_shuffle_epi8(_mm512_set1_epi32(0x47000000), 0x2222222222222222, bytes, places);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(numbers), of.scale, of.offset);
}

static inline void widen_block_f32(const uint8_t* block, int64_t k, float* band) {
  const Scales first(block), second(block + 16);
  const uint8_t* values = block + kBand;
  for (int64_t i = 0; i < k; i++, values += kBand, band += kBand) {
    _mm512_storeu_ps(band, widen16(values, first));
    _mm512_storeu_ps(band + 16, widen16(values + 16, second));
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
      if (pair % 2 == 0) _mm_prefetch((const char*)values + kAhead, _MM_HINT_T0);
      const __m512i even = _mm512_castps_si512(widen16(values, of)), odd = _mm512_castps_si512(widen16(values + 16, of));
      _mm512_storeu_si512(band, _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(even, 16), odd));
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
