// Declarations shared by the files of this library: the layout of the KV cache, the work of a step, and the kernel table of
// an instruction set. Each `isa_*.cpp` compiles the same inner loops (simd.h, attention_tile.h, ...) for one instruction set;
// `dispatch.cpp` selects the best one that the processor has; all other files are compiled for any processor.
//
// Cache of one layer, for each block and key/value head (Dk = head size rounded up to 4, Dv = rounded up to 16):
//
//     keys      [Dk][block]        one row per dimension: a vector holds the same dimension of adjacent keys, so a vector of
//                                  sums holds the scores of adjacent keys, without sums across lanes
//     values    [block][Dv]        one row per token: a vector holds adjacent dimensions of the output
//
// bfloat16 is stored in pairs, the operand layout of its dot-product instructions. Without these instructions pairs are cheap
// to widen: a pair is a 32-bit lane; its upper half is a float32 after a mask, its lower half after a shift.
//
//     keys      [Dk / 2][block][2]     dimensions (d, d + 1) of one key are adjacent
//     values    [block / 2][Dv][2]     tokens (t, t + 1) of one dimension are adjacent
//
// 8-bit numbers (int8, float8_e4m3fn) are stored in the same pairs and converted exactly to bfloat16 when they are read. Each
// token and head has a scale for its key and one for its value: [block] float32 for each block and head.
//
// Latent attention (MLA) stores no values: they are the first `value_size` dimensions of the keys.
//
// Sparse attention reads single tokens, so all dimensions of a token are adjacent there: keys [block][Dk], Dk rounded up to
// SELECTED_ALIGNMENT. The keys of its indexer, which are all read, have the layout above.
//
// Padding is always zero. Slots without a token have undefined contents: their scores are not used, and their values are not
// multiplied, because zero times a stale NaN is NaN.

#pragma once

#include <cstddef>
#include <cstdint>

#include "activations.h"
#include "head_product.h"
#include "state.h"
#include "strided.h"

namespace mvllm {

enum DType : int32_t { F32 = 0, BF16 = 1, F16 = 2, INT8 = 3, FP8 = 4 };

inline bool is_byte(int32_t dtype) { return dtype == INT8 || dtype == FP8; }

constexpr int SELECTED_ALIGNMENT = 32;  // dimensions of a token of sparse attention
constexpr int STRIP = 16;        // tokens computed together; the block size is a multiple
constexpr int CHUNK = 128;       // tokens whose scores are in memory at a time
constexpr int SEGMENT = 2 * CHUNK;  // tokens of a segment, see `Spec::batch_invariant`
constexpr int TILE_ROWS = 96;    // maximum number of rows (query tokens x heads of a group) computed in one pass over the keys
#ifndef MVLLM_SMALL_TILES        // fewer template instances, to compile faster with sanitizers
#define MVLLM_SMALL_TILES 0
#endif
constexpr int MAX_MR = MVLLM_SMALL_TILES ? 2 : 6;  // rows of a register tile

inline int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// One kind of attention layer. Mirrored in Python (paged_attention.py).
struct Spec {
    int32_t num_heads, num_kv_heads, head_size, value_size;
    int32_t dtype, kv_dtype;     // DType
    int32_t window;              // 0: none
    int32_t latent;              // values are the first `value_size` dimensions of the keys
    float scale, soft_cap;       // soft_cap 0: none
    // A row's result has the same bits in every step. Keys are divided into segments of SEGMENT, by their positions in the
    // sequence; each segment has its own softmax, and the results of segments are added in their order. So the order of sums
    // depends neither on the tile that the row is in nor on how many threads share its keys.
    int32_t batch_invariant;
    int32_t index_topk;          // sparse attention: the most positions that a query attends to; 0: all
    int32_t indexer;             // the layer selects these positions; its value_size is 0
};

// Whether attention reads selected positions only.
inline bool reads_selected(const Spec& spec) { return spec.index_topk && !spec.indexer; }

// One step's batch. Mirrored in Python. The caller owns the arrays, which outlive the step.
struct Batch {
    int32_t num_requests, num_tokens, block_size, block_table_stride;
    const int32_t* query_start_loc;
    const int32_t* seq_lens;
    const int32_t* block_table;
    const int32_t* slot_mapping;
    const int32_t* visible_lens;  // [tokens]: how many leading positions each token sees; null: those up to its own
};

// Work item: a tile of rows of one request and one key/value head, over a range of keys. With `save_state`: rows of several
// consecutive requests with one new token each, over keys in blocks that they share; the softmax state of the rows is saved,
// and the items of the requests continue from it (`load_state`).
struct WorkItem {
    int32_t request, kv_head;
    int32_t query_begin, query_end;  // tokens, as indices of the request's new tokens
    int32_t key_begin, key_end;
    int32_t partial;                 // index of its partial result (with `batch_invariant` of its first segment's), or -1 if
                                     // the item covers all keys of its rows
    int32_t save_state = -1, load_state = -1;  // index of a token's state, or -1
};

// A tile whose keys were split: its items' partial results are contiguous.
struct SplitTile {
    WorkItem item;
    int32_t first_partial, num_partials;
};

// One layer's cache. Scales exist for 8-bit numbers; values and their scales are null for latent attention.
struct Cache {
    void* keys;
    void* values;
    float* key_scales;
    float* value_scales;
};

// Tensors of one layer. Rows of `query` are `query_stride` elements apart.
struct Layer {
    const void* query;
    int64_t query_stride;
    Cache cache;
    const void* sinks;  // [num_heads] or null
    int32_t sinks_dtype;
    void* out;           // [tokens, num_heads * value_size]
    const int32_t* positions = nullptr;  // [tokens, index_topk]: the positions that tokens attend to, -1 at the end; or null
};

struct Geometry {
    Spec spec;
    Batch batch;
    int group, dk, dv;       // query heads per key/value head; padded head sizes
    int tile_rows;           // maximum number of rows of an item
    int64_t key_head, value_head;  // elements per block and head
    int partial_size;        // floats per partial result: tile_rows * (dv + 2)
    int state_size;          // floats of the saved state of one token's rows: group * (dv + 1 + STRIP)
    float* states;
};

// Memory of one thread, aligned to 64 bytes. Sizes for `rows` rows.
struct Scratch {
    float* query;      // [rows, dk], or bfloat16 pairs [rows, dk / 2]
    float* scores;     // [MAX_MR, CHUNK]
    uint32_t* pairs;   // [MAX_MR, CHUNK / 2]: probabilities as bfloat16 pairs
    float* acc;        // [rows, dv]
    float* row_max;    // [rows]: exponent to which a row's sums are relative
    float* row_sum;    // [rows, STRIP]: partial sums per lane
    float* total;      // [rows, dv]: sums of earlier segments, with `batch_invariant`
    float* total_max;  // [rows]
    float* total_sum;  // [rows]
    void* keys;        // a chunk's keys and values, if the products cannot read them in place
    void* values;
    uint16_t* widened; // [STRIP, dk]: keys of sparse attention that were stored in 8 bits
};

// Work item of an indexer: queries [query_begin, query_end) of a request over keys [key_begin, key_end); `key_begin` is a
// multiple of CHUNK. The score of query t and key k is scores[(t - query_begin) * stride + k].
struct IndexItem {
    WorkItem item;
    int64_t scores, stride;
};

// Tensors of an indexer.
struct IndexLayer {
    Layer layer;
    const float* weights;  // [tokens, num_heads], rows `weights_stride` elements apart
    int64_t weights_stride;
    float* scores;
};

// A step's new keys and values, and the layer's cache. Rows are `*_stride` elements apart.
struct NewKV {
    const void* key;
    const void* value;
    int64_t key_stride, value_stride;
    Cache cache;
};

// out = norm(x) * weight; with a residual, residual += x first and the sum is normalized. Rows are in groups of `heads`:
// groups are `x_stride` elements apart, rows of a group `head_stride`.
struct RmsNorm {
    const void* x;
    void* residual;  // null, or [rows, size] contiguous
    const void* weight;
    void* out;  // [rows, size] contiguous
    int64_t x_stride, heads, head_stride;
    int32_t size, dtype;
    float eps;
};

// out[i] = silu(x[i]) * x[up + i], or gelu (tanh form) instead of silu; rows are `x_stride` and `out_stride` elements apart.
struct ActAndMul {
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

// out[i] = (u + 1) * g * sigmoid(alpha * g), where g = min(x[i], limit) and u is x[up + i] clamped to [-limit, limit].
struct ClampedGate {
    ActAndMul rows;
    float alpha, limit;
};

// values[i] = maximum of row i, ids[i] = its first index. NaN is greater than every number.
struct Argmax {
    const void* x;  // rows `x_stride` elements apart
    void* values;
    int64_t* ids;
    int64_t x_stride, size;
    int32_t dtype;
};

// Rotates queries and keys in place. `index` holds 64-bit integers if `wide_index`, else 32-bit integers.
struct Rotary {
    const void* index;
    const float* cos_sin;  // [rows, rotary_dim]: cosines, then sines
    void* query;
    void* key;
    int64_t query_stride, query_head_stride, key_stride, key_head_stride;
    int32_t wide_index, num_heads, num_kv_heads, rotary_dim, dtype;
};

// out = x * weight^T + bias, with `weight` packed for one instruction set: columns in tiles of `linear_tile`, the last tile
// padded with zeros; in a tile one row per k, or per pair of k for bfloat16, as in the cache:
//
//     [tiles][in_features][linear_tile]    or    [tiles][in_features / 2, rounded up][linear_tile][2]
struct Linear {
    const void* x;  // rows `x_stride` elements apart
    const void* weight;
    const void* bias;  // [out_features] or null
    void* out;         // rows `out_stride` elements apart; 0: contiguous
    int64_t x_stride;
    int32_t in_features, out_features, dtype;
    int64_t out_stride = 0;
};

// out[t] = sum over k of weights[t][k] * rows[positions[t][k]], in float32.
struct MoeSum {
    const void* rows;  // `row_stride` elements apart
    const int32_t* positions;
    const float* weights;
    void* out;  // [tokens, size]
    int64_t row_stride, size;
    int32_t top_k, dtype;
};

// out[i] = log(sum of exp(row i)).
struct LogSumExp {
    const void* x;  // rows `x_stride` elements apart
    float* out;
    int64_t x_stride, size;
    int32_t dtype;
};

// Draws a token for each row; the parameters are those of `filtered_draw` in mvllm.ops.draw.
struct FilteredDraw {
    const float* logits;  // rows `stride` elements apart
    const float* peaks;
    const float* inv_temperature;
    const float* min_p_gap;
    const int64_t* top_k;
    const float* top_p;
    const float* coarse;
    const float* fine;
    int64_t* out;
    int64_t stride, size, block_size;
};

constexpr int LINEAR_ROWS = 96;  // maximum number of rows per call of `Isa::linear`

// The kernels of one instruction set.
struct Isa {
    const char* name;
    void (*paged_attention)(const Geometry&, const Layer&, const WorkItem&, const WorkItem* next, const Scratch&,
                            float* partials);
    void (*paged_attention_reduce)(const Geometry&, const Layer&, const SplitTile&, const Scratch&, const float* partials);
    void (*sparse_attention)(const Geometry&, const Layer&, const WorkItem&, const WorkItem* next, const Scratch&,
                             float* partials);
    void (*index_scores)(const Geometry&, const IndexLayer&, const IndexItem&, const Scratch&);
    void (*reshape_and_cache)(const Geometry&, const NewKV&, int token_begin, int token_end);
    void (*rms_norm)(const RmsNorm&, int64_t row_begin, int64_t row_end);
    void (*act_and_mul)(const ActAndMul&, int64_t row_begin, int64_t row_end);
    void (*add_or_scale)(const AddOrScale&, int64_t begin, int64_t end);
    void (*rotary_embedding)(const Rotary&, int64_t token_begin, int64_t token_end);
    void (*argmax)(const Argmax&, int64_t row_begin, int64_t row_end);
    // Computes strips of STRIP columns. For float32, and for bfloat16 with `bf16_dot`, it reads the caller's x directly.
    // Otherwise `x` holds float32 rows, zero-padded like the weight, which `linear_x` makes.
    void (*linear)(const Linear&, int64_t row_begin, int64_t row_end, int64_t strip_begin, int64_t strip_end);
    void (*linear_x)(const Linear&, void* out, int64_t row_stride, int64_t row_begin, int64_t row_end);
    int32_t linear_tile;
    bool bf16_dot;
    void (*moe_sum)(const MoeSum&, int64_t token_begin, int64_t token_end);
    void (*clamped_gate)(const ClampedGate&, int64_t row_begin, int64_t row_end);
    void (*logsumexp)(const LogSumExp&, int64_t row_begin, int64_t row_end);
    void (*filtered_draw)(const FilteredDraw&, int64_t row_begin, int64_t row_end, float* scratch);
    void (*causal_conv1d)(const CausalConv1d&, int64_t request, int64_t channel_begin, int64_t channel_end);
    void (*ssd)(const Ssd&, int64_t request, int64_t head, int64_t row_begin, int64_t row_end, float* scratch);
    void (*gated_delta_rule)(const GatedDeltaRule&, int64_t request, int64_t head, int64_t column_begin, int64_t column_end,
                             float* scratch);
    void (*gated_rms_norm)(const GatedRmsNorm&, int64_t row_begin, int64_t row_end, float* scratch);
    void (*activate)(const Activate&, int64_t row_begin, int64_t row_end);
    void (*layer_norm)(const LayerNorm&, int64_t row_begin, int64_t row_end);
    void (*log_decay)(const LogDecay&, int64_t row_begin, int64_t row_end);
    void (*elementwise)(const Elementwise&, int64_t row_begin, int64_t row_end);
    void (*head_product)(const HeadProduct&, int64_t head, int64_t column_begin, int64_t column_end, float* scratch);
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

// Prefetch distances in bytes of code that reads memory once, from start to end, on this processor. A distance is far enough
// for a line to arrive, and near enough to be within the range of the hardware prefetcher: a second, more distant stream
// would slow down the first.
struct PrefetchDistance {
    int64_t near;       // of products that use weights as they are packed
    int64_t unpacking;  // of products that unpack weights in registers; 0: they do not prefetch
};
extern const PrefetchDistance prefetch_distance;

}  // namespace mvllm
