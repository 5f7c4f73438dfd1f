// All kernels, compiled for one instruction set: avx512.

#include "kernels.h"

#if MVLLM_X86
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx2,fma,f16c,bmi2,prefer-vector-width=512")

#define LANES 16
#define HAS_F16C 1
#define HAS_BF16_DOT 0
namespace mvllm {
namespace avx512 {
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
}  // namespace avx512
#pragma GCC pop_options

const Isa isa_avx512 = {
    "avx512",
    avx512::paged_attention,
    avx512::paged_attention_reduce,
    avx512::sparse_attention,
    avx512::index_scores,
    avx512::reshape_and_cache,
    avx512::rms_norm,
    avx512::act_and_mul,
    avx512::add_or_scale,
    avx512::rotary_embedding,
    avx512::argmax,
    avx512::linear,
    avx512::linear_x,
    avx512::linear_tile,
    avx512::bf16_dot,
    avx512::moe_sum,
    avx512::clamped_gate,
    avx512::logsumexp,
    avx512::filtered_draw,
    avx512::causal_conv1d,
    avx512::ssd,
    avx512::gated_delta_rule,
    avx512::gated_rms_norm,
    avx512::activate,
    avx512::layer_norm,
    avx512::log_decay,
    avx512::elementwise,
    avx512::head_product,
};
}  // namespace mvllm
#endif
