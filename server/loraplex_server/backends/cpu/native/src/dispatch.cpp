// Which of the compiled variants runs: that of the level which version.cpp found or was told.
#include "kernels.h"

namespace lp {

int isa_level();

#define LP_DECLARE(name) const Kernels* kernels_##name();
LP_VARIANTS(LP_DECLARE)

const Kernels* current_kernels() {
#define LP_ENTRY(name) kernels_##name,
  static const Kernels* (*const variants[])() = {LP_VARIANTS(LP_ENTRY) nullptr};  // from level 1 on
  const int level = isa_level();
  return level == 0 ? nullptr : variants[level - 1]();
}

}  // namespace lp

// Whether there are kernels for this CPU: 1 or 0.
extern "C" __attribute__((visibility("default"))) int lp_has_kernels() { return lp::current_kernels() != nullptr; }
