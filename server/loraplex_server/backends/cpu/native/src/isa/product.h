// Products of a few rows with a band of packed weights.
#pragma once

#include "../kernels.h"
#include "tiles.h"
#include "vector.h"

#ifndef __AVX512F__
#include "product_256.h"
#else

namespace lp {
namespace LP_ISA {

// --- float32 -----------------------------------------------------------------------------------------------------------

template <int M>
static inline void rows_f32(const float* x, int64_t x_stride, const float* band, int64_t k, bool adds, float* c,
                            int64_t c_stride) {
  Floats acc[M][2];
  for (int r = 0; r < M; r++)
    for (int p = 0; p < 2; p++) acc[r][p] = adds ? load(c + r * c_stride + 16 * p) : zeros();
  for (int64_t i = 0; i < k; i++, band += kBand) {
    Floats b0 = load(band), b1 = load(band + 16);
    for (int r = 0; r < M; r++) {
      Floats a = all(x[r * x_stride + i]);
      acc[r][0] = fmadd(a, b0, acc[r][0]);
      acc[r][1] = fmadd(a, b1, acc[r][1]);
    }
  }
  for (int r = 0; r < M; r++) {
    store(c + r * c_stride, acc[r][0]);
    store(c + r * c_stride + 16, acc[r][1]);
  }
}

// --- bfloat16 with vectors ---------------------------------------------------------------------------------------------

template <int M>
static inline void rows_bf16(const bf16* x, int64_t x_stride, const bf16* band, int64_t k, bool adds, float* c,
                            int64_t c_stride) {
  Floats acc[M][2];
  for (int r = 0; r < M; r++)
    for (int p = 0; p < 2; p++) acc[r][p] = adds ? load(c + r * c_stride + 16 * p) : zeros();
  for (int64_t i = 0; i < k; i += 32, band += 32 * kBand) {
    for (int pair = 0; pair < 16; pair++) {
      Words b0 = load_words(band + pair * 32), b1 = load_words(band + 512 + pair * 32);
      for (int r = 0; r < M; r++) {
        int32_t two;
        __builtin_memcpy(&two, x + r * x_stride + i + 2 * pair, 4);
        Words a = all_words(two);
        acc[r][0] = dot_pairs(acc[r][0], a, b0);
        acc[r][1] = dot_pairs(acc[r][1], a, b1);
      }
    }
  }
  for (int r = 0; r < M; r++) {
    store(c + r * c_stride, acc[r][0]);
    store(c + r * c_stride + 16, acc[r][1]);
  }
}

#define LP_BY_ROWS(kernel, T)                                                                               \
  for (int r = 0; r < m; r += 8) {                                                                          \
    const T* at = (const T*)x + r * x_stride;                                                               \
    float* to = c + r * c_stride;                                                                           \
    switch (m - r) {                                                                                        \
      case 1: kernel<1>(at, x_stride, (const T*)band, k, adds, to, c_stride); break;                              \
      case 2: kernel<2>(at, x_stride, (const T*)band, k, adds, to, c_stride); break;                              \
      case 3: kernel<3>(at, x_stride, (const T*)band, k, adds, to, c_stride); break;                              \
      case 4: kernel<4>(at, x_stride, (const T*)band, k, adds, to, c_stride); break;                              \
      case 5: kernel<5>(at, x_stride, (const T*)band, k, adds, to, c_stride); break;                              \
      case 6: kernel<6>(at, x_stride, (const T*)band, k, adds, to, c_stride); break;                              \
      case 7: kernel<7>(at, x_stride, (const T*)band, k, adds, to, c_stride); break;                              \
      default: kernel<8>(at, x_stride, (const T*)band, k, adds, to, c_stride);                                    \
    }                                                                                                       \
  }

// --- bfloat16 with tiles -----------------------------------------------------------------------------------------------

#ifdef __AMX_BF16__
static inline void rows16(const bf16* x, int64_t x_bytes, const bf16* band, int64_t k) {
  for (int64_t i = 0; i < k; i += 32, band += 32 * kBand) {
    _tile_loadd(4, x + i, x_bytes);
    _tile_loadd(6, band, 64);
    _tile_loadd(7, band + 512, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
  }
}

// `Fetches`: bytes of `soon` for each of its 32 inputs.
template <int Fetches>
static inline void rows32(const bf16* x, int64_t x_bytes, const bf16* band, int64_t k, const char* soon) {
  const bf16* lower = x + 8 * x_bytes;
  for (int64_t i = 0; i < k; i += 32, band += 32 * kBand, soon += Fetches) {
    _tile_loadd(6, band, 64);
    _tile_loadd(4, x + i, x_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, band + 512, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, lower + i, x_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    for (int line = 0; line < Fetches; line += 64) _mm_prefetch(soon + line, _MM_HINT_T1);
  }
}

static void tiles_bf16(const bf16* x, int64_t x_stride, int m, const bf16* band, int64_t k, bool adds, float* c,
                       int64_t c_stride, const void* soon) {
  const int64_t x_bytes = x_stride * 2, c_bytes = c_stride * 4;
  float* lower = c + 16 * c_stride;
  configure(m);
  if (adds) {
    _tile_loadd(0, c, c_bytes);
    _tile_loadd(1, c + 16, c_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  if (m <= 16) {
    rows16(x, x_bytes, band, k);
  } else {
    if (adds) {
      _tile_loadd(2, lower, c_bytes);
      _tile_loadd(3, lower + 16, c_bytes);
    } else {
      _tile_zero(2);
      _tile_zero(3);
    }
    if (soon != nullptr)
      rows32<32 * kBand * sizeof(bf16) / kFetches>(x, x_bytes, band, k, (const char*)soon);
    else
      rows32<0>(x, x_bytes, band, k, nullptr);
    _tile_stored(2, lower, c_bytes);
    _tile_stored(3, lower + 16, c_bytes);
  }
  _tile_stored(0, c, c_bytes);
  _tile_stored(1, c + 16, c_bytes);
}
#endif

static void product(DType dtype, const void* x, int64_t x_stride, int m, const void* band, int64_t k, bool adds, float* c,
                    int64_t c_stride, const void* soon) {
  if (dtype == DType::F32) {
    LP_BY_ROWS(rows_f32, float)
    return;
  }
#ifdef __AMX_BF16__
  tiles_bf16((const bf16*)x, x_stride, m, (const bf16*)band, k, adds, c, c_stride, soon);
#else
  (void)soon;
  LP_BY_ROWS(rows_bf16, bf16)
#endif
}

}  // namespace LP_ISA
}  // namespace lp
#endif
