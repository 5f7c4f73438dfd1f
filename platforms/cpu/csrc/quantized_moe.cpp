// Mixture-of-experts layers with quantized weights. As in moe.cpp, pairs of a token and an expert are sorted by expert, and
// unused experts are not read:
//
//     tokens       x converted for the kernels            (convert; every thread converts all of a small x)
//     pieces       (expert, up to 96 of its rows, tiles)  gate and up, or up alone, activation
//     pieces       (expert, up to 96 of its rows, tiles)  down
//     tokens       t0 = w * row of e0 + w * row of e4     (moe_sum, in float32)
//
// A piece is a range of the (block of rows, tile) pairs of all experts. With a single token, each of its experts has so many
// tiles that several threads share them, in memory order.
//
// Results are rounded where the reference rounds. A token's result does not depend on the other tokens or their number: rows
// of a product are independent, and a token's experts are summed in the order of their ids.

#include <cstring>
#include <vector>

#include "activations.h"
#include "entries.h"
#include "expert_product.h"
#include "moe_routing.h"
#include "team.h"
#include "thread_buffer.h"

namespace mvllm {
namespace {

constexpr int64_t SERIAL_WORK = 1 << 19;        // multiply-adds below which waking other threads costs more than it saves
constexpr int64_t SERIAL_SUM = 1 << 16;         // the same for moe_sum, in elements
constexpr int64_t REPEATED_ELEMENTS = 1 << 13;  // up to this size every thread converts all of x: faster than waiting
constexpr int64_t REPEATED_INNER = 1 << 15;     // the same for inner rows; a thread converts those of its own pieces
constexpr int64_t GATED_ELEMENTS = 1 << 14;     // gate and up elements before the activation: they stay in the L1 cache
constexpr int64_t TILE_WORK = 8;                // reading a tile of a weight takes as long as computing this many rows

thread_local Buffer shared_memory, own_rows, gathered_rows, own_gates;
thread_local std::vector<char> own_blocks;

enum Gate { SILU_GATE, CLAMPED_GATE, NO_GATE };  // mirrored in Python

struct QuantizedMoe {
    const char* x;
    int64_t x_stride;
    const ExpertMatrices* gate_up;  // up alone without a gate
    const ExpertMatrices* down;
    const char* gate_up_bias;
    const char* down_bias;
    const int64_t* ids;
    const float* weights;
    char* out;
    int64_t tokens, experts, top_k;
    int gate;
    int function;  // Activation, without a gate
    float alpha, limit;
    int dtype;
};

// Divides all tiles of all blocks of rows into parts of equal work.
class Pieces {
  public:
    Pieces(const std::vector<Block>& blocks, int64_t tiles) : blocks_(blocks), tiles_(tiles), starts_(1, 0) {
        for (const Block& block : blocks) starts_.push_back(starts_.back() + tiles * work_of(block));
    }

    int64_t tiles() const { return int64_t(blocks_.size()) * tiles_; }

    // Calls work(block index, first tile, end) for the tiles of one part.
    template <class Work>
    void for_each(Part part, const Work& work) const {
        const Edge end = edge(part.index + 1, part.count);
        for (Edge at = edge(part.index, part.count); at.block < end.block || (at.block == end.block && at.tile < end.tile);
             at = {at.block + 1, 0})
            work(at.block, at.tile, at.block == end.block ? end.tile : tiles_);
    }

  private:
    struct Edge {
        int64_t block, tile;
    };

    static int64_t work_of(const Block& block) { return TILE_WORK + block.end - block.begin; }

    Edge edge(int64_t i, int64_t count) const {
        const int64_t at = starts_.back() * i / count;
        const int64_t block = std::upper_bound(starts_.begin(), starts_.end(), at) - starts_.begin() - 1;
        if (block == int64_t(blocks_.size())) return {block, 0};
        return {block, (at - starts_[size_t(block)]) / work_of(blocks_[size_t(block)])};
    }

    const std::vector<Block>& blocks_;
    int64_t tiles_;
    std::vector<int64_t> starts_;
};

class Run {
  public:
    explicit Run(const QuantizedMoe& op)
        : op_(op),
          halves_(op.gate == NO_GATE ? 1 : 2),
          gate_up_(current_quantized_isa(), *op.gate_up, halves_, op.dtype),
          down_(current_quantized_isa(), *op.down, 1, op.dtype),
          routing_(op.ids, op.weights, op.tokens, op.top_k, op.experts),
          pairs_(op.tokens * op.top_k),
          hidden_(op.gate_up->in_features),
          inner_(op.down->in_features),
          element_(element_size(op.dtype)),
          threads_(pairs_ * hidden_ * inner_ * 3 < SERIAL_WORK ? 1 : team_size()),
          shares_tokens_(threads_ > 1 && op.tokens * hidden_ > REPEATED_ELEMENTS && !gate_up_.converts_by_expert()),
          shares_inner_(threads_ > 1 && pairs_ * inner_ > REPEATED_INNER) {}

    void run() {
        const int64_t token_bytes = aligned(shares_tokens_ ? gate_up_.rows().bytes(op_.tokens) : 0);
        const int64_t inner_bytes = aligned(shares_inner_ ? down_.rows().bytes(pairs_) : 0);
        const int64_t gated_bytes = aligned(pairs_ * inner_ * element_);
        char* memory = shared_memory.at_least(size_t(token_bytes + inner_bytes + gated_bytes + pairs_ * hidden_ * element_));
        tokens_ = gate_up_.rows().place(memory, op_.tokens);
        inner_rows_ = down_.rows().place(memory + token_bytes, pairs_);
        gated_ = memory + token_bytes + inner_bytes;
        results_ = gated_ + gated_bytes;

        if (shares_tokens_)
            divide_range(threads_, op_.tokens, [&](int64_t begin, int64_t end) { convert_tokens(tokens_, begin, end); });
        const Pieces gates(routing_.blocks, gate_up_.tiles()), downs(routing_.blocks, down_.tiles());
        divide_pieces(threads_, gates.tiles(), [&](Part part) { compute_gates(gates, part); });
        if (shares_inner_)
            divide_range(threads_, int64_t(routing_.blocks.size()), [&](int64_t begin, int64_t end) {
                for (int64_t i = begin; i < end; ++i) convert_inner(inner_rows_, routing_.blocks[size_t(i)]);
            });
        divide_pieces(threads_, downs.tiles(), [&](Part part) { compute_down(downs, part); });
        const MoeSum sum{results_, routing_.positions.data(), routing_.weights.data(), op_.out, hidden_, hidden_,
                         int32_t(op_.top_k), op_.dtype};
        divide_range(pairs_ * hidden_ < SERIAL_SUM ? 1 : threads_, op_.tokens,
                     [&](int64_t begin, int64_t end) { current_isa().moe_sum(sum, begin, end); });
    }

  private:
    void convert_tokens(const ExpertRows& to, int64_t begin, int64_t end) const {
        gate_up_.convert(0, op_.x + begin * op_.x_stride * element_, op_.x_stride, gate_up_.rows().from(to, begin), end - begin);
    }

    void convert_inner(const ExpertRows& to, const Block& block) const {
        down_.convert(block.expert, gated_ + block.begin * inner_ * element_, inner_, down_.rows().from(to, block.begin),
                      block.end - block.begin);
    }

    // The converted rows of a block: in place if they are contiguous, else copies.
    ExpertRows rows_of(const ExpertRows& tokens, const Block& block) const {
        const ExpertRowFormat& format = gate_up_.rows();
        const int32_t* const of = routing_.tokens.data();
        const int64_t count = block.end - block.begin;
        if (gate_up_.converts_by_expert()) {
            const ExpertRows own = format.place(gathered_rows.at_least(size_t(format.bytes(count))), count);
            for (int64_t i = 0; i < count; ++i)
                gate_up_.convert(block.expert, op_.x + of[block.begin + i] * op_.x_stride * element_, op_.x_stride,
                                 format.from(own, i), 1);
            return own;
        }
        // Token indices are increasing.
        if (of[block.end - 1] - of[block.begin] == count - 1) return format.from(tokens, of[block.begin]);
        const ExpertRows copies = format.place(gathered_rows.at_least(size_t(format.bytes(count))), count);
        for (int64_t i = 0; i < count; ++i) format.copy(format.from(tokens, of[block.begin + i]), format.from(copies, i));
        return copies;
    }

    void compute_gates(const Pieces& pieces, Part part) const {
        ExpertRows tokens = tokens_;
        if (!shares_tokens_ && !gate_up_.converts_by_expert()) {
            tokens = gate_up_.rows().place(own_rows.at_least(size_t(gate_up_.rows().bytes(op_.tokens))), op_.tokens);
            if (part.fresh) convert_tokens(tokens, 0, op_.tokens);
        }
        pieces.for_each(part, [&](int64_t index, int64_t begin, int64_t end) {
            const Block& block = routing_.blocks[size_t(index)];
            gate_block(block, rows_of(tokens, block), begin, end);
        });
    }

    // Computes tiles [begin, end) of gate and up for the rows of a block: all gates first, since each half is contiguous.
    // Without a gate there is one half, which is activated in place.
    void gate_block(const Block& block, const ExpertRows& rows, int64_t begin, int64_t end) const {
        const int64_t height = block.end - block.begin;
        const int64_t most = std::max<int64_t>(1, GATED_ELEMENTS / (halves_ * gate_up_.tile() * height));
        const char* bias = op_.gate_up_bias ? op_.gate_up_bias + block.expert * op_.gate_up->out_features * element_ : nullptr;
        char* const both = own_gates.at_least(size_t(halves_ * most * gate_up_.tile() * height * element_));
        for (int64_t next; begin < end; begin = next) {
            next = std::min(end, begin + most);
            const ExpertColumns all = gate_up_.columns(begin, next);
            for (int half = 0; half < halves_; ++half)
                for (int64_t t = begin; t < next; ++t) {
                    const int64_t column = half * all.count + gate_up_.columns(t, t + 1).begin - all.begin;
                    gate_up_.multiply(block.expert, half, t, rows, int(height), bias, both + column * element_,
                                      halves_ * all.count);
                }
            char* const inner = gated_ + (block.begin * inner_ + all.begin) * element_;
            const ActAndMul gate{both, inner, 2 * all.count, inner_, all.count, all.count, op_.dtype};
            if (op_.gate == NO_GATE) {
                const int64_t bytes = all.count * element_;
                const Activate up{both, nullptr, both, all.count, 0, all.count, op_.function, op_.dtype};
                current_isa().activate(up, 0, height);
                for (int64_t m = 0; m < height; ++m)
                    std::memcpy(inner + m * inner_ * element_, both + m * bytes, size_t(bytes));
            } else if (op_.gate == CLAMPED_GATE)
                current_isa().clamped_gate(ClampedGate{gate, op_.alpha, op_.limit}, 0, height);
            else
                current_isa().act_and_mul(gate, 0, height);
        }
    }

    void compute_down(const Pieces& pieces, Part part) const {
        ExpertRows rows = inner_rows_;
        if (!shares_inner_) {
            rows = down_.rows().place(own_rows.at_least(size_t(down_.rows().bytes(pairs_))), pairs_);
            if (part.fresh) own_blocks.assign(routing_.blocks.size(), 0);
        }
        pieces.for_each(part, [&](int64_t index, int64_t begin, int64_t end) {
            const Block& block = routing_.blocks[size_t(index)];
            if (!shares_inner_ && !own_blocks[size_t(index)]) {
                convert_inner(rows, block);
                own_blocks[size_t(index)] = 1;
            }
            const char* bias = op_.down_bias ? op_.down_bias + block.expert * hidden_ * element_ : nullptr;
            for (int64_t t = begin; t < end; ++t)
                down_.multiply(block.expert, 0, t, down_.rows().from(rows, block.begin), int(block.end - block.begin), bias,
                               results_ + (block.begin * hidden_ + down_.columns(t, t + 1).begin) * element_, hidden_);
        });
    }

    const QuantizedMoe& op_;
    const int halves_;
    const ExpertProduct gate_up_, down_;
    const Routing routing_;
    const int64_t pairs_, hidden_, inner_;
    const int element_, threads_;
    const bool shares_tokens_, shares_inner_;
    ExpertRows tokens_{}, inner_rows_{};
    char* gated_ = nullptr;    // [pairs, inner]
    char* results_ = nullptr;  // [pairs, hidden]
};

}  // namespace
}  // namespace mvllm

using namespace mvllm;

extern "C" {

// out [tokens, hidden], contiguous; rows of `x` are `x_stride` elements apart. `ids` and `weights` are [tokens, top_k]; biases
// [experts, out_features] or null. `gate` is a Gate; without one, `gate_up` is up alone, and `function` is an Activation.
void mvllm_cpu_quantized_moe(const void* x, int64_t x_stride, const ExpertMatrices* gate_up, const ExpertMatrices* down,
                             const void* gate_up_bias, const void* down_bias, const int64_t* ids, const float* weights,
                             void* out, int64_t tokens, int64_t experts, int64_t top_k, int gate, int function, float alpha,
                             float limit, int dtype) {
    const int64_t element = element_size(dtype), hidden = gate_up->in_features;
    const int64_t most = tokens_at_once(top_k * (hidden + 2 * down->in_features) * 4);
    for (int64_t first = 0; first < tokens; first += most) {
        const QuantizedMoe part{static_cast<const char*>(x) + first * x_stride * element,
                                x_stride,
                                gate_up,
                                down,
                                static_cast<const char*>(gate_up_bias),
                                static_cast<const char*>(down_bias),
                                ids + first * top_k,
                                weights + first * top_k,
                                static_cast<char*>(out) + first * hidden * element,
                                std::min(most, tokens - first),
                                experts,
                                top_k,
                                gate,
                                function,
                                alpha,
                                limit,
                                dtype};
        Run(part).run();
    }
}

}  // extern "C"
