// AMX tiles in software, for tests of the kernels that use them on a CPU without AMX: the compiler includes this in front of
// every source. Sums are in the order of Intel's manual (TDPBF16PS), and shapes that the CPU would refuse
// end the program.
#pragma once

#define LP_EMULATES_TILES 1

#ifdef __AMX_BF16__
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>

namespace emulated_tiles {

struct Config {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
};

static __thread Config config;  // palette 0: none
alignas(64) static __thread uint8_t tiles[8][16][64];

static inline void demand(bool holds) {
  if (!holds) abort();
}

static inline void clear(int tile) { __builtin_memset(tiles[tile], 0, sizeof tiles[tile]); }

static inline void load_config(const void* from) {
  asm volatile("" : : : "memory");
  __builtin_memcpy(&config, from, sizeof config);
  demand(config.palette == 1 && config.start_row == 0);
  for (int i = 0; i < 16; i++) demand(i < 8 ? config.rows[i] <= 16 && config.bytes[i] <= 64 : config.rows[i] == 0 && config.bytes[i] == 0);
  for (int i = 0; i < 8; i++) clear(i);
}

static inline void release() { config.palette = 0; }

static inline void zero(int tile) {
  demand(config.palette == 1);
  clear(tile);
}

static inline void load(int tile, const void* from, int64_t stride) {
  demand(config.palette == 1 && config.rows[tile] > 0 && config.bytes[tile] > 0);
  asm volatile("" : : : "memory");
  clear(tile);
  for (int row = 0; row < config.rows[tile]; row++)
    __builtin_memcpy(tiles[tile][row], (const char*)from + row * stride, config.bytes[tile]);
}

static inline void store(int tile, void* to, int64_t stride) {
  demand(config.palette == 1 && config.rows[tile] > 0 && config.bytes[tile] > 0);
  for (int row = 0; row < config.rows[tile]; row++)
    __builtin_memcpy((char*)to + row * stride, tiles[tile][row], config.bytes[tile]);
  asm volatile("" : : : "memory");
}

static inline __m512 even(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
static inline __m512 odd(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)));
}

__attribute__((noinline)) static void dot(int sums, int a, int b) {
  demand(config.palette == 1 && config.rows[sums] > 0 && config.bytes[sums] > 0 && config.bytes[a] > 0);
  demand(config.rows[a] == config.rows[sums] && config.bytes[b] == config.bytes[sums] && config.bytes[a] == 4 * config.rows[b]);
  demand(config.bytes[sums] % 4 == 0);
  const unsigned kept = _mm_getcsr();
  _mm_setcsr((kept & ~0x6000u) | 0x8040u);  // nearest; what is smaller than the smallest normal number is 0
  asm volatile("" : : : "memory");
  const __mmask16 columns = (__mmask16)((1u << config.bytes[sums] / 4) - 1);
  for (int row = 0; row < config.rows[sums]; row++) {
    __m512 evens = _mm512_setzero_ps(), odds = _mm512_setzero_ps();
    for (int pair = 0; pair < config.bytes[a] / 4; pair++) {
      int32_t two;
      __builtin_memcpy(&two, tiles[a][row] + 4 * pair, 4);
      const __m512i x = _mm512_set1_epi32(two), y = _mm512_loadu_si512(tiles[b][pair]);
      evens = _mm512_fmadd_ps(even(x), even(y), evens);
      odds = _mm512_fmadd_ps(odd(x), odd(y), odds);
    }
    float* to = (float*)tiles[sums][row];
    _mm512_mask_storeu_ps(to, columns, _mm512_add_ps(_mm512_loadu_ps(to), _mm512_add_ps(evens, odds)));
  }
  asm volatile("" : : : "memory");
  _mm_setcsr(kept);
}

}  // namespace emulated_tiles

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated_tiles::load_config
#define _tile_release emulated_tiles::release
#define _tile_zero emulated_tiles::zero
#define _tile_loadd emulated_tiles::load
#define _tile_stored emulated_tiles::store
#define _tile_dpbf16ps emulated_tiles::dot
#endif
