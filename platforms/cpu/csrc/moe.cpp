// The experts of a mixture-of-experts layer. A *pair* is a token and one of its top_k experts. Pairs are sorted by
// expert, so that an expert's weights are multiplied with all its rows at once, and unused experts are not read:
//
//     tokens       t0 t1 t2 ...                          rows of x
//     pairs        [ t0 t7 | t1 | t0 t2 t5 t9 | ... ]    rows gathered by expert          (gather)
//                    e0      e1   e4
//     items        (expert, up to LINEAR_ROWS of its rows, panel of columns)              (gate and up, silu, product)
//                  (expert, up to LINEAR_ROWS of its rows, panel of columns)              (down)
//     tokens       t0 = w * row of e0 + w * row of e4                                     (moe_sum, in float32)
//
// Threads take the items of each step dynamically. A panel is a separate product for the
// kernels of linear_tile.h, with at most `linear_tile` outputs. Panels of gate and up contain the same columns of both,
// so that one thread can compute silu(gate) * up.
//
// A token's result does not depend on the other tokens or their number: rows of a product are independent, and a
// token's experts are summed in the order of their ids.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>

#include "entries.h"
#include "kernels.h"
#include "moe_routing.h"
#include "team.h"
#include "thread_buffer.h"

extern "C" {
int64_t mvllm_cpu_linear_packed_size(int64_t out_features, int64_t in_features, int dtype);
void mvllm_cpu_linear_pack(const void* weight, int64_t stride, void* packed, int64_t out_features, int64_t in_features,
                           int dtype);
}

namespace mvllm {
namespace {

constexpr int64_t SERIAL_WORK = 1 << 18;    // multiply-adds below which waking other threads costs more than it saves
constexpr int64_t MOST_COLUMNS = 64;  // no instruction set has a wider `linear_tile`

// The layout of a weight [rows, in_features] in panels, each packed separately.
struct Panels {
    int64_t width;        // columns of the result that a panel computes
    int64_t count;
    int64_t panel_bytes;
    int64_t in_features;

    Panels(int64_t columns, int64_t width, int64_t outputs, int64_t in_features, int dtype)
        : width(width),
          count((columns + width - 1) / width),
          panel_bytes(mvllm_cpu_linear_packed_size(outputs, in_features, dtype) * element_size(dtype)),
          in_features(in_features) {}
    int64_t expert_bytes() const { return count * panel_bytes; }
};

Panels gate_up_panels(int64_t hidden, int64_t inner, int dtype) {
    const int64_t tile = current_isa().linear_tile;
    return Panels(inner, tile / 2, tile, hidden, dtype);
}

// The first matrix of experts without a gate.
Panels up_panels(int64_t hidden, int64_t inner, int dtype) {
    const int64_t tile = current_isa().linear_tile;
    return Panels(inner, tile, tile, hidden, dtype);
}

Panels down_panels(int64_t hidden, int64_t inner, int dtype) {
    const int64_t tile = current_isa().linear_tile;
    return Panels(hidden, tile, tile, inner, dtype);
}

// The format of the rows of x in a product with `in_features`; `as_is` if they need no conversion.
struct RowFormat {
    bool as_is;
    int64_t elements, bytes;

    RowFormat(const Isa& isa, int64_t in_features, int dtype) {
        as_is = dtype == F32 || (dtype == BF16 && isa.bf16_dot && in_features % 2 == 0);
        elements = in_features + (dtype == BF16 ? in_features & 1 : 0);
        bytes = elements * (dtype == BF16 && isa.bf16_dot ? 2 : 4);
    }
};

enum Gate { SILU_GATE, GELU_TANH_GATE, CLAMPED_GATE, NO_GATE };

struct Moe {
    const char* x;
    int64_t x_stride;
    const char* gate_up;  // `up` without a gate
    const char* down;
    const int64_t* ids;
    const float* weights;
    char* out;
    int64_t experts, top_k, hidden, inner;
    int dtype;
    Gate gate;
    int function;              // Activation, without a gate
    const char* gate_up_bias;  // [experts, 2 * inner] or null
    const char* down_bias;     // [experts, hidden] or null
    float alpha, limit;        // of clamped gates
};

void run(const Isa& isa, const Moe& op, int64_t num_tokens) {
    const int element = element_size(op.dtype);
    const Routing routing(op.ids, op.weights, num_tokens, op.top_k, op.experts);
    const Panels gate_up = (op.gate == NO_GATE ? up_panels : gate_up_panels)(op.hidden, op.inner, op.dtype);
    const Panels down = down_panels(op.hidden, op.inner, op.dtype);
    const int halves = op.gate == NO_GATE ? 1 : 2;
    const RowFormat in(isa, op.hidden, op.dtype), mid(isa, op.inner, op.dtype);
    const int64_t pairs = num_tokens * op.top_k, num_blocks = int64_t(routing.blocks.size());
    const int64_t x_bytes = std::max(in.bytes, op.hidden * element), act_bytes = op.inner * element;

    // The rows of x have been read before those of `down` are written, so both use the same memory.
    thread_local Buffer kept;
    char* const rows =
        kept.at_least(size_t(aligned(pairs * x_bytes) + aligned(pairs * act_bytes) + (mid.as_is ? 0 : pairs * mid.bytes)));
    char* const act = rows + aligned(pairs * x_bytes);
    char* const wide = mid.as_is ? act : act + aligned(pairs * act_bytes);
    const int64_t wide_stride = mid.as_is ? op.inner : mid.elements;

    const int64_t work = pairs * op.hidden * op.inner * 3;
    const int threads = work < SERIAL_WORK ? 1 : int(std::min<int64_t>(team_size(), work / (SERIAL_WORK / 2)));
    divide_range(threads, pairs, [&](int64_t begin, int64_t end) {
        for (int64_t p = begin; p < end; ++p) {
            const char* x = op.x + routing.tokens[size_t(p)] * op.x_stride * element;
            if (in.as_is) {
                std::memcpy(rows + p * in.bytes, x, size_t(in.bytes));
                continue;
            }
            const Linear one{x, nullptr, nullptr, nullptr, op.x_stride, int32_t(op.hidden), 0, op.dtype};
            isa.linear_x(one, rows + p * in.bytes, in.elements, 0, 1);
        }
    });
    // Thread after thread takes one panel of one block: blocks have different heights.
    auto for_each_panel = [&](const Panels& panels, const auto& work) {
        const int64_t count = num_blocks * panels.count;
        std::atomic<int64_t> next{0};
        divide_pieces(threads, threads, [&](Part) {
            for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;)
                work(routing.blocks[size_t(i / panels.count)], i % panels.count);
        });
    };
    for_each_panel(gate_up, [&](const Block& block, int64_t panel) {
        alignas(64) char sums[LINEAR_ROWS * MOST_COLUMNS * 4];
        alignas(64) char gated[LINEAR_ROWS * MOST_COLUMNS * 4];
        const int64_t column = panel * gate_up.width;
        const int64_t n = std::min(gate_up.width, op.inner - column), height = block.end - block.begin;
        alignas(64) char bias[MOST_COLUMNS * 4];
        if (op.gate_up_bias)
            for (int half = 0; half < 2; ++half)
                std::memcpy(bias + half * n * element,
                            op.gate_up_bias + ((block.expert * 2 + half) * op.inner + column) * element, size_t(n * element));
        const Linear product{rows + block.begin * in.bytes, op.gate_up + block.expert * gate_up.expert_bytes() +
                             panel * gate_up.panel_bytes, op.gate_up_bias ? bias : nullptr, sums, in.elements,
                             int32_t(op.hidden), int32_t(halves * n), op.dtype};
        isa.linear(product, 0, height, 0, (halves * n + STRIP - 1) / STRIP);
        const ActAndMul gates{sums, gated, 2 * n, n, n, n, op.dtype, op.gate == GELU_TANH_GATE};
        if (op.gate == NO_GATE)
            isa.activate(Activate{sums, nullptr, gated, n, 0, n, op.function, op.dtype}, 0, height);
        else if (op.gate == CLAMPED_GATE)
            isa.clamped_gate(ClampedGate{gates, op.alpha, op.limit}, 0, height);
        else
            isa.act_and_mul(gates, 0, height);
        for (int64_t m = 0; m < height; ++m)
            std::memcpy(act + (block.begin + m) * act_bytes + column * element, gated + m * n * element,
                        size_t(n * element));
    });
    if (!mid.as_is) {
        const Linear all{act, nullptr, nullptr, nullptr, op.inner, int32_t(op.inner), 0, op.dtype};
        divide_range(threads, pairs,
                     [&](int64_t begin, int64_t end) { isa.linear_x(all, wide, mid.elements, begin, end); });
    }
    for_each_panel(down, [&](const Block& block, int64_t panel) {
        alignas(64) char sums[LINEAR_ROWS * MOST_COLUMNS * 4];
        const int64_t column = panel * down.width;
        const int64_t n = std::min(down.width, op.hidden - column), height = block.end - block.begin;
        const Linear product{wide + block.begin * mid.bytes, op.down + block.expert * down.expert_bytes() +
                             panel * down.panel_bytes,
                             op.down_bias ? op.down_bias + (block.expert * op.hidden + column) * element : nullptr, sums,
                             wide_stride, int32_t(op.inner), int32_t(n), op.dtype};
        isa.linear(product, 0, height, 0, (n + STRIP - 1) / STRIP);
        for (int64_t m = 0; m < height; ++m)
            std::memcpy(rows + ((block.begin + m) * op.hidden + column) * element, sums + m * n * element,
                        size_t(n * element));
    });
    const MoeSum sum{rows, routing.positions.data(), routing.weights.data(), op.out, op.hidden, op.hidden,
                     int32_t(op.top_k), op.dtype};
    divide_range(threads, num_tokens, [&](int64_t begin, int64_t end) { isa.moe_sum(sum, begin, end); });
}

// All tokens, as many at a time as buffers hold.
void run_all(const Moe& op, int64_t tokens) {
    const int64_t element = element_size(op.dtype), most = tokens_at_once(op.top_k * (op.hidden + 2 * op.inner) * 4);
    for (int64_t first = 0; first < tokens; first += most) {
        Moe part = op;
        part.x += first * op.x_stride * element;
        part.ids += first * op.top_k;
        part.weights += first * op.top_k;
        part.out += first * op.hidden * element;
        run(current_isa(), part, std::min(most, tokens - first));
    }
}

// Packs one expert. Panel `p` consists of columns [p * width, ...) of each of `parts` adjacent matrices
// [rows, in_features] in `weight`.
void pack_expert(const char* weight, char* packed, const Panels& panels, int64_t rows, int parts, int dtype) {
    const int64_t row_bytes = panels.in_features * element_size(dtype);
    divide_range(team_size(), panels.count, [&](int64_t begin, int64_t end) {
        std::unique_ptr<char[]> gathered(new char[size_t(parts * panels.width * row_bytes)]);
        for (int64_t p = begin; p < end; ++p) {
            const int64_t first = p * panels.width, n = std::min(panels.width, rows - first);
            for (int part = 0; part < parts; ++part)
                std::memcpy(gathered.get() + part * n * row_bytes, weight + (part * rows + first) * row_bytes,
                            size_t(n * row_bytes));
            char* to = packed + p * panels.panel_bytes;
            std::memset(to, 0, size_t(panels.panel_bytes));
            mvllm_cpu_linear_pack(gathered.get(), panels.in_features, to, parts * n, panels.in_features, dtype);
        }
    });
}

// Packs expert by expert. If the packed form has the same size, it may be in place, with a copy of one expert.
void pack_experts(const char* weights, char* packed, const Panels& panels, int64_t experts, int64_t rows, int parts,
                  int dtype) {
    const int64_t bytes = parts * rows * panels.in_features * element_size(dtype);
    std::unique_ptr<char[]> copy(weights == packed ? new char[size_t(bytes)] : nullptr);
    for (int64_t e = 0; e < experts; ++e) {
        const char* from = weights + e * bytes;
        if (copy) from = static_cast<const char*>(std::memcpy(copy.get(), from, size_t(bytes)));
        pack_expert(from, packed + e * panels.expert_bytes(), panels, rows, parts, dtype);
    }
}

}  // namespace
}  // namespace mvllm

using namespace mvllm;

extern "C" {

// Bytes of one expert's packed weights: of gate and up together (0), of down (1), or of up without a gate (2).
int64_t mvllm_cpu_moe_expert_bytes(int matrix, int64_t hidden, int64_t inner, int dtype) {
    return (matrix == 1 ? down_panels : matrix == 2 ? up_panels : gate_up_panels)(hidden, inner, dtype).expert_bytes();
}

// `weights` [experts, 2 * inner, hidden], [experts, hidden, inner] for down, or [experts, inner, hidden] for up without a
// gate, contiguous. `packed` may be the same memory if an expert's packed bytes are as many as its unpacked ones.
void mvllm_cpu_moe_pack(int matrix, const void* weights, void* packed, int64_t experts, int64_t hidden, int64_t inner,
                        int dtype) {
    const char* from = static_cast<const char*>(weights);
    char* to = static_cast<char*>(packed);
    if (matrix == 1) return pack_experts(from, to, down_panels(hidden, inner, dtype), experts, hidden, 1, dtype);
    if (matrix == 2) return pack_experts(from, to, up_panels(hidden, inner, dtype), experts, inner, 1, dtype);
    pack_experts(from, to, gate_up_panels(hidden, inner, dtype), experts, inner, 2, dtype);
}

// out [tokens, hidden], contiguous; rows of `x` are `x_stride` elements apart. `ids` and `weights` are [tokens, top_k].
void mvllm_cpu_moe(const void* x, int64_t x_stride, const void* gate_up, const void* down, const int64_t* ids,
                   const float* weights, void* out, int64_t tokens, int64_t experts, int64_t top_k, int64_t hidden,
                   int64_t inner, int dtype) {
    run_all({static_cast<const char*>(x), x_stride, static_cast<const char*>(gate_up), static_cast<const char*>(down), ids,
             weights, static_cast<char*>(out), experts, top_k, hidden, inner, dtype, SILU_GATE, 0, nullptr, nullptr, 0, 0},
            tokens);
}

// The same with gelu (tanh form) as the activation of the gates.
void mvllm_cpu_gelu_tanh_moe(const void* x, int64_t x_stride, const void* gate_up, const void* down, const int64_t* ids,
                             const float* weights, void* out, int64_t tokens, int64_t experts, int64_t top_k, int64_t hidden,
                             int64_t inner, int dtype) {
    run_all({static_cast<const char*>(x), x_stride, static_cast<const char*>(gate_up), static_cast<const char*>(down), ids,
             weights, static_cast<char*>(out), experts, top_k, hidden, inner, dtype, GELU_TANH_GATE, 0, nullptr, nullptr, 0, 0},
            tokens);
}

// The same without gates: `up` has `inner` rows for each expert, and `function` is an Activation.
void mvllm_cpu_ungated_moe(const void* x, int64_t x_stride, const void* up, const void* down, const int64_t* ids,
                           const float* weights, void* out, int64_t tokens, int64_t experts, int64_t top_k, int64_t hidden,
                           int64_t inner, int function, int dtype) {
    run_all({static_cast<const char*>(x), x_stride, static_cast<const char*>(up), static_cast<const char*>(down), ids,
             weights, static_cast<char*>(out), experts, top_k, hidden, inner, dtype, NO_GATE, function, nullptr, nullptr, 0, 0},
            tokens);
}

// The same with clamped gates, see ClampedGate, and biases [experts, 2 * inner] and [experts, hidden].
void mvllm_cpu_clamped_moe(const void* x, int64_t x_stride, const void* gate_up, const void* gate_up_bias, const void* down,
                           const void* down_bias, const int64_t* ids, const float* weights, void* out, int64_t tokens,
                           int64_t experts, int64_t top_k, int64_t hidden, int64_t inner, float alpha, float limit, int dtype) {
    run_all({static_cast<const char*>(x), x_stride, static_cast<const char*>(gate_up), static_cast<const char*>(down), ids,
             weights, static_cast<char*>(out), experts, top_k, hidden, inner, dtype, CLAMPED_GATE, 0,
             static_cast<const char*>(gate_up_bias), static_cast<const char*>(down_bias), alpha, limit},
            tokens);
}

}  // extern "C"
