// Primitives of Arm's NEON: vectors of 16 floats in four registers. vector_256.h has the same names for AVX2; sums run in
// the same order there. With the instructions for bfloat16 a pair's products are added before they are added to a sum.
#pragma once

#include <arm_neon.h>
#include <stddef.h>
#include <stdint.h>

#include "../kernels.h"

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
#define LP_DOTS_PAIRS 1  // products of bfloat16 go by dot_pairs
#endif

namespace lp {
namespace LP_ISA {

typedef uint16_t bf16;
struct Floats {  // 16
  float32x4_t v[4];
};
struct Words {  // 16 of 32 bits, or 32 of bfloat16
  uint32x4_t v[4];
};
struct Mask {  // of 16 lanes
  uint32x4_t v[4];
};
struct Part {  // the first lanes, for loads and stores
  int n;
};

static inline Part first(int n) { return {n}; }

// Brings a line into the first cache.
static inline void fetch(const void* p) { asm volatile("prfm pldl1keep, [%0]" : : "r"(p)); }

// Of the four registers. GCC would call these in the innermost loops of products.
template <class Make>
__attribute__((always_inline)) static inline Floats each(const Make& make) {
  return {{make(0), make(1), make(2), make(3)}};
}
template <class Make>
__attribute__((always_inline)) static inline Words each_word(const Make& make) {
  return {{make(0), make(1), make(2), make(3)}};
}
template <class Make>
__attribute__((always_inline)) static inline Mask each_mask(const Make& make) {
  return {{make(0), make(1), make(2), make(3)}};
}

static inline float32x4_t as_floats(uint32x4_t x) { return vreinterpretq_f32_u32(x); }
static inline uint32x4_t as_words(float32x4_t x) { return vreinterpretq_u32_f32(x); }

// --- bfloat16 ----------------------------------------------------------------------------------------------------------

// To the upper half of each word: round to nearest even; NaN stays NaN.
static inline uint32x4_t round4(float32x4_t x) {
  const uint32x4_t bits = as_words(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t sum = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  return vbslq_u32(vceqq_f32(x, x), sum, vdupq_n_u32(0x7fc00000));
}
// The same in half the bits.
static inline uint16x4_t halves4(float32x4_t x) {
#ifdef LP_DOTS_PAIRS
  return vreinterpret_u16_bf16(vcvt_bf16_f32(x));
#else
  return vshrn_n_u32(round4(x), 16);
#endif
}
static inline uint32x4_t upper(uint32x4_t x) { return vandq_u32(x, vdupq_n_u32(0xffff0000)); }

static inline Floats rounded(Floats x) {
#ifdef LP_DOTS_PAIRS
  return each([&](int i) { return as_floats(vshll_n_u16(halves4(x.v[i]), 16)); });
#else
  return each([&](int i) { return as_floats(upper(round4(x.v[i]))); });
#endif
}

// Of 16 pairs: the first of each, and the second.
static inline Floats evens(Words pairs) {
  return each([&](int i) { return as_floats(vshlq_n_u32(pairs.v[i], 16)); });
}
static inline Floats odds(Words pairs) {
  return each([&](int i) { return as_floats(upper(pairs.v[i])); });
}
// The way back, of floats with no more bits than bfloat16 has.
static inline Words join_pairs(Floats even, Floats odd) {
  return each_word([&](int i) { return vorrq_u32(vshrq_n_u32(as_words(even.v[i]), 16), upper(as_words(odd.v[i]))); });
}

// --- loads and stores --------------------------------------------------------------------------------------------------

static inline Floats load(const float* p) {
  return each([&](int i) { return vld1q_f32(p + 4 * i); });
}
static inline void store(float* p, Floats x) {
  for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, x.v[i]);
}
static inline Floats load_aligned(const float* p) { return load(p); }
static inline void store_aligned(float* p, Floats x) { store(p, x); }

static inline Floats load(const bf16* p) {
  return each([&](int i) { return as_floats(vshll_n_u16(vld1_u16(p + 4 * i), 16)); });
}
static inline void store(bf16* p, Floats x) {
  for (int i = 0; i < 4; i++) vst1_u16(p + 4 * i, halves4(x.v[i]));
}

// Parts go through a line of their own.
template <class T>
static inline Floats load(const T* p, Part part) {
  if (part.n >= 16) return load(p);
  alignas(16) T line[16] = {};
  for (int i = 0; i < part.n; i++) line[i] = p[i];
  return load(line);
}
template <class T>
static inline void store(T* p, Floats x, Part part) {
  if (part.n >= 16) return store(p, x);
  alignas(16) T line[16];
  store(line, x);
  for (int i = 0; i < part.n; i++) p[i] = line[i];
}

static inline Words load_words(const void* p) {
  return each_word([&](int i) { return vreinterpretq_u32_u8(vld1q_u8((const uint8_t*)p + 16 * i)); });
}
// Of the first n of 32 halves, n < 32.
static inline Words load_words(const bf16* p, int64_t n) {
  alignas(16) bf16 line[32] = {};
  __builtin_memcpy(line, p, (size_t)n * sizeof(bf16));  // they may be halves of floats
  return load_words(line);
}
static inline void store_words(void* p, Words x) {
  for (int i = 0; i < 4; i++) vst1q_u8((uint8_t*)p + 16 * i, vreinterpretq_u8_u32(x.v[i]));
}

// Copies a whole line.
static inline void stream_line(void* to, const void* from) { store_words(to, load_words(from)); }
// The same of 16 floats.
static inline void stream(float* p, Floats x) { store(p, x); }

// p[i * stride] of 16 lanes, strides in elements.
static inline Floats gather(const float* p, int64_t stride) {
  alignas(16) float line[16];
  for (int i = 0; i < 16; i++) line[i] = p[i * stride];
  return load(line);
}

// --- arithmetic --------------------------------------------------------------------------------------------------------

static inline Floats all(float x) {
  return each([&](int) { return vdupq_n_f32(x); });
}
static inline Floats zeros() { return all(0.0f); }
static inline Words all_words(int32_t x) {
  return each_word([&](int) { return vdupq_n_u32((uint32_t)x); });
}
static inline Floats add(Floats a, Floats b) {
  return each([&](int i) { return vaddq_f32(a.v[i], b.v[i]); });
}
static inline Floats sub(Floats a, Floats b) {
  return each([&](int i) { return vsubq_f32(a.v[i], b.v[i]); });
}
static inline Floats mul(Floats a, Floats b) {
  return each([&](int i) { return vmulq_f32(a.v[i], b.v[i]); });
}
static inline Floats div(Floats a, Floats b) {
  return each([&](int i) { return vdivq_f32(a.v[i], b.v[i]); });
}
static inline Floats fmadd(Floats a, Floats b, Floats c) {
  return each([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
}
static inline Floats fnmadd(Floats a, Floats b, Floats c) {
  return each([&](int i) { return vfmsq_f32(c.v[i], a.v[i], b.v[i]); });
}
// Where either is NaN, both return b.
static inline float32x4_t min4(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
static inline float32x4_t max4(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
static inline Floats min(Floats a, Floats b) {
  return each([&](int i) { return min4(a.v[i], b.v[i]); });
}
static inline Floats max(Floats a, Floats b) {
  return each([&](int i) { return max4(a.v[i], b.v[i]); });
}
static inline Floats nearest(Floats x) {
  return each([&](int i) { return vrndnq_f32(x.v[i]); });
}

// Sums of products of 32 pairs of bfloat16, two to a lane.
static inline Floats dot_pairs(Floats acc, Words a, Words b) {
#ifdef LP_DOTS_PAIRS
  return each([&](int i) {
    return vbfdotq_f32(acc.v[i], vreinterpretq_bf16_u32(a.v[i]), vreinterpretq_bf16_u32(b.v[i]));
  });
#else
  return fmadd(odds(a), odds(b), fmadd(evens(a), evens(b), acc));
#endif
}

// In two steps: 2^128 is not a float, but what it makes of x may be.
static inline float32x4_t scale4(float32x4_t x, float32x4_t n) {
  const int32x4_t whole = vcvtnq_s32_f32(n), half = vshrq_n_s32(whole, 1), rest = vsubq_s32(whole, half);
  const int32x4_t one = vdupq_n_s32(127);
  x = vmulq_f32(x, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(half, one), 23)));
  return vmulq_f32(x, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(rest, one), 23)));
}
// x * 2^n of whole numbers n in -126..128; 0 in other lanes than `counts`.
static inline Floats scale_by_power(Mask counts, Floats x, Floats n) {
  return each([&](int i) { return as_floats(vandq_u32(counts.v[i], as_words(scale4(x.v[i], n.v[i])))); });
}

static inline float sum(Floats x) {
  const float32x4_t four = vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3]));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
static inline float largest(Floats x) {
  const float32x4_t four = max4(max4(x.v[0], x.v[2]), max4(x.v[1], x.v[3]));
  const float32x4_t two = max4(four, vextq_f32(four, four, 2));
  const float a = vgetq_lane_f32(two, 0), b = vgetq_lane_f32(two, 1);
  return a > b ? a : b;
}

// --- masks -------------------------------------------------------------------------------------------------------------

static inline Mask both(Mask a, Mask b) {
  return each_mask([&](int i) { return vandq_u32(a.v[i], b.v[i]); });
}
static inline Mask either(Mask a, Mask b) {
  return each_mask([&](int i) { return vorrq_u32(a.v[i], b.v[i]); });
}
static inline Mask nowhere() {
  return each_mask([&](int) { return vdupq_n_u32(0); });
}
static inline bool any(Mask mask) {
  return vmaxvq_u32(vorrq_u32(vorrq_u32(mask.v[0], mask.v[1]), vorrq_u32(mask.v[2], mask.v[3]))) != 0;
}

static inline Words numbers_from(int from) {
  const uint32_t lanes[4] = {0, 1, 2, 3};
  return each_word([&](int i) { return vaddq_u32(vld1q_u32(lanes), vdupq_n_u32((uint32_t)(from + 4 * i))); });
}
static inline Mask lanes(Part part) {
  const Words numbers = numbers_from(0);
  return each_mask(
      [&](int i) { return vcgtq_s32(vdupq_n_s32(part.n), vreinterpretq_s32_u32(numbers.v[i])); });
}
// Those whose bit is set, the lowest first.
static inline Mask lanes_of_bits(uint16_t bits) {
  const uint32_t low[4] = {1, 2, 4, 8};
  return each_mask([&](int i) { return vtstq_u32(vdupq_n_u32((uint32_t)bits >> (4 * i)), vld1q_u32(low)); });
}
// Those of lanes i..i + 16 that are in from..to; i < to.
static inline Mask between(int64_t from, int64_t to, int64_t i) {
  const Mask behind = lanes({(int)(to - i > 16 ? 16 : to - i)}), before = lanes({(int)(i < from ? from - i : 0)});
  return each_mask([&](int n) { return vbicq_u32(behind.v[n], before.v[n]); });
}
static inline Mask is_nan(Floats x) {
  return each_mask([&](int i) { return vmvnq_u32(vceqq_f32(x.v[i], x.v[i])); });
}
static inline Mask is_wild(Floats x) {  // NaN, infinity: their difference to themselves is NaN
  return is_nan(sub(x, x));
}
static inline Mask equals(Floats a, Floats b) {
  return each_mask([&](int i) { return vceqq_f32(a.v[i], b.v[i]); });
}
static inline Mask is_not_less(Floats a, Floats b) {
  return each_mask([&](int i) { return vmvnq_u32(vcltq_f32(a.v[i], b.v[i])); });
}
static inline Mask is_larger(Mask of, Floats a, Floats b) {
  return each_mask([&](int i) { return vandq_u32(of.v[i], vcgtq_f32(a.v[i], b.v[i])); });
}
// b where the mask is set, a elsewhere.
static inline Floats select(Floats a, Mask mask, Floats b) {
  return each([&](int i) { return vbslq_f32(mask.v[i], b.v[i], a.v[i]); });
}

// --- lanes' numbers ----------------------------------------------------------------------------------------------------

static inline Words no_words() { return all_words(0); }
static inline Words select_words(Words a, Mask mask, Words b) {
  return each_word([&](int i) { return vbslq_u32(mask.v[i], b.v[i], a.v[i]); });
}
// from + lane where the mask is set, a elsewhere.
static inline Words select_numbers(Words a, Mask mask, int from) { return select_words(a, mask, numbers_from(from)); }
static inline int smallest(Mask of, Words x) {
  const Words found = select_words(all_words(0x7fffffff), of, x);
  int best = 0x7fffffff;
  for (int i = 0; i < 4; i++) {
    const int one = vminvq_s32(vreinterpretq_s32_u32(found.v[i]));
    best = one < best ? one : best;
  }
  return best;
}

// --- sums and transposes -----------------------------------------------------------------------------------------------

// The sum of each of 16 vectors, as one vector.
static inline Floats sums16(const Floats* v) {
  return each([&](int i) {
    const Floats* w = v + 4 * i;
    float32x4_t part[2];
    for (int half = 0; half < 2; half++) {
      float32x4_t four[4];
      for (int n = 0; n < 4; n++) four[n] = vaddq_f32(w[n].v[half], w[n].v[half + 2]);
      part[half] = vpaddq_f32(vpaddq_f32(four[0], four[1]), vpaddq_f32(four[2], four[3]));
    }
    return vaddq_f32(part[0], part[1]);
  });
}

// Columns of 4 rows of words become rows.
static inline void transpose4(uint32x4_t* v) {
  const uint32x4_t a = vtrn1q_u32(v[0], v[1]), b = vtrn2q_u32(v[0], v[1]);
  const uint32x4_t c = vtrn1q_u32(v[2], v[3]), d = vtrn2q_u32(v[2], v[3]);
  const auto halves = [](uint32x4_t x, uint32x4_t y, bool upper) {
    const uint64x2_t p = vreinterpretq_u64_u32(x), q = vreinterpretq_u64_u32(y);
    return vreinterpretq_u32_u64(upper ? vzip2q_u64(p, q) : vzip1q_u64(p, q));
  };
  v[0] = halves(a, c, false), v[1] = halves(b, d, false);
  v[2] = halves(a, c, true), v[3] = halves(b, d, true);
}

// Columns of v become rows: 16 rows of 16 words.
static inline void transpose_words(Words* v) {
  Words columns[16];
  for (int from = 0; from < 4; from++)
    for (int to = 0; to < 4; to++) {
      uint32x4_t four[4];
      for (int i = 0; i < 4; i++) four[i] = v[4 * from + i].v[to];
      transpose4(four);
      for (int i = 0; i < 4; i++) columns[4 * to + i].v[from] = four[i];
    }
  for (int i = 0; i < 16; i++) v[i] = columns[i];
}

// v[8] = pairs of ranks, each of 16 outputs, of up to 16 ranks in bfloat16.
static inline void transpose_outputs(const bf16* b, int64_t stride, Part ranks, Words* v) {
  uint32_t pairs[8][16] = {};
  for (int output = 0; output < 16; output++)
    for (int pair = 0; pair < 8 && 2 * pair < ranks.n; pair++)
      __builtin_memcpy(&pairs[pair][output], b + output * stride + 2 * pair, 2 * pair + 1 < ranks.n ? 4 : 2);
  for (int pair = 0; pair < 8; pair++) v[pair] = load_words(pairs[pair]);
}

// --- eight bits --------------------------------------------------------------------------------------------------------

// Of a block and 16 outputs.
struct Scales {
  Floats scale;

  explicit Scales(const void* exponents) {
    const uint8x16_t bytes = vld1q_u8((const uint8_t*)exponents);
    const uint16x8_t halves[2] = {vmovl_u8(vget_low_u8(bytes)), vmovl_u8(vget_high_u8(bytes))};
    for (int i = 0; i < 2; i++) {
      scale.v[2 * i] = as_floats(vshlq_n_u32(vmovl_u16(vget_low_u16(halves[i])), 23));
      scale.v[2 * i + 1] = as_floats(vshlq_n_u32(vmovl_u16(vget_high_u16(halves[i])), 23));
    }
  }
};

// The values less 128, with their signs.
struct Int8Group {
  Words values;

  explicit Int8Group(const uint8_t* bytes)
      : values(each_word([&](int i) { return vreinterpretq_u32_u8(veorq_u8(vld1q_u8(bytes + 16 * i), vdupq_n_u8(0x80))); })) {}
};

// The value times a power of two, which is exact.
template <int pair>
struct Int8Pair {
  const Int8Group& group;
  const Scales& of;

  Floats even() const { return at<2 * pair>(); }
  Floats odd() const { return at<2 * pair + 1>(); }
  Words words() const { return join_pairs(even(), odd()); }

 private:
  template <int byte>
  Floats at() const {
    return each([&](int i) {
      const int32x4_t value = vshrq_n_s32(vreinterpretq_s32_u32(vshlq_n_u32(group.values.v[i], 24 - 8 * byte)), 24);
      return vmulq_f32(vcvtq_f32_s32(value), of.scale.v[i]);
    });
  }
};

// --- four bits ---------------------------------------------------------------------------------------------------------

// Of a block and 16 outputs.
struct Int4Scales {
  Floats scale;

  explicit Int4Scales(const void* codes) {
    const uint8x16_t bytes = vld1q_u8((const uint8_t*)codes);
    const uint16x8_t halves[2] = {vmovl_u8(vget_low_u8(bytes)), vmovl_u8(vget_high_u8(bytes))};
    const uint32x4_t bias = vdupq_n_u32((127 - kInt4Bias) << 23);
    for (int i = 0; i < 2; i++) {
      scale.v[2 * i] = as_floats(vaddq_u32(vshlq_n_u32(vmovl_u16(vget_low_u16(halves[i])), 21), bias));
      scale.v[2 * i + 1] = as_floats(vaddq_u32(vshlq_n_u32(vmovl_u16(vget_high_u16(halves[i])), 21), bias));
    }
  }
};

// Levels, a byte each: of the group's pairs 0 and 2, and of 1 and 3.
struct Int4Group {
  Words even_pairs, odd_pairs;

  explicit Int4Group(const uint8_t* values) {
    static const int8_t levels[16] = {LP_INT4_LEVELS};
    const int8x16_t table = vld1q_s8(levels);
    for (int i = 0; i < 4; i++) {
      const uint8x16_t numbers = vld1q_u8(values + 16 * i);
      even_pairs.v[i] = vreinterpretq_u32_s8(vqtbl1q_s8(table, vandq_u8(numbers, vdupq_n_u8(15))));
      odd_pairs.v[i] = vreinterpretq_u32_s8(vqtbl1q_s8(table, vshrq_n_u8(numbers, 4)));
    }
  }
};

// The level times the scale, which is exact.
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
    return each([&](int i) {
      const int32x4_t level = vshrq_n_s32(vreinterpretq_s32_u32(vshlq_n_u32(levels.v[i], 24 - 8 * byte)), 24);
      return vmulq_f32(vcvtq_f32_s32(level), of.scale.v[i]);
    });
  }
};

// --- sizes -------------------------------------------------------------------------------------------------------------

// Vectors that stay in 32 registers of a quarter of their size.
static const int kShrinkRows = 2, kShrinkRanks = 2, kShrinkRanksOfOne = 4;  // of inner products at once
static const int kScoreRows = 4;                                             // of queries, for 16 keys
static const int kWeighColumns = 1;                                          // of 16 values, for four rows
static const int kStateColumns = 1;                                          // of 16 values of a state

}  // namespace LP_ISA
}  // namespace lp
