// Queue of memory to prefetch: adapters' factors, keys and values, and first weights, which a thread reads behind the product
// at hand. Products of many rows leave memory idle, and the caches have room for what they prefetch until it is read.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels.h"

namespace lp {

// Of one thread: what another one prefetches may be in a cache far away. Between jobs any thread may change it.
class alignas(128) PrefetchQueue {
 public:
  void clear() {
    ranges_.clear();
    ends_.clear();
    phases_.clear();
    phase_ = 0;
    position_ = next_ = 0;
  }

  // Memory that the next phase of the step reads.
  void add(const void* memory, int64_t num_bytes) {
    const int64_t num_lines = (num_bytes + 63) / 64;
    if (num_lines == 0) return;
    ranges_.push_back({static_cast<const char*>(memory), num_lines});
    ends_.push_back(total() + num_lines);
  }

  // `weights`: bytes that the thread's products read before the phase begins.
  void end_phase(int64_t weights) { phases_.push_back({total(), weights / 64}); }

  // The next phase begins: what it reads is not fetched any more.
  void begin_phase() {
    if (phase_ == phases_.size()) return;
    const Phase& phase = phases_[phase_++];
    next_ = std::max(next_, phase.end);
    position_ = phase.weights;
  }

  int64_t num_bytes() const { return 64 * total(); }

  // What to fetch beside a product with so many bytes of weights: as late as possible, for caches do not keep it for long.
  void take(int64_t weights, Prefetch& prefetch) {
    if (next_ >= total()) return;
    const int64_t num_lines = weights / 64;
    position_ += num_lines;
    int64_t end = 0;
    for (size_t i = phase_; i < std::min(phase_ + kPhasesAhead, phases_.size()); i++)
      end = std::max(end, phases_[i].end - kLines * std::max<int64_t>(0, phases_[i].weights - position_) / kLinesOfWeights);
    end = std::min(end, next_ + kMost * num_lines);
    if (end <= next_) return;
    size_t i = size_t(std::upper_bound(ends_.begin(), ends_.end(), next_) - ends_.begin());
    for (int64_t line = next_; line < end && prefetch.num_ranges < Prefetch::kMaxRanges; line = ends_[i++]) {
      const int64_t skipped = line - (ends_[i] - ranges_[i].num_lines);
      prefetch.ranges[prefetch.num_ranges++] = {ranges_[i].begin + 64 * skipped, std::min(end, ends_[i]) - line};
    }
    next_ = end;
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
  size_t phase_ = 0;      // the next one
  int64_t position_ = 0;  // lines of weights that products have begun with
  int64_t next_ = 0;      // line to fetch
};

// Of all threads of a pool.
class PrefetchQueues {
 public:
  void clear(int num_threads) {
    queues_.resize(size_t(num_threads));
    for (PrefetchQueue& queue : queues_) queue.clear();
  }

  PrefetchQueue& of(int thread) { return queues_[size_t(thread)]; }

  // `weights`: of all threads' products before the phase.
  void end_phase(int64_t weights) {
    for (PrefetchQueue& queue : queues_) queue.end_phase(weights / int64_t(queues_.size()));
  }

  void begin_phase() {
    for (PrefetchQueue& queue : queues_) queue.begin_phase();
  }

 private:
  std::vector<PrefetchQueue> queues_;
};

}  // namespace lp
