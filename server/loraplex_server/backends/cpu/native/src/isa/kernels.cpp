// All kernels of one instruction set: compiled once for each, in a namespace of its own (LP_ISA).
//
// Everything here is static and nothing of the standard library is instantiated: code that was compiled for a newer CPU
// must not end up in functions that the linker shares with others.
#include "../kernels.h"

#include "vector.h"
#include "pages.h"
#include "tiles.h"
#include "attention_tiles.h"
#include "attention.h"
#include "elementwise.h"
#include "product.h"
#include "widen.h"
#include "shrink.h"
#include "expand.h"
#include "recurrence.h"
#include "draw.h"

#define LP_JOIN2(a, b) a##b
#define LP_JOIN(a, b) LP_JOIN2(a, b)

namespace lp {
namespace LP_ISA {

#ifdef LP_WIDENS_ROWS
#define LP_WIDE(kernel) kernel
#else
#define LP_WIDE(kernel) nullptr
#endif

static const Kernels table = {
    product, blocking, LP_WIDE(widen_rows), LP_WIDE(product_of_wide), product_narrow, widen, end_products, shrink,
    term_bytes, split, expand, expand_uses, rms_norm, gated_norm, layer_norm, rms_norm_f32, rotate, rotate_pairs, gated, gate_row, gated_bands, store, add_to, add_rows,
    add_part, add_bias, weighted_sum, argmax, block_maxima, weigh, sort_into_bins,
    bound_noisy, attend, attend_rows, attend_linearly, convolve, scan,
};

}  // namespace LP_ISA

const Kernels* LP_JOIN(kernels_, LP_ISA)() { return &LP_ISA::table; }

}  // namespace lp
