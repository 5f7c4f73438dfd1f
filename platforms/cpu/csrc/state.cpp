// Operations of layers with a state over the threads, see state_tile.h. Work is divided by request and head, and by parts of a
// head's state if there are few heads. Parts are independent of each other, so the division does not change results.

#include "state.h"

#include <algorithm>
#include <cstring>

#include "entries.h"
#include "kernels.h"
#include "team.h"
#include "thread_buffer.h"

namespace mvllm {
namespace {

constexpr int64_t SERIAL_ELEMENTS = 1 << 14;  // advanced in a call: below that waking other threads costs more than it saves
constexpr int64_t CONV_CHANNELS = 256;        // channels of a unit of work
constexpr int64_t SSD_ROWS = 16, DELTA_COLUMNS = 64;  // the least of a part of a state
constexpr int64_t MAX_LANES = 16;

int threads_for(int64_t elements) { return elements < SERIAL_ELEMENTS ? 1 : team_size(); }

// Calls work(request, head, begin, end) for all requests, heads, and parts of `size` rows or columns: `least` of them if there
// are few heads.
template <class Work>
void over_states(int threads, int64_t requests, int64_t heads, int64_t size, int64_t least, const Work& work) {
    const bool whole = threads == 1 || requests * heads >= 4 * threads;
    const int64_t part = whole ? size : std::min(size, least), parts = (size + part - 1) / part;
    divide_range(threads, requests * heads * parts, [&](int64_t begin, int64_t end) {
        for (int64_t unit = begin; unit < end; ++unit) {
            const int64_t state = unit / parts, first = unit % parts * part;
            work(state / heads, state % heads, first, std::min(first + part, size));
        }
    });
}

// Sets the results of the tokens after the last request to zero.
void clear_padding(const StateStep& step, int64_t requests, int64_t tokens, void* out, int64_t elements, int dtype) {
    if (!step.query_start_loc) return;
    const int64_t row = elements * (dtype == F32 ? 4 : 2), used = step.query_start_loc[requests];
    if (used < tokens) std::memset(static_cast<char*>(out) + used * row, 0, size_t((tokens - used) * row));
}

float* scratch_of(int64_t count) {
    thread_local Buffer memory;
    return reinterpret_cast<float*>(memory.at_least(size_t(count) * sizeof(float)));
}

}  // namespace
}  // namespace mvllm

using namespace mvllm;

extern "C" {

// The functions take the pointers of a `StateStep`; query_start_loc is null if token i belongs to request i.

void mvllm_cpu_causal_conv1d(const void* x, int64_t x_stride, const void* weight, const void* bias, void* state, void* out,
                             const int32_t* query_start_loc, const int32_t* read_slots, const int32_t* write_slots,
                             int64_t requests, int64_t tokens, int64_t channels, int64_t kernel_size, int silu, int dtype) {
    record_kernel_use();
    const CausalConv1d op{x,        weight,   bias,        state,     out, {query_start_loc, read_slots, write_slots},
                          x_stride, channels, kernel_size, silu != 0, dtype};
    clear_padding(op.step, requests, tokens, out, channels, dtype);
    const int64_t blocks = (channels + CONV_CHANNELS - 1) / CONV_CHANNELS;
    divide_range(threads_for(tokens * channels * kernel_size), requests * blocks, [&](int64_t begin, int64_t end) {
        for (int64_t unit = begin; unit < end; ++unit) {
            const int64_t first = unit % blocks * CONV_CHANNELS;
            current_isa().causal_conv1d(op, unit / blocks, first, std::min(first + CONV_CHANNELS, channels));
        }
    });
}

void mvllm_cpu_ssd(const void* x, int64_t x_stride, const void* dt, int64_t dt_stride, const float* a, const void* b,
                   int64_t b_stride, const void* c, int64_t c_stride, const float* d, const float* dt_bias, float* state,
                   void* out, const int32_t* query_start_loc, const int32_t* read_slots, const int32_t* write_slots,
                   int64_t requests, int64_t tokens, int64_t heads, int64_t head_dim, int64_t groups, int64_t state_size,
                   float dt_min, float dt_max, int dtype) {
    record_kernel_use();
    const Ssd op{x,         dt,        b,        c,        a,     d,        dt_bias, state,      out,
                 {query_start_loc, read_slots, write_slots}, x_stride, dt_stride, b_stride, c_stride, heads, head_dim, groups,
                 state_size, dt_min,   dt_max,   dtype};
    clear_padding(op.step, requests, tokens, out, heads * head_dim, dtype);
    const int64_t elements = head_dim * state_size;
    const int threads = threads_for(tokens * heads * elements);
    over_states(threads, requests, heads, head_dim, SSD_ROWS, [&](int64_t request, int64_t head, int64_t begin, int64_t end) {
        const int64_t group = 2 * STATE_TOKENS * (end - begin + MAX_LANES);
        current_isa().ssd(op, request, head, begin, end, scratch_of(elements + group));
    });
}

void mvllm_cpu_gated_delta_rule(const void* q, int64_t q_stride, const void* k, int64_t k_stride, const void* v,
                                int64_t v_stride, const float* g, int64_t g_stride, const void* beta, int64_t beta_stride,
                                float* state, void* out, const int32_t* query_start_loc, const int32_t* read_slots,
                                const int32_t* write_slots, int64_t requests, int64_t tokens, int64_t k_heads, int64_t v_heads,
                                int64_t k_dim, int64_t v_dim, float scale, int l2_norm, int channel_decay, int beta_dtype,
                                int dtype) {
    record_kernel_use();
    const GatedDeltaRule op{q, k, v, g, beta, state, out, {query_start_loc, read_slots, write_slots},
                            q_stride, k_stride, v_stride, g_stride, beta_stride, k_heads, v_heads, k_dim, v_dim,
                            scale, l2_norm != 0, channel_decay != 0, beta_dtype, dtype};
    clear_padding(op.step, requests, tokens, out, v_heads * v_dim, dtype);
    const int64_t elements = k_dim * v_dim, prepared = 4 * STATE_TOKENS * (k_dim + MAX_LANES);
    const int threads = threads_for(tokens * v_heads * elements);
    over_states(threads, requests, v_heads, v_dim, DELTA_COLUMNS, [&](int64_t request, int64_t head, int64_t begin, int64_t end) {
        current_isa().gated_delta_rule(op, request, head, begin, end, scratch_of(elements + prepared));
    });
}

void mvllm_cpu_gated_rms_norm(const void* x, int64_t x_stride, int64_t x_head_stride, const void* gate, int64_t gate_stride,
                              int64_t gate_head_stride, const void* weight, void* out, int64_t rows, int64_t heads,
                              int64_t width, int64_t group_size, float eps, int norm_before_gate, int sigmoid,
                              int weight_dtype, int dtype) {
    record_kernel_use();
    const GatedRmsNorm op{x,     gate, weight, out, heads, x_stride, x_head_stride, gate_stride, gate_head_stride, width,
                          group_size, eps, norm_before_gate != 0, sigmoid != 0, weight_dtype, dtype};
    divide_range(rows == 1 ? 1 : threads_for(rows * width), rows, [&](int64_t begin, int64_t end) {
        current_isa().gated_rms_norm(op, begin, end, scratch_of(2 * (group_size + MAX_LANES)));
    });
}

}  // extern "C"
