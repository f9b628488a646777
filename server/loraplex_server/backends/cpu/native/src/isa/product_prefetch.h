// What a product prefetches while it multiplies, a few lines in each of its turns.
#pragma once

#include "../kernels.h"
#include "vector.h"

namespace lp {
namespace LP_ISA {

// Lines of weights and of anything else, a few in each turn: AMD's Zen 4 drops prefetches that it cannot begin with.
class TurnPrefetch {
 public:
  TurnPrefetch(Prefetch::Range weights, const Prefetch* others, int64_t num_turns)
      : weights_(weights), num_weights_(share(weights.num_lines, num_turns)) {
    if (others == nullptr || others->num_ranges == 0) return;
    int64_t all = 0;
    for (int i = 0; i < others->num_ranges; i++) all += others->ranges[i].num_lines;
    next_ = others->ranges, end_ = next_ + others->num_ranges, other_ = *next_++;
    num_others_ = share(all, num_turns);
  }

  void take_weights() {
    for (int line = 0; line < num_weights_; line++, weights_.begin += 64) fetch_line(weights_.begin);
    weights_.num_lines -= num_weights_;
    if (weights_.num_lines <= 0) num_weights_ = 0;
  }

  void take_others() {
    for (int line = 0; line < num_others_; line++, other_.begin += 64, other_.num_lines--) {
      if (other_.num_lines == 0) {
        if (next_ == end_) {
          num_others_ = 0;
          return;
        }
        other_ = *next_++;
      }
      fetch_line(other_.begin);
    }
  }

 private:
  static int share(int64_t num_lines, int64_t num_turns) { return (int)((num_lines + num_turns - 1) / num_turns); }

  Prefetch::Range weights_;
  int num_weights_;     // of a turn
  int num_others_ = 0;  // likewise
  Prefetch::Range other_{nullptr, 0};
  const Prefetch::Range *next_ = nullptr, *end_ = nullptr;
};

}  // namespace LP_ISA
}  // namespace lp
