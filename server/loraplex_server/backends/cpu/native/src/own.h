// Products in the place of the base's, for rows whose adapter has a weight of its own, or changes what the base's weight
// is multiplied with.
#pragma once

#include "lora.h"

namespace lp {

class OwnProducts {
 public:
  OwnProducts(Pool& pool, const Kernels& kernels, DType dtype, const LpRuns& runs)
      : pool_(pool), kernels_(kernels), dtype_(dtype), runs_(runs), pieces_(pieces_of(runs)) {}

  // x [num_rows][k] of the next group of modules; changed inputs are computed here.
  void prepare(const Rows& x, int64_t k, const Target* targets, int num_modules) {
    x_ = x;
    k_ = k;
    int64_t num_changed = 0;
    for (int i = 0; i < num_modules; i++) num_changed += find_spans(i, *targets[i].table, num_changed);
    if (num_changed == 0) return;
    const size_t needed = size_t(num_changed * k * item_bytes(dtype_)) / sizeof(Line) + 1;
    if (inputs_.size() < needed) inputs_.resize(needed);
    pool_.run(int(pieces_.size()) * num_modules * kParts, [&](int chunk, int) {
      const Piece& piece = pieces_[size_t(chunk / kParts / num_modules)];
      for (const Span& span : spans_[chunk / kParts % num_modules])
        if (span.run == piece.run && span.blocks != nullptr) change(span, piece.start, piece.end, chunk % kParts);
    });
  }

  // Whether nothing of the base's product is left in these rows of a module.
  bool covers(int module, int row, int m) const {
    int found = 0;
    for_rows(module, row, m, [&](const Span&, int, int num_rows) { found += num_rows; });
    return found == m;
  }

  // c [m][width] = the own product of a module's outputs from `output` on, for rows from `row` on that have one. They begin
  // in `column` of the base's band.
  void replace(int module, int64_t output, int width, int row, int m, const Bands& bands, int band, int column, float* c,
               int64_t stride) {
    for_rows(module, row, m, [&](const Span& span, int first, int num_rows) {
      float* to = c + (first - row) * stride;
      if (span.blocks == nullptr) {
        kernels_.shrink(dtype_, x_.at(first, 0, dtype_), x_.stride, num_rows, at(span.weight, output * k_, dtype_), k_, width, 1.0f,
                        to, stride);
        return;
      }
      alignas(64) float found[kRows * kBand];
      const void* x = changed(span, first);
      const void* weights = bands.at(dtype_, band, k_, 0);
      if (bands.format == Format::PLAIN)
        kernels_.product(dtype_, x, k_, num_rows, weights, k_, false, found, kBand, nullptr);
      else
        kernels_.product_narrow(dtype_, bands.format, x, k_, num_rows, weights, k_, found, kBand);
      for (int r = 0; r < num_rows; r++) std::copy_n(found + r * kBand + column, width, to + r * stride);
    });
  }

 private:
  static constexpr int kParts = 4;  // of a row's inputs, which are changed in chunks of their own

  // Rows of a run with a product of their own in a module: by another weight, or else of other inputs.
  struct Span {
    int run, start, end;
    const void* weight;
    const void* blocks;    // [k / size] of [size][size], `block_stride` apart: on the diagonal of what x is multiplied with
    int64_t size, block_stride;
    int64_t first_changed;  // of the rows of inputs_
  };

  // Returns how many rows have other inputs.
  int64_t find_spans(int module, const LpTable& table, int64_t before) {
    spans_[module].clear();
    if (!has_table(table) || table.own_ptrs == nullptr) return 0;
    int64_t num_changed = 0;
    for (int run = 0; run < runs_.num_runs; run++) {
      const int slot = slot_of(runs_, run);
      const auto* weight = reinterpret_cast<const void*>(table.own_ptrs[slot]);
      const auto* blocks = reinterpret_cast<const void*>(table.block_ptrs[slot]);
      if (weight == nullptr && blocks == nullptr) continue;
      spans_[module].push_back({run, runs_.starts[run], runs_.ends[run], weight, blocks, table.block_sizes[slot],
                                table.block_strides[slot], before + num_changed});
      if (blocks != nullptr) num_changed += runs_.ends[run] - runs_.starts[run];
    }
    return num_changed;
  }

  // Calls body(span, first, num_rows) for rows from `row` on with products of their own, at most kRows at once.
  template <class Body>
  void for_rows(int module, int row, int m, const Body& body) const {
    if (pieces_.empty()) return;
    for (const Span& span : spans_[module])
      for (int first = std::max(span.start, row), end = std::min(span.end, row + m); first < end; first += kRows)
        body(span, first, std::min(kRows, end - first));
  }

  void* changed(const Span& span, int64_t row, int64_t input = 0) {
    return at(static_cast<void*>(inputs_.data()), (span.first_changed + row - span.start) * k_ + input, dtype_);
  }

  void load(const void* from, int64_t n, std::vector<float>& to) const {
    to.assign(size_t(n), 0.0f);
    kernels_.add_bias(dtype_, from, int(n), to.data());
  }

  // A part of the inputs of rows start..end, times their blocks.
  void change(const Span& span, int start, int end, int part) {
    static thread_local std::vector<float> x, block, products, sums;
    const int64_t size = span.size, num_blocks = k_ / size, per_part = ceil_div(num_blocks, kParts);
    const int64_t from = part * per_part, to = std::min(from + per_part, num_blocks);
    if (size == 1 && from < to) {  // a gain of each input
      load(at(span.blocks, from, dtype_), to - from, block);
      for (int row = start; row < end; row++) {
        load(x_.at(row, from, dtype_), to - from, x);
        for (size_t i = 0; i < x.size(); i++) x[i] *= block[i];
        kernels_.store(dtype_, x.data(), int(to - from), changed(span, row, from));
      }
      return;
    }
    for (int64_t b = from; b < to; b++) {
      load(at(span.blocks, b * span.block_stride, dtype_), size * size, block);
      for (int row = start; row < end; row++) {
        load(x_.at(row, b * size, dtype_), size, x);
        products.resize(size_t(size));
        sums.assign(size_t(size), 0.0f);
        for (int64_t i = 0; i < size; i++) {  // products apart: some compilers would fuse the two, and others not
          for (int64_t j = 0; j < size; j++) products[size_t(j)] = x[size_t(i)] * block[size_t(i * size + j)];
          kernels_.add_bias(DType::F32, products.data(), int(size), sums.data());
        }
        kernels_.store(dtype_, sums.data(), int(size), changed(span, row, b * size));
      }
    }
  }

  Pool& pool_;
  const Kernels& kernels_;
  const DType dtype_;
  const LpRuns& runs_;
  const std::vector<Piece> pieces_;
  Rows x_{nullptr, 0};
  int64_t k_ = 0;
  std::vector<Span> spans_[kMaxModules];  // by module
  std::vector<Line> inputs_;    // [changed rows][k]
};

}  // namespace lp
