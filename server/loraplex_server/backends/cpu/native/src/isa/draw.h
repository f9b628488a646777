// Passes over a row of scores that a draw needs: maxima of blocks, weights, bounds of noise.
#pragma once

#include <cstring>

#include "../kernels.h"
#include "vector.h"

namespace lp {
namespace LP_ISA {

static float block_maxima(const float* x, int64_t n, float* maxima) {
  const Floats lowest = all(-__builtin_inff());
  Floats top = lowest;
  Mask nan = nowhere();
  for (int64_t start = 0; start < n; start += kDrawBlock) {
    const int64_t end = start + kDrawBlock < n ? start + kDrawBlock : n;
    Floats found = lowest;
    for (int64_t i = start; i < end; i += 16) {
      const Part part = first((int)(end - i > 16 ? 16 : end - i));
      const Floats v = select(lowest, lanes(part), load(x + i, part));
      nan = either(nan, is_nan(v));
      found = max(found, v);
    }
    maxima[start / kDrawBlock] = largest(found);
    top = max(top, found);
  }
  return any(nan) ? __builtin_nanf("") : largest(top);
}

static float weigh(const float* x, int64_t n, float top, float temperature, float* weights) {
  Floats total = zeros();
  for (int64_t i = 0; i < n; i += 16) {
    const Part part = first((int)(n - i > 16 ? 16 : n - i));
    const Floats weight = exp_ps(div(sub(load(x + i, part), all(top)), all(temperature)));
    const Floats counted = select(zeros(), lanes(part), weight);
    if (weights != nullptr) store(weights + i, counted, part);
    total = add(total, counted);
  }
  return sum(total);
}

// Plain C from here on: integers have no vectors of their own in vector.h, and compilers see through these loops.

static void sort_into_bins(const float* x, int64_t n, float top, float scale, int32_t* bins) {
  for (int64_t i = 0; i < n; i++) {
    const float far = (top - x[i]) * scale;
    bins[i] = (int32_t)(far < kDrawBins - 1 ? far : kDrawBins - 1);
  }
}

static float bound_noisy(const float* x, const int32_t* mixed_ids, int n, const int32_t* key, const NoiseBound& bound,
                         float top, float scale) {
  const uint32_t flip = (uint32_t)key[0], first_factor = (uint32_t)key[1], second_factor = (uint32_t)key[2];
  float best[16];
  for (int j = 0; j < 16; j++) best[j] = -__builtin_inff();
  const auto add_lanes = [&](const float* scores, const int32_t* ids) {
    for (int j = 0; j < 16; j++) {
      int32_t hash = (int32_t)(((uint32_t)ids[j] ^ flip) * first_factor);
      hash ^= hash >> 15;
      const float magnitude = (float)(int32_t)((uint32_t)hash * second_factor);
      int32_t bits;
      std::memcpy(&bits, &magnitude, sizeof(bits));
      float noise = (float)bits * bound.slope;
      noise = noise > bound.least ? noise : bound.least;
      const float v = noise + (scores[j] - top) * scale;
      best[j] = v > best[j] ? v : best[j];
    }
  };
  int i = 0;
  for (; i + 16 <= n; i += 16) add_lanes(x + i, mixed_ids + i);
  if (i < n) {
    float scores[16];
    int32_t ids[16] = {};
    for (int j = 0; j < 16; j++) scores[j] = -__builtin_inff();
    std::memcpy(scores, x + i, sizeof(float) * (n - i));
    std::memcpy(ids, mixed_ids + i, sizeof(int32_t) * (n - i));
    add_lanes(scores, ids);
  }
  float found = best[0];
  for (int j = 1; j < 16; j++) found = best[j] > found ? best[j] : found;
  return found + bound.shift;
}

}  // namespace LP_ISA
}  // namespace lp
