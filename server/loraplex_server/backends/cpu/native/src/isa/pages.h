// How attention goes through a span's pages.
#pragma once

#include "../kernels.h"
#include "vector.h"

namespace lp {
namespace LP_ISA {

// Walks over a span's rows of keys or values, position by position.
template <class D>
class Cursor {
 public:
  typedef typename D::T T;

  static Cursor of_keys(const AttendTask& t, int64_t position) { return {t.k, t.block_stride, t.token_stride, t, position}; }

  static Cursor of_values(const AttendTask& t, int64_t position) {
    return {t.v, t.v_block_stride, t.v_token_stride, t, position};
  }

  // The row of the next position.
  const T* next() {
    if (left_ == 0) enter(++block_, 0);
    const T* row = row_;
    row_ += token_stride_, left_--;
    return row;
  }

 private:
  Cursor(const void* pages, int64_t block_stride, int64_t token_stride, const AttendTask& t, int64_t position)
      : pages_((const T*)pages), blocks_(t.blocks), block_size_(t.block_size), block_stride_(block_stride),
        token_stride_(token_stride), block_(position / t.block_size) {
    enter(block_, position % t.block_size);
  }

  void enter(int64_t block, int64_t offset) {
    row_ = pages_ + blocks_[block] * block_stride_ + offset * token_stride_;
    left_ = block_size_ - offset;
  }

  const T* pages_;
  const int64_t* blocks_;
  int64_t block_size_, block_stride_, token_stride_, block_;
  const T* row_;  // of the next position, where any are left in the block
  int64_t left_;
};

// Chunks, sinks or biases, which few models have: their code by vectors is another, so that the others' stays as it is.
static inline bool is_special(const AttendTask& t) { return t.chunk > 0 || t.sinks != nullptr || t.key_bias != nullptr; }

// The first position that a query sees, or one before position 0; none of a later query is before it.
template <bool kSpecial>
static inline int64_t first_key(const AttendTask& t, int64_t position) {
  const int64_t from = t.window > 0 ? position - t.window + 1 : 0;
  if (!kSpecial || t.chunk == 0) return from;
  const int64_t begin = position / t.chunk * t.chunk;
  return from < begin ? begin : from;
}

// The first n of a row's elements as words, at most as many as there is room for, and zeros behind them.
template <class T>
static inline Words load_first(const T* row, int n) {
  const int num_halves = n * (int)(sizeof(T) / 2);
  return num_halves >= 32 ? load_words(row) : load_words((const bf16*)row, num_halves);
}

static inline void fetch_early(const void* row, int num_bytes) {
  for (int i = 0; i < num_bytes; i += 64) fetch((const char*)row + i);
}

}  // namespace LP_ISA
}  // namespace lp
