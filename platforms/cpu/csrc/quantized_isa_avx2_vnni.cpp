// Kernels of quantized products, compiled for one instruction set: avx2_vnni.

#include "quantized_linear.h"

#if MVLLM_X86
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2,avxvnni,fma,f16c,bmi2")

#define LANES 8
#define HAS_F16C 1
#define HAS_BF16_DOT 0
#define HAS_VNNI 1
namespace mvllm {
namespace q_avx2_vnni {
#include "simd.h"
#include "quantized_linear_tile.h"
#include "block_linear_tile.h"
}  // namespace q_avx2_vnni
#pragma GCC pop_options
const QuantizedIsa quantized_isa_avx2_vnni = {
    "avx2_vnni",           q_avx2_vnni::quantize,     q_avx2_vnni::int8, q_avx2_vnni::convert, q_avx2_vnni::weight_only,
    q_avx2_vnni::quantized_linear_tile, q_avx2_vnni::quantized_linear_bf16_dot,
    q_avx2_vnni::block_kernels,
};
}  // namespace mvllm
#endif
