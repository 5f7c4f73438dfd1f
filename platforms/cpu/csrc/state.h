// Arguments of the kernels of layers with a state (state_tile.h).

#pragma once

#include <cstdint>

namespace mvllm {

constexpr int STATE_TOKENS = 16;  // tokens that a part of a state is advanced by before the next part
constexpr int MAX_CONV_KERNEL = 16;
constexpr int MAX_STATE_SIZE = 512;

// The requests of a step and their slots. Slot -1: zeros are read, or nothing is written.
struct StateStep {
    const int32_t* query_start_loc;  // null: token i belongs to request i
    const int32_t* read_slots;
    const int32_t* write_slots;
};

// The tokens of one request and its slots.
struct Tokens {
    int64_t begin, end, read, write;
};

inline Tokens tokens_of(const StateStep& step, int64_t request) {
    const int64_t begin = step.query_start_loc ? step.query_start_loc[request] : request;
    const int64_t end = step.query_start_loc ? step.query_start_loc[request + 1] : request + 1;
    return {begin, end, step.read_slots[request], step.write_slots[request]};
}

// Strides are elements between tokens; results are contiguous.

struct CausalConv1d {
    const void* x;
    const void* weight;  // [channels, kernel_size]
    const void* bias;    // [channels] or null
    void* state;         // [slots, channels, kernel_size - 1]
    void* out;
    StateStep step;
    int64_t x_stride, channels, kernel_size;
    bool silu;
    int32_t dtype;
};

struct Ssd {
    const void *x, *dt, *b, *c;
    const float *a, *d, *dt_bias;  // [heads]; d and dt_bias may be null
    float* state;                  // [slots, heads, head_dim, state_size]
    void* out;
    StateStep step;
    int64_t x_stride, dt_stride, b_stride, c_stride;
    int64_t heads, head_dim, groups, state_size;
    float dt_min, dt_max;
    int32_t dtype;
};

struct GatedDeltaRule {
    const void *q, *k, *v;
    const float* g;    // per token and head, or with `channel_decay` per channel of the key
    const void* beta;
    float* state;      // [slots, v_heads, k_dim, v_dim]
    void* out;
    StateStep step;
    int64_t q_stride, k_stride, v_stride, g_stride, beta_stride;
    int64_t k_heads, v_heads, k_dim, v_dim;
    float scale;
    bool l2_norm, channel_decay;
    int32_t beta_dtype, dtype;
};

struct GatedRmsNorm {
    const void* x;
    const void* gate;  // or null
    const void* weight;
    void* out;
    // Rows of x and gate are in groups of `heads`: groups are `*_stride` elements apart, rows of a group `*_head_stride`.
    int64_t heads, x_stride, x_head_stride, gate_stride, gate_head_stride, width, group_size;
    float eps;
    bool norm_before_gate, sigmoid;
    int32_t weight_dtype, dtype;
};

}  // namespace mvllm
