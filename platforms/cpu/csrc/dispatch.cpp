// Which instruction set runs: the best that the processor has, or what MVLLM_CPU_ISA names if the processor has it.

#include <cstdlib>
#include <cstring>

#include "kernels.h"
#include "other_isas.h"

namespace mvllm {

// Weak, so that a library may be linked with some of them: the sanitized one of the tests is.
#if MVLLM_X86
extern const Isa isa_avx2 __attribute__((weak));
extern const Isa isa_avx512 __attribute__((weak));
extern const Isa isa_avx512_bf16 __attribute__((weak));
#endif
extern const Isa isa_generic __attribute__((weak));

namespace {

bool runs_here(const Isa& isa) {
#if MVLLM_X86
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
                      __builtin_cpu_supports("bmi2");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vl");
    if (&isa == &isa_avx2) return avx2;
    if (&isa == &isa_avx512) return avx512;
    if (&isa == &isa_avx512_bf16) return avx512 && __builtin_cpu_supports("avx512bf16");
#endif
    return &isa == &isa_generic;
}

const Isa* const best_first[] = {
#if MVLLM_X86
    &isa_avx512_bf16, &isa_avx512, &isa_avx2,
#endif
    &isa_generic,
};

const Isa& choose() {
    const char* asked = std::getenv("MVLLM_CPU_ISA");
    const Isa* best = nullptr;
    for (const Isa* isa : best_first) {
        if (!isa || !runs_here(*isa)) continue;
        if (!best) best = isa;
        if (asked && !std::strcmp(asked, isa->name)) return *isa;
#if MVLLM_X86
        // Names that only products of integers know.
        if (asked && isa == &isa_avx512 && !std::strcmp(asked, "avx512_vnni")) return *isa;
        if (asked && isa == &isa_avx2 && !std::strcmp(asked, "avx2_vnni")) return *isa;
#endif
    }
    return *best;
}

}  // namespace

const Isa& current_isa() {
    static const Isa* const other = other_isa(std::getenv("MVLLM_CPU_ISA"));
    static const Isa& isa = other ? *other : choose();
    return isa;
}

}  // namespace mvllm
