// All kernels of one instruction set: compiled once for each, in a namespace of its own (LP_ISA).
//
// Everything here is static and nothing of the standard library is instantiated: code that was compiled for a newer CPU
// must not end up in functions that the linker shares with others.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define LP_CAN 1
#else
#define LP_CAN 0
#endif

#include "../kernels.h"

#include "vector.h"
// In this order: each knows the ones before.
#include "attention.h"
#include "elementwise.h"
#include "product.h"
//
#include "lora.h"

#define LP_JOIN2(a, b) a##b
#define LP_JOIN(a, b) LP_JOIN2(a, b)

namespace lp {
namespace LP_ISA {

#if LP_CAN
static const Kernels table = {
    product, end_products, shrink, expand, rms_norm, rms_norm_f32, rotate, gated, store, add_to, add_bias, argmax, attend,
};
#endif

}  // namespace LP_ISA

const Kernels* LP_JOIN(kernels_, LP_ISA)() {
#if LP_CAN
  return &LP_ISA::table;
#else
  return nullptr;
#endif
}

}  // namespace lp
