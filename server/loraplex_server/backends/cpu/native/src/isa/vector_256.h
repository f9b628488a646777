// Primitives of AVX2 with FMA: vectors of 16 floats in two registers. vector_512.h has the same names for AVX-512.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#include "../kernels.h"

namespace lp {
namespace LP_ISA {

#define LP_EXPANDS_LYING 1  // there is expand_lying

typedef uint16_t bf16;
struct Floats {  // 16
  __m256 low, high;
};
struct Words {  // 16 of 32 bits, or 32 of bfloat16
  __m256i low, high;
};
struct Mask {  // of 16 lanes
  __m256 low, high;
};
struct Part {  // the first lanes, for loads and stores
  int n;
};

static inline Part first(int n) { return {n}; }

// Brings a line into the first cache.
static inline void fetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }

// --- bfloat16 ----------------------------------------------------------------------------------------------------------

static inline __m256 widen8(__m128i halves) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

// To the upper half of each word: round to nearest even; NaN stays NaN.
static inline __m256i round8(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  return _mm256_blendv_epi8(sum, _mm256_set1_epi32(0x7fc00000), _mm256_castps_si256(nan));
}

static inline __m256i narrow(Floats x) {
  const __m256i both = _mm256_packus_epi32(_mm256_srli_epi32(round8(x.low), 16), _mm256_srli_epi32(round8(x.high), 16));
  return _mm256_permute4x64_epi64(both, 0xd8);
}

static inline Floats rounded(Floats x) {
  const __m256i high = _mm256_set1_epi32(0xffff0000);
  return {_mm256_castsi256_ps(_mm256_and_si256(round8(x.low), high)),
          _mm256_castsi256_ps(_mm256_and_si256(round8(x.high), high))};
}

static inline __m256 evens8(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
static inline __m256 odds8(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(0xffff0000)));
}

// Of 16 pairs: the first of each, and the second.
static inline Floats evens(Words pairs) { return {evens8(pairs.low), evens8(pairs.high)}; }
static inline Floats odds(Words pairs) { return {odds8(pairs.low), odds8(pairs.high)}; }
// The way back, of floats with no more bits than bfloat16 has.
static inline __m256i join8(__m256 even, __m256 odd) {
  return _mm256_blend_epi16(_mm256_srli_epi32(_mm256_castps_si256(even), 16), _mm256_castps_si256(odd), 0xaa);
}
static inline Words join_pairs(Floats even, Floats odd) { return {join8(even.low, odd.low), join8(even.high, odd.high)}; }

static inline __m256 dot8(__m256 acc, __m256i a, __m256i b) {
  acc = _mm256_fmadd_ps(evens8(a), evens8(b), acc);
  return _mm256_fmadd_ps(odds8(a), odds8(b), acc);
}

// Sums of products of 32 pairs of bfloat16, two to a lane.
static inline Floats dot_pairs(Floats acc, Words a, Words b) {
  return {dot8(acc.low, a.low, b.low), dot8(acc.high, a.high, b.high)};
}

// --- loads and stores --------------------------------------------------------------------------------------------------

static inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, Floats x) {
  _mm256_storeu_ps(p, x.low);
  _mm256_storeu_ps(p + 8, x.high);
}
static inline Floats load_aligned(const float* p) { return {_mm256_load_ps(p), _mm256_load_ps(p + 8)}; }
static inline void store_aligned(float* p, Floats x) {
  _mm256_store_ps(p, x.low);
  _mm256_store_ps(p + 8, x.high);
}

static inline Floats load(const bf16* p) {
  return {widen8(_mm_loadu_si128((const __m128i*)p)), widen8(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
static inline void store(bf16* p, Floats x) { _mm256_storeu_si256((__m256i*)p, narrow(x)); }

// Parts go through a line of their own: masked stores take these CPUs very long, and halves have none.
template <class T>
static inline Floats load(const T* p, Part part) {
  if (part.n >= 16) return load(p);
  alignas(32) T line[16] = {};
  for (int i = 0; i < part.n; i++) line[i] = p[i];
  return load(line);
}
template <class T>
static inline void store(T* p, Floats x, Part part) {
  if (part.n >= 16) return store(p, x);
  alignas(32) T line[16];
  store(line, x);
  for (int i = 0; i < part.n; i++) p[i] = line[i];
}

static inline Words load_words(const void* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
// Of the first n of 32 halves, n < 32.
static inline Words load_words(const bf16* p, int64_t n) {
  if (n == 16) return {_mm256_loadu_si256((const __m256i*)p), _mm256_setzero_si256()};
  alignas(32) bf16 line[32] = {};
  __builtin_memcpy(line, p, (size_t)n * sizeof(bf16));  // they may be halves of floats
  return load_words(line);
}
static inline void store_words(void* p, Words x) {
  _mm256_storeu_si256((__m256i*)p, x.low);
  _mm256_storeu_si256((__m256i*)p + 1, x.high);
}

// Copies a whole line past the caches; both addresses are multiples of 64.
static inline void stream_line(void* to, const void* from) {
  _mm256_stream_si256((__m256i*)to, _mm256_load_si256((const __m256i*)from));
  _mm256_stream_si256((__m256i*)to + 1, _mm256_load_si256((const __m256i*)from + 1));
}
// The same of 16 floats.
static inline void stream(float* p, Floats x) {
  _mm256_stream_ps(p, x.low);
  _mm256_stream_ps(p + 8, x.high);
}

// p[i * stride] of 16 lanes, strides in elements. Single loads are faster than the instruction for it.
static inline Floats gather(const float* p, int64_t stride) {
  alignas(32) float line[16];
  for (int i = 0; i < 16; i++) line[i] = p[i * stride];
  return load_aligned(line);
}

// --- arithmetic --------------------------------------------------------------------------------------------------------

static inline Floats zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline Floats all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline Words all_words(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
static inline Floats add(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
static inline Floats sub(Floats a, Floats b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
static inline Floats mul(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
static inline Floats div(Floats a, Floats b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
static inline Floats fmadd(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
static inline Floats fnmadd(Floats a, Floats b, Floats c) {
  return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
// Where either is NaN, both return b.
static inline Floats min(Floats a, Floats b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
static inline Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
static inline Floats nearest(Floats x) { return {_mm256_round_ps(x.low, 8), _mm256_round_ps(x.high, 8)}; }

// In two steps: 2^128 is not a float, but what it makes of x may be.
static inline __m256 scale8(__m256 x, __m256 n) {
  const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), rest = _mm256_sub_epi32(whole, half);
  const __m256i one = _mm256_set1_epi32(127);
  x = _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, one), 23)));
  return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, one), 23)));
}
// x * 2^n of whole numbers n in -126..128; 0 in other lanes than `counts`.
static inline Floats scale_by_power(Mask counts, Floats x, Floats n) {
  return {_mm256_and_ps(counts.low, scale8(x.low, n.low)), _mm256_and_ps(counts.high, scale8(x.high, n.high))};
}

static inline float sum(Floats x) {
  const __m256 eight = _mm256_add_ps(x.low, x.high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
static inline float largest(Floats x) {
  const __m256 eight = _mm256_max_ps(x.low, x.high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// --- masks -------------------------------------------------------------------------------------------------------------

template <int Comparison>
static inline Mask compare(Floats a, Floats b) {
  return {_mm256_cmp_ps(a.low, b.low, Comparison), _mm256_cmp_ps(a.high, b.high, Comparison)};
}
static inline Mask both(Mask a, Mask b) { return {_mm256_and_ps(a.low, b.low), _mm256_and_ps(a.high, b.high)}; }
static inline Mask either(Mask a, Mask b) { return {_mm256_or_ps(a.low, b.low), _mm256_or_ps(a.high, b.high)}; }
static inline Mask nowhere() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline bool any(Mask mask) { return _mm256_movemask_ps(_mm256_or_ps(mask.low, mask.high)) != 0; }

static inline Words numbers_from(int from) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return {_mm256_add_epi32(lanes, _mm256_set1_epi32(from)), _mm256_add_epi32(lanes, _mm256_set1_epi32(from + 8))};
}
static inline Mask lanes(Part part) {
  const Words numbers = numbers_from(0);
  const __m256i n = _mm256_set1_epi32(part.n);
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(n, numbers.low)),
          _mm256_castsi256_ps(_mm256_cmpgt_epi32(n, numbers.high))};
}
// Those whose bit is set, the lowest first.
static inline Mask lanes_of_bits(uint16_t bits) {
  const __m256i low = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), high = _mm256_slli_epi32(low, 8);
  const __m256i set = _mm256_set1_epi32(bits);
  return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(set, low), low)),
          _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(set, high), high))};
}
// Those of lanes i..i + 16 that are in from..to; i < to.
static inline Mask between(int64_t from, int64_t to, int64_t i) {
  const Mask behind = lanes({(int)(to - i > 16 ? 16 : to - i)}), before = lanes({(int)(i < from ? from - i : 0)});
  return {_mm256_andnot_ps(before.low, behind.low), _mm256_andnot_ps(before.high, behind.high)};
}
static inline Mask is_nan(Floats x) { return compare<_CMP_UNORD_Q>(x, x); }
static inline Mask is_wild(Floats x) {  // NaN, infinity: their difference to themselves is NaN
  return is_nan(sub(x, x));
}
static inline Mask equals(Floats a, Floats b) { return compare<_CMP_EQ_OQ>(a, b); }
static inline Mask is_not_less(Floats a, Floats b) { return compare<_CMP_NLT_UQ>(a, b); }
static inline Mask is_larger(Mask of, Floats a, Floats b) { return both(of, compare<_CMP_GT_OQ>(a, b)); }
// b where the mask is set, a elsewhere.
static inline Floats select(Floats a, Mask mask, Floats b) {
  return {_mm256_blendv_ps(a.low, b.low, mask.low), _mm256_blendv_ps(a.high, b.high, mask.high)};
}

// --- lanes' numbers ----------------------------------------------------------------------------------------------------

static inline Words no_words() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
static inline Words select_words(Words a, Mask mask, Words b) {
  return {_mm256_blendv_epi8(a.low, b.low, _mm256_castps_si256(mask.low)),
          _mm256_blendv_epi8(a.high, b.high, _mm256_castps_si256(mask.high))};
}
// from + lane where the mask is set, a elsewhere.
static inline Words select_numbers(Words a, Mask mask, int from) { return select_words(a, mask, numbers_from(from)); }
static inline int smallest(Mask of, Words x) {
  alignas(32) int line[16];
  store_words(line, select_words(all_words(0x7fffffff), of, x));
  int found = line[0];
  for (int i = 1; i < 16; i++) found = line[i] < found ? line[i] : found;
  return found;
}

// --- sums and transposes -----------------------------------------------------------------------------------------------

// The sum of each of 8 vectors of 8, as one vector.
static inline __m256 sums8(const __m256* v) {
  const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

// The sum of each of 16 vectors, as one vector.
static inline Floats sums16(const Floats* v) {
  __m256 eight[16];
  for (int i = 0; i < 16; i++) eight[i] = _mm256_add_ps(v[i].low, v[i].high);
  return {sums8(eight), sums8(eight + 8)};
}

// Columns of 8 rows of pairs become rows.
static inline void transpose8(__m256i* v) {
  __m256i a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_epi32(v[i], v[i + 1]);
    a[i + 1] = _mm256_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    b[i] = _mm256_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm256_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm256_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    v[i] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x20);
    v[i + 4] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x31);
  }
}

// Columns of v become rows: 16 rows of 16 words.
static inline void transpose_words(Words* v) {
  __m256i quarters[4][8];  // of upper rows: left and right, and so of lower ones
  for (int i = 0; i < 8; i++) {
    quarters[0][i] = v[i].low, quarters[1][i] = v[i].high;
    quarters[2][i] = v[8 + i].low, quarters[3][i] = v[8 + i].high;
  }
  for (int i = 0; i < 4; i++) transpose8(quarters[i]);
  for (int i = 0; i < 8; i++) {
    v[i] = {quarters[0][i], quarters[2][i]};
    v[8 + i] = {quarters[1][i], quarters[3][i]};
  }
}

// An output's ranks in bfloat16: 16, or fewer and zeros.
static inline __m256i load_ranks(const bf16* b, Part ranks) {
  if (ranks.n >= 16) return _mm256_loadu_si256((const __m256i*)b);
  if (ranks.n == 8) return _mm256_zextsi128_si256(_mm_loadu_si128((const __m128i*)b));
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), pairs = _mm256_set1_epi32(ranks.n / 2);
  const __m256i even = _mm256_maskload_epi32((const int*)b, _mm256_cmpgt_epi32(pairs, lanes));
  if (ranks.n % 2 == 0) return even;
  return _mm256_or_si256(even, _mm256_and_si256(_mm256_cmpeq_epi32(lanes, pairs), _mm256_set1_epi32(b[ranks.n - 1])));
}

// v[8] = pairs of ranks, each of 16 outputs, of up to 16 ranks in bfloat16.
static inline void transpose_outputs(const bf16* b, int64_t stride, Part ranks, Words* v) {
  __m256i low[8], high[8];
  for (int i = 0; i < 8; i++) {
    low[i] = load_ranks(b + i * stride, ranks);
    high[i] = load_ranks(b + (i + 8) * stride, ranks);
  }
  transpose8(low);
  transpose8(high);
  for (int i = 0; i < 8; i++) v[i] = {low[i], high[i]};
}

static inline __m256 quarters_in_order(__m256 x) {  // of 64 bits: 0, 2, 1, 3
  return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0xd8));
}

// Of 16 outputs as they lie, `stride` apart, and inner products, of a multiple of eight ranks: the outputs' sums of eight
// pairs each, ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)).
static inline __m256 expand8(const bf16* b, int64_t stride, int rank, const float* h) {
  __m256 pairs[8];
  for (__m256& pair : pairs) pair = _mm256_setzero_ps();
  for (int at = 0; at < rank; at += 16) {
    const Part ranks = first(rank - at);
    const __m256 low = _mm256_loadu_ps(h + at), high = ranks.n > 8 ? _mm256_loadu_ps(h + at + 8) : _mm256_setzero_ps();
    const __m256 even = quarters_in_order(_mm256_shuffle_ps(low, high, 0x88));
    const __m256 odd = quarters_in_order(_mm256_shuffle_ps(low, high, 0xdd));
    for (int i = 0; i < 8; i++) {
      const __m256i factors = load_ranks(b + i * stride + at, ranks);
      pairs[i] = _mm256_fmadd_ps(odds8(factors), odd, _mm256_fmadd_ps(evens8(factors), even, pairs[i]));
    }
  }
  return sums8(pairs);
}
static inline Floats expand_lying(const bf16* b, int64_t stride, int rank, const float* h) {
  return {expand8(b, stride, rank, h), expand8(b + 8 * stride, stride, rank, h)};
}

// The same of eight ranks, with two outputs to a vector: ((0 + 1) + (2 + 3)) + 0.
static inline __m256 expand8_of_8(const bf16* b, __m256 even, __m256 odd) {
  __m256 pairs[4];
  for (int i = 0; i < 4; i++) {
    const __m256i factors = _mm256_loadu_si256((const __m256i*)(b + 16 * i));
    pairs[i] = _mm256_fmadd_ps(odds8(factors), odd, _mm256_fmadd_ps(evens8(factors), even, _mm256_setzero_ps()));
  }
  const __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(pairs[0], pairs[1]), _mm256_hadd_ps(pairs[2], pairs[3]));
  return _mm256_add_ps(_mm256_permutevar8x32_ps(sums, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)), _mm256_setzero_ps());
}
static inline Floats expand_lying_of_8(const bf16* b, const float* h) {
  const __m128 low = _mm_loadu_ps(h), high = _mm_loadu_ps(h + 4);
  const __m128 evens = _mm_shuffle_ps(low, high, 0x88), odds = _mm_shuffle_ps(low, high, 0xdd);
  const __m256 even = _mm256_set_m128(evens, evens), odd = _mm256_set_m128(odds, odds);
  return {expand8_of_8(b, even, odd), expand8_of_8(b + 64, even, odd)};
}

// --- eight bits --------------------------------------------------------------------------------------------------------

// Of a block and 16 outputs.
struct Scales {
  Floats scale, offset;

  explicit Scales(const void* exponents) {
    const __m128i bytes = _mm_loadu_si128((const __m128i*)exponents);
    scale = {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 23)),
             _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)), 23))};
    offset = mul(scale, all(-32768.0f - 128.0f));
  }
};

struct Int8Group {
  Words values;

  explicit Int8Group(const void* values) : values(load_words(values)) {}
};

// A byte that is put into the second byte of 32768.0f makes it 32768 + byte, without widening and converting. The product with
// a power of two and the difference are exact.
template <int pair>
struct Int8Pair {
  const Int8Group& group;
  const Scales& of;

  Floats even() const { return weights<2 * pair>(); }
  Floats odd() const { return weights<2 * pair + 1>(); }
  Words words() const { return join_pairs(even(), odd()); }

 private:
  template <int byte>
  Floats weights() const {
    return {weights8<byte>(group.values.low, of.scale.low, of.offset.low),
            weights8<byte>(group.values.high, of.scale.high, of.offset.high)};
  }
  template <int byte>
  static inline __m256 weights8(__m256i values, __m256 scale, __m256 offset) {
    if (byte == 0) values = _mm256_slli_epi32(values, 8);
    if (byte > 1) values = _mm256_srli_epi32(values, 8 * byte - 8);
    const __m256i numbers = _mm256_or_si256(_mm256_and_si256(values, _mm256_set1_epi32(0xff00)), _mm256_set1_epi32(0x47000000));
    return _mm256_fmadd_ps(_mm256_castsi256_ps(numbers), scale, offset);
  }
};

// --- four bits ---------------------------------------------------------------------------------------------------------

// Of a block and 16 outputs.
struct Int4Scales {
  Floats scale, offset;

  explicit Int4Scales(const void* codes) {
    const __m128i bytes = _mm_loadu_si128((const __m128i*)codes);
    const __m256i bias = _mm256_set1_epi32((127 - kInt4Bias) << 23);
    const auto scale8 = [&](__m128i of) {
      return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(_mm256_cvtepu8_epi32(of), 21), bias));
    };
    scale = {scale8(bytes), scale8(_mm_srli_si128(bytes, 8))};
    offset = mul(scale, all(-128.0f - 32.0f));
  }
};

// Levels + 32, a byte each: of the group's pairs 0 and 2, and of 1 and 3.
struct Int4Group {
  Words even_pairs, odd_pairs;

  explicit Int4Group(const uint8_t* values) {
    const __m256i low = _mm256_loadu_si256((const __m256i*)values), high = _mm256_loadu_si256((const __m256i*)(values + 32));
    even_pairs = {levels(low), levels(high)};
    odd_pairs = {levels(_mm256_srli_epi16(low, 4)), levels(_mm256_srli_epi16(high, 4))};
  }

  static inline __m256i levels(__m256i numbers) {
    const __m128i all16 = _mm_add_epi8(_mm_setr_epi8(LP_INT4_LEVELS), _mm_set1_epi8(32));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(all16), _mm256_and_si256(numbers, _mm256_set1_epi8(15)));
  }
};

// A byte in the third of a float's four that is 128 otherwise makes it 128 + byte. The product with the scale and the
// difference are exact.
template <int pair>
struct Int4Pair {
  const Int4Group& group;
  const Int4Scales& of;

  Floats even() const { return at<pair / 2>(); }
  Floats odd() const { return at<2 + pair / 2>(); }
  Words words() const { return join_pairs(even(), odd()); }

 private:
  template <int byte>
  Floats at() const {
    const Words& levels = pair % 2 == 0 ? group.even_pairs : group.odd_pairs;
    return {at8<byte>(levels.low, of.scale.low, of.offset.low), at8<byte>(levels.high, of.scale.high, of.offset.high)};
  }
  template <int byte>
  static inline __m256 at8(__m256i levels, __m256 scale, __m256 offset) {
    const __m256i places = _mm256_set1_epi32((int)0x80008080 | byte << 16);
    const __m256i number = byte == 2 ? _mm256_and_si256(levels, _mm256_set1_epi32(0xff0000))
                                     : _mm256_shuffle_epi8(levels, _mm256_add_epi32(places, by_output()));
    return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_or_si256(number, _mm256_set1_epi32(0x43000000))), scale, offset);
  }
  static inline __m256i by_output() {
    return _mm256_setr_epi32(0, 4 << 16, 8 << 16, 12 << 16, 0, 4 << 16, 8 << 16, 12 << 16);
  }
};

// --- sizes -------------------------------------------------------------------------------------------------------------

// Vectors that stay in 16 registers of half their size.
static const int kShrinkRows = 2, kShrinkRanks = 2, kShrinkRanksOfOne = 4;  // of inner products at once
static const int kScoreRows = 4;                                             // of queries, for 16 keys
static const int kWeighColumns = 1;                                          // of 16 values, for four rows
static const int kStateColumns = 2;                                          // of 16 values of a state

}  // namespace LP_ISA
}  // namespace lp
