// All kernels, compiled for one instruction set: avx512_bf16.

#include "kernels.h"

#if MVLLM_X86
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,bmi2,prefer-vector-width=512")

#define LANES 16
#define HAS_F16C 1
#define HAS_BF16_DOT 1
namespace mvllm {
namespace avx512_bf16 {
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
}  // namespace avx512_bf16
#pragma GCC pop_options

const Isa isa_avx512_bf16 = {
    "avx512_bf16",
    avx512_bf16::paged_attention,
    avx512_bf16::paged_attention_reduce,
    avx512_bf16::sparse_attention,
    avx512_bf16::index_scores,
    avx512_bf16::reshape_and_cache,
    avx512_bf16::rms_norm,
    avx512_bf16::act_and_mul,
    avx512_bf16::add_or_scale,
    avx512_bf16::rotary_embedding,
    avx512_bf16::argmax,
    avx512_bf16::linear,
    avx512_bf16::linear_x,
    avx512_bf16::linear_tile,
    avx512_bf16::bf16_dot,
    avx512_bf16::moe_sum,
    avx512_bf16::clamped_gate,
    avx512_bf16::logsumexp,
    avx512_bf16::filtered_draw,
    avx512_bf16::causal_conv1d,
    avx512_bf16::ssd,
    avx512_bf16::gated_delta_rule,
    avx512_bf16::gated_rms_norm,
    avx512_bf16::activate,
    avx512_bf16::layer_norm,
    avx512_bf16::log_decay,
    avx512_bf16::elementwise,
    avx512_bf16::head_product,
};
}  // namespace mvllm
#endif
