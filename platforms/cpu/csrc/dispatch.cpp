// Selects the instruction set: the best of the processor, or the one that MVLLM_CPU_ISA names if the processor has it.

#include "kernels.h"
#include "other_isas.h"
#include "processor.h"

namespace mvllm {

// Weak, so that a library can be linked with some of them only, like the sanitizer build of the tests.
#if MVLLM_X86
extern const Isa isa_avx2 __attribute__((weak));
extern const Isa isa_avx512 __attribute__((weak));
extern const Isa isa_avx512_bf16 __attribute__((weak));
#endif
extern const Isa isa_generic __attribute__((weak));

namespace {

// Measured (tests/perf/quantized_linear.py): Zen 5 reads a tile fastest without prefetches and other weights with distant
// ones; the first processors with AMX read up to a fifth faster with prefetches that stay within their pages of 4 KiB.
PrefetchDistance prefetch_distance_here() {
    [[maybe_unused]] const Features has;
#if MVLLM_X86
    if (has.amx) return {2560, 2560};
#endif
    return {4096, 0};
}

const Isa& choose() {
    [[maybe_unused]] const Features has;
    const Candidate<Isa> best_first[] = {
#if MVLLM_X86
        {&isa_avx512_bf16, has.avx512_bf16},
        {&isa_avx512, has.avx512, "avx512_vnni"},  // VNNI is used by integer products only
        {&isa_avx2, has.avx2, "avx2_vnni"},
#endif
        {&isa_generic, true},
    };
    return chosen(best_first);
}

}  // namespace

const PrefetchDistance prefetch_distance = prefetch_distance_here();

const Isa& current_isa() {
    static const Isa* const other = other_isa(std::getenv("MVLLM_CPU_ISA"));
    static const Isa& isa = other ? *other : choose();
    return isa;
}

}  // namespace mvllm
