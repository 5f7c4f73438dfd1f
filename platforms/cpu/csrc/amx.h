// The instruction set amx_bf16: that of avx512_bf16, but for its products of bfloat16.

#pragma once

#include "kernels.h"

// Linux alone gives the tiles out; an assembler that knows them came with the compilers that have this header.
#if MVLLM_AMX_EMULATED || (MVLLM_X86 && defined(__linux__) && __has_include(<amxtileintrin.h>))
#define MVLLM_AMX 1
#else
#define MVLLM_AMX 0
#endif

namespace mvllm {

#if MVLLM_AMX
// The instruction set, or null where the processor does not have it or the system does not let this process use it; asks
// the system to.
const Isa* amx_isa();

// As `Isa::linear`, with weights packed for avx512_bf16.
void amx_linear(const Linear&, int64_t row_begin, int64_t row_end, int64_t strip_begin, int64_t strip_end);
#endif

}  // namespace mvllm
