// Products of rows with the weights of the experts that they go to: one job for all experts of a step.
#include "parallel.h"

#define LP_API __attribute__((visibility("default")))

namespace lp {
namespace {

constexpr int kUnit = 4;  // bands of a chunk

// Pairs of a row and an expert, in the order of the experts; of one expert in the order in which they came.
struct Order {
  struct Group {
    int64_t expert, begin, end;  // of `pairs`
  };
  std::vector<int64_t> pairs;
  std::vector<Group> groups;

  Order(const int64_t* experts, int64_t num_pairs, int64_t num_experts) : pairs(size_t(num_pairs)) {
    std::vector<int64_t> ends(size_t(num_experts) + 1, 0);
    for (int64_t i = 0; i < num_pairs; i++) ends[size_t(experts[i]) + 1]++;
    for (int64_t e = 0; e < num_experts; e++) {
      ends[size_t(e) + 1] += ends[size_t(e)];
      if (ends[size_t(e) + 1] > ends[size_t(e)]) groups.push_back({e, ends[size_t(e)], ends[size_t(e) + 1]});
    }
    for (int64_t i = 0; i < num_pairs; i++) pairs[size_t(ends[size_t(experts[i])]++)] = i;
  }
};

}  // namespace
}  // namespace lp

extern "C" {

// y [num_pairs][num_outputs] = x [num_pairs / per_row][k], each row for `per_row` pairs, @ weight.T of each pair's expert.
// `packed` has the experts' weights [num_outputs][k] one after the other, as lp_pack leaves each.
LP_API void lp_experts(lp::Pool* pool, int dtype, const void* x, int64_t k, const int64_t* experts, int64_t num_pairs,
                       int64_t per_row, int64_t num_experts, const void* packed, int format, int64_t num_outputs, void* y) {
  const auto turn = pool->take_turn();
  const lp::Kernels& kernels = *lp::current_kernels();
  const lp::DType type = lp::DType(dtype);
  const lp::Order order(experts, num_pairs, num_experts);
  const int num_bands = lp::ceil_div(num_outputs, lp::kBand), num_units = lp::ceil_div(num_bands, lp::kUnit);
  const lp::Format kind = lp::Format(format);
  const int64_t band_bytes = lp::band_bytes(kind, type, k), expert_bytes = num_bands * band_bytes, row_bytes = k * lp::item_bytes(type);
  pool->run(int(order.groups.size()) * num_units, [&](int chunk, int) {
    static thread_local std::vector<lp::Line> lines;
    float c[lp::kRows * lp::kUnit * lp::kBand];
    constexpr int64_t kStride = lp::kUnit * lp::kBand;
    const lp::Order::Group& group = order.groups[size_t(chunk / num_units)];
    const int first = chunk % num_units * lp::kUnit, last = std::min(first + lp::kUnit, num_bands);
    const char* weights = static_cast<const char*>(packed) + group.expert * expert_bytes;
    const int64_t output = int64_t(first) * lp::kBand;
    const int width = int(std::min<int64_t>(kStride, num_outputs - output));
    if (lines.size() * sizeof(lp::Line) < size_t(lp::kRows * row_bytes))
      lines.resize(size_t(lp::kRows * row_bytes) / sizeof(lp::Line) + 1);
    char* rows = reinterpret_cast<char*>(lines.data());
    for (int64_t begin = group.begin; begin < group.end; begin += lp::kRows) {
      const int m = int(std::min<int64_t>(lp::kRows, group.end - begin));
      const int64_t* pairs = order.pairs.data() + begin;
      for (int64_t r = 0; r < m; r++)
        std::memcpy(rows + r * row_bytes, static_cast<const char*>(x) + pairs[r] / per_row * row_bytes, size_t(row_bytes));
      for (int band = first; band < last; band++)
        if (kind == lp::Format::PLAIN)
          kernels.product(type, rows, k, m, weights + band * band_bytes, k, false, c + (band - first) * lp::kBand, kStride,
                          nullptr);
        else
          kernels.product_narrow(type, kind, rows, k, m, weights + band * band_bytes, k, c + (band - first) * lp::kBand,
                                 kStride);
      kernels.end_products();
      for (int64_t r = 0; r < m; r++) kernels.store(type, c + r * kStride, width, lp::at(y, pairs[r] * num_outputs + output, type));
    }
  });
}
}
