// AVX-512, its bfloat16 and AMX on a CPU that has AVX2 alone, for tests: the compiler includes this in front of every source.
// Variants are compiled for AVX2 with LP_EMULATED, 1: AVX-512, 2: also its bfloat16, 3: also AMX, whose tiles are those of
// emulated_tiles.h. Only the intrinsics that the kernels use are there; another one does not compile.
#pragma once

#define LP_EMULATES_AVX512 1

#ifdef LP_EMULATED
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define __AVX512F__ 1
#if LP_EMULATED > 1
#define __AVX512BF16__ 1
#endif
#if LP_EMULATED > 2
#define __AMX_BF16__ 1
#endif

namespace emulated_512 {

// The numbers of a register one by one, or its halves.
template <class T, class V>
struct Lanes {
  static constexpr int kNum = (int)(sizeof(V) / sizeof(T));
  T of[kNum];
  Lanes() = default;
  explicit Lanes(const V& x) { memcpy(of, &x, sizeof x); }
  V all() const {
    V x;
    memcpy(&x, of, sizeof x);
    return x;
  }
};
typedef Lanes<float, __m512> Floats;
typedef Lanes<int32_t, __m512i> Ints;
typedef Lanes<uint16_t, __m512i> Shorts;
typedef Lanes<__m256, __m512> Halves;
typedef Lanes<__m256i, __m512i> IntHalves;

template <class Op>
static inline __m512 by_halves(const Op& op, __m512 a, __m512 b) {
  const Halves x(a), y(b);
  Halves z;
  for (int i = 0; i < 2; i++) z.of[i] = op(x.of[i], y.of[i]);
  return z.all();
}

template <class Op>
static inline __m512i by_halves(const Op& op, __m512i a, __m512i b) {
  const IntHalves x(a), y(b);
  IntHalves z;
  for (int i = 0; i < 2; i++) z.of[i] = op(x.of[i], y.of[i]);
  return z.all();
}

#define LP_BY_HALVES(T, name, half) \
  static inline T name(T a, T b) { return by_halves([](auto x, auto y) { return half(x, y); }, a, b); }
LP_BY_HALVES(__m512, add_ps, _mm256_add_ps)
LP_BY_HALVES(__m512, sub_ps, _mm256_sub_ps)
LP_BY_HALVES(__m512, mul_ps, _mm256_mul_ps)
LP_BY_HALVES(__m512, div_ps, _mm256_div_ps)
LP_BY_HALVES(__m512, min_ps, _mm256_min_ps)
LP_BY_HALVES(__m512, max_ps, _mm256_max_ps)
LP_BY_HALVES(__m512, unpacklo_ps, _mm256_unpacklo_ps)
LP_BY_HALVES(__m512, unpackhi_ps, _mm256_unpackhi_ps)
LP_BY_HALVES(__m512i, add_epi32, _mm256_add_epi32)
LP_BY_HALVES(__m512i, sub_epi32, _mm256_sub_epi32)
LP_BY_HALVES(__m512i, add_epi16, _mm256_add_epi16)
LP_BY_HALVES(__m512i, sub_epi16, _mm256_sub_epi16)
LP_BY_HALVES(__m512i, subs_epu16, _mm256_subs_epu16)
LP_BY_HALVES(__m512i, max_epu16, _mm256_max_epu16)
LP_BY_HALVES(__m512i, mullo_epi32, _mm256_mullo_epi32)
LP_BY_HALVES(__m512i, and_si512, _mm256_and_si256)
LP_BY_HALVES(__m512i, or_si512, _mm256_or_si256)
LP_BY_HALVES(__m512i, unpacklo_epi16, _mm256_unpacklo_epi16)
LP_BY_HALVES(__m512i, unpackhi_epi16, _mm256_unpackhi_epi16)
LP_BY_HALVES(__m512i, unpacklo_epi32, _mm256_unpacklo_epi32)
LP_BY_HALVES(__m512i, unpackhi_epi32, _mm256_unpackhi_epi32)
LP_BY_HALVES(__m512i, unpacklo_epi64, _mm256_unpacklo_epi64)
LP_BY_HALVES(__m512i, unpackhi_epi64, _mm256_unpackhi_epi64)
#undef LP_BY_HALVES

static inline __m512 castpd_ps(__m512d x) { return (__m512)x; }
static inline __m512d castps_pd(__m512 x) { return (__m512d)x; }
static inline __m512i castps_si512(__m512 x) { return (__m512i)x; }
static inline __m512 castsi512_ps(__m512i x) { return (__m512)x; }
static inline __m512i castsi256_si512(__m256i x) {
  IntHalves z;
  z.of[0] = x, z.of[1] = _mm256_set1_epi8(0x55);  // undefined
  return z.all();
}
static inline __m512d unpacklo_pd(__m512d a, __m512d b) { return (__m512d)unpacklo_epi64((__m512i)a, (__m512i)b); }
static inline __m512d unpackhi_pd(__m512d a, __m512d b) { return (__m512d)unpackhi_epi64((__m512i)a, (__m512i)b); }

// --- constants --------------------------------------------------------------------------------------------------------

static inline __m512 set1_ps(float x) {
  Halves z;
  z.of[0] = z.of[1] = _mm256_set1_ps(x);
  return z.all();
}
static inline __m512i set1_epi32(int x) {
  IntHalves z;
  z.of[0] = z.of[1] = _mm256_set1_epi32(x);
  return z.all();
}
static inline __m512i set1_epi16(short x) {
  IntHalves z;
  z.of[0] = z.of[1] = _mm256_set1_epi16(x);
  return z.all();
}
static inline __m512 setzero_ps() { return set1_ps(0); }
static inline __m512i setzero_si512() { return set1_epi32(0); }

template <class T, class... Numbers>
static inline __m512i in_order(Numbers... numbers) {
  const T all[] = {(T)numbers...};
  static_assert(sizeof all == 64, "as many as a register holds");
  __m512i x;
  memcpy(&x, all, sizeof x);
  return x;
}
template <class... Numbers>
static inline __m512i set_epi16(Numbers... numbers) {  // the last one first
  const Shorts x(in_order<int16_t>(numbers...));
  Shorts z;
  for (int i = 0; i < 32; i++) z.of[i] = x.of[31 - i];
  return z.all();
}

// --- memory -----------------------------------------------------------------------------------------------------------

static inline void demand_aligned(const void* p) {
  if ((uintptr_t)p % 64 != 0) __builtin_trap();
}

template <class V>
static inline V loadu(const void* p) {
  V x;
  memcpy(&x, p, sizeof x);
  return x;
}
template <class V>
static inline V load(const void* p) {
  demand_aligned(p);
  return loadu<V>(p);
}
static inline void storeu(void* p, const __m512& x) { memcpy(p, &x, sizeof x); }
static inline void storeu(void* p, const __m512i& x) { memcpy(p, &x, sizeof x); }
template <class V>
static inline void store(void* p, const V& x) {
  demand_aligned(p);
  storeu(p, x);
}

// Touches no more than the lanes of the mask.
template <class T, class V>
static inline V maskz_loadu(uint64_t mask, const void* p) {
  Lanes<T, V> z;
  for (int i = 0; i < z.kNum; i++) {
    z.of[i] = 0;
    if (mask >> i & 1) memcpy(&z.of[i], (const T*)p + i, sizeof(T));
  }
  return z.all();
}
template <class T, class V>
static inline void mask_storeu(void* p, uint64_t mask, V x) {
  const Lanes<T, V> z(x);
  for (int i = 0; i < z.kNum; i++)
    if (mask >> i & 1) memcpy((T*)p + i, &z.of[i], sizeof(T));
}

static inline __m512 i32gather_ps(__m512i places, const void* from, int scale) {
  const Ints at(places);
  Floats z;
  for (int i = 0; i < 16; i++) memcpy(&z.of[i], (const char*)from + (int64_t)at.of[i] * scale, 4);
  return z.all();
}

// --- arithmetic -------------------------------------------------------------------------------------------------------

#define LP_FUSED(name, half)                                                      \
  static inline __m512 name(__m512 a, __m512 b, __m512 c) {                       \
    const Halves x(a), y(b), w(c);                                                \
    Halves z;                                                                     \
    for (int i = 0; i < 2; i++) z.of[i] = half(x.of[i], y.of[i], w.of[i]);        \
    return z.all();                                                               \
  }
LP_FUSED(fmadd_ps, _mm256_fmadd_ps)
LP_FUSED(fmsub_ps, _mm256_fmsub_ps)
LP_FUSED(fnmadd_ps, _mm256_fnmadd_ps)
#undef LP_FUSED
static inline __m512 abs_ps(__m512 x) { return (__m512)and_si512((__m512i)x, set1_epi32(0x7fffffff)); }

static inline __m512 roundscale_ps(__m512 x, int how) {
  if (how != 8) __builtin_trap();  // to the nearest whole number
  const Halves a(x);
  Halves z;
  for (int i = 0; i < 2; i++) z.of[i] = _mm256_round_ps(a.of[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return z.all();
}

static inline __m512 maskz_scalef_ps(__mmask16 mask, __m512 x, __m512 n) {
  const Floats a(x), b(n);
  Floats z;
  for (int i = 0; i < 16; i++)
    z.of[i] = !(mask >> i & 1) ? 0.0f : b.of[i] != b.of[i] ? b.of[i] : ldexpf(a.of[i], (int)floorf(b.of[i]));
  return z.all();
}

// By halves, as the compiler does it.
template <class Op>
static inline float reduce(__m512 x, const Op& op) {
  Floats a(x);
  for (int num = 8; num > 0; num /= 2)
    for (int i = 0; i < num; i++) a.of[i] = op(a.of[i + num], a.of[i]);
  return a.of[0];
}
static inline float reduce_add_ps(__m512 x) {
  return reduce(x, [](float a, float b) { return a + b; });
}
static inline float reduce_max_ps(__m512 x) {
  return reduce(x, [](float a, float b) { return a > b ? a : b; });
}
static inline int mask_reduce_min_epi32(__mmask16 mask, __m512i x) {
  const Ints a(x);
  int least = INT32_MAX;
  for (int i = 0; i < 16; i++)
    if ((mask >> i & 1) && a.of[i] < least) least = a.of[i];
  return least;
}

// --- whole numbers ----------------------------------------------------------------------------------------------------

#define LP_SHIFT(name, half)                                   \
  static inline __m512i name(__m512i x, int by) {              \
    const IntHalves a(x);                                      \
    IntHalves z;                                               \
    for (int i = 0; i < 2; i++) z.of[i] = half(a.of[i], by);   \
    return z.all();                                            \
  }
LP_SHIFT(slli_epi32, _mm256_slli_epi32)
LP_SHIFT(srli_epi32, _mm256_srli_epi32)
LP_SHIFT(slli_epi16, _mm256_slli_epi16)
LP_SHIFT(srli_epi16, _mm256_srli_epi16)
#undef LP_SHIFT

static inline __m512i cvtepu16_epi32(__m256i x) {
  IntHalves z;
  z.of[0] = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 0));
  z.of[1] = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1));
  return z.all();
}
static inline __m512i cvtepu8_epi32(__m128i x) {
  uint8_t bytes[16];
  memcpy(bytes, &x, sizeof x);
  Ints z;
  for (int i = 0; i < 16; i++) z.of[i] = bytes[i];
  return z.all();
}
static inline __m256i cvtepi32_epi16(__m512i x) {
  const Ints a(x);
  Lanes<uint16_t, __m256i> z;
  for (int i = 0; i < 16; i++) z.of[i] = (uint16_t)a.of[i];
  return z.all();
}

static inline __m512i ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int table) {
  const __m512i ones = set1_epi32(-1);
  __m512i z = setzero_si512();
  for (int i = 0; i < 8; i++)
    if (table >> i & 1) z |= (i & 4 ? a : a ^ ones) & (i & 2 ? b : b ^ ones) & (i & 1 ? c : c ^ ones);
  return z;
}

// --- masks ------------------------------------------------------------------------------------------------------------

template <int kHow>
static inline __mmask16 cmp_ps(__m512 a, __m512 b) {
  const Halves x(a), y(b);
  int found = 0;
  for (int i = 0; i < 2; i++) found |= _mm256_movemask_ps(_mm256_cmp_ps(x.of[i], y.of[i], kHow)) << 8 * i;
  return (__mmask16)found;
}
static inline __mmask16 fpclass_ps(__m512 x, int classes) {
  if (classes != 0x99) __builtin_trap();  // NaN and infinity
  const Ints a((__m512i)x);
  int found = 0;
  for (int i = 0; i < 16; i++) found |= ((a.of[i] & 0x7f800000) == 0x7f800000) << i;
  return (__mmask16)found;
}
static inline __mmask16 cmpgt_epi32_mask(__m512i a, __m512i b) {
  const Ints x(a), y(b);
  int found = 0;
  for (int i = 0; i < 16; i++) found |= (x.of[i] > y.of[i]) << i;
  return (__mmask16)found;
}
static inline __mmask16 cmple_epi32_mask(__m512i a, __m512i b) { return (__mmask16)~cmpgt_epi32_mask(a, b); }
static inline __mmask32 cmpeq_epi16_mask(__m512i a, __m512i b) {
  const Shorts x(a), y(b);
  uint32_t found = 0;
  for (int i = 0; i < 32; i++) found |= (uint32_t)(x.of[i] == y.of[i]) << i;
  return found;
}

// y where the mask is set, x elsewhere.
template <class T, class V>
static inline V chosen(V x, uint64_t mask, V y) {
  const Lanes<T, V> a(x), b(y);
  Lanes<T, V> z;
  for (int i = 0; i < z.kNum; i++) z.of[i] = mask >> i & 1 ? b.of[i] : a.of[i];
  return z.all();
}
static inline __m512 mask_mov_ps(__m512 x, __mmask16 mask, __m512 y) { return chosen<float>(x, mask, y); }
static inline __m512i mask_mov_epi32(__m512i x, __mmask16 mask, __m512i y) { return chosen<int32_t>(x, mask, y); }
static inline __m512i mask_blend_epi16(__mmask32 mask, __m512i x, __m512i y) { return chosen<uint16_t>(x, mask, y); }
static inline __m512i mask_add_epi32(__m512i x, __mmask16 mask, __m512i a, __m512i b) {
  return chosen<int32_t>(x, mask, add_epi32(a, b));
}

// --- places -----------------------------------------------------------------------------------------------------------

template <class T>
static inline __m512i permutex2var(__m512i a, __m512i places, __m512i b) {
  const Lanes<T, __m512i> x(a), at(places), y(b);
  Lanes<T, __m512i> z;
  for (int i = 0; i < z.kNum; i++) z.of[i] = (at.of[i] & z.kNum ? y : x).of[at.of[i] & (z.kNum - 1)];
  return z.all();
}
static inline __m512 permutex2var_ps(__m512 a, __m512i places, __m512 b) {
  return (__m512)permutex2var<uint32_t>((__m512i)a, places, (__m512i)b);
}
static inline __m512i permutexvar_epi16(__m512i places, __m512i x) {
  return permutex2var<uint16_t>(x, and_si512(places, set1_epi16(31)), x);
}
static inline __m512 permutexvar_ps(__m512i places, __m512 x) {
  return (__m512)permutex2var<uint32_t>((__m512i)x, and_si512(places, set1_epi32(15)), (__m512i)x);
}
static inline __m512i shuffle_i32x4(__m512i a, __m512i b, int how) {
  const Lanes<__m128i, __m512i> x(a), y(b);
  Lanes<__m128i, __m512i> z;
  for (int i = 0; i < 4; i++) z.of[i] = (i < 2 ? x : y).of[how >> 2 * i & 3];
  return z.all();
}
static inline __m512 shuffle_f32x4(__m512 a, __m512 b, int how) {
  return (__m512)shuffle_i32x4((__m512i)a, (__m512i)b, how);
}
static inline __m512i inserti64x4(__m512i a, __m256i b, int half) {
  IntHalves z(a);
  z.of[half] = b;
  return z.all();
}
static inline __m512 broadcast_f32x4(__m128 x) {
  Halves z;
  z.of[0] = z.of[1] = _mm256_broadcast_ps(&x);
  return z.all();
}
static inline __m512 broadcast_f32x8(__m256 x) {
  Halves z;
  z.of[0] = z.of[1] = x;
  return z.all();
}
static inline __m512i broadcast_i64x4(__m256i x) {
  IntHalves z;
  z.of[0] = z.of[1] = x;
  return z.all();
}
static inline __m512i broadcast_i32x4(__m128i x) { return broadcast_i64x4(_mm256_broadcastsi128_si256(x)); }

// --- bfloat16 ---------------------------------------------------------------------------------------------------------

static inline float without_subnormal(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.0f, x) : x; }

// To nearest even; numbers below the smallest normal one are 0, whatever the control register says.
static inline uint16_t narrowed(float number) {
  const float x = without_subnormal(number);
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static inline __m256i cvtneps_pbh(__m512 x) {
  const Floats a(x);
  Lanes<uint16_t, __m256i> z;
  for (int i = 0; i < 16; i++) z.of[i] = narrowed(a.of[i]);
  return z.all();
}
static inline __m512i cvtne2ps_pbh(__m512 upper, __m512 lower) {
  IntHalves z;
  z.of[0] = cvtneps_pbh(lower), z.of[1] = cvtneps_pbh(upper);
  return z.all();
}
// Of each pair the second product first, as Intel's manual has it. What is smaller than the smallest normal number stays as
// it is; the instruction makes 0 of it.
static inline __m512 dpbf16_ps(__m512 sums, __m512i a, __m512i b) {
  const __m512i upper = set1_epi32((int)0xffff0000);
  sums = fmadd_ps((__m512)and_si512(a, upper), (__m512)and_si512(b, upper), sums);
  return fmadd_ps((__m512)slli_epi32(a, 16), (__m512)slli_epi32(b, 16), sums);
}

}  // namespace emulated_512

#undef _mm512_add_ps
#define _mm512_add_ps emulated_512::add_ps
#undef _mm512_sub_ps
#define _mm512_sub_ps emulated_512::sub_ps
#undef _mm512_mul_ps
#define _mm512_mul_ps emulated_512::mul_ps
#undef _mm512_div_ps
#define _mm512_div_ps emulated_512::div_ps
#undef _mm512_min_ps
#define _mm512_min_ps emulated_512::min_ps
#undef _mm512_max_ps
#define _mm512_max_ps emulated_512::max_ps
#undef _mm512_unpacklo_ps
#define _mm512_unpacklo_ps emulated_512::unpacklo_ps
#undef _mm512_unpackhi_ps
#define _mm512_unpackhi_ps emulated_512::unpackhi_ps
#undef _mm512_unpacklo_pd
#define _mm512_unpacklo_pd emulated_512::unpacklo_pd
#undef _mm512_unpackhi_pd
#define _mm512_unpackhi_pd emulated_512::unpackhi_pd
#undef _mm512_add_epi32
#define _mm512_add_epi32 emulated_512::add_epi32
#undef _mm512_sub_epi32
#define _mm512_sub_epi32 emulated_512::sub_epi32
#undef _mm512_add_epi16
#define _mm512_add_epi16 emulated_512::add_epi16
#undef _mm512_sub_epi16
#define _mm512_sub_epi16 emulated_512::sub_epi16
#undef _mm512_subs_epu16
#define _mm512_subs_epu16 emulated_512::subs_epu16
#undef _mm512_max_epu16
#define _mm512_max_epu16 emulated_512::max_epu16
#undef _mm512_mullo_epi32
#define _mm512_mullo_epi32 emulated_512::mullo_epi32
#undef _mm512_and_si512
#define _mm512_and_si512 emulated_512::and_si512
#undef _mm512_or_si512
#define _mm512_or_si512 emulated_512::or_si512
#undef _mm512_unpacklo_epi16
#define _mm512_unpacklo_epi16 emulated_512::unpacklo_epi16
#undef _mm512_unpackhi_epi16
#define _mm512_unpackhi_epi16 emulated_512::unpackhi_epi16
#undef _mm512_unpacklo_epi32
#define _mm512_unpacklo_epi32 emulated_512::unpacklo_epi32
#undef _mm512_unpackhi_epi32
#define _mm512_unpackhi_epi32 emulated_512::unpackhi_epi32
#undef _mm512_unpacklo_epi64
#define _mm512_unpacklo_epi64 emulated_512::unpacklo_epi64
#undef _mm512_unpackhi_epi64
#define _mm512_unpackhi_epi64 emulated_512::unpackhi_epi64
#undef _mm512_castpd_ps
#define _mm512_castpd_ps emulated_512::castpd_ps
#undef _mm512_castps_pd
#define _mm512_castps_pd emulated_512::castps_pd
#undef _mm512_castps_si512
#define _mm512_castps_si512 emulated_512::castps_si512
#undef _mm512_castsi512_ps
#define _mm512_castsi512_ps emulated_512::castsi512_ps
#undef _mm512_castsi256_si512
#define _mm512_castsi256_si512 emulated_512::castsi256_si512
#undef _mm512_set1_ps
#define _mm512_set1_ps emulated_512::set1_ps
#undef _mm512_set1_epi32
#define _mm512_set1_epi32 emulated_512::set1_epi32
#undef _mm512_set1_epi16
#define _mm512_set1_epi16 emulated_512::set1_epi16
#undef _mm512_setzero_ps
#define _mm512_setzero_ps emulated_512::setzero_ps
#undef _mm512_setzero_si512
#define _mm512_setzero_si512 emulated_512::setzero_si512
#undef _mm512_set_epi16
#define _mm512_set_epi16 emulated_512::set_epi16
#undef _mm512_fmadd_ps
#define _mm512_fmadd_ps emulated_512::fmadd_ps
#undef _mm512_fmsub_ps
#define _mm512_fmsub_ps emulated_512::fmsub_ps
#undef _mm512_fnmadd_ps
#define _mm512_fnmadd_ps emulated_512::fnmadd_ps
#undef _mm512_abs_ps
#define _mm512_abs_ps emulated_512::abs_ps
#undef _mm512_roundscale_ps
#define _mm512_roundscale_ps emulated_512::roundscale_ps
#undef _mm512_maskz_scalef_ps
#define _mm512_maskz_scalef_ps emulated_512::maskz_scalef_ps
#undef _mm512_reduce_add_ps
#define _mm512_reduce_add_ps emulated_512::reduce_add_ps
#undef _mm512_reduce_max_ps
#define _mm512_reduce_max_ps emulated_512::reduce_max_ps
#undef _mm512_mask_reduce_min_epi32
#define _mm512_mask_reduce_min_epi32 emulated_512::mask_reduce_min_epi32
#undef _mm512_slli_epi32
#define _mm512_slli_epi32 emulated_512::slli_epi32
#undef _mm512_srli_epi32
#define _mm512_srli_epi32 emulated_512::srli_epi32
#undef _mm512_slli_epi16
#define _mm512_slli_epi16 emulated_512::slli_epi16
#undef _mm512_srli_epi16
#define _mm512_srli_epi16 emulated_512::srli_epi16
#undef _mm512_cvtepu16_epi32
#define _mm512_cvtepu16_epi32 emulated_512::cvtepu16_epi32
#undef _mm512_cvtepu8_epi32
#define _mm512_cvtepu8_epi32 emulated_512::cvtepu8_epi32
#undef _mm512_cvtepi32_epi16
#define _mm512_cvtepi32_epi16 emulated_512::cvtepi32_epi16
#undef _mm512_ternarylogic_epi32
#define _mm512_ternarylogic_epi32 emulated_512::ternarylogic_epi32
#undef _mm512_cmpgt_epi32_mask
#define _mm512_cmpgt_epi32_mask emulated_512::cmpgt_epi32_mask
#undef _mm512_cmple_epi32_mask
#define _mm512_cmple_epi32_mask emulated_512::cmple_epi32_mask
#undef _mm512_cmpeq_epi16_mask
#define _mm512_cmpeq_epi16_mask emulated_512::cmpeq_epi16_mask
#undef _mm512_mask_mov_ps
#define _mm512_mask_mov_ps emulated_512::mask_mov_ps
#undef _mm512_mask_mov_epi32
#define _mm512_mask_mov_epi32 emulated_512::mask_mov_epi32
#undef _mm512_mask_blend_epi16
#define _mm512_mask_blend_epi16 emulated_512::mask_blend_epi16
#undef _mm512_mask_add_epi32
#define _mm512_mask_add_epi32 emulated_512::mask_add_epi32
#undef _mm512_permutexvar_epi16
#define _mm512_permutexvar_epi16 emulated_512::permutexvar_epi16
#undef _mm512_permutexvar_ps
#define _mm512_permutexvar_ps emulated_512::permutexvar_ps
#undef _mm512_permutex2var_ps
#define _mm512_permutex2var_ps emulated_512::permutex2var_ps
#undef _mm512_shuffle_i32x4
#define _mm512_shuffle_i32x4 emulated_512::shuffle_i32x4
#undef _mm512_shuffle_f32x4
#define _mm512_shuffle_f32x4 emulated_512::shuffle_f32x4
#undef _mm512_broadcast_f32x4
#define _mm512_broadcast_f32x4 emulated_512::broadcast_f32x4
#undef _mm512_broadcast_f32x8
#define _mm512_broadcast_f32x8 emulated_512::broadcast_f32x8
#undef _mm512_inserti64x4
#define _mm512_inserti64x4 emulated_512::inserti64x4
#undef _mm512_broadcast_i64x4
#define _mm512_broadcast_i64x4 emulated_512::broadcast_i64x4
#undef _mm512_broadcast_i32x4
#define _mm512_broadcast_i32x4 emulated_512::broadcast_i32x4
#undef _mm512_cvtneps_pbh
#define _mm512_cvtneps_pbh emulated_512::cvtneps_pbh
#undef _mm512_cvtne2ps_pbh
#define _mm512_cvtne2ps_pbh emulated_512::cvtne2ps_pbh
#undef _mm512_i32gather_ps
#define _mm512_i32gather_ps emulated_512::i32gather_ps
#undef _mm512_setr_epi32
#define _mm512_setr_epi32 emulated_512::in_order<int32_t>
#undef _mm512_setr_epi64
#define _mm512_setr_epi64 emulated_512::in_order<int64_t>
#undef _mm512_loadu_ps
#define _mm512_loadu_ps emulated_512::loadu<__m512>
#undef _mm512_load_ps
#define _mm512_load_ps emulated_512::load<__m512>
#undef _mm512_loadu_si512
#define _mm512_loadu_si512 emulated_512::loadu<__m512i>
#undef _mm512_load_si512
#define _mm512_load_si512 emulated_512::load<__m512i>
#undef _mm512_storeu_ps
#define _mm512_storeu_ps emulated_512::storeu
#undef _mm512_storeu_si512
#define _mm512_storeu_si512 emulated_512::storeu
#undef _mm512_store_ps
#define _mm512_store_ps emulated_512::store
#undef _mm512_store_si512
#define _mm512_store_si512 emulated_512::store
#undef _mm512_stream_si512
#define _mm512_stream_si512 emulated_512::store
#undef _mm512_stream_ps
#define _mm512_stream_ps emulated_512::store
#undef _mm512_maskz_loadu_ps
#define _mm512_maskz_loadu_ps emulated_512::maskz_loadu<float, __m512>
#undef _mm512_maskz_loadu_epi16
#define _mm512_maskz_loadu_epi16 emulated_512::maskz_loadu<uint16_t, __m512i>
#undef _mm512_mask_storeu_ps
#define _mm512_mask_storeu_ps emulated_512::mask_storeu<float>
#undef _mm512_permutex2var_epi16
#define _mm512_permutex2var_epi16 emulated_512::permutex2var<uint16_t>
#undef _mm512_permutex2var_epi64
#define _mm512_permutex2var_epi64 emulated_512::permutex2var<uint64_t>
#undef _mm512_cmp_ps_mask
#define _mm512_cmp_ps_mask(a, b, how) emulated_512::cmp_ps<how>(a, b)
#undef _mm512_mask_cmp_ps_mask
#define _mm512_mask_cmp_ps_mask(of, a, b, how) (__mmask16)((of) & emulated_512::cmp_ps<how>(a, b))
#undef _mm512_fpclass_ps_mask
#define _mm512_fpclass_ps_mask emulated_512::fpclass_ps
#undef _mm512_dpbf16_ps
#define _mm512_dpbf16_ps(sums, a, b) emulated_512::dpbf16_ps(sums, (__m512i)(a), (__m512i)(b))
#undef _mm256_maskz_loadu_epi16
#define _mm256_maskz_loadu_epi16 emulated_512::maskz_loadu<uint16_t, __m256i>
#undef _mm256_mask_storeu_epi16
#define _mm256_mask_storeu_epi16 emulated_512::mask_storeu<uint16_t>
#endif
