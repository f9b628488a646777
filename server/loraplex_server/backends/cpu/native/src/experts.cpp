// Experts of a mixture: products of rows with the weights of the experts that they go to, and all that experts compute.
#include "lora.h"

#define LP_API __attribute__((visibility("default")))

extern "C" {

// The experts of a layer, whose output is down(act(gate(x)) * up(x)).
struct LpExperts {
  int32_t dtype;
  int32_t format;  // lp::Format of the weights
  int32_t act;     // 0: silu, 1: gelu_tanh
  int32_t num_experts;
  int64_t hidden;
  int64_t inner;        // a multiple of 16
  const void* gate_up;  // of each expert, as lp_pack_pair leaves them
  const void* down;     // of each expert, as lp_pack leaves it
  LpTable up_table;     // factors of gate and up together, by slot: [experts][rank][hidden] and [experts][2 * inner][rank]
  LpTable down_table;   // [experts][rank][inner] and [experts][hidden][rank]
};

// A step's rows and the experts that they go to.
struct LpRouted {
  int64_t num_rows;
  int64_t top_k;
  const void* x;            // [num_rows][hidden]
  const int64_t* chosen;    // [num_rows][top_k] experts
  const float* weights;     // [num_rows][top_k]
  const int64_t* uses;      // [num_rows] 1 + an index of those below, 0: none; null: none of all rows
  const int32_t* slots;     // [num_uses]
  const float* slot_weights;
  int64_t num_uses;
  int64_t max_rank;         // of their factors
  void* scratch;            // lp_experts_scratch_bytes
  void* y;                  // [num_rows][hidden]
};
}

namespace lp {
namespace {

constexpr int kUnit = 4;  // bands of a chunk

// Pairs of a row and an expert, in the order of the experts; of one expert in the order of their adapters, and of these as
// they came.
struct Order {
  struct Group {
    int64_t expert, begin, end;  // of `pairs`
  };
  std::vector<int64_t> pairs;
  std::vector<Group> groups;      // pairs of an expert
  std::vector<Group> use_groups;  // of an expert and an adapter
  std::vector<int64_t> uses;      // of these

  // `use_of(pair)`: less than num_uses.
  template <class Use>
  Order(const int64_t* experts, int64_t num_pairs, int64_t num_experts, int64_t num_uses, const Use& use_of)
      : pairs(size_t(num_pairs)) {
    std::vector<int64_t> ends(size_t(num_experts * num_uses) + 1, 0);
    const auto key = [&](int64_t pair) { return size_t(experts[pair] * num_uses + use_of(pair)); };
    for (int64_t i = 0; i < num_pairs; i++) ends[key(i) + 1]++;
    for (int64_t e = 0; e < num_experts; e++) {
      const size_t first = size_t(e * num_uses);
      const int64_t begin = ends[first];
      for (int64_t use = 0; use < num_uses; use++) {
        const size_t at = first + size_t(use);
        ends[at + 1] += ends[at];
        if (ends[at + 1] == ends[at]) continue;
        use_groups.push_back({e, ends[at], ends[at + 1]});
        uses.push_back(use);
      }
      if (ends[first + size_t(num_uses)] > begin) groups.push_back({e, begin, ends[first + size_t(num_uses)]});
    }
    for (int64_t i = 0; i < num_pairs; i++) pairs[size_t(ends[key(i)]++)] = i;
  }
};

// The adapters' factors for sorted pairs, as those of a module: each group of an expert and an adapter is a run whose slot
// is its own.
class Factors {
 public:
  Factors(const Order& order, const LpRouted& routed, const LpTable& table, DType dtype, int64_t k, int64_t num_outputs) {
    first_uses_.push_back(0);
    for (size_t i = 0; i < order.uses.size() && table.ranks != nullptr; i++) {
      const int64_t use = order.uses[i] - 1;
      const int64_t rank = use < 0 ? 0 : table.ranks[routed.slots[use]];
      if (rank == 0) continue;
      const Order::Group& group = order.use_groups[i];
      const int slot = routed.slots[use];
      a_ptrs_.push_back(table.a_ptrs[slot] + group.expert * rank * k * item_bytes(dtype));
      b_ptrs_.push_back(table.b_ptrs[slot] + group.expert * num_outputs * rank * item_bytes(dtype));
      ranks_.push_back(int32_t(rank));
      scales_.push_back(table.scales[slot]);
      starts_.push_back(int32_t(group.begin));
      ends_.push_back(int32_t(group.end));
      slots_.push_back(int32_t(slots_.size()));
      weights_.push_back(routed.slot_weights[use]);
      first_uses_.push_back(int32_t(slots_.size()));
    }
    table_ = {a_ptrs_.data(), b_ptrs_.data(), ranks_.data(), scales_.data(), nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
    runs_ = {int32_t(starts_.size()), int32_t(routed.max_rank), starts_.data(), ends_.data(), first_uses_.data(),
             slots_.data(), weights_.data()};
  }

  const LpTable& table() const { return table_; }
  const LpRuns& runs() const { return runs_; }

 private:
  std::vector<int64_t> a_ptrs_, b_ptrs_;
  std::vector<int32_t> ranks_, starts_, ends_, first_uses_, slots_;
  std::vector<float> scales_, weights_;
  LpTable table_;
  LpRuns runs_;
};

// Each pair's row of x, in the order of the pairs.
void gather(Pool& pool, const Order& order, const void* x, int64_t per_row, int64_t row_bytes, char* sorted) {
  const int64_t num_pairs = int64_t(order.pairs.size());
  pool.run(ceil_div(num_pairs, kRows), [&](int chunk, int) {
    for (int64_t i = int64_t(chunk) * kRows, end = std::min(i + kRows, num_pairs); i < end; i++)
      std::memcpy(sorted + i * row_bytes, static_cast<const char*>(x) + order.pairs[size_t(i)] / per_row * row_bytes,
                  size_t(row_bytes));
  });
}

// Products of sorted rows [..][k] with their experts' weights. finish(first band, number of bands, row, m, c, stride)
// takes c [m][bands * 32] of sorted rows from one on.
template <class Finish>
void expert_products(Pool& pool, const Kernels& kernels, DType dtype, Format format, const Order& order, const char* rows,
                     int64_t k, const void* packed, int num_bands, const Finish& finish) {
  const int num_units = ceil_div(num_bands, kUnit);
  const int64_t bytes_of_band = band_bytes(format, dtype, k);
  pool.run(int(order.groups.size()) * num_units, [&](int chunk, int) {
    alignas(64) float c[kRows * kUnit * kBand];
    constexpr int64_t kStride = kUnit * kBand;
    const Order::Group& group = order.groups[size_t(chunk / num_units)];
    const int first = chunk % num_units * kUnit, last = std::min(first + kUnit, num_bands);
    const char* weights = static_cast<const char*>(packed) + (group.expert * num_bands + first) * bytes_of_band;
    for (int64_t row = group.begin; row < group.end; row += kRows) {
      const int m = int(std::min<int64_t>(kRows, group.end - row));
      const char* x = at(rows, row * k, dtype);
      for (int band = 0; band < last - first; band++)
        if (format == Format::PLAIN)
          kernels.product(dtype, x, k, m, weights + band * bytes_of_band, k, false, c + band * kBand, kStride, nullptr);
        else
          kernels.product_narrow(dtype, format, x, k, m, weights + band * bytes_of_band, k, c + band * kBand, kStride);
      kernels.end_products();
      finish(first, last - first, row, m, c, kStride);
    }
  });
}

struct ExpertScratch {
  char* x;      // [pairs][hidden] sorted
  char* inner;  // [pairs][inner] sorted
  char* y;      // [pairs][hidden] as they came
  float* updates;
  int64_t num_bytes;
};

ExpertScratch lay_out_experts(const LpExperts& experts, int64_t num_pairs, int64_t max_rank, void* base) {
  const DType dtype = DType(experts.dtype);
  char* const start = static_cast<char*>(base);
  char* next = start;
  const auto take = [&](int64_t num_bytes) {
    char* taken = next;
    next += (num_bytes + 63) & ~int64_t(63);
    return taken;
  };
  ExpertScratch s;
  s.x = take(num_pairs * experts.hidden * item_bytes(dtype));
  s.inner = take(num_pairs * experts.inner * item_bytes(dtype));
  s.y = take(num_pairs * experts.hidden * item_bytes(dtype));
  const int64_t widest = std::max(2 * experts.inner, experts.hidden);
  s.updates = reinterpret_cast<float*>(
      take(max_rank > 0 ? Updates::num_floats(num_pairs, max_rank, 1, widest) * int64_t(sizeof(float)) : 0));
  s.num_bytes = next - start;
  return s;
}

void run_experts(Pool& pool, const Kernels& kernels, const LpExperts& experts, const LpRouted& routed, const Order& order) {
  const DType dtype = DType(experts.dtype);
  const Format format = Format(experts.format);
  const int64_t num_pairs = routed.num_rows * routed.top_k, hidden = experts.hidden, inner = experts.inner;
  const ExpertScratch scratch = lay_out_experts(experts, num_pairs, routed.max_rank, routed.scratch);
  gather(pool, order, routed.x, routed.top_k, hidden * item_bytes(dtype), scratch.x);
  {
    const Factors factors(order, routed, experts.up_table, dtype, hidden, 2 * inner);
    Updates updates(pool, kernels, dtype, factors.runs(), int(num_pairs), scratch.updates);
    const Target target{&factors.table(), 2 * inner};
    updates.prepare({scratch.x, hidden}, hidden, &target, 1);
    expert_products(pool, kernels, dtype, format, order, scratch.x, hidden, experts.gate_up, ceil_div(inner, kPanel),
                    [&](int first, int num_bands, int64_t row, int m, float* c, int64_t stride) {
                      for (int band = 0; band < num_bands; band++)
                        for (int part = 0; part < 2; part++)
                          updates.add(0, part * inner + int64_t(first + band) * kPanel, kPanel, int(row), m,
                                      c + band * kBand + part * kPanel, stride);
                      for (int band = 0; band < num_bands; band += 2)
                        kernels.gated_bands(dtype, experts.act, c + band * kBand, stride, m,
                                            std::min(num_bands - band, 2) * kPanel,
                                            at(scratch.inner, row * inner + int64_t(first + band) * kPanel, dtype), inner, false);
                    });
  }
  const Factors factors(order, routed, experts.down_table, dtype, inner, hidden);
  Updates updates(pool, kernels, dtype, factors.runs(), int(num_pairs), scratch.updates);
  const Target target{&factors.table(), hidden};
  updates.prepare({scratch.inner, inner}, inner, &target, 1);
  expert_products(pool, kernels, dtype, format, order, scratch.inner, inner, experts.down, ceil_div(hidden, kBand),
                  [&](int first, int num_bands, int64_t row, int m, float* c, int64_t stride) {
                    const int64_t output = int64_t(first) * kBand;
                    const int width = int(std::min<int64_t>(int64_t(num_bands) * kBand, hidden - output));
                    updates.add(0, output, width, int(row), m, c, stride);
                    for (int64_t r = 0; r < m; r++)
                      kernels.store(dtype, c + r * stride, width,
                                    at(scratch.y, order.pairs[size_t(row + r)] * hidden + output, dtype));
                  });
  pool.run(ceil_div(routed.num_rows, kUnit), [&](int chunk, int) {
    for (int64_t row = int64_t(chunk) * kUnit, end = std::min(row + kUnit, routed.num_rows); row < end; row++)
      kernels.weighted_sum(dtype, at(scratch.y, row * routed.top_k * hidden, dtype), routed.weights + row * routed.top_k,
                           int(routed.top_k), hidden, at(routed.y, row * hidden, dtype));
  });
}

}  // namespace
}  // namespace lp

extern "C" {

LP_API int64_t lp_experts_scratch_bytes(const LpExperts* experts, int64_t num_pairs, int64_t max_rank) {
  return lp::lay_out_experts(*experts, num_pairs, max_rank, nullptr).num_bytes;
}

// y = the sum of each row's experts, times their weights. 0: a row goes to an expert that is not there.
LP_API int lp_experts_run(lp::Pool* pool, const LpExperts* experts, const LpRouted* routed) {
  const int64_t num_pairs = routed->num_rows * routed->top_k;
  for (int64_t i = 0; i < num_pairs; i++)
    if (routed->chosen[i] < 0 || routed->chosen[i] >= experts->num_experts) return 0;
  const auto turn = pool->take_turn();
  const bool is_adapted = routed->uses != nullptr;
  const lp::Order order(routed->chosen, num_pairs, experts->num_experts, is_adapted ? routed->num_uses + 1 : 1,
                        [=](int64_t pair) { return is_adapted ? routed->uses[pair / routed->top_k] : 0; });
  lp::run_experts(*pool, *lp::current_kernels(), *experts, *routed, order);
  return 1;
}

// y [num_pairs][num_outputs] = x [num_pairs / per_row][k], each row for `per_row` pairs, @ weight.T of each pair's expert.
// `packed` has the experts' weights [num_outputs][k] one after the other, as lp_pack leaves each.
LP_API void lp_experts(lp::Pool* pool, int dtype, const void* x, int64_t k, const int64_t* experts, int64_t num_pairs,
                       int64_t per_row, int64_t num_experts, const void* packed, int format, int64_t num_outputs, void* y) {
  static thread_local std::vector<lp::Line> sorted;
  const auto turn = pool->take_turn();
  const lp::Kernels& kernels = *lp::current_kernels();
  const lp::DType type = lp::DType(dtype);
  const lp::Order order(experts, num_pairs, num_experts, 1, [](int64_t) { return 0; });
  sorted.resize(size_t(num_pairs * k * lp::item_bytes(type)) / sizeof(lp::Line) + 1);
  char* rows = reinterpret_cast<char*>(sorted.data());
  lp::gather(*pool, order, x, per_row, k * lp::item_bytes(type), rows);
  lp::expert_products(*pool, kernels, type, lp::Format(format), order, rows, k, packed, lp::ceil_div(num_outputs, lp::kBand),
                      [&](int first, int num_bands, int64_t row, int m, float* c, int64_t stride) {
                        const int64_t output = int64_t(first) * lp::kBand;
                        const int width = int(std::min<int64_t>(int64_t(num_bands) * lp::kBand, num_outputs - output));
                        for (int64_t r = 0; r < m; r++)
                          kernels.store(type, c + r * stride, width,
                                        lp::at(y, order.pairs[size_t(row + r)] * num_outputs + output, type));
                      });
}
}
