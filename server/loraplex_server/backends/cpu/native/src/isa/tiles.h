// The tiles of AMX: how they are set up, and what brings data into their layout.
#pragma once

#include <stdint.h>

#include "vector.h"

namespace lp {
namespace LP_ISA {

#ifdef __AMX_BF16__
struct TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
};

static __thread int configured = 0;  // for what; 0 between tasks, when other code may use the tiles

static inline void load(const TileConfig& config) {
  asm volatile("" : : "r"(&config) : "memory");  // GCC 12 takes it that only the first 8 bytes are read
  _tile_loadconfig(&config);
}

// Tiles 0-3: results, 4-5: up to 32 rows of x, 6-7: 16 outputs each.
static inline void configure(int m) {
  if (configured == m) return;
  configured = m;
  alignas(64) TileConfig config = {};
  const int upper = m > 16 ? 16 : m, lower = m > 16 ? m - 16 : 1;
  config.palette = 1;
  for (int i = 0; i < 8; i++) config.bytes[i] = 64;
  config.rows[0] = config.rows[1] = config.rows[4] = (uint8_t)upper;
  config.rows[2] = config.rows[3] = config.rows[5] = (uint8_t)lower;
  config.rows[6] = config.rows[7] = 16;
  load(config);
}

// Attention's, of n queries, fewer than 16. Tiles 0-1: scores of 16 keys each, 2-3: sums of 16 columns each, 4-5: 16 keys, or 16
// columns of 32 values, 6: queries, 7: weights.
static inline void configure_few_rows(int n) {
  if (configured == kRows + n) return;
  configured = kRows + n;
  alignas(64) TileConfig config = {};
  config.palette = 1;
  for (int i = 0; i < 8; i++) config.rows[i] = 16, config.bytes[i] = 64;
  config.bytes[0] = config.bytes[1] = config.bytes[6] = (uint16_t)(4 * n);
  config.rows[2] = config.rows[3] = config.rows[7] = (uint8_t)n;
  load(config);
}

// The other way round. Tile 0: results, 4: up to 16 outputs, 6: one row of x, as a column of pairs.
static inline void configure_row(int num_outputs) {
  if (configured == -num_outputs) return;
  configured = -num_outputs;
  alignas(64) TileConfig config = {};
  config.palette = 1;
  config.rows[0] = config.rows[4] = (uint8_t)num_outputs;
  config.rows[6] = 16;
  config.bytes[0] = config.bytes[6] = 4;
  config.bytes[4] = 64;
  load(config);
}
#endif

static void end_products() {
#ifdef __AMX_BF16__
  _tile_release();
  configured = 0;
#endif
}

}  // namespace LP_ISA
}  // namespace lp
