// Linears that read the same rows, with the terms of the rows' adapters, in one call.
#include "adapted.h"

#define LP_API __attribute__((visibility("default")))

extern "C" {

// One of the linears.
struct LpMember {
  const void* packed;
  int64_t num_outputs;
  const void* bias;  // null: none
  LpTable table;
  void* y;  // [num_rows][num_outputs]
};

// Floats of scratch that lp_linears needs, for `num_outputs` of all modules.
LP_API int64_t lp_linears_scratch(int64_t num_rows, int64_t max_rank, int64_t num_modules, int64_t num_outputs) {
  return max_rank > 0 ? lp::Updates::num_floats(num_rows, max_rank, num_modules, num_outputs) : 0;
}

// The outputs of at most lp::kMaxModules linears of x [num_rows][k].
LP_API void lp_linears(lp::Pool* pool, int dtype, int format, const void* x, int64_t k, int num_rows,
                       const LpMember* members, int num_modules, const LpRuns* runs, float* scratch) {
  const auto turn = pool->take_turn();
  const lp::Kernels& kernels = *lp::current_kernels();
  const lp::DType type = lp::DType(dtype);
  lp::AdaptedProducts products(*pool, kernels, type, lp::Format(format), *runs, num_rows, scratch, nullptr);
  lp::Target targets[lp::kMaxModules];
  for (int i = 0; i < num_modules; i++) targets[i] = {&members[i].table, members[i].num_outputs};
  const lp::Rows rows{x, k};
  products.prepare(rows, k, targets, num_modules);
  for (int i = 0; i < num_modules; i++) {
    const LpMember& member = members[i];
    products.multiply_one(rows, k, member.packed, member.num_outputs, lp::unit_of(member.num_outputs), i, member.bias,
                          [&](int64_t output, int width, int row, int m, const float* c, int64_t stride) {
                            for (int64_t r = 0; r < m; r++)
                              kernels.store(type, c + r * stride, width,
                                            lp::at(member.y, (row + r) * member.num_outputs + output, type));
                          });
  }
}
}
