// Primitives of AVX-512: vectors of 16 floats in one register. vector_256.h has the same names for AVX2.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "../kernels.h"

#define LP_DOTS_PAIRS 1  // products of bfloat16 go by dot_pairs
#ifdef __AVX512BF16__
#define LP_FAST_PAIRS 1  // which is one instruction
#ifndef __AMX_BF16__
#define LP_ATTENDS_BY_PAIRS 1
#endif
#endif

namespace lp {
namespace LP_ISA {

typedef uint16_t bf16;
typedef __m512 Floats;   // 16
typedef __m512i Words;   // 16 of 32 bits, or 32 of bfloat16
typedef __mmask16 Mask;  // of 16 lanes
typedef __mmask16 Part;  // the first lanes, for loads and stores

static inline Part first(int n) { return n >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << n) - 1); }

// Brings a line into the first cache.
static inline void fetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }

// --- bfloat16 ----------------------------------------------------------------------------------------------------------

static inline Floats widen(__m256i halves) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

// Round to nearest even; NaN stays NaN. (The instruction makes 0 of what is smaller than the smallest normal number.)
static inline __m256i narrow(Floats x) {
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  __m512i bits = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}

static inline Floats rounded(Floats x) { return widen(narrow(x)); }

// Of 16 pairs: the first of each, and the second.
static inline Floats evens(Words pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
static inline Floats odds(Words pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000)));
}
// The way back, of floats with no more bits than bfloat16 has.
static inline Words join_pairs(Floats even, Floats odd) {
  return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(_mm512_castps_si512(even), 16), _mm512_castps_si512(odd));
}

// Sums of products of 32 pairs of bfloat16, two to a lane.
static inline Floats dot_pairs(Floats acc, Words a, Words b) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
#else
  const __m512i high = _mm512_set1_epi32(0xffff0000);
  acc = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), acc);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, high)), _mm512_castsi512_ps(_mm512_and_si512(b, high)), acc);
#endif
}

// --- loads and stores --------------------------------------------------------------------------------------------------

static inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
static inline Floats load(const float* p, Part part) { return _mm512_maskz_loadu_ps(part, p); }
static inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
static inline void store(float* p, Floats x, Part part) { _mm512_mask_storeu_ps(p, part, x); }
static inline Floats load_aligned(const float* p) { return _mm512_load_ps(p); }
static inline void store_aligned(float* p, Floats x) { _mm512_store_ps(p, x); }

static inline Floats load(const bf16* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
static inline Floats load(const bf16* p, Part part) { return widen(_mm256_maskz_loadu_epi16(part, p)); }
static inline void store(bf16* p, Floats x) { _mm256_storeu_si256((__m256i*)p, narrow(x)); }
static inline void store(bf16* p, Floats x, Part part) { _mm256_mask_storeu_epi16(p, part, narrow(x)); }

static inline Words load_words(const void* p) { return _mm512_loadu_si512(p); }
// Of the first n of 32 halves, n < 32.
static inline Words load_words(const bf16* p, int64_t n) { return _mm512_maskz_loadu_epi16((1u << n) - 1, p); }
static inline void store_words(void* p, Words x) { _mm512_storeu_si512(p, x); }

// Copies a whole line past the caches; both addresses are multiples of 64.
static inline void stream_line(void* to, const void* from) {
  _mm512_stream_si512((__m512i*)to, _mm512_load_si512(from));
}
// The same of 16 floats.
static inline void stream(float* p, Floats x) { _mm512_stream_ps(p, x); }

// p[i * stride] of 16 lanes, strides in elements.
static inline Floats gather(const float* p, int64_t stride) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_i32gather_ps(_mm512_mullo_epi32(_mm512_set1_epi32((int)stride), lanes), p, 4);
}

// --- arithmetic --------------------------------------------------------------------------------------------------------

static inline Floats zeros() { return _mm512_setzero_ps(); }
static inline Floats all(float x) { return _mm512_set1_ps(x); }
static inline Words all_words(int32_t x) { return _mm512_set1_epi32(x); }
static inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
static inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
static inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
static inline Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
static inline Floats fmadd(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
static inline Floats fnmadd(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
// Where either is NaN, both return b.
static inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
static inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
static inline Floats nearest(Floats x) { return _mm512_roundscale_ps(x, 8); }
// x * 2^n of whole numbers n in -126..128; 0 in other lanes than `counts`.
static inline Floats scale_by_power(Mask counts, Floats x, Floats n) { return _mm512_maskz_scalef_ps(counts, x, n); }
static inline float sum(Floats x) { return _mm512_reduce_add_ps(x); }
static inline float largest(Floats x) { return _mm512_reduce_max_ps(x); }

// --- masks -------------------------------------------------------------------------------------------------------------

static inline Mask lanes(Part part) { return part; }
// Those whose bit is set, the lowest first.
static inline Mask lanes_of_bits(uint16_t bits) { return bits; }
// Those of lanes i..i + 16 that are in from..to; i < to.
static inline Mask between(int64_t from, int64_t to, int64_t i) {
  return first((int)(to - i > 16 ? 16 : to - i)) & (__mmask16)(i < from ? 0xffffu << (from - i) : 0xffffu);
}
static inline Mask is_nan(Floats x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
static inline Mask is_wild(Floats x) { return _mm512_fpclass_ps_mask(x, 0x99); }  // NaN, infinity
static inline Mask equals(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
static inline Mask is_not_less(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ); }
static inline Mask is_larger(Mask of, Floats a, Floats b) { return _mm512_mask_cmp_ps_mask(of, a, b, _CMP_GT_OQ); }
static inline Mask either(Mask a, Mask b) { return a | b; }
static inline Mask nowhere() { return 0; }
static inline bool any(Mask mask) { return mask != 0; }
// b where the mask is set, a elsewhere.
static inline Floats select(Floats a, Mask mask, Floats b) { return _mm512_mask_mov_ps(a, mask, b); }

// --- lanes' numbers ----------------------------------------------------------------------------------------------------

static inline Words no_words() { return _mm512_setzero_si512(); }
// from + lane where the mask is set, a elsewhere.
static inline Words select_numbers(Words a, Mask mask, int from) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_mask_add_epi32(a, mask, lanes, _mm512_set1_epi32(from));
}
static inline int smallest(Mask of, Words x) { return _mm512_mask_reduce_min_epi32(of, x); }

// --- sums and transposes -----------------------------------------------------------------------------------------------

// The sum of each of 16 vectors, as one vector.
static inline Floats sums16(const Floats* v) {
  __m512 a[8], b[4];
  for (int i = 0; i < 8; i++)  // lanes of 4: v[2i] 0+2, v[2i+1] 0+2, v[2i] 1+3, v[2i+1] 1+3
    a[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
  for (int i = 0; i < 4; i++)
    b[i] = _mm512_add_ps(
        _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a[2 * i]), _mm512_castps_pd(a[2 * i + 1]))),
        _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a[2 * i]), _mm512_castps_pd(a[2 * i + 1]))));
  // b[i]: in each of four quarters the partial sums of v[4i .. 4i+3]
  __m512 c = _mm512_add_ps(_mm512_shuffle_f32x4(b[0], b[1], 0x88), _mm512_shuffle_f32x4(b[0], b[1], 0xdd));
  __m512 d = _mm512_add_ps(_mm512_shuffle_f32x4(b[2], b[3], 0x88), _mm512_shuffle_f32x4(b[2], b[3], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xdd));
}

// In each quarter of 4 vectors of pairs, columns become rows.
template <int N>
static inline void transpose_fours(__m512i* v) {
  __m512i w[N];
  for (int i = 0; i < N; i += 2) {
    w[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    w[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < N; i += 4) {
    v[i] = _mm512_unpacklo_epi64(w[i], w[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(w[i], w[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(w[i + 1], w[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(w[i + 1], w[i + 3]);
  }
}

// The quarters of four vectors: columns become rows.
static inline void transpose_quarters(__m512i& v0, __m512i& v1, __m512i& v2, __m512i& v3) {
  const __m512i a = _mm512_shuffle_i32x4(v0, v1, 0x88), b = _mm512_shuffle_i32x4(v2, v3, 0x88);
  const __m512i c = _mm512_shuffle_i32x4(v0, v1, 0xdd), d = _mm512_shuffle_i32x4(v2, v3, 0xdd);
  v0 = _mm512_shuffle_i32x4(a, b, 0x88);
  v1 = _mm512_shuffle_i32x4(c, d, 0x88);
  v2 = _mm512_shuffle_i32x4(a, b, 0xdd);
  v3 = _mm512_shuffle_i32x4(c, d, 0xdd);
}

// Columns of v become rows: 16 rows of 16 words.
static inline void transpose_words(__m512i* v) {
  transpose_fours<16>(v);
  // v[4i + j], quarter q: pair 4q + j of rows 4i to 4i + 3
  for (int j = 0; j < 4; j++) transpose_quarters(v[j], v[4 + j], v[8 + j], v[12 + j]);
}

// Pairs of a number of a and the one of b at the same place.
static inline void join_rows(Words a, Words b, Words& first, Words& second) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                       36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  first = _mm512_permutex2var_epi16(a, low, b);
  second = _mm512_permutex2var_epi16(a, _mm512_add_epi16(low, _mm512_set1_epi16(16)), b);
}

// An output's ranks in bfloat16: 16, or fewer and zeros.
static inline __m256i load_ranks(const bf16* b, Part ranks) {
  return ranks == 0xffff ? _mm256_loadu_si256((const __m256i*)b) : _mm256_maskz_loadu_epi16(ranks, b);
}

// v[8] = pairs of ranks, each of 16 outputs, of up to 16 ranks in bfloat16: rows i and i + 8 share a register.
static inline void transpose_outputs(const bf16* b, int64_t stride, Part ranks, Words* v) {
  __m512i w[8];
  for (int i = 0; i < 8; i++)
    w[i] = _mm512_inserti64x4(_mm512_castsi256_si512(load_ranks(b + i * stride, ranks)), load_ranks(b + (i + 8) * stride, ranks), 1);
  transpose_fours<8>(w);
  // w[i] and w[i + 4]: in each quarter one pair of four outputs; quarters 0, 2 are outputs 0-3 (4-7) and 8-11 (12-15).
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13), high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
  for (int i = 0; i < 4; i++) {
    v[i] = _mm512_permutex2var_epi64(w[i], low, w[i + 4]);
    v[i + 4] = _mm512_permutex2var_epi64(w[i], high, w[i + 4]);
  }
}

// Of 16 outputs, two to a register: each one's pairs of up to 16 ranks in bfloat16.
static inline void load_outputs(const bf16* b, int64_t stride, Part ranks, Words* v) {
  for (int i = 0; i < 8; i++)
    v[i] = stride == 16 ? _mm512_loadu_si512(b + 32 * i)
                        : _mm512_inserti64x4(_mm512_castsi256_si512(load_ranks(b + 2 * i * stride, ranks)),
                                             load_ranks(b + (2 * i + 1) * stride, ranks), 1);
}

// Up to 16 numbers in bfloat16, twice; eight of them, four times.
static inline Words load_twice(const bf16* p, Part part) { return _mm512_broadcast_i64x4(load_ranks(p, part)); }
static inline Words four_times(const bf16* p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p)); }

// Of v[4], four outputs to a vector with four numbers each: the outputs' sums, ((0 + 2) + (1 + 3)) + 0.
static inline Floats sums_of_fours(const Floats* v) {
  __m512 a[2];
  for (int i = 0; i < 2; i++)  // in each quarter: v[2i] 0+2, v[2i+1] 0+2, v[2i] 1+3, v[2i+1] 1+3
    a[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
  const __m512d low = _mm512_castps_pd(a[0]), high = _mm512_castps_pd(a[1]);
  const __m512 sums = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)), _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
  const __m512 in_order = _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), sums);
  return _mm512_add_ps(in_order, _mm512_setzero_ps());
}

// Of v[8], two outputs to a vector with eight numbers each: the outputs' sums, ((0 + 2) + (1 + 3)) + ((4 + 6) + (5 + 7)).
static inline Floats sums_of_eights(const Floats* v) {
  __m512 a[4], b[2];
  for (int i = 0; i < 4; i++)  // in each quarter: v[2i] 0+2, v[2i+1] 0+2, v[2i] 1+3, v[2i+1] 1+3
    a[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
  for (int i = 0; i < 2; i++)
    b[i] = _mm512_add_ps(
        _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a[2 * i]), _mm512_castps_pd(a[2 * i + 1]))),
        _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a[2 * i]), _mm512_castps_pd(a[2 * i + 1]))));
  const __m512 c = _mm512_add_ps(_mm512_shuffle_f32x4(b[0], b[1], 0x88), _mm512_shuffle_f32x4(b[0], b[1], 0xdd));
  return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15), c);
}

// --- eight bits --------------------------------------------------------------------------------------------------------

// Of a block and 16 outputs.
struct Scales {
  __m512 scale, offset;

  explicit Scales(const void* exponents)
      : scale(_mm512_castsi512_ps(
            _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)exponents)), 23))),
        offset(_mm512_mul_ps(scale, _mm512_set1_ps(-32768.0f - 128.0f))) {}
};

struct Int8Group {
  Words values;

  explicit Int8Group(const void* values) : values(_mm512_loadu_si512(values)) {}
};

// A byte that is put into the second byte of 32768.0f makes it 32768 + byte, without widening and converting. The product with
// a power of two and the difference are exact.
template <int pair>
struct Int8Pair {
  const Int8Group& group;
  const Scales& of;

  Floats even() const {
    return weights(pair == 0 ? _mm512_slli_epi32(group.values, 8) : _mm512_srli_epi32(group.values, 8));
  }
  Floats odd() const { return weights(pair == 0 ? group.values : _mm512_srli_epi32(group.values, 16)); }
  Words words() const { return join_pairs(even(), odd()); }

 private:
  Floats weights(Words bytes) const {
    const Words power = _mm512_set1_epi32(0x47000000);
    const Words numbers = _mm512_ternarylogic_epi32(bytes, _mm512_set1_epi32(0xff00), power, 0xea);  // (a & b) | c
    return _mm512_fmadd_ps(_mm512_castsi512_ps(numbers), of.scale, of.offset);
  }
};

// --- four bits ---------------------------------------------------------------------------------------------------------

// Levels times (4 + m) / 4 with the largest exponent, in bfloat16; m 0 to 3.
static inline const uint16_t* int4_weights() {
  struct Table {
    alignas(64) uint16_t weights[64];
  };
  static constexpr Table table = [] {
    constexpr int levels[16] = {LP_INT4_LEVELS};
    Table made = {};
    for (int i = 0; i < 64; i++) {
      const int level = levels[i % 16], size = (level < 0 ? -level : level) * (4 + i / 16);
      int bits = 0;
      while (size >> bits > 1) bits++;
      // size / 4 * 2 ** (63 - kInt4Bias); of size the bits behind the first are the mantissa's first
      if (size > 0) made.weights[i] = uint16_t((level < 0) << 15 | (127 - 2 + 63 - kInt4Bias + bits) << 7 | ((size << 7 >> bits) & 0x7f));
    }
    return made;
  }();
  return table.weights;
}

// Of a block and 16 outputs, in both words of an output.
struct Int4Scales {
  Words upper_bits, lowered;  // of the table's number, and what a weight's exponent is too large

  explicit Int4Scales(const void* codes) {
    Words both = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)codes));
    both = _mm512_or_si512(both, _mm512_slli_epi32(both, 16));
    upper_bits = _mm512_slli_epi16(_mm512_and_si512(both, _mm512_set1_epi16(3)), 4);
    lowered = _mm512_slli_epi16(_mm512_sub_epi16(_mm512_set1_epi16(63), _mm512_srli_epi16(both, 2)), 7);
  }
};

struct Int4Group {
  Words numbers;

  explicit Int4Group(const void* values) : numbers(_mm512_loadu_si512(values)) {}
};

// A weight is found in the table, and the difference of exponents taken off it; where that would be less than nothing the
// weight is zero and stays so.
template <int pair>
struct Int4Pair {
  const Int4Group& group;
  const Int4Scales& of;

  Words words() const {
    const uint16_t* table = int4_weights();
    Words number = pair == 0 ? group.numbers : _mm512_srli_epi16(group.numbers, 4 * pair);
    number = _mm512_ternarylogic_epi32(number, _mm512_set1_epi16(15), of.upper_bits, 0xea);  // (a & b) | c
    number = _mm512_permutex2var_epi16(_mm512_load_si512(table), number, _mm512_load_si512(table + 32));
    return _mm512_subs_epu16(number, of.lowered);
  }
  Floats even() const { return evens(words()); }
  Floats odd() const { return odds(words()); }
};

// --- sizes -------------------------------------------------------------------------------------------------------------

// Vectors that stay in 32 registers.
static const int kShrinkRows = 4, kShrinkRanks = 4, kShrinkRanksOfOne = 8;  // of inner products at once
static const int kScoreRows = 8;                                             // of queries, for 16 keys
static const int kWeighColumns = 4;                                          // of 16 values, for four rows
static const int kStateColumns = 4;                                          // of 16 values of a state

}  // namespace LP_ISA
}  // namespace lp
