// What is shared out among threads: packing, products with an epilogue, low-rank updates, attention.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "pool.h"
#include "prefetch.h"

extern "C" {

// The factors of one module by adapter slot, as its FactorTable keeps them. All null: the module has no table.
struct LpTable {
  const int64_t* a_ptrs;
  const int64_t* b_ptrs;
  const int32_t* ranks;
  const float* scales;
  const int64_t* gain_ptrs;  // [outputs] by slot, 0: none; of DoRA and the like
  const int64_t* shift_ptrs;
  // Of rows whose product is not the base's, by slot: [outputs][inputs], 0: none, or blocks on the diagonal of a matrix that
  // inputs are multiplied with before the base's weight, 0: none. In elements: rows of a block, and between blocks.
  const int64_t* own_ptrs;
  const int64_t* block_ptrs;
  const int64_t* block_sizes;
  const int64_t* block_strides;
};

// A step's adapters: runs of rows which use the same adapters, in row order; rows between runs use none.
struct LpRuns {
  int32_t num_runs;
  int32_t max_rank;  // the largest sum of ranks that a row of any run has in any module
  const int32_t* starts;      // [num_runs] first row
  const int32_t* ends;        // [num_runs] behind the last row
  const int32_t* first_uses;  // [num_runs + 1] into the two below
  const int32_t* slots;
  const float* weights;
};

// Spans of the step over the paged KV cache; see AttentionBatch.
struct LpSpans {
  int32_t num_spans;
  int32_t block_size;
  int64_t table_stride;
  const int64_t* query_starts;  // [num_spans + 1]
  const int64_t* context_lens;  // [num_spans]
  const int64_t* block_tables;  // [num_spans][table_stride]
  const int64_t* slots;         // [num_tokens]
};
}

namespace lp {

// Of weights in few bits, at once: they stay in a core's first cache, and are made anew for so many rows.
constexpr int64_t kWidenedBytes = 1 << 14;
constexpr int kWidenedRows = 512;
constexpr int kWidenedRowsOfFloats = 128;  // which a thread keeps; 512 are no faster with AVX2 on AMD's Zen 4
// Results of more than this are no longer in a second cache when they are read again. (The pool waits for stores past the
// caches before its next job.)
constexpr int64_t kStreamedBytes = 2 << 20;

inline const char* at(const void* base, int64_t offset, DType dtype) {
  return static_cast<const char*>(base) + offset * item_bytes(dtype);
}

inline char* at(void* base, int64_t offset, DType dtype) { return static_cast<char*>(base) + offset * item_bytes(dtype); }

// Rows in memory, `stride` elements apart.
struct Rows {
  const void* memory;
  int64_t stride;

  const char* at(int64_t row, int64_t input, DType dtype) const { return lp::at(memory, row * stride + input, dtype); }
};

inline int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

// --- products -----------------------------------------------------------------------------------------------------------

// Bands of a unit of a linear by itself.
inline int unit_of(int64_t num_outputs) { return ceil_div(num_outputs, kBand) >= 64 ? 4 : 1; }

// A weight in bands: of the product's dtype, or in few bits, of which each slab is made what the product reads.
struct Bands {
  const void* memory;
  Format format;

  const void* at(DType dtype, int64_t band, int64_t k, int64_t input) const {
    return static_cast<const char*>(memory) + band * band_bytes(format, dtype, k) + band_bytes(format, dtype, input);
  }
};

struct alignas(64) Line {
  float floats[16];
};

// A thread's copy of the rows that it multiplies with weights, as floats: made once for all chunks of a job that read them.
class WideRows {
 public:
  static WideRows& of_thread() {
    static thread_local WideRows rows;
    return rows;
  }

  static int64_t next_job() {
    static std::atomic<int64_t> num_jobs{0};
    return ++num_jobs;
  }

  // Rows begin..end of the job's x [..][k]; tiles follow each other.
  const float* of(const Kernels& kernels, int64_t job, const Rows& x, int begin, int end, int64_t k) {
    if (job != job_ || begin != begin_) {
      const size_t needed = size_t(ceil_div(k, kWideInputs)) * size_t(tile_stride(begin, end)) / 16;
      if (lines_.size() < needed) {
        lines_.clear();  // or what it held is copied
        lines_.resize(needed);
      }
      kernels.widen_rows(x.at(begin, 0, DType::BF16), x.stride, end - begin, k, tile_stride(begin, end), lines_[0].floats);
      job_ = job, begin_ = begin;
    }
    return lines_[0].floats;
  }

  static int64_t tile_stride(int begin, int end) { return int64_t(end - begin) * kWideInputs; }

 private:
  int64_t job_ = 0;  // none
  int begin_ = 0;
  std::vector<Line> lines_;
};

// Shares out x [num_rows][k] @ bands. Bands come in units of `unit`; of many rows, a chunk is several units and part of the
// rows. For each chunk it calls
//
//   find(band, row, m, prefetch)      for its bands and all its rows, before their products, to add to `prefetch` what `add`
//                                     will read; false: they need no products,
//   add(band, row, m, c, stride)      likewise, when c [m][32] is complete, to add to it,
//   epilogue(band, row, m, c, stride) last, for the units c [m][unit * 32] that begin with the bands, and at most kRows rows.
//
// Of few rows by slabs, products prefetch from the thread's queue too, if there are any.
template <class Find, class Add, class Epilogue>
void products(Pool& pool, const Kernels& kernels, DType dtype, const Rows& x, int num_rows, int64_t k, const Bands& bands,
              int num_bands, int unit, PrefetchQueues* queues, const Find& find, const Add& add,
              const Epilogue& epilogue) {
  if (num_rows <= 0) return;  // of a step that asks for no logits
  const bool many = num_rows > 2 * kRows;
  const bool is_narrow = bands.format != Format::PLAIN;
  const bool widens = is_narrow && num_rows > kRows;  // each slab once, for several blocks of rows
  const Blocking blocking = kernels.blocking(dtype);
  const bool by_slabs = !is_narrow && num_rows >= blocking.min_rows;
  const int num_units = ceil_div(num_bands, unit), enough = 4 * pool.num_threads();
  const int per_chunk = many ? unit * std::clamp(num_units / enough, 1, std::max(1, blocking.part_bands / unit)) : unit;
  const int64_t slab_bytes = widens ? kWidenedBytes : blocking.slab_bytes;
  const int64_t slab = widens || by_slabs ? std::min(k, slab_bytes / band_bytes(dtype, 1)) : k;
  const bool as_floats = (by_slabs || widens) && dtype == DType::BF16 && kernels.product_of_wide != nullptr;
  const int widened_rows = as_floats ? kWidenedRowsOfFloats : kWidenedRows;
  const int num_parts = ceil_div(num_rows, is_narrow ? widened_rows : blocking.part_rows);
  const int part_rows = ceil_div(ceil_div(num_rows, num_parts), kRows) * kRows;
  const int num_groups = ceil_div(num_bands, per_chunk), num_chunks = num_parts * num_groups;
  const int64_t stride = int64_t(unit) * kBand;
  const int64_t job = as_floats ? WideRows::next_job() : 0;
  pool.run(num_chunks, [&](int chunk, int thread) {
    static thread_local std::vector<Line> lines;
    static thread_local std::vector<Prefetch> found;  // by band, for its first product
    static thread_local std::vector<char> is_needed;  // likewise
    alignas(64) char widened[kWidenedBytes];
    const int first = chunk % num_groups * per_chunk, last = std::min(first + per_chunk, num_bands);
    const int begin = chunk / num_groups * part_rows, end = std::min(begin + part_rows, num_rows);
    const size_t needed = size_t(end - begin) * size_t(per_chunk) * kBand / 16;
    if (lines.size() < needed) lines.resize(needed);
    // Those of a unit lie one below the other, so that each is in one piece.
    const auto block = [&](int band, int row) {
      return lines[0].floats + ((band - first) / unit * (end - begin) + row - begin) * stride + (band - first) % unit * kBand;
    };
    const auto slab_of = [&](int band, int64_t i) {
      const int64_t num_bytes = band_bytes(dtype, std::min(slab, k - i));
      return Prefetch::Range{static_cast<const char*>(bands.at(dtype, band, k, i)), num_bytes / 64};
    };
    // What this thread multiplies with next.
    const auto slab_behind = [&](int band, int64_t i) {
      if (band + 1 < last) return slab_of(band + 1, i);
      if (i + slab < k) return slab_of(first, i + slab);
      const int next = pool.follower(chunk, thread, num_chunks);
      return next >= 0 ? slab_of(next % num_groups * per_chunk, 0) : Prefetch::Range{nullptr, 0};
    };
    const float* wide = nullptr;  // until a product needs it
    const int64_t tile_stride = WideRows::tile_stride(begin, end);
    found.resize(size_t(per_chunk));
    is_needed.clear();
    for (int band = first; band < last; band++) {
      Prefetch& prefetch = found[size_t(band - first)];
      prefetch.num_ranges = 0;
      is_needed.push_back(find(band, begin, end - begin, prefetch));
      if (by_slabs && blocking.takes_ranges) continue;
      prefetch.fetch_all();
      prefetch.num_ranges = 0;
    }
    for (int64_t i = 0; i < k; i += slab)
      for (int band = first; band < last; band++) {
        const int64_t inputs = std::min(slab, k - i);
        const void* weights = bands.at(dtype, band, k, i);
        if (!is_needed[size_t(band - first)]) {
          if (i + slab >= k) add(band, begin, end - begin, block(band, begin), stride);
          continue;
        }
        if (is_narrow && !widens) {
          kernels.product_narrow(dtype, bands.format, x.at(begin, 0, dtype), x.stride, end - begin, weights, k,
                                 block(band, begin), stride);
          add(band, begin, end - begin, block(band, begin), stride);
          continue;
        }
        if (as_floats && wide == nullptr)
          wide = WideRows::of_thread().of(kernels, job, x, begin, end, k);
        if (widens) {
          kernels.widen(dtype, bands.format, weights, inputs, widened);
          weights = widened;
        }
        Prefetch::Range next = by_slabs ? slab_behind(band, i) : Prefetch::Range{nullptr, 0};
        const int64_t share = ceil_div(next.num_lines, blocking.num_fetches);
        for (int row = begin; row < end; row += kRows, next.begin += 64 * share, next.num_lines -= share) {
          Prefetch more;
          Prefetch& prefetch = i == 0 && row == begin ? found[size_t(band - first)] : more;
          prefetch.weights = {next.begin, std::clamp<int64_t>(next.num_lines, 0, share)};
          if (queues != nullptr && !many && row == begin) queues->of(thread).take(band_bytes(dtype, inputs), prefetch);
          const int m = std::min(kRows, end - row);
          if (as_floats) {
            const float* tiles = wide + i / kWideInputs * tile_stride + (row - begin) * kWideInputs;
            kernels.product_of_wide(tiles, tile_stride, m, weights, inputs, i > 0, block(band, row), stride, &prefetch);
            continue;
          }
          kernels.product(dtype, x.at(row, i, dtype), x.stride, m, weights, inputs, i > 0, block(band, row), stride,
                          widens || by_slabs ? &prefetch : nullptr);
        }
        if (i + slab >= k) add(band, begin, end - begin, block(band, begin), stride);
      }
    kernels.end_products();
    for (int row = begin; row < end; row += kRows)
      for (int band = first; band < last; band += unit)
        epilogue(band, row, std::min(kRows, end - row), block(band, row), stride);
  });
}

template <class Epilogue>
void products(Pool& pool, const Kernels& kernels, DType dtype, const Rows& x, int num_rows, int64_t k, const Bands& bands,
              int num_bands, int unit, const Epilogue& epilogue) {
  products(pool, kernels, dtype, x, num_rows, k, bands, num_bands, unit, nullptr,
           [](int, int, int, Prefetch&) { return true; }, [](int, int, int, float*, int64_t) {}, epilogue);
}

// --- attention ----------------------------------------------------------------------------------------------------------

struct Pages {
  const void* k;  // [num_blocks][block_size][kv_heads][dim]
  const void* v;  // the same of v_dim
};

struct Heads {
  int num_heads, num_kv_heads, dim, v_dim;
  float scaling, softcap;
  int64_t window;
  int64_t chunk = 0;             // 0: none
  const float* sinks = nullptr;  // [num_heads]
  const float* key_bias = nullptr;  // [num_heads][bias_stride]
  int64_t bias_stride = 0;
};

// Rows of a task: as many as are fastest together, but enough tasks for all threads.
inline int attend_rows(const Pool& pool, const Kernels& kernels, DType dtype, int64_t all) {
  int rows = kernels.attend_rows(dtype);
  while (rows > 16 && all < 4 * int64_t(rows) * pool.num_threads()) rows /= 2;
  return rows;
}

// q [num_tokens][num_heads][dim], out [num_tokens][num_heads][v_dim], its tokens `out_stride` elements apart; keys and values
// are in their pages already.
inline void attend_all(Pool& pool, const Kernels& kernels, DType dtype, const void* q, void* out, int64_t out_stride,
                       const Pages& pages, const Heads& heads, const LpSpans& spans) {
  const int group = heads.num_heads / heads.num_kv_heads;
  const int part = std::min(group, 16), num_parts = ceil_div(group, part);
  const int64_t num_rows = spans.query_starts[spans.num_spans] * heads.num_heads;
  const int per_block = attend_rows(pool, kernels, dtype, num_rows) / part;
  struct Block {
    int span;
    int64_t start;
  };
  std::vector<Block> blocks;
  for (int span = 0; span < spans.num_spans; span++)
    for (int64_t start = spans.query_starts[span]; start < spans.query_starts[span + 1]; start += per_block)
      blocks.push_back({span, start});
  const int per_token = heads.num_kv_heads * num_parts;
  pool.run(int(blocks.size()) * per_token, [&](int chunk, int) {
    static thread_local std::vector<Line> scratch;
    const Block& block = blocks[blocks.size() - 1 - size_t(chunk / per_token)];  // the end of a prompt takes longest
    const int kv_head = chunk % per_token / num_parts, offset = chunk % num_parts * part;
    const int64_t query_end = spans.query_starts[block.span + 1];
    AttendTask task;
    task.num_tokens = int(std::min<int64_t>(per_block, query_end - block.start));
    task.group = std::min(part, group - offset);
    task.dim = heads.dim;
    task.v_dim = heads.v_dim;
    task.q_token_stride = int64_t(heads.num_heads) * heads.dim;
    task.out_token_stride = out_stride;
    const int64_t head = int64_t(kv_head) * group + offset;
    task.q = at(q, block.start * task.q_token_stride + head * heads.dim, dtype);
    task.out = at(out, block.start * task.out_token_stride + head * heads.v_dim, dtype);
    task.token_stride = int64_t(heads.num_kv_heads) * heads.dim;
    task.v_token_stride = int64_t(heads.num_kv_heads) * heads.v_dim;
    task.block_stride = task.token_stride * spans.block_size;
    task.v_block_stride = task.v_token_stride * spans.block_size;
    task.k = at(pages.k, int64_t(kv_head) * heads.dim, dtype);
    task.v = at(pages.v, int64_t(kv_head) * heads.v_dim, dtype);
    task.blocks = spans.block_tables + block.span * spans.table_stride;
    task.block_size = spans.block_size;
    task.first_position = spans.context_lens[block.span] - (query_end - block.start);
    task.window = heads.window;
    task.chunk = heads.chunk;
    task.sinks = heads.sinks == nullptr ? nullptr : heads.sinks + int64_t(kv_head) * group + offset;
    task.key_bias = heads.key_bias == nullptr ? nullptr : heads.key_bias + (int64_t(kv_head) * group + offset) * heads.bias_stride;
    task.bias_stride = heads.bias_stride;
    task.scaling = heads.scaling;
    task.softcap = heads.softcap;
    const size_t needed = size_t(attend_scratch(whole_dim(heads.dim))) / 16 + 1;
    if (scratch.size() < needed) scratch.resize(needed + needed / 2);
    kernels.attend(dtype, task, scratch[0].floats);
  });
}

}  // namespace lp
