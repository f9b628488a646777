// Low-rank updates of a group of modules that read the same rows.
#pragma once

#include "work.h"

namespace lp {

inline bool has_table(const LpTable& table) { return table.ranks != nullptr; }

// Of a run of few rows, the update is computed at once and kept: the adapter's factors are read in one go, as fast as
// memory gives them. Where many rows share the factors, the products' epilogue adds the update block by block.
constexpr int kKeptRows = 4;     // of a run
constexpr int kKeptInAll = 128;  // rows of the step up to which there is memory for it
constexpr int kPieceRows = 32;   // rows of a run that are one chunk's

// One module of a group.
struct Target {
  const LpTable* table;
  int64_t num_outputs;
};

// Rows of one run.
struct Piece {
  int run, start, end;
};

inline std::vector<Piece> pieces_of(const LpRuns& runs) {
  std::vector<Piece> pieces;
  for (int run = 0; run < runs.num_runs; run++)
    for (int start = runs.starts[run]; start < runs.ends[run]; start += kPieceRows)
      pieces.push_back({run, start, std::min(start + kPieceRows, runs.ends[run])});
  return pieces;
}

class Updates {
 public:
  // Floats that `memory` needs for groups of at most `num_modules` modules with `num_outputs` outputs in all.
  static int64_t num_floats(int64_t num_rows, int64_t max_rank, int64_t num_modules, int64_t num_outputs) {
    return num_rows * max_rank * num_modules + (num_rows <= kKeptInAll ? num_rows * num_outputs : 0);
  }

  Updates(Pool& pool, const Kernels& kernels, DType dtype, const LpRuns& runs, int num_rows, float* memory)
      : pool_(pool),
        kernels_(kernels),
        dtype_(dtype),
        runs_(runs),
        num_rows_(num_rows),
        memory_(memory),
        pieces_(pieces_of(runs)) {}

  const std::vector<Piece>& pieces() const { return pieces_; }

  // x [num_rows][k] of the next group.
  void prepare(const void* x, int64_t k, const Target* targets, int num_modules) {
    if (pieces_.empty()) return;
    targets_ = targets;
    kept_ = memory_ + int64_t(num_rows_) * runs_.max_rank * num_modules;
    starts_[0] = 0;
    for (int i = 0; i < num_modules; i++) starts_[i + 1] = starts_[i] + targets[i].num_outputs;
    stride_ = starts_[num_modules];
    const int num_pieces = int(pieces_.size());
    // Parts of a module's outputs are chunks of their own where there are few pieces; each of them computes the inner
    // product anew, which is the smaller half.
    const int num_parts = std::clamp(4 * pool_.num_threads() / (num_pieces * num_modules), 1, 8);
    pool_.run(num_pieces * num_modules * num_parts, [&](int chunk, int) {
      const int part = chunk % num_parts, module = chunk / num_parts % num_modules;
      const Piece& piece = pieces_[size_t(chunk / num_parts / num_modules)];
      if (!has_table(*targets_[module].table)) return;
      if (keeps(piece.run))
        keep(x, k, module, piece, part, num_parts);
      else
        shrink(x, k, module, piece, part, num_parts);
      kernels_.end_products();
    });
  }

  // c [m][width] += the update of a module's outputs from `output` on, for rows from `row` on.
  void add(int module, int64_t output, int width, int row, int m, float* c, int64_t c_stride) const {
    if (pieces_.empty() || !has_table(*targets_[module].table)) return;
    int run = int(std::upper_bound(runs_.ends, runs_.ends + runs_.num_runs, row) - runs_.ends);
    for (; run < runs_.num_runs && runs_.starts[run] < row + m; run++) {
      const int start = std::max(runs_.starts[run], row), end = std::min(runs_.ends[run], row + m);
      float* to = c + int64_t(start - row) * c_stride;
      if (!has_update(module, run)) continue;
      if (!keeps(run)) {
        expand(module, run, output, width, start, end - start, to, c_stride);
        continue;
      }
      for (int64_t r = 0; r < end - start; r++)
        kernels_.add_to(DType::F32, kept_ + (start + r) * stride_ + starts_[module] + output, width, to + r * c_stride);
    }
  }

  // Whether any of a run's adapters has factors in this module.
  bool has_update(int module, int run) const {
    bool found = false;
    for_uses(*targets_[module].table, run, [&](int, int, float) { found = true; });
    return found;
  }

 private:
  bool keeps(int run) const { return num_rows_ <= kKeptInAll && runs_.ends[run] - runs_.starts[run] <= kKeptRows; }

  float* inner(int module, int64_t row) const { return memory_ + (int64_t(module) * num_rows_ + row) * runs_.max_rank; }

  const void* a(const LpTable& table, int slot) const { return reinterpret_cast<const void*>(table.a_ptrs[slot]); }
  const void* b(const LpTable& table, int slot) const { return reinterpret_cast<const void*>(table.b_ptrs[slot]); }

  // Calls body(slot, rank, alpha) for each of a run's adapters that has factors in this module.
  template <class Body>
  void for_uses(const LpTable& table, int run, const Body& body) const {
    for (int use = runs_.first_uses[run]; use < runs_.first_uses[run + 1]; use++) {
      const int slot = runs_.slots[use], rank = table.ranks[slot];
      if (rank > 0) body(slot, rank, runs_.weights[use] * table.scales[slot]);
    }
  }

  // The whole update of a part of the module's outputs.
  void keep(const void* x, int64_t k, int module, const Piece& piece, int part, int num_parts) const {
    static thread_local std::vector<float> h;
    const Target& target = targets_[module];
    const int64_t width = int64_t(ceil_div(target.num_outputs, int64_t(num_parts) * kPanel)) * kPanel;
    const int64_t first = part * width, last = std::min(first + width, target.num_outputs);
    if (first >= last) return;
    const int m = piece.end - piece.start;
    float* c = kept_ + piece.start * stride_ + starts_[module] + first;
    for (int64_t r = 0; r < m; r++) std::memset(c + r * stride_, 0, size_t(last - first) * sizeof(float));
    for_uses(*target.table, piece.run, [&](int slot, int rank, float alpha) {
      if (h.size() < size_t(rank) * kPieceRows) h.resize(size_t(rank) * kPieceRows);
      kernels_.shrink(dtype_, at(x, piece.start * k, dtype_), k, m, a(*target.table, slot), k, rank, alpha, h.data(), rank);
      kernels_.expand(dtype_, h.data(), rank, m, at(b(*target.table, slot), first * rank, dtype_), rank,
                      int(last - first), c, stride_);
    });
  }

  // The inner products only, of a part of the ranks.
  void shrink(const void* x, int64_t k, int module, const Piece& piece, int part, int num_parts) const {
    const LpTable& table = *targets_[module].table;
    float* h = inner(module, piece.start);
    for_uses(table, piece.run, [&](int slot, int rank, float alpha) {
      const int width = ceil_div(rank, num_parts * 16) * 16, first = part * width, last = std::min(first + width, rank);
      if (first < last)
        kernels_.shrink(dtype_, at(x, piece.start * k, dtype_), k, piece.end - piece.start,
                        at(a(table, slot), first * k, dtype_), k, last - first, alpha, h + first, runs_.max_rank);
      h += rank;
    });
  }

  // Added up apart and then put on c at once, like what is kept: a row's sums have one order, however long its run is.
  void expand(int module, int run, int64_t output, int width, int row, int m, float* c, int64_t c_stride) const {
    static thread_local std::vector<float> sums;
    const LpTable& table = *targets_[module].table;
    const float* h = inner(module, row);
    sums.assign(size_t(m) * size_t(width), 0.0f);
    for_uses(table, run, [&](int slot, int rank, float) {
      kernels_.expand(dtype_, h, runs_.max_rank, m, at(b(table, slot), output * rank, dtype_), rank, width, sums.data(), width);
      h += rank;
    });
    for (int64_t r = 0; r < m; r++) kernels_.add_to(DType::F32, sums.data() + r * width, width, c + r * c_stride);
  }

  Pool& pool_;
  const Kernels& kernels_;
  const DType dtype_;
  const LpRuns& runs_;
  const int num_rows_;
  float* const memory_;
  const std::vector<Piece> pieces_;
  float* kept_ = nullptr;  // [rows][outputs of all modules]
  const Target* targets_ = nullptr;
  int64_t starts_[4] = {};
  int64_t stride_ = 0;
};

}  // namespace lp
