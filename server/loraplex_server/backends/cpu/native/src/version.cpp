// What the library is and what the machine can run of it: versions, and the choice of the instruction set.
//
// Compiled with baseline flags, like every file in this folder: code here runs before it is known what the CPU has. The
// build script defines LP_SOURCE_HASH, and LP_VARIANTS(X) as an X(name) for each variant of isa/ that the compiler could
// make, in the order of its table. None before the last is missing.

#include <atomic>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#include <sys/prctl.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#define LP_EXPORT extern "C" __attribute__((visibility("default")))

namespace lp {

// Raise it when a function changes its arguments or meaning, together with ABI_VERSION in library.py.
constexpr int kAbiVersion = 21;

namespace {

// What this CPU has of the variant's instruction set beyond that of the one before it.
#if defined(__x86_64__)

bool has_all(uint32_t word, std::initializer_list<int> bits) {
    for (int bit : bits)
        if (!((word >> bit) & 1)) return false;
    return true;
}

struct Leaf {
    uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
    Leaf(uint32_t number, uint32_t part) { __get_cpuid_count(number, part, &eax, &ebx, &ecx, &edx); }
};

bool saves(uint64_t wanted) {  // XCR0: the register files that the operating system saves
    if (!has_all(Leaf(1, 0).ecx, {27})) return false;  // osxsave
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (((uint64_t(high) << 32) | low) & wanted) == wanted;
}

[[maybe_unused]] bool has_avx2() {
    return has_all(Leaf(1, 0).ecx, {12, 28}) && saves(0x6) && has_all(Leaf(7, 0).ebx, {5});  // fma avx; xmm ymm
}

#ifdef LP_EMULATES_AVX512  // as a test does
[[maybe_unused]] bool has_avx512() { return has_avx2(); }
[[maybe_unused]] bool has_avx512bf16() { return true; }
#else
[[maybe_unused]] bool has_avx512() {  // masks zmm; f16c; f dq bw vl
    return saves(0xe6) && has_all(Leaf(1, 0).ecx, {29}) && has_all(Leaf(7, 0).ebx, {16, 17, 30, 31});
}

[[maybe_unused]] bool has_avx512bf16() { return Leaf(7, 0).eax >= 1 && has_all(Leaf(7, 1).eax, {5}); }
#endif

[[maybe_unused]] bool has_amx() {
#ifdef LP_EMULATES_TILES  // as a test does
    return true;
#else
    // Linux hands out the tile registers only to processes that ask (8 KiB more per thread's saved state).
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return saves(0x60000) && has_all(Leaf(7, 0).edx, {22, 24}) &&
           syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#endif
}

#elif defined(__aarch64__)

[[maybe_unused]] bool has_neon() { return true; }  // every such CPU

[[maybe_unused]] bool has_neonbf16() {
#if defined(__linux__)
    constexpr unsigned long kBf16 = 1UL << 14;  // HWCAP2_BF16, which old headers lack
    return (getauxval(AT_HWCAP2) & kBf16) != 0;
#elif defined(__APPLE__)
    int found = 0;
    size_t size = sizeof found;
    return sysctlbyname("hw.optional.arm.FEAT_BF16", &found, &size, nullptr, 0) == 0 && found != 0;
#else
    return false;
#endif
}

#if defined(__linux__)
[[maybe_unused]] bool has_sve256() {  // and vectors of just the length that its kernels are compiled for
    constexpr unsigned long kSve = 1UL << 22, kSveBf16 = 1UL << 12;  // HWCAP_SVE, HWCAP2_SVEBF16
    constexpr int kGetLength = 51, kLengthMask = 0xffff;             // PR_SVE_GET_VL, PR_SVE_VL_LEN_MASK
    if ((getauxval(AT_HWCAP) & kSve) == 0 || (getauxval(AT_HWCAP2) & kSveBf16) == 0) return false;
    const int length = prctl(kGetLength);
    return length > 0 && (length & kLengthMask) == 32;
}
#endif

#endif

// Levels, each including those below it. 0 is a CPU that none of the variants runs on.
struct Level {
    const char* name;
    bool (*is_here)();
};
#define LP_LEVEL(name) , {#name, has_##name}
constexpr Level kLevels[] = {{"none", nullptr} LP_VARIANTS(LP_LEVEL)};
constexpr int kNumLevels = sizeof kLevels / sizeof *kLevels;

int highest_usable() {
    int level = 0;
    while (level + 1 < kNumLevels && kLevels[level + 1].is_here()) ++level;
    return level;
}

const int best = highest_usable();
std::atomic<int> current{best};

}  // namespace

// The level whose variant is to run. Other files declare it and dispatch on it.
int isa_level() { return current.load(std::memory_order_relaxed); }

}  // namespace lp

LP_EXPORT int lp_abi_version() { return lp::kAbiVersion; }

// The build script finds it in the file by the text in front, without loading the library.
LP_EXPORT const char* lp_source_hash() {
    static const char marked[] = "lp_source_hash=" LP_SOURCE_HASH;
    return marked + sizeof("lp_source_hash=") - 1;
}

LP_EXPORT const char* lp_isa() { return lp::kLevels[lp::isa_level()].name; }

// Runs another variant from here on, for tests and measurements: 0, or -1 where it is not built or not for this CPU.
LP_EXPORT int lp_use_isa(const char* name) {
    for (int level = 1; level <= lp::best; ++level)
        if (std::strcmp(name, lp::kLevels[level].name) == 0) {
            lp::current.store(level, std::memory_order_relaxed);
            return 0;
        }
    return -1;
}
