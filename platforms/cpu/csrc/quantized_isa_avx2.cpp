// Kernels of quantized products, compiled for one instruction set: avx2.

#include "quantized_linear.h"

#if MVLLM_X86
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2")

#define LANES 8
#define HAS_F16C 1
#define HAS_BF16_DOT 0
#define HAS_VNNI 0
namespace mvllm {
namespace q_avx2 {
#include "simd.h"
#include "quantized_linear_tile.h"
#include "block_linear_tile.h"
}  // namespace q_avx2
#pragma GCC pop_options
const QuantizedIsa quantized_isa_avx2 = {
    "avx2",           q_avx2::quantize,     q_avx2::int8, q_avx2::convert, q_avx2::weight_only,
    q_avx2::quantized_linear_tile, q_avx2::quantized_linear_bf16_dot,
    q_avx2::block_kernels,
};
}  // namespace mvllm
#endif
