// What the library is and what the machine can run of it: versions, and the choice of the instruction set.
//
// Compiled with baseline flags, like every file in this folder: code here runs before it is known what the CPU has. The
// build script defines LP_SOURCE_HASH, and LP_HAVE_<NAME> for each variant of isa/ that the compiler could make.

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
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#define LP_EXPORT extern "C" __attribute__((visibility("default")))

namespace lp {

// Raise it when a function changes its arguments or meaning, together with ABI_VERSION in library.py.
constexpr int kAbiVersion = 10;

#if defined(__x86_64__)

// Levels, each including those below it. 0 is a CPU that none of the variants runs on.
constexpr int kNone = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3, kAmx = 4, kNumLevels = 5;
constexpr const char* kNames[kNumLevels] = {"none", "avx2", "avx512", "avx512bf16", "amx"};

constexpr bool kBuilt[kNumLevels] = {
    true,
#ifdef LP_HAVE_AVX2
    true,
#else
    false,
#endif
#ifdef LP_HAVE_AVX512
    true,
#else
    false,
#endif
#ifdef LP_HAVE_AVX512BF16
    true,
#else
    false,
#endif
#ifdef LP_HAVE_AMX
    true,
#else
    false,
#endif
};

namespace {

bool has_all(uint32_t word, std::initializer_list<int> bits) {
    for (int bit : bits)
        if (!((word >> bit) & 1)) return false;
    return true;
}

uint64_t enabled_states() {  // XCR0: the register files that the operating system saves
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t(high) << 32) | low;
}

// Linux hands out the tile registers only to processes that ask (8 KiB more per thread's saved state).
[[maybe_unused]] bool may_use_tiles() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

int highest_level() {
    uint32_t eax, ebx, ecx, edx, subleaves;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !has_all(ecx, {12, 27, 28})) return kNone;  // fma osxsave avx
    const bool has_f16c = has_all(ecx, {29});
    const uint64_t states = enabled_states();
    if ((states & 0x6) != 0x6) return kNone;  // xmm ymm
    if (!__get_cpuid_count(7, 0, &subleaves, &ebx, &ecx, &edx) || !has_all(ebx, {5})) return kNone;  // avx2
    [[maybe_unused]] const uint32_t tiles = edx;
    if ((states & 0xe6) != 0xe6 || !has_f16c || !has_all(ebx, {16, 17, 30, 31})) return kAvx2;  // masks zmm; f dq bw vl
    if (subleaves < 1 || !__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) || !has_all(eax, {5})) return kAvx512;
#ifndef LP_EMULATES_TILES  // as a test does
    if ((states & 0x60000) != 0x60000 || !has_all(tiles, {22, 24}) || !may_use_tiles()) return kAvx512Bf16;
#endif
    return kAmx;
}

}  // namespace

#elif defined(__aarch64__)

constexpr int kNone = 0, kNeon = 1, kNeonBf16 = 2, kNumLevels = 3;
constexpr const char* kNames[kNumLevels] = {"none", "neon", "neonbf16"};

constexpr bool kBuilt[kNumLevels] = {
    true,
#ifdef LP_HAVE_NEON
    true,
#else
    false,
#endif
#ifdef LP_HAVE_NEONBF16
    true,
#else
    false,
#endif
};

namespace {

bool has_bf16() {
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

int highest_level() { return has_bf16() ? kNeonBf16 : kNeon; }  // every such CPU has NEON

}  // namespace

#endif

namespace {

int highest_usable() {
    int level = highest_level();
    while (!kBuilt[level]) --level;
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

LP_EXPORT const char* lp_isa() { return lp::kNames[lp::isa_level()]; }

// Runs another variant from here on, for tests and measurements: 0, or -1 where it is not built or not for this CPU.
LP_EXPORT int lp_use_isa(const char* name) {
    for (int level = lp::kNone + 1; level <= lp::best; ++level)
        if (std::strcmp(name, lp::kNames[level]) == 0 && lp::kBuilt[level]) {
            lp::current.store(level, std::memory_order_relaxed);
            return 0;
        }
    return -1;
}
