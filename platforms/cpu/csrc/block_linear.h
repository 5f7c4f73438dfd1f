// Matrix products with block-quantized weights of GGUF files: the packed layout, and the kernel table of one instruction
// set (quantized_isa_*.cpp each compile block_linear_tile.h for one; block_pack.cpp packs; block_linear.cpp divides a product
// among threads). core's mvllm/ops/block_formats.py describes the blocks of a file.
//
// A block of a file belongs to one column of the product and has 32 or 256 values of k. The packed layout interleaves
// adjacent columns in tiles. It takes as many bytes as the file, except that 6-bit scales of groups take a byte each. A tile
// is contiguous. Columns with different formats are different parts; each part begins a new tile, and its last tile is padded
// with zero columns.
//
//     part      [tiles][blocks] block
//     block     head[tile] fields  |  groups of 32 k:  sub[tile] bytes ...  |  rows of 32-bit lanes [tile] ...
//
//     head      d, for q4_1 and q5_1 also m, for q4_k and q5_k also d' (float16 each); mxfp4: the exponent's byte;
//               e4m3: float32
//     sub       q4_k, q5_k: scale, minimum; q3_k, q6_k: scales of the two halves; iq4_xs: scale
//     lanes     row r of four: nibbles of k = 8r + i in the low half of byte i, of k = 8r + 4 + i in its high half
//               q5_k, q5_0, q5_1: one more row: bit j of byte i is the fifth bit of k = 4j + i
//               q6_k: two more rows: the upper 2 bits of k = 4j + i are in row j / 4, byte i, from bit 2 (j mod 4) on
//               q3_k: three rows instead: two with the lower bits, as the upper ones of q6_k; one with the third bits, as
//               the fifth ones of q5_k
//               q8_0: eight rows instead: byte i of row j is k = 4j + i, as value + 128
//               e4m3: likewise, the 8-bit float; not a GGUF format: blocks of 128 values, for weight-only kernels
//
// A shift and a mask give four k of one column in the bytes of a lane: the operand of byte dot products.
//
// *Int8 activations*: 32 consecutive k of a row of x (a run) are rounded to int8 with one scale. Sums within a group are
// exact integers.
// *Weight-only*: weights are converted to float32 and multiplied by float32 x.

#pragma once

#include "kernels.h"

namespace mvllm {

enum BlockFormat : int32_t {
    Q4_0, Q4_1, Q8_0, Q4_K, Q5_K, Q6_K, MXFP4, Q5_0, Q5_1, Q3_K, IQ4_NL, IQ4_XS, E4M3, NUM_BLOCK_FORMATS
};

constexpr int BLOCK_GROUP = 32;  // number of k in a group of the weight and in a run of x

// Sizes in bytes per column; `groups` per block, `rows` of lanes per group.
struct BlockLayout {
    int32_t file_block, groups, head, sub, rows;

    constexpr int group() const { return sub + 4 * rows; }
    constexpr int block() const { return head + groups * group(); }
};

constexpr BlockLayout BLOCK_LAYOUTS[NUM_BLOCK_FORMATS] = {
    {18, 1, 2, 0, 4}, {20, 1, 4, 0, 4}, {34, 1, 2, 0, 8}, {144, 8, 4, 2, 4}, {176, 8, 4, 2, 5}, {210, 8, 2, 2, 6}, {17, 1, 1, 0, 4},
    {22, 1, 2, 0, 5}, {24, 1, 4, 0, 5}, {110, 8, 2, 2, 3}, {18, 1, 2, 0, 4}, {136, 8, 2, 1, 4},
    {128, 4, 4, 0, 8},
};

// Columns with one format. Mirrored in Python.
struct BlockPart {
    int64_t format;
    int64_t offset;  // of the first tile, in bytes
    int64_t column, columns;
};

inline int64_t tiles_of(const BlockPart& part, int tile) { return (part.columns + tile - 1) / tile; }

inline int64_t tiles_of(const BlockPart* parts, int64_t num_parts, int tile) {
    int64_t all = 0;
    for (int64_t i = 0; i < num_parts; ++i) all += tiles_of(parts[i], tile);
    return all;
}

// Location of tile `index` of a packed weight; `columns`: number of columns in the tile.
struct BlockPlace {
    const char* weight;
    int64_t column;
    int32_t format, columns;
};

inline BlockPlace place_of(const char* weight, const BlockPart* part, int64_t in_features, int64_t index, int tile) {
    for (int64_t tiles; index >= (tiles = tiles_of(*part, tile)); ++part) index -= tiles;
    const BlockLayout& layout = BLOCK_LAYOUTS[part->format];
    const int64_t bytes = in_features / (layout.groups * BLOCK_GROUP) * layout.block() * tile;
    const int64_t columns = part->columns - index * tile;
    return {weight + part->offset + index * bytes, part->column + index * tile, int32_t(part->format),
            int32_t(columns < tile ? columns : tile)};
}

// A run of 32 values of x rounded to int8: its scale, and the sums of the rounded values (all, each half). `start`: first
// values of integer sums, by the offset of the weight's bytes (block_linear_tile.h).
struct BlockInput {
    float scale, total, half[2];
    float start[4];
};

struct BlockRows {
    const void* x;  // rows `x_stride` elements apart: int8, or float32 for weight-only kernels
    const BlockInput* inputs;  // [rows][in_features / 32], null for weight-only kernels
    int64_t x_stride;
    int32_t in_features, dtype;  // `dtype` of the result
};

// A tile of the result: up to `BlockKernels::tile` columns.
struct BlockTile {
    const char* weight;
    const void* bias;  // of these columns, or null
    void* out;         // of the first row and column
    int64_t out_stride;
    int32_t format, columns;
};

// Rows of x for products with 8-bit floats. `size` and `run` are multiples of 32.
struct Float8Inputs {
    const void* x;  // rows `x_stride` elements apart
    int64_t x_stride, size, padded;  // elements of a row, without and with zero padding
    int64_t run;                     // elements that share a scale
    int32_t dtype;
    bool rounds, dynamic;  // round x to 8-bit floats; one scale per run, from its largest magnitude
    float scale;           // of all rows, unless `dynamic`
};

constexpr int BLOCK_ROWS = 96;  // maximum number of rows per kernel call

struct BlockKernels {
    // Rounds rows of x to int8. Rows of `out` are `stride` bytes apart; runs are adjacent.
    void (*quantize)(const void* x, int64_t x_stride, int32_t in_features, int32_t dtype, int8_t* out, int64_t stride,
                     BlockInput* inputs, int64_t rows);
    void (*int8)(const BlockRows&, const BlockTile&, int64_t row, int rows);
    // Converts rows of x to float32.
    void (*convert)(const void* x, int64_t x_stride, int32_t in_features, int32_t dtype, float* out, int64_t stride,
                    int64_t rows);
    void (*weight_only)(const BlockRows&, const BlockTile&, int64_t row, int rows);
    // Converts rows of x to float32 with zero padding, rounded to 8-bit floats if `rounds`.
    void (*convert_float8)(const Float8Inputs&, float* out, int64_t stride, int64_t rows);
    int32_t tile;
};

}  // namespace mvllm
