// Kernels of quantized products, compiled for one instruction set: generic.

#include "quantized_linear.h"


#define LANES 4
#define HAS_F16C 0
#define HAS_BF16_DOT 0
#define HAS_VNNI 0
namespace mvllm {
namespace q_generic {
#include "simd.h"
#include "quantized_linear_tile.h"
#include "block_linear_tile.h"
}  // namespace q_generic

const QuantizedIsa quantized_isa_generic = {
    "generic",           q_generic::quantize,     q_generic::int8, q_generic::convert, q_generic::weight_only,
    q_generic::quantized_linear_tile, q_generic::quantized_linear_bf16_dot,
    q_generic::block_kernels,
};
}  // namespace mvllm
