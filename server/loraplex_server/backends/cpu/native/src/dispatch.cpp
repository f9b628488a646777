// Which of the compiled variants runs: that of the level which version.cpp found or was told.
#include "kernels.h"

namespace lp {

int isa_level();

#ifdef LP_HAVE_AMX
const Kernels* kernels_amx();
#endif
#ifdef LP_HAVE_AVX512BF16
const Kernels* kernels_avx512bf16();
#endif
#ifdef LP_HAVE_AVX512
const Kernels* kernels_avx512();
#endif
#ifdef LP_HAVE_AVX2
const Kernels* kernels_avx2();
#endif
#ifdef LP_HAVE_NEON
const Kernels* kernels_neon();
#endif
#ifdef LP_HAVE_NEONBF16
const Kernels* kernels_neonbf16();
#endif

const Kernels* current_kernels() {
  switch (isa_level()) {
#ifdef LP_HAVE_AMX
    case 4: return kernels_amx();
#endif
#ifdef LP_HAVE_AVX512BF16
    case 3: return kernels_avx512bf16();
#endif
#ifdef LP_HAVE_AVX512
    case 2: return kernels_avx512();
#endif
#ifdef LP_HAVE_AVX2
    case 1: return kernels_avx2();
#endif
#ifdef LP_HAVE_NEONBF16
    case 2: return kernels_neonbf16();
#endif
#ifdef LP_HAVE_NEON
    case 1: return kernels_neon();
#endif
    default: return nullptr;
  }
}

}  // namespace lp

// Whether there are kernels for this CPU: 1 or 0.
extern "C" __attribute__((visibility("default"))) int lp_has_kernels() { return lp::current_kernels() != nullptr; }
