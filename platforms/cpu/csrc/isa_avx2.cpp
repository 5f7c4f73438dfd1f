// All kernels, compiled for one instruction set: avx2.

#include "kernels.h"

#if MVLLM_X86
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2")

#define LANES 8
#define HAS_F16C 1
#define HAS_BF16_DOT 0
namespace mvllm {
namespace avx2 {
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
}  // namespace avx2
#pragma GCC pop_options

const Isa isa_avx2 = {
    "avx2",
    avx2::paged_attention,
    avx2::paged_attention_reduce,
    avx2::sparse_attention,
    avx2::index_scores,
    avx2::reshape_and_cache,
    avx2::rms_norm,
    avx2::act_and_mul,
    avx2::add_or_scale,
    avx2::rotary_embedding,
    avx2::argmax,
    avx2::linear,
    avx2::linear_x,
    avx2::linear_tile,
    avx2::bf16_dot,
    avx2::moe_sum,
    avx2::clamped_gate,
    avx2::logsumexp,
    avx2::filtered_draw,
    avx2::causal_conv1d,
    avx2::ssd,
    avx2::gated_delta_rule,
    avx2::gated_rms_norm,
    avx2::activate,
    avx2::layer_norm,
    avx2::log_decay,
    avx2::elementwise,
    avx2::head_product,
};
}  // namespace mvllm
#endif
