// Detects instruction sets that are not in the x86 list of dispatch.cpp: AMX, and bfloat16 of Arm.

#include "other_isas.h"

#include <cstring>

#include "amx.h"

#if MVLLM_ARM64
#include <sys/auxv.h>
#endif

namespace mvllm {

// Weak, as in dispatch.cpp.
#if MVLLM_ARM64
extern const Isa isa_neon_bf16 __attribute__((weak));
#endif

const Isa* other_isa(const char* asked) {
#if MVLLM_AMX
    if (!asked || !*asked || !std::strncmp(asked, "amx_", 4)) return amx_isa();
#endif
#if MVLLM_ARM64
    constexpr unsigned long BF16_BIT = 1ul << 14;  // HWCAP2_BF16 of asm/hwcap.h
    const bool has_it = &isa_neon_bf16 && (getauxval(AT_HWCAP2) & BF16_BIT);
    // A requested instruction set that does not run here selects the best one that does.
    if (has_it && !(asked && !std::strcmp(asked, "generic"))) return &isa_neon_bf16;
#endif
    static_cast<void>(asked);
    return nullptr;
}

}  // namespace mvllm
