// The softmax of attention with tiles: what a tile of scores shows, and its weights. A vector of scores is N rows, 4, 8 or 16,
// of 16 / N keys, one key behind the other; what becomes of a row is the same for any N.
#pragma once

#include "../kernels.h"
#include "pages.h"
#include "vector.h"

#ifdef __AMX_BF16__

namespace lp {
namespace LP_ISA {

// 2^x, exactly 1 of 0, and 0 where that would be too small a number for tiles (of -inf too); relative error below 5e-5, a
// fiftieth of what rounding to bfloat16 adds. What is too small is not computed at all, for that takes the CPU very long.
static inline __m512 exp2_ps(__m512 x) {
  const __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-125.0f), _CMP_NLT_UQ);  // of NaN too
  const __m512 n = _mm512_roundscale_ps(x, 8), r = _mm512_sub_ps(x, n);
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(9.6181291e-3f), r, _mm512_set1_ps(5.5504109e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4022651e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9314718e-1f));
  return _mm512_maskz_scalef_ps(counts, _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f)), n);
}

// What a tile's rows see of a block: keys [first, last) of each, counted from the block's first.
struct Sight {
  alignas(64) int32_t first[16], last[16];  // by lane of a vector of scores
  int num_keys = kAttendKeys;  // that any row sees, rounded up to 32
  bool is_whole = true;        // every row sees all of them; then nobody reads which
};

// True if all queries of a task see all keys of the block at `from`.
static inline bool sees_all(const AttendTask& t, int64_t from) {
  const int64_t last = t.first_position + t.num_tokens - 1;
  return from + kAttendKeys <= t.first_position + 1 && ((t.window == 0 && t.chunk == 0) || first_key<true>(t, last) <= from);
}

template <int N>
static Sight sight_of(const AttendTask& t, int tile, int64_t from) {
  const int num_rows = t.num_tokens * t.group;
  Sight sight;
  int lowest = kAttendKeys, highest = 0, most_first = 0, least_last = kAttendKeys;
  for (int r = 0; r < N; r++) {
    const int row = tile * 16 + r < num_rows ? tile * 16 + r : num_rows - 1;
    const int64_t position = t.first_position + row / t.group - from;
    const int64_t first = t.window > 0 || t.chunk > 0 ? first_key<true>(t, position + from) - from : 0;
    sight.first[r] = (int32_t)(first < 0 ? 0 : first > kAttendKeys ? kAttendKeys : first);
    sight.last[r] = (int32_t)(position < 0 ? 0 : position >= kAttendKeys ? kAttendKeys : position + 1);
    if (sight.first[r] < lowest) lowest = sight.first[r];
    if (sight.first[r] > most_first) most_first = sight.first[r];
    if (sight.last[r] > highest) highest = sight.last[r];
    if (sight.last[r] < least_last) least_last = sight.last[r];
  }
  for (int lane = N; lane < 16; lane++) sight.first[lane] = sight.first[lane % N], sight.last[lane] = sight.last[lane % N];
  sight.num_keys = lowest < highest ? (highest + 31) & ~31 : 0;
  sight.is_whole = most_first == 0 && least_last == sight.num_keys;
  return sight;
}

// Whether scores get their factor before the softmax takes them: what else is done to them comes behind it.
static inline bool is_scaled_early(const AttendTask& t) { return t.softcap != 0.0f || t.key_bias != nullptr; }

// A number of each row, in all lanes of the row.
template <int N>
static inline __m512 by_lane(const float* rows) {
  if (N == 4) return _mm512_broadcast_f32x4(_mm_load_ps(rows));
  if (N == 8) return _mm512_broadcast_f32x8(_mm256_load_ps(rows));
  return _mm512_load_ps(rows);
}

template <int N>
static inline void store_rows(float* rows, __m512 lanes) {
  _mm512_mask_storeu_ps(rows, (__mmask16)((1u << N) - 1), lanes);
}

static inline __m512 swap_halves(__m512 x) { return _mm512_shuffle_f32x4(x, x, 0x4e); }
static inline __m512 swap_quarters(__m512 x) { return _mm512_shuffle_f32x4(x, x, 0xb1); }  // in each half

// Each row's largest lane.
template <int N>
static inline __m512 largest_of_row(__m512 x) {
  if (N == 4) x = _mm512_max_ps(x, swap_quarters(x));
  return N < 16 ? _mm512_max_ps(x, swap_halves(x)) : x;
}

// Each row's sum of what its keys have added up by four: (0, 4, ... + 1, 5, ...) + (2, 6, ... + 3, 7, ...) for any N.
template <int N>
static inline __m512 sum_of_row(const __m512* parts) {
  if (N == 16) return _mm512_add_ps(_mm512_add_ps(parts[0], parts[1]), _mm512_add_ps(parts[2], parts[3]));
  if (N == 8)
    return _mm512_add_ps(_mm512_add_ps(parts[0], swap_halves(parts[0])), _mm512_add_ps(parts[1], swap_halves(parts[1])));
  const __m512 pairs = _mm512_add_ps(parts[0], swap_quarters(parts[0]));
  return _mm512_add_ps(pairs, swap_halves(pairs));
}

// Biases of a tile's rows by the keys of a block.
struct Biases {
  const float* first;  // of the first row's head, at the block's first key; null: none
  __m512i places;      // where those of each lane are from there on
  bool is_one;         // all lanes have one head and one key

  Biases(const AttendTask& t, int n, int tile, int64_t from)
      : first(t.key_bias == nullptr ? nullptr : t.key_bias + from), places(_mm512_setzero_si512()), is_one(t.group == 1 && n == 16) {
    if (first == nullptr) return;
    alignas(64) int32_t at[16];
    for (int lane = 0; lane < 16; lane++) at[lane] = (int32_t)((tile * 16 + lane % n) % t.group * t.bias_stride + lane / n);
    places = _mm512_load_si512(at);
  }

  __m512 of(int key) const {
    return is_one ? _mm512_set1_ps(first[key]) : _mm512_i32gather_ps(places, first + key, 4);
  }
};

// Scales, caps, biases and hides scores as needed, and returns each row's largest.
template <int N>
static __m512 largest_scores(const AttendTask& t, const Sight& sight, int tile, int64_t from, float* scores) {
  const __m512 none = _mm512_set1_ps(-__builtin_inff());
  __m512 top[4] = {none, none, none, none};
  const int num_vectors = sight.num_keys * N / 16;  // a multiple of 8
  if (!is_scaled_early(t) && sight.is_whole) {
    for (int i = 0; i < num_vectors; i += 4)
      for (int j = 0; j < 4; j++) top[j] = _mm512_max_ps(top[j], _mm512_load_ps(scores + (i + j) * 16));
  } else {
    const Biases biases(t, N, tile, from);
    alignas(64) int32_t keys[16];
    for (int lane = 0; lane < 16; lane++) keys[lane] = lane / N;
    const __m512i of_lane = _mm512_load_si512(keys);
    const __m512i first = _mm512_sub_epi32(_mm512_load_si512(sight.first), of_lane);
    const __m512i last = _mm512_sub_epi32(_mm512_load_si512(sight.last), of_lane);
    for (int i = 0; i < num_vectors; i += 4)
      for (int j = 0; j < 4; j++) {
        const int key = (i + j) * (16 / N);
        __m512 s = _mm512_load_ps(scores + (i + j) * 16);
        if (t.softcap != 0.0f) {
          const __m512 cap = _mm512_set1_ps(t.softcap);
          s = _mm512_mul_ps(tanh_ps(_mm512_div_ps(_mm512_mul_ps(s, _mm512_set1_ps(t.scaling)), cap)), cap);
        }
        if (biases.first != nullptr) {
          if (t.softcap == 0.0f) s = _mm512_mul_ps(s, _mm512_set1_ps(t.scaling));
          s = _mm512_add_ps(s, biases.of(key));
        }
        if (!sight.is_whole) {
          const __m512i at = _mm512_set1_epi32(key);
          s = _mm512_mask_mov_ps(none, _mm512_cmple_epi32_mask(first, at) & _mm512_cmpgt_epi32_mask(last, at), s);
        }
        _mm512_store_ps(scores + (i + j) * 16, s);
        top[j] = _mm512_max_ps(top[j], s);
      }
  }
  return largest_of_row<N>(_mm512_max_ps(_mm512_max_ps(top[0], top[1]), _mm512_max_ps(top[2], top[3])));
}

// p[N][32 keys] of vectors of pairs: the weights of 32 / N keys each, N rows of one key behind the other; of 16 rows, each
// lane a row's weights of two keys.
template <int N>
static inline void store_weights(__m512i* v, bf16* p) {
  if (N == 16) {
    transpose_words(v);
  } else {
    alignas(64) int16_t places[32];
    for (int i = 0; i < 32; i++) places[i] = (int16_t)(i % (32 / N) * N + i / (32 / N));
    const __m512i by_row = _mm512_load_si512(places);
    for (int i = 0; i < N; i++) v[i] = _mm512_permutexvar_epi16(by_row, v[i]);
    for (int i = 0; N == 8 && i < N; i += 2) {  // rows of even numbers and of odd ones
      const __m512i even = _mm512_unpacklo_epi64(v[i], v[i + 1]), odd = _mm512_unpackhi_epi64(v[i], v[i + 1]);
      v[i] = even, v[i + 1] = odd;
    }
    constexpr int kStep = N / 4;
    for (int i = 0; i < kStep; i++) transpose_quarters(v[i], v[i + kStep], v[i + 2 * kStep], v[i + 3 * kStep]);
  }
  for (int r = 0; r < N; r++) _mm512_store_si512(p + r * 32, v[r]);
}

// Turns scores into weights p, relative to each row's largest score so far. Returns by how much what was added up before
// them shrinks.
template <int N>
static __m512 soften_tile(const AttendTask& t, const Sight& sight, int tile, int64_t from, float* scores, float* top, float* total,
                          bf16* p) {
  const __m512 none = _mm512_set1_ps(-__builtin_inff()), log2e = _mm512_set1_ps(1.44269504f);
  const __m512 factor = is_scaled_early(t) ? log2e : _mm512_mul_ps(log2e, _mm512_set1_ps(t.scaling));
  const __m512 before = by_lane<N>(top), now = _mm512_max_ps(before, largest_scores<N>(t, sight, tile, from, scores));
  // A row that has seen nothing yet: its scores are all -inf, and no difference to that is a number.
  const __mmask16 is_new = _mm512_cmp_ps_mask(now, none, _CMP_EQ_OQ);
  const __m512 shift = _mm512_mask_mov_ps(_mm512_mul_ps(now, factor), is_new, _mm512_setzero_ps());
  const __m512 shrinks = exp2_ps(_mm512_sub_ps(_mm512_mul_ps(before, factor), shift));
  const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                         20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  constexpr int kParts = N / 4;
  __m512 parts[kParts];
  for (int i = 0; i < kParts; i++) parts[i] = _mm512_setzero_ps();
  for (int i = 0; i < sight.num_keys; i += 32) {
    __m512i v[N];
    for (int j = 0; j < N; j++) {
      const float* two = scores + i * N + 32 * j;
      const __m512 a = exp2_ps(_mm512_fmsub_ps(_mm512_load_ps(two), factor, shift));
      const __m512 b = exp2_ps(_mm512_fmsub_ps(_mm512_load_ps(two + 16), factor, shift));
      parts[2 * j % kParts] = _mm512_add_ps(parts[2 * j % kParts], a);
      parts[(2 * j + 1) % kParts] = _mm512_add_ps(parts[(2 * j + 1) % kParts], b);
      v[j] = (__m512i)_mm512_cvtne2ps_pbh(b, a);
      if (N == 16) v[j] = _mm512_permutexvar_epi16(pairs, v[j]);
    }
    store_weights<N>(v, p + i * 16);
  }
  store_rows<N>(top, now);
  store_rows<N>(total, _mm512_fmadd_ps(by_lane<N>(total), shrinks, sum_of_row<N>(parts)));
  return shrinks;
}

}  // namespace LP_ISA
}  // namespace lp
#endif
