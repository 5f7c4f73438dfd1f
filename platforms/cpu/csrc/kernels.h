// Declarations shared by the files of this library: the layout of the cache, the plan of a step, and the table of kernels
// that each instruction set fills in. `isa_*.cpp` compile the same inner loops (simd.h, attention_tile.h, ...) for one instruction
// set each; `dispatch.cpp` picks the best one that the processor has; everything else is compiled for any processor.
//
// Cache of one layer, for each block and key/value head (Dk = head size rounded up to 4, Dv = rounded up to 16):
//
//     keys      [Dk][block]        one row per dimension: a vector holds the same dimension of neighbouring keys, so scores
//                                  come out side by side and no sum runs across a vector
//     values    [block][Dv]        one row per token: a vector holds neighbouring dimensions of the output
//
// bfloat16 is stored in pairs, the form that its dot-product instructions take. It is also the cheapest to widen by hand:
// a pair is one 32-bit lane, whose upper half is already a float32 and whose lower half is one shift away.
//
//     keys      [Dk / 2][block][2]     (d, d + 1) of one key side by side
//     values    [block / 2][Dv][2]     (t, t + 1) of one dimension side by side
//
// Numbers of 8 bits (int8, float8_e4m3fn) lie in the same pairs, and become bfloat16, exactly, when they are read. Each
// token and head has a scale for its key and one for its value: [block] float32 for each block and head.
//
// Latent attention stores no values: they are the first `value_size` dimensions of the keys.
//
// Padding is zero and stays zero, except slots that hold no token yet: their scores are never used, and their values are
// never multiplied (zero times a stale NaN is NaN).

#pragma once

#include <cstddef>
#include <cstdint>

namespace mvllm {

enum DType : int32_t { F32 = 0, BF16 = 1, F16 = 2, INT8 = 3, FP8 = 4 };

inline bool is_byte(int32_t dtype) { return dtype == INT8 || dtype == FP8; }

constexpr int STRIP = 16;        // tokens computed together; every block is a whole number of strips
constexpr int CHUNK = 128;       // tokens whose scores are in memory at a time
constexpr int TILE_ROWS = 96;    // rows (query tokens x heads of a group) that share one walk over the keys
#ifndef MVLLM_SMALL_TILES        // the same kernels with less to compile, for the sanitizers' test
#define MVLLM_SMALL_TILES 0
#endif
constexpr int MAX_MR = MVLLM_SMALL_TILES ? 2 : 6;  // rows that the registers hold at a time

inline int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// One kind of attention layer. Mirrored in Python (paged_attention.py).
struct Spec {
    int32_t num_heads, num_kv_heads, head_size, value_size;
    int32_t dtype, kv_dtype;     // DType
    int32_t window;              // 0: none
    int32_t latent;              // values are the first `value_size` dimensions of the keys
    float scale, soft_cap;       // soft_cap 0: none
};

// One step's batch. Mirrored in Python. The arrays stay the caller's and outlive the step.
struct Batch {
    int32_t num_requests, num_tokens, block_size, block_table_stride;
    const int32_t* query_start_loc;
    const int32_t* seq_lens;
    const int32_t* block_table;
    const int32_t* slot_mapping;
};

// Work item: a tile of rows of one request and one key/value head, over a range of keys. With `save_state`, rows of several
// consecutive requests with one new token each, over keys in blocks that they share; the rows' partial states are saved for
// the requests' own items, which load them.
struct Item {
    int32_t request, kv_head;
    int32_t query_begin, query_end;  // tokens, counted within the request's new ones
    int32_t key_begin, key_end;
    int32_t partial;                 // index of its partial result, or -1 when it has all the keys its rows see
    int32_t save_state = -1, load_state = -1;  // index of a token's state, or -1
};

// A tile whose keys were split: its items' partial results are contiguous.
struct SplitTile {
    Item item;
    int32_t first_partial, num_partials;
};

// One layer's cache. Scales are there for 8-bit numbers, values (and their scales) where they are not the keys'.
struct Cache {
    void* keys;
    void* values;
    float* key_scales;
    float* value_scales;
};

// Tensors of one layer. `query` rows lie `query_stride` elements apart.
struct Layer {
    const void* query;
    int64_t query_stride;
    Cache cache;
    const float* sinks;  // [num_heads] or null
    void* out;           // [tokens, num_heads * value_size]
};

struct Geometry {
    Spec spec;
    Batch batch;
    int group, dk, dv;       // query heads per key/value head; padded head sizes
    int tile_rows;           // most rows of one item
    int64_t key_head, value_head;  // elements per block and head
    int partial_size;        // floats per partial result: tile_rows * (dv + 2)
    int state_size;          // floats of a token's rows that are half done: group * (dv + 1 + STRIP)
    float* states;
};

// Memory of one thread, aligned to 64 bytes. Sizes for `rows` rows.
struct Scratch {
    float* query;      // [rows, dk], or bfloat16 pairs [rows, dk / 2]
    float* scores;     // [MAX_MR, CHUNK]
    uint32_t* pairs;   // [MAX_MR, CHUNK / 2]: probabilities as bfloat16 pairs
    float* acc;        // [rows, dv]
    float* row_max;    // [rows]: maximum that the powers of 2 are relative to
    float* row_sum;    // [rows, STRIP]: in lanes
    void* keys;        // a chunk's keys and values, converted if the products need another form than the cache's
    void* values;
};

// A step's new keys and values, and the layer's cache. Rows lie `*_stride` elements apart.
struct NewKV {
    const void* key;
    const void* value;
    int64_t key_stride, value_stride;
    Cache cache;
};

// out = norm(x) * weight; with a residual, residual += x first and the sum is normalised. Rows come in groups of `heads`:
// groups lie `x_stride` elements apart, the rows of one `head_stride`.
struct RmsNorm {
    const void* x;
    void* residual;  // null, or [rows, size] contiguous
    const void* weight;
    void* out;  // [rows, size] contiguous
    int64_t x_stride, heads, head_stride;
    int32_t size, dtype;
    float eps;
};

// out[i] = silu(x[i]) * x[up + i], or gelu in its tanh form in place of silu; rows lie `x_stride` and `out_stride` elements
// apart.
struct GateAndMul {
    const void* x;
    void* out;
    int64_t x_stride, out_stride, up, size;
    int32_t dtype;
    bool is_gelu_tanh = false;
};

// out[i] = x[i] + y[i], or x[i] * factor if `y` is null.
struct AddOrScale {
    const void* x;
    const void* y;
    void* out;
    float factor;
    int32_t dtype;
};

// out[i] = (u + 1) * g * sigmoid(alpha * g), where g = min(x[i], limit) and u is x[up + i], at least -limit and at most limit.
struct ClampedGate {
    GateAndMul rows;
    float alpha, limit;
};

// values[i] = the largest of row i, ids[i] = where it is first. A NaN is larger than anything.
struct Argmax {
    const void* x;  // rows `x_stride` elements apart
    void* values;
    int64_t* ids;
    int64_t x_stride, size;
    int32_t dtype;
};

// Rotates queries and keys in place. `index` holds 64-bit numbers where `wide_index`, else 32-bit ones.
struct Rotary {
    const void* index;
    const float* cos_sin;  // [rows, rotary_dim]: cosines, then sines
    void* query;
    void* key;
    int64_t query_stride, query_head_stride, key_stride, key_head_stride;
    int32_t wide_index, num_heads, num_kv_heads, rotary_dim, dtype;
};

// out = x * weight^T + bias, with `weight` packed for one instruction set: columns in tiles of `linear_tile`, a tile's last
// ones zero where there are fewer; within a tile one row per k, or per pair of k for bfloat16, as in the cache:
//
//     [tiles][in_features][linear_tile]    or    [tiles][in_features / 2, rounded up][linear_tile][2]
struct Linear {
    const void* x;  // rows `x_stride` elements apart
    const void* weight;
    const void* bias;  // [out_features] or null
    void* out;         // rows `out_stride` elements apart, or without gaps where that is 0
    int64_t x_stride;
    int32_t in_features, out_features, dtype;
    int64_t out_stride = 0;
};

// out[t] = the sum over k of weights[t][k] * rows[positions[t][k]], in float32.
struct MoeCombine {
    const void* rows;  // `row_stride` elements apart
    const int32_t* positions;
    const float* weights;
    void* out;  // [tokens, size]
    int64_t row_stride, size;
    int32_t top_k, dtype;
};

constexpr int LINEAR_ROWS = 96;  // most rows that one call of an instruction set's `linear` takes

// The kernels of one instruction set.
struct Isa {
    const char* name;
    void (*attend)(const Geometry&, const Layer&, const Item&, const Item* next, const Scratch&, float* partials);
    void (*combine)(const Geometry&, const Layer&, const SplitTile&, const Scratch&, const float* partials);
    void (*store_kv)(const Geometry&, const NewKV&, int token_begin, int token_end);
    void (*rms_norm)(const RmsNorm&, int64_t row_begin, int64_t row_end);
    void (*gate_and_mul)(const GateAndMul&, int64_t row_begin, int64_t row_end);
    void (*add_or_scale)(const AddOrScale&, int64_t begin, int64_t end);
    void (*rotary)(const Rotary&, int64_t token_begin, int64_t token_end);
    void (*argmax)(const Argmax&, int64_t row_begin, int64_t row_end);
    // Columns in strips of STRIP. `x` holds float32 rows, zero-padded like the weight, except where it is the caller's
    // own: for float32, and for bfloat16 in pairs where `bf16_dot`. `linear_x` makes such rows.
    void (*linear)(const Linear&, int64_t row_begin, int64_t row_end, int64_t strip_begin, int64_t strip_end);
    void (*linear_x)(const Linear&, void* out, int64_t row_stride, int64_t row_begin, int64_t row_end);
    int32_t linear_tile;
    bool bf16_dot;
    void (*moe_combine)(const MoeCombine&, int64_t token_begin, int64_t token_end);
    void (*clamped_gate)(const ClampedGate&, int64_t row_begin, int64_t row_end);
};

extern const Isa isa_generic;
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MVLLM_X86 1
extern const Isa isa_avx2;
extern const Isa isa_avx512;
extern const Isa isa_avx512_bf16;
#endif

#if defined(__aarch64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 10
#define MVLLM_ARM64 1
extern const Isa isa_neon_bf16;
#endif

const Isa& current_isa();

}  // namespace mvllm
