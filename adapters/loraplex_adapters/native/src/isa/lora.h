// The two halves of a low-rank update, for rows of one adapter. Factors are read where they lie.
#pragma once

namespace lp {
namespace LP_ISA {

template <class D>
struct Dot;

template <>
struct Dot<F32> {
  static const int step = 16;
  static inline __m512 add(const float* a, const float* b, __m512 acc, int64_t n) {
    if (n >= 16) return _mm512_fmadd_ps(_mm512_loadu_ps(a), _mm512_loadu_ps(b), acc);
    __mmask16 mask = first((int)n);
    return _mm512_fmadd_ps(_mm512_maskz_loadu_ps(mask, a), _mm512_maskz_loadu_ps(mask, b), acc);
  }
};

template <>
struct Dot<BF16> {
  static const int step = 32;
  static inline __m512 add(const bf16* a, const bf16* b, __m512 acc, int64_t n) {
    if (n >= 32) return dot_pairs(acc, _mm512_loadu_si512(a), _mm512_loadu_si512(b));
    __mmask32 mask = (1u << n) - 1;
    return dot_pairs(acc, _mm512_maskz_loadu_epi16(mask, a), _mm512_maskz_loadu_epi16(mask, b));
  }
};

// h[M][R] = alpha * x[M] . a[R]
template <class D, int M, int R>
static inline void shrink_block(const typename D::T* x, int64_t x_stride, const typename D::T* a, int64_t k, float alpha,
                                float* h, int64_t h_stride) {
  __m512 acc[16];
  for (int i = 0; i < 16; i++) acc[i] = _mm512_setzero_ps();
  for (int64_t i = 0; i < k; i += Dot<D>::step)
    for (int m = 0; m < M; m++)
      for (int r = 0; r < R; r++)
        acc[m * R + r] = Dot<D>::add(x + m * x_stride + i, a + r * k + i, acc[m * R + r], k - i);
  alignas(64) float sums[16];
  _mm512_store_ps(sums, _mm512_mul_ps(sums16(acc), _mm512_set1_ps(alpha)));
  for (int m = 0; m < M; m++)
    for (int r = 0; r < R; r++) h[m * h_stride + r] = sums[m * R + r];
}

template <class D>
static void shrink_rows(const typename D::T* x, int64_t x_stride, int m, const typename D::T* a, int64_t k, int rank,
                        float alpha, float* h, int64_t h_stride) {
  int row = 0;
  for (; row + 4 <= m; row += 4) {
    const typename D::T* at = x + row * x_stride;
    float* to = h + row * h_stride;
    int r = 0;
    for (; r + 4 <= rank; r += 4) shrink_block<D, 4, 4>(at, x_stride, a + r * k, k, alpha, to + r, h_stride);
    for (; r < rank; r++) shrink_block<D, 4, 1>(at, x_stride, a + r * k, k, alpha, to + r, h_stride);
  }
  for (; row < m; row++) {
    const typename D::T* at = x + row * x_stride;
    float* to = h + row * h_stride;
    int r = 0;
    for (; r + 8 <= rank; r += 8) shrink_block<D, 1, 8>(at, x_stride, a + r * k, k, alpha, to + r, h_stride);
    for (; r < rank; r++) shrink_block<D, 1, 1>(at, x_stride, a + r * k, k, alpha, to + r, h_stride);
  }
}

#ifdef __AMX_BF16__
// The same with tiles, whatever the number of rows is, so that a row's sums are the same among any others: the products of
// a pair of tiles are added up in one order, whichever of them is which. At most 16 ranks; k is a multiple of 32.
//
// Of few rows, the factors are the left tile, which is read as it lies, and a row of x is the right one.
static void shrink_row(const bf16* x, const bf16* a, int64_t k, int rank, float alpha, float* h) {
  alignas(64) float c[16];
  configure_row(rank);
  _tile_zero(0);
  for (int64_t i = 0; i < k; i += 32) {
    _tile_loadd(4, a + i, k * 2);
    _tile_loadd(6, x + i, 4);
    _tile_dpbf16ps(0, 4, 6);
  }
  _tile_stored(0, c, 4);
  _mm512_mask_storeu_ps(h, first(rank), _mm512_mul_ps(_mm512_load_ps(c), _mm512_set1_ps(alpha)));
}

// Of up to kRows rows, x is the left tile, and factors are transposed to be the right one.
static void shrink_tiles(const bf16* x, int64_t x_stride, int m, const bf16* a, int64_t k, int rank, float alpha, float* h,
                         int64_t h_stride) {
  const int kSteps = 4;  // that are transposed ahead of their products
  alignas(64) bf16 b[kSteps][16 * 32];
  alignas(64) float c[kRows * 16];
  configure(m);
  _tile_zero(0);
  if (m > 16) _tile_zero(2);
  for (int64_t i = 0; i < k; i += 32 * kSteps) {
    const int steps = k - i < 32 * kSteps ? (int)(k - i) / 32 : kSteps;
    for (int s = 0; s < steps; s++) {
      __m512i v[16];
      for (int r = 0; r < 16; r++)
        v[r] = r < rank ? _mm512_loadu_si512(a + r * k + i + 32 * s) : _mm512_setzero_si512();
      transpose_pairs(v);
      for (int r = 0; r < 16; r++) _mm512_store_si512(b[s] + r * 32, v[r]);
    }
    for (int s = 0; s < steps; s++) {
      _tile_loadd(6, b[s], 64);
      _tile_loadd(4, x + i + 32 * s, x_stride * 2);
      _tile_dpbf16ps(0, 4, 6);
      if (m <= 16) continue;
      _tile_loadd(5, x + 16 * x_stride + i + 32 * s, x_stride * 2);
      _tile_dpbf16ps(2, 5, 6);
    }
  }
  _tile_stored(0, c, 64);
  if (m > 16) _tile_stored(2, c + 16 * 16, 64);
  for (int row = 0; row < m; row++)
    _mm512_mask_storeu_ps(h + row * h_stride, first(rank),
                          _mm512_mul_ps(_mm512_load_ps(c + row * 16), _mm512_set1_ps(alpha)));
}

static const int kFewRows = 4;

static void shrink_by_tiles(const bf16* x, int64_t x_stride, int m, const bf16* a, int64_t k, int rank, float alpha, float* h,
                            int64_t h_stride) {
  for (int r = 0; r < rank; r += 16) {
    const int part = rank - r < 16 ? rank - r : 16;
    const bf16* factors = a + r * k;
    for (int row = 0; m <= kFewRows && row < m; row++)
      shrink_row(x + row * x_stride, factors, k, part, alpha, h + row * h_stride + r);
    for (int row = 0; m > kFewRows && row < m; row += kRows)
      shrink_tiles(x + row * x_stride, x_stride, m - row < kRows ? m - row : kRows, factors, k, part, alpha,
                   h + row * h_stride + r, h_stride);
  }
}
#endif

static void shrink(DType dtype, const void* x, int64_t x_stride, int m, const void* a, int64_t k, int rank, float alpha,
                   float* h, int64_t h_stride) {
  if (dtype == DType::F32)
    shrink_rows<F32>((const float*)x, x_stride, m, (const float*)a, k, rank, alpha, h, h_stride);
#ifdef __AMX_BF16__
  else if (k % 32 == 0)
    shrink_by_tiles((const bf16*)x, x_stride, m, (const bf16*)a, k, rank, alpha, h, h_stride);
#endif
  else
    shrink_rows<BF16>((const bf16*)x, x_stride, m, (const bf16*)a, k, rank, alpha, h, h_stride);
}

// --- expand ------------------------------------------------------------------------------------------------------------

// t[rank] = the 16 outputs' factors of that rank, of 16 ranks in bfloat16: rows i and i + 8 share a register, and pairs of
// ranks are transposed.
static inline void transpose_16x16(const bf16* b, int64_t stride, __m512* t) {
  __m512i v[8];
  for (int i = 0; i < 8; i++)
    v[i] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)(b + i * stride))),
                              _mm256_loadu_si256((const __m256i*)(b + (i + 8) * stride)), 1);
  transpose_fours<8>(v);
  // v[i] and v[i + 4]: in each quarter one pair of four outputs; quarters 0, 2 are outputs 0-3 (4-7) and 8-11 (12-15).
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13), high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
  const __m512i mask = _mm512_set1_epi32(0xffff0000);
  for (int i = 0; i < 4; i++) {
    __m512i pair = _mm512_permutex2var_epi64(v[i], low, v[i + 4]);
    t[2 * i] = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
    t[2 * i + 1] = _mm512_castsi512_ps(_mm512_and_si512(pair, mask));
    pair = _mm512_permutex2var_epi64(v[i], high, v[i + 4]);
    t[2 * i + 8] = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
    t[2 * i + 9] = _mm512_castsi512_ps(_mm512_and_si512(pair, mask));
  }
}

static inline float value(float x) { return x; }
static inline float value(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}

template <class T>
static inline void transpose_any(const T* b, int64_t stride, int num_outputs, int rank, float* t) {
  for (int r = 0; r < rank; r++)
    for (int o = 0; o < 16; o++) t[r * 16 + o] = o < num_outputs ? value(b[o * stride + r]) : 0.0f;
}

static inline void gather_f32(const float* b, int64_t stride, int rank, float* t) {
  const __m512i idx = _mm512_mullo_epi32(_mm512_set1_epi32((int)stride),
                                         _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  for (int r = 0; r < rank; r++) _mm512_store_ps(t + r * 16, _mm512_i32gather_ps(idx, b + r, 4));
}

static inline void gather_pairs(const bf16* b, int64_t stride, int num_pairs, float* t) {
  const __m512i idx = _mm512_mullo_epi32(_mm512_set1_epi32((int)stride * 2),
                                         _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  const __m512i mask = _mm512_set1_epi32(0xffff0000);
  for (int p = 0; p < num_pairs; p++) {
    __m512i pair = _mm512_i32gather_epi32(idx, b + 2 * p, 1);
    _mm512_store_ps(t + 2 * p * 16, _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16)));
    _mm512_store_ps(t + (2 * p + 1) * 16, _mm512_castsi512_ps(_mm512_and_si512(pair, mask)));
  }
}

// t[rank][16] of up to 16 ranks, in any dtype and of any number of outputs up to 16.
template <class T>
static inline void transpose_part(const T* b, int64_t stride, int num_outputs, int rank, float* t);

template <>
[[maybe_unused]] inline void transpose_part<float>(const float* b, int64_t stride, int num_outputs, int rank, float* t) {
  if (num_outputs < 16)
    transpose_any(b, stride, num_outputs, rank, t);
  else
    gather_f32(b, stride, rank, t);
}

template <>
[[maybe_unused]] inline void transpose_part<bf16>(const bf16* b, int64_t stride, int num_outputs, int rank, float* t) {
  const int pairs = num_outputs < 16 ? 0 : rank / 2;
  gather_pairs(b, stride, pairs, t);
  transpose_any(b + 2 * pairs, stride, num_outputs, rank - 2 * pairs, t + 2 * pairs * 16);
}

// c[16] += h[rank] . t[rank][16]: two sums, so that one's latency hides the other's.
template <class Get>
static inline void add_ranks(const float* h, int rank, float* c, __mmask16 mask, const Get& get) {
  __m512 even = _mm512_maskz_loadu_ps(mask, c), odd = _mm512_setzero_ps();
  int r = 0;
  for (; r + 2 <= rank; r += 2) {
    even = _mm512_fmadd_ps(_mm512_set1_ps(h[r]), get(r), even);
    odd = _mm512_fmadd_ps(_mm512_set1_ps(h[r + 1]), get(r + 1), odd);
  }
  if (r < rank) even = _mm512_fmadd_ps(_mm512_set1_ps(h[r]), get(r), even);
  _mm512_mask_storeu_ps(c, mask, _mm512_add_ps(even, odd));
}

template <class D>
static void expand_rows(const float* h, int64_t h_stride, int m, const typename D::T* b, int rank, int num_outputs,
                        float* c, int64_t c_stride) {
  typedef typename D::T T;
  const int kBytesAhead = 2048;  // the factors are read as one stream, but too little at once for the CPU to notice
  for (int o = 0; o < num_outputs; o += 16) {
    const int outputs = num_outputs - o < 16 ? num_outputs - o : 16;
    const __mmask16 mask = first(outputs);
    const T* block = b + (int64_t)o * rank;
    for (int i = 0; i < 16 * rank * (int)sizeof(T); i += 64) _mm_prefetch((const char*)block + kBytesAhead + i, _MM_HINT_T0);
    for (int at = 0; at < rank; at += 16) {
      const int part = rank - at < 16 ? rank - at : 16;
      if (sizeof(T) == 2 && part == 16 && outputs == 16) {
        __m512 t[16];
        transpose_16x16((const bf16*)block + at, rank, t);
        for (int row = 0; row < m; row++)
          add_ranks(h + row * h_stride + at, 16, c + row * c_stride + o, mask, [&](int r) { return t[r]; });
      } else {
        alignas(64) float t[16 * 16];
        transpose_part<T>(block + at, rank, outputs, part, t);
        for (int row = 0; row < m; row++)
          add_ranks(h + row * h_stride + at, part, c + row * c_stride + o, mask,
                    [&](int r) { return _mm512_load_ps(t + r * 16); });
      }
    }
  }
}

static void expand(DType dtype, const float* h, int64_t h_stride, int m, const void* b, int rank, int num_outputs,
                   float* c, int64_t c_stride) {
  if (dtype == DType::F32)
    expand_rows<F32>(h, h_stride, m, (const float*)b, rank, num_outputs, c, c_stride);
  else
    expand_rows<BF16>(h, h_stride, m, (const bf16*)b, rank, num_outputs, c, c_stride);
}

}  // namespace LP_ISA
}  // namespace lp
