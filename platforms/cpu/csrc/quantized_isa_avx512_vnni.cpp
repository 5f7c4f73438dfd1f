// Kernels of quantized products, compiled for one instruction set: avx512_vnni.

#include "quantized_linear.h"

#if MVLLM_X86
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi2,prefer-vector-width=512")

#define LANES 16
#define HAS_F16C 1
#define HAS_BF16_DOT 0
#define HAS_VNNI 1
namespace mvllm {
namespace q_avx512_vnni {
#include "simd.h"
#include "quantized_linear_tile.h"
#include "block_linear_tile.h"
}  // namespace q_avx512_vnni
#pragma GCC pop_options
const QuantizedIsa quantized_isa_avx512_vnni = {
    "avx512_vnni",           q_avx512_vnni::quantize,     q_avx512_vnni::int8, q_avx512_vnni::convert, q_avx512_vnni::weight_only,
    q_avx512_vnni::quantized_linear_tile, q_avx512_vnni::quantized_linear_bf16_dot,
    q_avx512_vnni::block_kernels,
};
}  // namespace mvllm
#endif
