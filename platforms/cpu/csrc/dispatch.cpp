// Which instruction set runs: the best that the processor has, or what MVLLM_CPU_ISA names if the processor has it.

#include "amx.h"
#include "kernels.h"
#include "processor.h"

namespace mvllm {

// Weak, so that a library may be linked with some of them: the sanitized one of the tests is.
#if MVLLM_X86
extern const Isa isa_avx2 __attribute__((weak));
extern const Isa isa_avx512 __attribute__((weak));
extern const Isa isa_avx512_bf16 __attribute__((weak));
#endif
extern const Isa isa_generic __attribute__((weak));

namespace {

const Isa& choose() {
#if MVLLM_AMX
    // Only where it is named: it has not run on hardware yet.
    const char* asked = std::getenv("MVLLM_CPU_ISA");
    if (asked && !std::strcmp(asked, "amx_bf16"))
        if (const Isa* isa = amx_isa()) return *isa;
#endif
    [[maybe_unused]] const Features has;
    const Candidate<Isa> best_first[] = {
#if MVLLM_X86
        {&isa_avx512_bf16, has.avx512_bf16},
        {&isa_avx512, has.avx512, "avx512_vnni"},  // VNNI is for products of integers
        {&isa_avx2, has.avx2, "avx2_vnni"},
#endif
        {&isa_generic, true},
    };
    return chosen(best_first);
}

}  // namespace

const Isa& current_isa() {
    static const Isa& isa = choose();
    return isa;
}

}  // namespace mvllm
