// All kernels, compiled for one instruction set: generic.

#include "kernels.h"

#define LANES 4
#define HAS_F16C 0
#define HAS_BF16_DOT 0
namespace mvllm {
namespace generic {
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
}  // namespace generic
const Isa isa_generic = {
    "generic",
    generic::paged_attention,
    generic::paged_attention_reduce,
    generic::sparse_attention,
    generic::index_scores,
    generic::reshape_and_cache,
    generic::rms_norm,
    generic::act_and_mul,
    generic::add_or_scale,
    generic::rotary_embedding,
    generic::argmax,
    generic::linear,
    generic::linear_x,
    generic::linear_tile,
    generic::bf16_dot,
    generic::moe_sum,
    generic::clamped_gate,
    generic::logsumexp,
    generic::filtered_draw,
    generic::causal_conv1d,
    generic::ssd,
    generic::gated_delta_rule,
    generic::gated_rms_norm,
    generic::activate,
    generic::layer_norm,
    generic::log_decay,
    generic::elementwise,
    generic::head_product,
};
}  // namespace mvllm
