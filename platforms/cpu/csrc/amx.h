// The instruction sets amx_bf16 and amx_int8: avx512_bf16 with products of bfloat16 and of int8 on AMX tiles.

#pragma once

#include "kernels.h"
#include "quantized_linear.h"

// MVLLM_AMX_EMULATED compiles these files for tests on processors without AMX (amx_tiles.h): 1, of products of bfloat16 only,
// for any processor; 2, of all, for processors with avx512_bf16.
#ifndef MVLLM_AMX_EMULATED
#define MVLLM_AMX_EMULATED 0
#endif

// Linux only, because a process has to request the tiles from the system. Compilers with this header can assemble AMX.
#if MVLLM_AMX_EMULATED || (MVLLM_X86 && defined(__linux__) && __has_include(<amxtileintrin.h>))
#define MVLLM_AMX 1
#else
#define MVLLM_AMX 0
#endif

namespace mvllm {

#if MVLLM_AMX
// Bits of CPUID leaf 7 (EDX): products of tiles that a processor has.
constexpr unsigned AMX_BF16 = 1u << 22, AMX_INT8 = 1u << 25;

// Requests the tiles from the system; false if the processor or the system lacks them or these products.
bool amx_runs_here(unsigned products);

// avx512_bf16 with products of int8 rows on tiles. Null if the processor or the system lacks the tiles.
const QuantizedIsa* amx_quantized_isa();

// Requests the tiles from the system. Returns the instruction set, or null if the processor or the system lacks it.
const Isa* amx_isa();

// Implements `BlockKernels::int8` for weights packed for avx512_bf16; see amx_block_linear.cpp.
void amx_block_int8(const BlockRows&, const BlockTile&, int64_t row, int rows);

// Implements `Isa::paged_attention`.
void amx_paged_attention(const Geometry&, const Layer&, const WorkItem&, const WorkItem* next, const Scratch&, float* partials);

// Implements `Isa::linear` for weights packed for avx512_bf16.
void amx_linear(const Linear&, int64_t row_begin, int64_t row_end, int64_t strip_begin, int64_t strip_end);
#endif

}  // namespace mvllm
