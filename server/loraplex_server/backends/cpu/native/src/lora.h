// Low-rank updates of a group of modules that read the same rows.
#pragma once

#include <array>

#include "parallel.h"

namespace lp {

inline bool has_table(const LpTable& table) { return table.ranks != nullptr; }

// Of a run of few rows, the update is computed at once and kept: the adapter's factors are read in one go, as fast as
// memory gives them. Where many rows share the factors, the inner products are kept, and the update is added to each band of
// a product for itself.
constexpr int kKeptRows = 4;     // of a run
constexpr int kKeptInAll = 128;  // rows of the step up to which there is memory for it
constexpr int kPieceRows = 32;   // most rows of a run that are one chunk's

// One module of a group, which has no more than so many.
constexpr int kMaxModules = 4;

struct Target {
  const LpTable* table;
  int64_t num_outputs;
};

// Rows of one run.
struct Piece {
  int run, start, end;
};

inline std::vector<Piece> pieces_of(const LpRuns& runs, int most = kPieceRows) {
  std::vector<Piece> pieces;
  for (int run = 0; run < runs.num_runs; run++)
    for (int start = runs.starts[run]; start < runs.ends[run]; start += most)
      pieces.push_back({run, start, std::min(start + most, runs.ends[run])});
  return pieces;
}

// A run's adapter, where it has more than low-rank terms: mixtures have nothing else.
inline int slot_of(const LpRuns& runs, int run) { return runs.slots[runs.first_uses[run]]; }

// The same by row, -1: none. Empty of a step without adapters.
inline std::vector<int> slots_of(const LpRuns& runs, int num_rows) {
  std::vector<int> slots(runs.num_runs > 0 ? size_t(num_rows) : 0, -1);
  for (int run = 0; run < runs.num_runs; run++)
    std::fill(slots.begin() + runs.starts[run], slots.begin() + runs.ends[run], slot_of(runs, run));
  return slots;
}

class Updates {
 public:
  // Floats that `memory` needs for groups of at most `num_modules` modules with `num_outputs` outputs in all.
  static int64_t num_floats(int64_t num_rows, int64_t max_rank, int64_t num_modules, int64_t num_outputs) {
    return num_rows * max_rank * num_modules + (num_rows <= kKeptInAll ? num_rows * (num_outputs + num_modules * kPanel) : 0);
  }

  Updates(Pool& pool, const Kernels& kernels, DType dtype, const LpRuns& runs, int num_rows, float* memory)
      : pool_(pool),
        kernels_(kernels),
        dtype_(dtype),
        runs_(runs),
        num_rows_(num_rows),
        memory_(memory),
        pieces_(pieces_of(runs, std::clamp(ceil_div(num_rows, 16 * pool.num_threads()) * 4, 4, kPieceRows))),  // 4 a thread
        keeps_(num_rows <= std::min(kKeptInAll, kernels.blocking(dtype).kept_rows)) {}

  // x [num_rows][k] of the next group.
  void prepare(const Rows& x, int64_t k, const Target* targets, int num_modules) {
    if (pieces_.empty()) return;
    targets_ = targets;
    updates_ = memory_ + int64_t(num_rows_) * runs_.max_rank * num_modules;
    starts_[0] = 0;
    for (int i = 0; i < num_modules; i++) starts_[i + 1] = starts_[i] + ceil_div(targets[i].num_outputs, kPanel);
    for (int i = 0; i < num_modules; i++) find_updates(i);
    for (int i = 0; i < num_modules; i++) find_rescaled(i);
    const Chunks chunks(*this, num_modules);
    pool_.run(chunks.num(), [&](int chunk, int) {
      const auto [idx, group, part] = chunks.at(chunk);
      const Piece& piece = pieces_[size_t(idx)];
      const int at_once = chunks.at_once, num_parts = chunks.num_parts;
      for (int module = group * at_once; module < (group + 1) * at_once; module++) {
        if (!has_table(*targets_[module].table)) continue;
        if (keeps(piece.run))
          keep(x, k, module, piece, part, num_parts);
        else
          shrink(x, k, module, piece, part, num_parts);
      }
      kernels_.end_products();
    });
  }

  // What `add` will read for these rows, from the other core or from memory: to be fetched while their product is computed.
  void find(int module, int64_t output, int64_t width, int row, int m, Prefetch& prefetch) const {
    if (pieces_.empty()) return;
    for (const Kept& kept : of_rows(kept_[module], row, m))
      for (int64_t o = output; o < output + width; o += kPanel) {
        const int start = std::max(kept.start, row), end = std::min(kept.end, row + m);
        prefetch.add(kept_update(module, o, start), (end - start) * kPanel * int64_t(sizeof(float)));
      }
    for (const Use& use : of_rows(uses_[module], row, m))
      prefetch.add(at(use.b, output * use.rank, dtype_), width * use.rank * item_bytes(dtype_));
  }

  // c [m][width] += the update of a module's outputs from `output` on, for rows from `row` on.
  void add(int module, int64_t output, int width, int row, int m, float* c, int64_t c_stride) const {
    if (pieces_.empty()) return;
    for (const Kept& kept : of_rows(kept_[module], row, m)) {
      const int start = std::max(kept.start, row), end = std::min(kept.end, row + m);
      for (int i = 0; i < width; i += kPanel)
        kernels_.add_rows(DType::F32, kept_update(module, output + i, start), kPanel, end - start, std::min(width - i, kPanel),
                          c + int64_t(start - row) * c_stride + i, c_stride);
    }
    const auto uses = of_rows(uses_[module], row, m);
    if (uses.begin() != uses.end())
      kernels_.expand_uses(dtype_, uses.begin(), int(uses.end() - uses.begin()), runs_.max_rank, row, m, output, width, c,
                           c_stride);
  }

  // c [m][width] = gain * c + shift: a module's outputs from `output` on, for rows from `row` on whose adapter has these.
  void rescale(int module, int64_t output, int width, int row, int m, float* c, int64_t c_stride) const {
    if (pieces_.empty()) return;
    static thread_local std::vector<float> gains;
    for (const Rescaled& rescaled : of_rows(rescaled_[module], row, m)) {
      const int start = std::max(rescaled.start, row), end = std::min(rescaled.end, row + m);
      const LpTable& table = *targets_[module].table;
      const int slot = slot_of(runs_, rescaled.run);
      const void* gain = reinterpret_cast<const void*>(table.gain_ptrs[slot]);
      const void* shift = reinterpret_cast<const void*>(table.shift_ptrs[slot]);
      if (gain != nullptr) {
        gains.assign(size_t(width), 0.0f);
        kernels_.add_bias(dtype_, at(gain, output, dtype_), width, gains.data());
      }
      for (int r = start - row; r < end - row; r++) {
        float* to = c + r * c_stride;
        for (int i = 0; gain != nullptr && i < width; i++) to[i] *= gains[size_t(i)];
        if (shift != nullptr) kernels_.add_bias(dtype_, at(shift, output, dtype_), width, to);
      }
    }
  }

  // The factors that inner products of a group of modules with k inputs read, each for the thread that reads it.
  void add_factors(const Target* targets, int num_modules, int64_t k, PrefetchQueues& queues) const {
    if (pieces_.empty()) return;
    const Chunks chunks(*this, num_modules);
    std::vector<std::array<int, 3>> last(size_t(num_modules), {-1, -1, -1});  // run, part and thread, by module
    for (int chunk = 0; chunk < chunks.num(); chunk++) {
      const auto [idx, group, part] = chunks.at(chunk);
      const int run = pieces_[size_t(idx)].run, thread = pool_.owner(chunk, chunks.num());
      for (int module = group * chunks.at_once; module < (group + 1) * chunks.at_once; module++) {
        const std::array<int, 3> key{run, part, thread};
        if (!has_table(*targets[module].table) || last[size_t(module)] == key) continue;
        last[size_t(module)] = key;
        for_uses(*targets[module].table, run, [&](int slot, int rank, float) {
          const auto [first, end] = keeps(key[0]) ? std::make_pair(0, rank) : ranks_of(rank, key[1], chunks.num_parts);
          if (first < end)
            queues.of(key[2]).add(at(a(*targets[module].table, slot), first * k, dtype_), (end - first) * k * item_bytes(dtype_));
        });
      }
    }
  }

  // Whether any of a run's adapters has factors in this module.
  bool has_update(int module, int run) const {
    bool found = false;
    for_uses(*targets_[module].table, run, [&](int, int, float) { found = true; });
    return found;
  }

 private:
  // The chunks of inner products. Parts of a module's outputs are chunks of their own where there are few pieces; each of
  // them computes the inner product anew, which is the smaller half. Of many rows, all modules read a piece while it is
  // cached.
  struct Chunks {
    Chunks(const Updates& updates, int num_modules)
        : num_pieces(int(updates.pieces_.size())),
          num_parts(std::clamp(4 * updates.pool_.num_threads() / (num_pieces * num_modules), 1, 8)),
          at_once(updates.num_rows_ > kKeptInAll ? num_modules : 1),
          num_groups(num_modules / at_once) {}

    int num() const { return num_pieces * num_groups * num_parts; }

    // The piece, the group of modules and the part.
    std::array<int, 3> at(int chunk) const {
      return {chunk / num_parts / num_groups, chunk / num_parts % num_groups, chunk % num_parts};
    }

    const int num_pieces, num_parts, at_once, num_groups;
  };

  // Rows whose updates of a module are kept.
  struct Kept {
    int start, end;
  };

  struct Rescaled {
    int run, start, end;
  };

  // Some of a vector.
  template <class T>
  struct Part {
    const T *first, *last;
    const T* begin() const { return first; }
    const T* end() const { return last; }
  };

  // Those that rows from `row` on are of. All are in the order of rows.
  template <class T>
  static Part<T> of_rows(const std::vector<T>& all, int row, int m) {
    const auto first = std::partition_point(all.begin(), all.end(), [=](const T& one) { return one.end <= row; });
    const auto last = std::partition_point(first, all.end(), [=](const T& one) { return one.start < row + m; });
    return {all.data() + (first - all.begin()), all.data() + (last - all.begin())};
  }

  void find_updates(int module) {
    kept_[module].clear();
    uses_[module].clear();
    const LpTable& table = *targets_[module].table;
    if (!has_table(table)) return;
    for (int run = 0; run < runs_.num_runs; run++) {
      const int start = runs_.starts[run], end = runs_.ends[run];
      if (!keeps(run)) {
        int before = 0;
        for_uses(table, run, [&](int slot, int rank, float) {
          uses_[module].push_back({inner(module, start, before), b(table, slot), rank, start, end, before > 0});
          before += rank;
        });
      } else if (has_update(module, run)) {
        if (!kept_[module].empty() && kept_[module].back().end == start)
          kept_[module].back().end = end;
        else
          kept_[module].push_back({start, end});
      }
    }
  }

  void find_rescaled(int module) {
    rescaled_[module].clear();
    const LpTable& table = *targets_[module].table;
    if (!has_table(table) || table.gain_ptrs == nullptr) return;
    for (int run = 0; run < runs_.num_runs; run++) {
      const int slot = slot_of(runs_, run);
      if (table.gain_ptrs[slot] != 0 || table.shift_ptrs[slot] != 0)
        rescaled_[module].push_back({run, runs_.starts[run], runs_.ends[run]});
    }
  }

  bool keeps(int run) const { return keeps_ && runs_.ends[run] - runs_.starts[run] <= kKeptRows; }

  // Kept updates of a row and those below it, of the 16 outputs from one on.
  float* kept_update(int module, int64_t output, int64_t row) const {
    return updates_ + ((starts_[module] + output / kPanel) * num_rows_ + row) * kPanel;
  }

  // A row's inner products, from one on.
  void* inner(int module, int64_t row, int rank) const {
    char* first = reinterpret_cast<char*>(memory_ + (int64_t(module) * num_rows_ + row) * runs_.max_rank);
    return first + int64_t(rank) * kernels_.term_bytes(dtype_);
  }

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

  // Inner products of m rows of x, from one on, with an adapter's factors, as `expand` reads them.
  void multiply(const Rows& x, int first, int64_t k, int m, const void* a, int rank, float alpha, void* h, int64_t h_stride) const {
    static thread_local std::vector<float> products;
    if (products.size() < size_t(m) * size_t(rank)) products.resize(size_t(m) * size_t(rank));
    kernels_.shrink(dtype_, x.at(first, 0, dtype_), x.stride, m, a, k, rank, alpha, products.data(), rank);
    kernels_.split(dtype_, products.data(), rank, m, rank, h, h_stride);
  }

  // The whole update of a part of the module's outputs.
  void keep(const Rows& x, int64_t k, int module, const Piece& piece, int part, int num_parts) const {
    static thread_local std::vector<float> h;
    const Target& target = targets_[module];
    const int64_t width = int64_t(ceil_div(target.num_outputs, int64_t(num_parts) * kPanel)) * kPanel;
    const int64_t first = part * width, last = std::min(first + width, target.num_outputs);
    if (first >= last) return;
    const int m = piece.end - piece.start;
    float* c = kept_update(module, first, piece.start);
    bool adds = false;
    for_uses(*target.table, piece.run, [&](int slot, int rank, float alpha) {
      if (h.size() < size_t(m) * size_t(rank)) h.resize(size_t(m) * size_t(rank));
      multiply(x, piece.start, k, m, a(*target.table, slot), rank, alpha, h.data(), rank);
      kernels_.expand(dtype_, h.data(), rank, m, at(b(*target.table, slot), first * rank, dtype_), rank, int(last - first),
                      adds, c, kPanel, int64_t(num_rows_) * kPanel);
      adds = true;
    });
  }

  // The first rank of a part of an adapter's, and the one behind it; none where the first is not less.
  static std::pair<int, int> ranks_of(int rank, int part, int num_parts) {
    const int width = ceil_div(rank, num_parts * 16) * 16;
    return {part * width, std::min((part + 1) * width, rank)};
  }

  // The inner products only, of a part of the ranks.
  void shrink(const Rows& x, int64_t k, int module, const Piece& piece, int part, int num_parts) const {
    const LpTable& table = *targets_[module].table;
    int before = 0;
    for_uses(table, piece.run, [&](int slot, int rank, float alpha) {
      const auto [first, last] = ranks_of(rank, part, num_parts);
      if (first < last)
        multiply(x, piece.start, k, piece.end - piece.start, at(a(table, slot), first * k, dtype_),
                 last - first, alpha, inner(module, piece.start, before + first), runs_.max_rank);
      before += rank;
    });
  }

  Pool& pool_;
  const Kernels& kernels_;
  const DType dtype_;
  const LpRuns& runs_;
  const int num_rows_;
  float* const memory_;
  const std::vector<Piece> pieces_;
  const bool keeps_;
  float* updates_ = nullptr;  // kept ones, by 16 outputs of all modules: [rows][16]
  const Target* targets_ = nullptr;
  std::vector<Kept> kept_[kMaxModules];  // by module, as those below
  std::vector<Use> uses_[kMaxModules];
  std::vector<Rescaled> rescaled_[kMaxModules];
  int64_t starts_[kMaxModules + 1] = {};  // of modules, in 16s
};

}  // namespace lp
