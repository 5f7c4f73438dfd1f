// All kernels, compiled for one instruction set: neon_bf16, for 64-bit Arm with bfloat16 dot products (Armv8.6, and
// many of 8.2). Other Arm processors run the portable kernels, whose vectors of four floats compile to NEON.

#include "kernels.h"

#if MVLLM_ARM64
#include <arm_neon.h>

#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+bf16")

#define LANES 4
#define HAS_F16C 0
#define HAS_BF16_DOT 1
namespace mvllm {
namespace neon_bf16 {
#include "simd.h"
#include "attention_tile.h"
#include "kv_store.h"
#include "sparse_attention_tile.h"
#include "elementwise.h"
#include "linear_tile.h"
#include "moe_tile.h"
#include "sampling_rows.h"
#include "state_tile.h"
#include "activation_tile.h"
#include "head_product_tile.h"
#include "strided_tile.h"
}  // namespace neon_bf16
#pragma GCC pop_options

const Isa isa_neon_bf16 = {
    "neon_bf16",
    neon_bf16::paged_attention,
    neon_bf16::paged_attention_reduce,
    neon_bf16::sparse_attention,
    neon_bf16::index_scores,
    neon_bf16::reshape_and_cache,
    neon_bf16::rms_norm,
    neon_bf16::act_and_mul,
    neon_bf16::add_or_scale,
    neon_bf16::rotary_embedding,
    neon_bf16::argmax,
    neon_bf16::linear,
    neon_bf16::linear_x,
    neon_bf16::linear_tile,
    neon_bf16::bf16_dot,
    neon_bf16::moe_sum,
    neon_bf16::clamped_gate,
    neon_bf16::logsumexp,
    neon_bf16::filtered_draw,
    neon_bf16::causal_conv1d,
    neon_bf16::ssd,
    neon_bf16::gated_delta_rule,
    neon_bf16::gated_rms_norm,
    neon_bf16::activate,
    neon_bf16::layer_norm,
    neon_bf16::log_decay,
    neon_bf16::elementwise,
    neon_bf16::head_product,
};
}  // namespace mvllm
#endif
