// How attention goes through a span's pages.
#pragma once

#include "../kernels.h"
#include "vector.h"

namespace lp {
namespace LP_ISA {

// Walks over a span's rows of keys or values, position by position.
template <class D>
struct Cursor {
  const typename D::T* pages;
  const AttendTask& task;
  int64_t block, offset;

  Cursor(const void* base, const AttendTask& t, int64_t position)
      : pages((const typename D::T*)base), task(t), block(position / t.block_size), offset(position % t.block_size) {}

  const typename D::T* row() const { return pages + task.blocks[block] * task.block_stride + offset * task.token_stride; }

  void next() {
    if (++offset == task.block_size) offset = 0, block++;
  }
};

static inline void fetch_early(const void* row, int num_bytes) {
  for (int i = 0; i < num_bytes; i += 64) _mm_prefetch((const char*)row + i, _MM_HINT_T0);
}

}  // namespace LP_ISA
}  // namespace lp
