// Queue of memory to prefetch: adapters' factors, keys and values that the layers read behind the product at hand. Products
// of many rows leave memory idle, and the cores' shared cache has room for what they prefetch until it is read.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "kernels.h"

namespace lp {

class PrefetchQueue {
 public:
  void clear() {
    ranges_.clear();
    ends_.clear();
    phases_.clear();
    phase_ = 0;
    position_.store(0, std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
  }

  // Memory that the next phase of the step reads.
  void add(const void* memory, int64_t num_bytes) {
    const int64_t num_lines = (num_bytes + 63) / 64;
    if (num_lines == 0) return;
    ranges_.push_back({static_cast<const char*>(memory), num_lines});
    ends_.push_back(total() + num_lines);
  }

  // `weights`: bytes that the step's products read before the phase begins.
  void end_phase(int64_t weights) { phases_.push_back({total(), weights / 64}); }

  // The next phase begins: what it reads is not fetched any more.
  void begin_phase() {
    if (phase_ == phases_.size()) return;
    const Phase& phase = phases_[phase_++];
    next_.store(std::max(next_.load(std::memory_order_relaxed), phase.end), std::memory_order_relaxed);
    position_.store(phase.weights, std::memory_order_relaxed);
  }

  int64_t num_bytes() const { return 64 * total(); }

  // What to fetch beside a product with so many bytes of weights: as late as possible, for caches do not keep it for long.
  void take(int64_t weights, Prefetch& prefetch) {
    if (next_.load(std::memory_order_relaxed) >= total()) return;
    const int64_t num_lines = weights / 64, position = position_.fetch_add(num_lines, std::memory_order_relaxed) + num_lines;
    int64_t end = 0;
    for (size_t i = phase_; i < std::min(phase_ + kPhasesAhead, phases_.size()); i++)
      end = std::max(end, phases_[i].end - kLines * std::max<int64_t>(0, phases_[i].weights - position) / kLinesOfWeights);
    const int64_t wanted = end;
    int64_t begin = next_.load(std::memory_order_relaxed);
    do {
      if (wanted <= begin) return;
      end = std::min(wanted, begin + kMost * num_lines);
    } while (!next_.compare_exchange_weak(begin, end, std::memory_order_relaxed));
    size_t i = size_t(std::upper_bound(ends_.begin(), ends_.end(), begin) - ends_.begin());
    for (int64_t line = begin; line < end && prefetch.num_ranges < Prefetch::kMaxRanges; line = ends_[i++]) {
      const int64_t skipped = line - (ends_[i] - ranges_[i].num_lines), num_lines = std::min(end, ends_[i]) - line;
      prefetch.ranges[prefetch.num_ranges++] = {ranges_[i].begin + 64 * skipped, num_lines};
    }
  }

 private:
  struct Phase {
    int64_t end;      // of what it reads, in lines
    int64_t weights;  // before it, likewise
  };

  static constexpr size_t kPhasesAhead = 5;                  // as many as a layer has
  static constexpr int64_t kLines = 3, kLinesOfWeights = 2;  // that are fetched beside so many of weights
  static constexpr int64_t kMost = 2;                        // lines at once for each of weights

  int64_t total() const { return ends_.empty() ? 0 : ends_.back(); }

  std::vector<Prefetch::Range> ranges_;
  std::vector<int64_t> ends_;  // of the ranges, in lines
  std::vector<Phase> phases_;
  size_t phase_ = 0;                  // the next one
  std::atomic<int64_t> position_{0};  // lines of weights that products have begun with
  std::atomic<int64_t> next_{0};      // line to fetch
};

}  // namespace lp
