// Products of linears that read the same rows, with what the rows' adapters change of them.
#pragma once

#include "own.h"

namespace lp {

class AdaptedProducts {
 public:
  // `memory`: as many floats as Updates needs. `queues`: as of `products`, or null.
  AdaptedProducts(Pool& pool, const Kernels& kernels, DType dtype, Format format, const LpRuns& runs, int num_rows,
                  float* memory, PrefetchQueues* queues)
      : pool_(pool),
        kernels_(kernels),
        dtype_(dtype),
        format_(format),
        num_rows_(num_rows),
        queues_(queues),
        updates_(pool, kernels, dtype, runs, num_rows, memory),
        own_(pool, kernels, dtype, runs) {}

  // x [num_rows][k] of the next group of modules.
  void prepare(const Rows& x, int64_t k, const Target* targets, int num_modules) {
    updates_.prepare(x, k, targets, num_modules);
    own_.prepare(x, k, targets, num_modules);
  }

  // x [num_rows][k] @ packed, in which several modules may have outputs. places(band, body) calls body(module, output, width,
  // column) for the outputs of each module that a band holds, and the first one's column in it. `epilogue`: as of `products`.
  template <class Places, class Epilogue>
  void multiply(const Rows& x, int64_t k, const void* packed, int num_bands, int unit, const Places& places,
                const Epilogue& epilogue) {
    const Bands bands{packed, format_};
    products(
        pool_, kernels_, dtype_, x, num_rows_, k, bands, num_bands, unit, queues_,
        [&](int band, int row, int m, Prefetch& prefetch) {
          bool is_needed = false;
          places(band, [&](int module, int64_t output, int width, int) {
            updates_.find(module, output, width, row, m, prefetch);
            is_needed = is_needed || !own_.covers(module, row, m);
          });
          return is_needed;
        },
        [&](int band, int row, int m, float* c, int64_t stride) {
          places(band, [&](int module, int64_t output, int width, int column) {
            own_.replace(module, output, width, row, m, bands, band, column, c + column, stride);
            updates_.add(module, output, width, row, m, c + column, stride);
          });
        },
        epilogue);
  }

  // The same of one module, which has all `num_outputs`, with its bias, or null. store(output, width, row, m, c, stride) takes
  // c [m][width] of its outputs from one on, of a unit's bands.
  template <class Store>
  void multiply_one(const Rows& x, int64_t k, const void* packed, int64_t num_outputs, int unit, int module, const void* bias,
                    const Store& store) {
    const auto width_of = [=](int band, int bands) {
      return int(std::min(int64_t(bands) * kBand, num_outputs - int64_t(band) * kBand));
    };
    multiply(
        x, k, packed, ceil_div(num_outputs, kBand), unit,
        [&](int band, const auto& body) { body(module, int64_t(band) * kBand, width_of(band, 1), 0); },
        [&](int band, int row, int m, float* c, int64_t stride) {
          const int64_t output = int64_t(band) * kBand;
          const int width = width_of(band, unit);
          for (int64_t r = 0; bias != nullptr && r < m; r++)
            kernels_.add_bias(dtype_, at(bias, output, dtype_), width, c + r * stride);
          updates_.rescale(module, output, width, row, m, c, stride);
          store(output, width, row, m, c, stride);
        });
  }

  const Updates& updates() const { return updates_; }

 private:
  Pool& pool_;
  const Kernels& kernels_;
  const DType dtype_;
  const Format format_;
  const int num_rows_;
  PrefetchQueues* const queues_;
  Updates updates_;
  OwnProducts own_;
};

}  // namespace lp
