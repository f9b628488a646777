// Queue of memory to prefetch: adapters' factors, keys and values that a layer reads after the product at hand. Products of
// many rows leave memory idle, and the cores' shared cache has room for what they prefetch until it is read.
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
    next_.store(0, std::memory_order_relaxed);
  }

  void add(const void* memory, int64_t num_bytes) {
    const int64_t num_lines = (num_bytes + 63) / 64;
    if (num_lines == 0) return;
    ranges_.push_back({static_cast<const char*>(memory), num_lines});
    ends_.push_back(total() + num_lines);
  }

  // What was added since the last call is read by one phase of the layer.
  void end_phase() { phases_.push_back(total()); }

  // Phases up to this one begin, or are over: what they read is not fetched any more.
  void begin_phase(int phase) {
    if (phases_.empty()) return;
    next_.store(std::max(next_.load(std::memory_order_relaxed), phases_[size_t(phase)]), std::memory_order_relaxed);
  }

  int64_t num_bytes() const { return 64 * total(); }

  // The next ranges, of about so many bytes; threads take them in turns.
  void take(int64_t num_bytes, Prefetch& prefetch) {
    const int64_t budget = num_bytes / 64, all = total();
    if (next_.load(std::memory_order_relaxed) >= all) return;
    const int64_t begin = next_.fetch_add(budget, std::memory_order_relaxed), end = std::min(begin + budget, all);
    size_t i = size_t(std::upper_bound(ends_.begin(), ends_.end(), begin) - ends_.begin());
    for (int64_t line = begin; line < end && prefetch.num_ranges < Prefetch::kMaxRanges; line = ends_[i++]) {
      const int64_t skipped = line - (ends_[i] - ranges_[i].num_lines), num_lines = std::min(end, ends_[i]) - line;
      prefetch.ranges[prefetch.num_ranges++] = {ranges_[i].begin + 64 * skipped, num_lines};
    }
  }

 private:
  int64_t total() const { return ends_.empty() ? 0 : ends_.back(); }

  std::vector<Prefetch::Range> ranges_;
  std::vector<int64_t> ends_;    // of the ranges, in lines
  std::vector<int64_t> phases_;  // likewise
  std::atomic<int64_t> next_{0};
};

}  // namespace lp
