// The instruction set amx_bf16: avx512_bf16 with bfloat16 products on AMX tiles.

#pragma once

#include "kernels.h"

// Linux only, because a process has to request the tiles from the system. Compilers with this header can assemble AMX.
#if MVLLM_AMX_EMULATED || (MVLLM_X86 && defined(__linux__) && __has_include(<amxtileintrin.h>))
#define MVLLM_AMX 1
#else
#define MVLLM_AMX 0
#endif

namespace mvllm {

#if MVLLM_AMX
// Requests the tiles from the system. Returns the instruction set, or null if the processor or the system lacks it.
const Isa* amx_isa();

// The table of avx512_bf16 with products of block-quantized weights on AMX tiles, or null; see amx_block_linear.cpp.
struct QIsa;
const QIsa* amx_qisa();

// Implements `Isa::linear` for weights packed for avx512_bf16.
void amx_linear(const Linear&, int64_t row_begin, int64_t row_end, int64_t strip_begin, int64_t strip_end);
#endif

}  // namespace mvllm
