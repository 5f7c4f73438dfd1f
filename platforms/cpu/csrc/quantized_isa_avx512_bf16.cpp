// Kernels of quantized products, compiled for one instruction set: avx512_bf16.

#include "quantized_linear.h"

#if MVLLM_X86
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c,bmi2,prefer-vector-width=512")

#define LANES 16
#define HAS_F16C 1
#define HAS_BF16_DOT 1
#define HAS_VNNI 1
namespace mvllm {
namespace q_avx512_bf16 {
#include "simd.h"
#include "quantized_linear_tile.h"
#include "block_linear_tile.h"
}  // namespace q_avx512_bf16
#pragma GCC pop_options
const QuantizedIsa quantized_isa_avx512_bf16 = {
    "avx512_bf16",           q_avx512_bf16::quantize,     q_avx512_bf16::int8, q_avx512_bf16::convert, q_avx512_bf16::weight_only,
    q_avx512_bf16::quantized_linear_tile, q_avx512_bf16::quantized_linear_bf16_dot,
    q_avx512_bf16::block_kernels,
};
}  // namespace mvllm
#endif
