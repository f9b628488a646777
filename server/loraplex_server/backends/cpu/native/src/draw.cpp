// Draws of tokens: temperature, top-k, top-p and min-p, and the largest score with noise. sampling/draw.py defines them.
//
// One thread draws for one row. Of a row only those blocks are read again whose largest score, or whose bound of noise,
// says that they matter; a threshold of top-p is found in bins, without a sort of the row.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels.h"
#include "pool.h"

#define LP_API __attribute__((visibility("default")))

extern "C" {

// Rows of scores and their parameters; see DrawRows.
struct LpDraws {
  int32_t num_rows;
  int64_t n, stride;     // scores of a row, and from one row to the next
  const float* scores;
  const int32_t* keys;   // [num_rows][3] of the noise
  const float* temperature;
  // Of rows that truncate, else all three are null.
  const int64_t* top_k;  // 0: off
  const double* top_p;   // 1: off
  const float* log_min_p;  // -inf: off
};

// Noise of a token by its id; see NoiseField.
struct LpNoise {
  const int32_t* mixed_ids;  // [n]
  const float *values, *slopes;  // [2 ** (32 - low_bits)] cells
  int32_t low_bits;
  float bound_slope, bound_least, bound_shift;
};
}

namespace lp {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();
// Tokens looked at first for a top-p without top-k: in most texts they hold enough of the probability.
constexpr int64_t kLikely = 64;
constexpr int64_t kWeighed = 1024;  // at once, whose weights stay in the first cache
constexpr float kBinsOfTemperature = kDrawBins / 32.0f;
// Of min-p's threshold as a score, which is rounded otherwise than its definition.
constexpr float kMargin = 1e-3f;

struct Scratch {
  std::vector<float> maxima, ordered, found, weights;
  std::vector<int32_t> bins;
  std::vector<double> masses;
};

class Row {
 public:
  Row(const Kernels& kernels, const LpDraws& draws, const LpNoise& noise, int row, Scratch& scratch)
      : kernels_(kernels), noise_(noise), scratch_(scratch), x_(draws.scores + row * draws.stride), n_(draws.n),
        num_blocks_((draws.n + kDrawBlock - 1) / kDrawBlock), key_(draws.keys + 3 * row),
        temperature_(draws.temperature[row]), top_k_(draws.top_k ? draws.top_k[row] : 0),
        top_p_(draws.top_p ? draws.top_p[row] : 1.0), log_min_p_(draws.log_min_p ? draws.log_min_p[row] : kLowest) {
    scratch_.maxima.resize(num_blocks_);
    top_ = kernels_.block_maxima(x_, n_, scratch_.maxima.data());
  }

  float top() const { return top_; }

  int64_t draw() {
    return std::isfinite(top_) ? best_of_kept(threshold()) : 0;
  }

 private:
  int64_t block_size(int64_t block) const { return std::min<int64_t>(kDrawBlock, n_ - block * kDrawBlock); }

  // The least score that top-k and top-p keep.
  float threshold() {
    if (top_k_ <= 0) return top_p_ < 1.0 ? nucleus() : kLowest;
    const float kth = kth_largest(top_k_);
    return top_p_ < 1.0 ? std::max(kth, nucleus_of_found(kth)) : kth;
  }

  // Into `found`: all scores of at least `low`.
  void find(float low) {
    scratch_.found.clear();
    for (int64_t block = 0; block < num_blocks_; block++) {
      if (scratch_.maxima[block] < low) continue;
      const float* x = x_ + block * kDrawBlock;
      for (int64_t i = 0; i < block_size(block); i++)
        if (x[i] >= low) scratch_.found.push_back(x[i]);
    }
  }

  // A score that at least k tokens reach: so many blocks do.
  float reached_by(int64_t k) {
    if (k > num_blocks_) return kLowest;
    scratch_.ordered.resize(num_blocks_);
    std::copy(scratch_.maxima.begin(), scratch_.maxima.end(), scratch_.ordered.begin());
    return nth_largest(scratch_.ordered, k);
  }

  static float nth_largest(std::vector<float>& values, int64_t k) {
    std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), std::greater<float>());
    return values[k - 1];
  }

  // Leaves in `found` all that reach it, and others.
  float kth_largest(int64_t k) {
    find(reached_by(std::min(k, n_)));
    return nth_largest(scratch_.found, std::min(k, n_));
  }

  // Top-p's threshold among the scores in `found` that reach `low`.
  float nucleus_of_found(float low) {
    auto& found = scratch_.found;
    found.erase(std::remove_if(found.begin(), found.end(), [&](float x) { return x < low; }), found.end());
    weigh_found();
    float last = low;
    reaches(0.0, top_p_ * std::accumulate(scratch_.weights.begin(), scratch_.weights.end(), 0.0), &last);
    return last;
  }

  // Sorts `found`, best first, and weighs it.
  void weigh_found() {
    auto& found = scratch_.found;
    std::sort(found.begin(), found.end(), std::greater<float>());
    scratch_.weights.resize(found.size());
    kernels_.weigh(found.data(), int64_t(found.size()), top_, temperature_, scratch_.weights.data());
  }

  // Top-p's threshold among all tokens.
  float nucleus() {
    double mass = 0.0;
    for (int64_t i = 0; i < n_; i += kWeighed)
      mass += kernels_.weigh(x_ + i, std::min(kWeighed, n_ - i), top_, temperature_, nullptr);
    const double limit = top_p_ * mass;
    float last = top_;
    if (num_blocks_ > 4 * kLikely) {
      find(reached_by(kLikely));
      weigh_found();
      if (reaches(0.0, limit, &last)) return last;
    }
    return nucleus_by_bins(limit);
  }

  // Goes through what `weigh_found` left, until what lies `before` and it have the mass. `last`: the score that reaches it.
  // False if all of them have less.
  bool reaches(double before, double limit, float* last) const {
    for (size_t i = 0; i < scratch_.found.size(); i++) {
      *last = scratch_.found[i];
      if ((before += scratch_.weights[i]) >= limit) return true;
    }
    return false;
  }

  float nucleus_by_bins(double limit) {
    const float scale = kBinsOfTemperature / temperature_;
    scratch_.masses.assign(kDrawBins, 0.0);
    scratch_.weights.resize(kWeighed);
    scratch_.bins.resize(kWeighed);
    for (int64_t start = 0; start < n_; start += kWeighed) {
      const int64_t num = std::min(kWeighed, n_ - start);
      kernels_.weigh(x_ + start, num, top_, temperature_, scratch_.weights.data());
      kernels_.sort_into_bins(x_ + start, num, top_, scale, scratch_.bins.data());
      for (int64_t i = 0; i < num; i++) scratch_.masses[scratch_.bins[i]] += scratch_.weights[i];
    }
    double before = 0.0;
    int32_t bin = 0;
    while (bin < kDrawBins - 1 && before + scratch_.masses[bin] < limit) before += scratch_.masses[bin++];
    find_in_bin(bin, scale);
    weigh_found();
    float last = kLowest;
    return reaches(before, limit, &last) ? last : kLowest;
  }

  // Into `found`: the scores of a bin.
  void find_in_bin(int32_t bin, float scale) {
    scratch_.found.clear();
    for (int64_t block = 0; block < num_blocks_; block++) {
      const float* x = x_ + block * kDrawBlock;
      kernels_.sort_into_bins(&scratch_.maxima[block], 1, top_, scale, scratch_.bins.data());
      if (scratch_.bins[0] > bin) continue;
      kernels_.sort_into_bins(x, block_size(block), top_, scale, scratch_.bins.data());
      for (int64_t i = 0; i < block_size(block); i++)
        if (scratch_.bins[i] == bin) scratch_.found.push_back(x[i]);
    }
  }

  // The token whose score over the temperature and noise are the most, the lowest of equal ones.
  int64_t best_of_kept(float threshold) {
    const float least = std::max(threshold, top_ + temperature_ * (log_min_p_ - kMargin));
    const NoiseBound bound{noise_.bound_slope, noise_.bound_least, noise_.bound_shift};
    const float scale = 1.0f / temperature_;  // the bounds' margin covers the difference to a division
    float best = kLowest;
    int64_t where = 0;
    for (int64_t block = 0; block < num_blocks_; block++) {
      if (scratch_.maxima[block] < least) continue;
      const int64_t start = block * kDrawBlock, size = block_size(block);
      if (kernels_.bound_noisy(x_ + start, noise_.mixed_ids + start, int(size), key_, bound, top_, scale) < best) continue;
      for (int64_t id = start; id < start + size; id++) {
        const float scaled = (x_[id] - top_) / temperature_;
        if (x_[id] < threshold || scaled < log_min_p_) continue;
        const float noisy = scaled + noise_of(id);
        if (noisy > best) best = noisy, where = id;
      }
    }
    return where;
  }

  float noise_of(int64_t id) const {
    int32_t hash = int32_t((uint32_t(noise_.mixed_ids[id]) ^ uint32_t(key_[0])) * uint32_t(key_[1]));
    hash ^= hash >> 15;
    const float magnitude = float(int32_t(uint32_t(hash) * uint32_t(key_[2])));
    int32_t bits;
    std::memcpy(&bits, &magnitude, sizeof(bits));
    const int64_t cell = (bits >> noise_.low_bits) + (int64_t(1) << (31 - noise_.low_bits));
    // Rounded by itself, as on every device.
    const volatile float rise = noise_.slopes[cell] * float(bits & ((1 << noise_.low_bits) - 1));
    return rise + noise_.values[cell];
  }

  const Kernels& kernels_;
  const LpNoise& noise_;
  Scratch& scratch_;
  const float* x_;
  int64_t n_, num_blocks_;
  const int32_t* key_;
  float temperature_;
  int64_t top_k_;
  double top_p_;
  float log_min_p_, top_;
};

}  // namespace
}  // namespace lp

extern "C" {

// The largest score of each row, NaN if one is, and the token that is drawn; any where the largest is not finite.
LP_API void lp_draw(lp::Pool* pool, const LpDraws* draws, const LpNoise* noise, float* tops, int64_t* token_ids) {
  const auto turn = pool->take_turn();
  pool->run(draws->num_rows, [&](int row, int) {
    static thread_local lp::Scratch scratch;
    lp::Row one(*lp::current_kernels(), *draws, *noise, row, scratch);
    tops[row] = one.top();
    token_ids[row] = one.draw();
  });
}
}
