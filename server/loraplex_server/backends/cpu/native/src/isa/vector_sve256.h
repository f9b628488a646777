// Primitives of Arm's SVE with vectors of 256 bits: vectors of 16 floats in two registers. vector_neon.h has the same
// names for NEON, whose sums run in the same order and whose instructions for bfloat16 round alike: both have the same
// bits.
#pragma once

#include <arm_sve.h>
#include <stddef.h>
#include <stdint.h>

#include "../kernels.h"

#define LP_DOTS_PAIRS 1  // products of bfloat16 go by dot_pairs

namespace lp {
namespace LP_ISA {

// The registers, whose length the compiler is told.
typedef svfloat32_t Floats8 __attribute__((arm_sve_vector_bits(256)));
typedef svuint32_t Words8 __attribute__((arm_sve_vector_bits(256)));
typedef svbool_t Mask8 __attribute__((arm_sve_vector_bits(256)));

typedef uint16_t bf16;
struct Floats {  // 16
  Floats8 v[2];
};
struct Words {  // 16 of 32 bits, or 32 of bfloat16
  Words8 v[2];
};
struct Mask {  // of 16 lanes
  Mask8 v[2];
};
struct Part {  // the first lanes, for loads and stores
  int n;
};

static inline Part first(int n) { return {n}; }

// Brings a line into the first cache.
static inline void fetch(const void* p) { asm volatile("prfm pldl1keep, [%0]" : : "r"(p)); }

static inline svbool_t all_lanes() { return svptrue_b32(); }

template <class Make>
static inline Floats each(const Make& make) {
  return {{make(0), make(1)}};
}
template <class Make>
static inline Words each_word(const Make& make) {
  return {{make(0), make(1)}};
}
template <class Make>
static inline Mask each_mask(const Make& make) {
  return {{make(0), make(1)}};
}

static inline svfloat32_t as_floats(svuint32_t x) { return svreinterpret_f32_u32(x); }
static inline svuint32_t as_words(svfloat32_t x) { return svreinterpret_u32_f32(x); }

// --- masks -------------------------------------------------------------------------------------------------------------

static inline Mask both(Mask a, Mask b) {
  return each_mask([&](int i) { return svand_b_z(all_lanes(), a.v[i], b.v[i]); });
}
static inline Mask either(Mask a, Mask b) {
  return each_mask([&](int i) { return svorr_b_z(all_lanes(), a.v[i], b.v[i]); });
}
static inline Mask nowhere() {
  return each_mask([&](int) { return svpfalse_b(); });
}
static inline bool any(Mask mask) {
  return svptest_any(all_lanes(), svorr_b_z(all_lanes(), mask.v[0], mask.v[1]));
}

static inline Mask lanes(Part part) {
  return each_mask([&](int i) { return svwhilelt_b32_s32(8 * i, part.n); });
}
// Those whose bit is set, the lowest first.
static inline Mask lanes_of_bits(uint16_t bits) {
  return each_mask([&](int i) {
    const svuint32_t own = svlsl_u32_x(all_lanes(), svdup_u32(1), svindex_u32(8 * i, 1));
    return svcmpne_n_u32(all_lanes(), svand_n_u32_x(all_lanes(), own, bits), 0);
  });
}
// Those of lanes i..i + 16 that are in from..to; i < to.
static inline Mask between(int64_t from, int64_t to, int64_t i) {
  return each_mask([&](int n) {
    return svbic_b_z(all_lanes(), svwhilelt_b32_s64(i + 8 * n, to), svwhilelt_b32_s64(i + 8 * n, from));
  });
}
static inline Mask is_nan(Floats x) {
  return each_mask([&](int i) { return svcmpuo_f32(all_lanes(), x.v[i], x.v[i]); });
}
static inline Mask equals(Floats a, Floats b) {
  return each_mask([&](int i) { return svcmpeq_f32(all_lanes(), a.v[i], b.v[i]); });
}
static inline Mask is_not_less(Floats a, Floats b) {
  return each_mask([&](int i) { return svnot_b_z(all_lanes(), svcmplt_f32(all_lanes(), a.v[i], b.v[i])); });
}
static inline Mask is_larger(Mask of, Floats a, Floats b) {
  return each_mask([&](int i) { return svcmpgt_f32(of.v[i], a.v[i], b.v[i]); });
}
// b where the mask is set, a elsewhere.
static inline Floats select(Floats a, Mask mask, Floats b) {
  return each([&](int i) { return svsel_f32(mask.v[i], b.v[i], a.v[i]); });
}

// --- bfloat16 ----------------------------------------------------------------------------------------------------------

// In the lower half of each word: round to nearest even; NaN stays NaN.
static inline svuint32_t narrow8(svfloat32_t x) { return svreinterpret_u32_bf16(svcvt_bf16_f32_x(all_lanes(), x)); }
static inline svfloat32_t widen8(svuint32_t x) { return as_floats(svlsl_n_u32_x(all_lanes(), x, 16)); }

static inline Floats rounded(Floats x) {
  return each([&](int i) { return widen8(narrow8(x.v[i])); });
}

// Of 16 pairs: the first of each, and the second.
static inline Floats evens(Words pairs) {
  return each([&](int i) { return widen8(pairs.v[i]); });
}
static inline Floats odds(Words pairs) {
  return each([&](int i) { return as_floats(svand_n_u32_x(all_lanes(), pairs.v[i], 0xffff0000)); });
}
// The way back, of floats with no more bits than bfloat16 has: the upper halves of both.
static inline Words join_pairs(Floats even, Floats odd) {
  return each_word([&](int i) {
    return svreinterpret_u32_u16(svtrn2_u16(svreinterpret_u16_f32(even.v[i]), svreinterpret_u16_f32(odd.v[i])));
  });
}

// Sums of products of 32 pairs of bfloat16, two to a lane.
static inline Floats dot_pairs(Floats acc, Words a, Words b) {
  return each([&](int i) {
    return svbfdot_f32(acc.v[i], svreinterpret_bf16_u32(a.v[i]), svreinterpret_bf16_u32(b.v[i]));
  });
}

// --- loads and stores --------------------------------------------------------------------------------------------------

static inline Floats load(const float* p) {
  return each([&](int i) { return svld1_f32(all_lanes(), p + 8 * i); });
}
static inline Floats load(const float* p, Part part) {
  const Mask mask = lanes(part);
  return each([&](int i) { return svld1_f32(mask.v[i], p + 8 * i); });
}
static inline void store(float* p, Floats x) {
  for (int i = 0; i < 2; i++) svst1_f32(all_lanes(), p + 8 * i, x.v[i]);
}
static inline void store(float* p, Floats x, Part part) {
  const Mask mask = lanes(part);
  for (int i = 0; i < 2; i++) svst1_f32(mask.v[i], p + 8 * i, x.v[i]);
}
static inline Floats load_aligned(const float* p) { return load(p); }
static inline void store_aligned(float* p, Floats x) { store(p, x); }

static inline Floats load(const bf16* p) {
  return each([&](int i) { return widen8(svld1uh_u32(all_lanes(), p + 8 * i)); });
}
static inline Floats load(const bf16* p, Part part) {
  const Mask mask = lanes(part);
  return each([&](int i) { return widen8(svld1uh_u32(mask.v[i], p + 8 * i)); });
}
static inline void store(bf16* p, Floats x) {
  for (int i = 0; i < 2; i++) svst1h_u32(all_lanes(), p + 8 * i, narrow8(x.v[i]));
}
static inline void store(bf16* p, Floats x, Part part) {
  const Mask mask = lanes(part);
  for (int i = 0; i < 2; i++) svst1h_u32(mask.v[i], p + 8 * i, narrow8(x.v[i]));
}

// The first n of 16 halves; the others are 0.
static inline svuint32_t load_halves(const bf16* p, int64_t n) {
  return svreinterpret_u32_u16(svld1_u16(svwhilelt_b16_s64(0, n), p));
}

static inline Words load_words(const void* p) {
  return each_word([&](int i) { return svreinterpret_u32_u8(svld1_u8(svptrue_b8(), (const uint8_t*)p + 32 * i)); });
}
// Of the first n of 32 halves, n < 32.
static inline Words load_words(const bf16* p, int64_t n) {
  return each_word([&](int i) { return load_halves(p + 16 * i, n - 16 * i); });
}
static inline void store_words(void* p, Words x) {
  for (int i = 0; i < 2; i++) svst1_u8(svptrue_b8(), (uint8_t*)p + 32 * i, svreinterpret_u8_u32(x.v[i]));
}

// Copies a whole line.
static inline void stream_line(void* to, const void* from) { store_words(to, load_words(from)); }
// The same of 16 floats.
static inline void stream(float* p, Floats x) { store(p, x); }

// p[i * stride] of 16 lanes, strides in elements.
static inline Floats gather(const float* p, int64_t stride) {
  alignas(32) float line[16];
  for (int i = 0; i < 16; i++) line[i] = p[i * stride];
  return load(line);
}

// --- arithmetic --------------------------------------------------------------------------------------------------------

static inline Floats all(float x) {
  return each([&](int) { return svdup_f32(x); });
}
static inline Floats zeros() { return all(0.0f); }
static inline Words all_words(int32_t x) {
  return each_word([&](int) { return svdup_u32((uint32_t)x); });
}
static inline Floats add(Floats a, Floats b) {
  return each([&](int i) { return svadd_f32_x(all_lanes(), a.v[i], b.v[i]); });
}
static inline Floats sub(Floats a, Floats b) {
  return each([&](int i) { return svsub_f32_x(all_lanes(), a.v[i], b.v[i]); });
}
static inline Floats mul(Floats a, Floats b) {
  return each([&](int i) { return svmul_f32_x(all_lanes(), a.v[i], b.v[i]); });
}
static inline Floats div(Floats a, Floats b) {
  return each([&](int i) { return svdiv_f32_x(all_lanes(), a.v[i], b.v[i]); });
}
static inline Floats fmadd(Floats a, Floats b, Floats c) {
  return each([&](int i) { return svmla_f32_x(all_lanes(), c.v[i], a.v[i], b.v[i]); });
}
static inline Floats fnmadd(Floats a, Floats b, Floats c) {
  return each([&](int i) { return svmls_f32_x(all_lanes(), c.v[i], a.v[i], b.v[i]); });
}
// Where either is NaN, both return b.
static inline svfloat32_t max8(svfloat32_t a, svfloat32_t b) { return svsel_f32(svcmpgt_f32(all_lanes(), a, b), a, b); }
static inline Floats min(Floats a, Floats b) {
  return each([&](int i) { return svsel_f32(svcmplt_f32(all_lanes(), a.v[i], b.v[i]), a.v[i], b.v[i]); });
}
static inline Floats max(Floats a, Floats b) {
  return each([&](int i) { return max8(a.v[i], b.v[i]); });
}
static inline Floats nearest(Floats x) {
  return each([&](int i) { return svrintn_f32_x(all_lanes(), x.v[i]); });
}
static inline Mask is_wild(Floats x) {  // NaN, infinity: their difference to themselves is NaN
  return is_nan(sub(x, x));
}

// x * 2^n of whole numbers n in -126..128; 0 in other lanes than `counts`.
static inline Floats scale_by_power(Mask counts, Floats x, Floats n) {
  return each([&](int i) { return svscale_f32_z(counts.v[i], x.v[i], svcvt_s32_f32_x(all_lanes(), n.v[i])); });
}

static inline float sum(Floats x) {
  const svfloat32_t eight = svadd_f32_x(all_lanes(), x.v[0], x.v[1]);
  const svfloat32_t four = svadd_f32_x(all_lanes(), eight, svext_f32(eight, eight, 4));
  const svfloat32_t two = svadd_f32_x(all_lanes(), four, svext_f32(four, four, 2));
  return svlastb_f32(svptrue_pat_b32(SV_VL1), svadd_f32_x(all_lanes(), two, svext_f32(two, two, 1)));
}
static inline float largest(Floats x) {
  const svfloat32_t eight = max8(x.v[0], x.v[1]);
  const svfloat32_t four = max8(eight, svext_f32(eight, eight, 4));
  const svfloat32_t two = max8(four, svext_f32(four, four, 2));
  return svlastb_f32(svptrue_pat_b32(SV_VL1), max8(two, svext_f32(two, two, 1)));
}

// --- lanes' numbers ----------------------------------------------------------------------------------------------------

static inline Words no_words() { return all_words(0); }
// from + lane where the mask is set, a elsewhere.
static inline Words select_numbers(Words a, Mask mask, int from) {
  return each_word([&](int i) { return svsel_u32(mask.v[i], svindex_u32((uint32_t)(from + 8 * i), 1), a.v[i]); });
}
static inline int smallest(Mask of, Words x) {  // of no lane it is the largest number
  const int low = svminv_s32(of.v[0], svreinterpret_s32_u32(x.v[0]));
  const int high = svminv_s32(of.v[1], svreinterpret_s32_u32(x.v[1]));
  return low < high ? low : high;
}

// --- sums and transposes -----------------------------------------------------------------------------------------------

// The sums of neighbours: of a, then of b.
static inline svfloat32_t sums_of_two(svfloat32_t a, svfloat32_t b) {
  return svadd_f32_x(all_lanes(), svuzp1_f32(a, b), svuzp2_f32(a, b));
}

// The sum of each of 16 vectors, as one vector.
static inline Floats sums16(const Floats* v) {
  return each([&](int i) {
    const Floats* w = v + 8 * i;
    Floats8 two[4];
    for (int n = 0; n < 4; n++) {
      const Floats &a = w[2 * n], &b = w[2 * n + 1];
      two[n] = sums_of_two(svadd_f32_x(all_lanes(), a.v[0], a.v[1]), svadd_f32_x(all_lanes(), b.v[0], b.v[1]));
    }
    return sums_of_two(sums_of_two(two[0], two[1]), sums_of_two(two[2], two[3]));
  });
}

// Columns of 8 rows of words become rows: three times, each row is mixed with the one four below it.
static inline void transpose8(Words8* v) {
  for (int turn = 0; turn < 3; turn++) {
    Words8 mixed[8];
    for (int i = 0; i < 4; i++) {
      mixed[2 * i] = svzip1_u32(v[i], v[i + 4]);
      mixed[2 * i + 1] = svzip2_u32(v[i], v[i + 4]);
    }
    for (int i = 0; i < 8; i++) v[i] = mixed[i];
  }
}

// Columns of v become rows: 16 rows of 16 words.
static inline void transpose_words(Words* v) {
  Words8 quarters[2][2][8];  // of upper and lower rows: left and right
  for (int i = 0; i < 16; i++)
    for (int half = 0; half < 2; half++) quarters[i / 8][half][i % 8] = v[i].v[half];
  for (int half = 0; half < 2; half++) {
    transpose8(quarters[0][half]);
    transpose8(quarters[1][half]);
  }
  for (int i = 0; i < 16; i++) v[i] = {{quarters[0][i / 8][i % 8], quarters[1][i / 8][i % 8]}};
}

// v[8] = pairs of ranks, each of 16 outputs, of up to 16 ranks in bfloat16.
static inline void transpose_outputs(const bf16* b, int64_t stride, Part ranks, Words* v) {
  for (int half = 0; half < 2; half++) {
    Words8 outputs[8];
    for (int i = 0; i < 8; i++) outputs[i] = load_halves(b + (8 * half + i) * stride, ranks.n);
    transpose8(outputs);
    for (int i = 0; i < 8; i++) v[i].v[half] = outputs[i];
  }
}

// --- few bits ----------------------------------------------------------------------------------------------------------

// Byte number `byte` of each word with its sign, times a scale.
template <int byte>
static inline Floats scaled_bytes(Words words, Floats scale) {
  return each([&](int i) {
    const svint32_t first = svreinterpret_s32_u32(svlsl_n_u32_x(all_lanes(), words.v[i], 24 - 8 * byte));
    const svfloat32_t value = svcvt_f32_s32_x(all_lanes(), svasr_n_s32_x(all_lanes(), first, 24));
    return svmul_f32_x(all_lanes(), value, scale.v[i]);
  });
}

// --- eight bits --------------------------------------------------------------------------------------------------------

// Of a block and 16 outputs.
struct Scales {
  Floats scale;

  explicit Scales(const void* exponents)
      : scale(each([&](int i) {
          return as_floats(svlsl_n_u32_x(all_lanes(), svld1ub_u32(all_lanes(), (const uint8_t*)exponents + 8 * i), 23));
        })) {}
};

// The values less 128, with their signs.
struct Int8Group {
  Words values;

  explicit Int8Group(const uint8_t* bytes) {
    const Words stored = load_words(bytes);
    values = each_word([&](int i) { return sveor_n_u32_x(all_lanes(), stored.v[i], 0x80808080); });
  }
};

// The value times a power of two, which is exact.
template <int pair>
struct Int8Pair {
  const Int8Group& group;
  const Scales& of;

  Floats even() const { return scaled_bytes<2 * pair>(group.values, of.scale); }
  Floats odd() const { return scaled_bytes<2 * pair + 1>(group.values, of.scale); }
  Words words() const { return join_pairs(even(), odd()); }
};

// --- four bits ---------------------------------------------------------------------------------------------------------

// Of a block and 16 outputs.
struct Int4Scales {
  Floats scale;

  explicit Int4Scales(const void* codes)
      : scale(each([&](int i) {
          const svuint32_t code = svld1ub_u32(all_lanes(), (const uint8_t*)codes + 8 * i);
          return as_floats(svadd_n_u32_x(all_lanes(), svlsl_n_u32_x(all_lanes(), code, 21), (127 - kInt4Bias) << 23));
        })) {}
};

// Levels, a byte each: of the group's pairs 0 and 2, and of 1 and 3.
struct Int4Group {
  Words even_pairs, odd_pairs;

  explicit Int4Group(const uint8_t* values) {
    static const int8_t levels[16] = {LP_INT4_LEVELS};
    const svint8_t table = svld1rq_s8(svptrue_b8(), levels);
    for (int i = 0; i < 2; i++) {
      const svuint8_t numbers = svld1_u8(svptrue_b8(), values + 32 * i);
      even_pairs.v[i] = svreinterpret_u32_s8(svtbl_s8(table, svand_n_u8_x(svptrue_b8(), numbers, 15)));
      odd_pairs.v[i] = svreinterpret_u32_s8(svtbl_s8(table, svlsr_n_u8_x(svptrue_b8(), numbers, 4)));
    }
  }
};

// The level times the scale, which is exact.
template <int pair>
struct Int4Pair {
  const Int4Group& group;
  const Int4Scales& of;

  Floats even() const { return scaled_bytes<pair / 2>(levels(), of.scale); }
  Floats odd() const { return scaled_bytes<2 + pair / 2>(levels(), of.scale); }
  Words words() const { return join_pairs(even(), odd()); }

 private:
  const Words& levels() const { return pair % 2 == 0 ? group.even_pairs : group.odd_pairs; }
};

// --- sizes -------------------------------------------------------------------------------------------------------------

// Vectors that stay in 32 registers of half their size.
static const int kShrinkRows = 4, kShrinkRanks = 2, kShrinkRanksOfOne = 8;  // of inner products at once
static const int kScoreRows = 8;                                             // of queries, for 16 keys
static const int kWeighColumns = 2;                                          // of 16 values, for four rows
static const int kStateColumns = 2;                                          // of 16 values of a state

}  // namespace LP_ISA
}  // namespace lp
