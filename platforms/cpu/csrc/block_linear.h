// Matrix products with the blocks of GGUF files: the packing, and the table of kernels that each instruction set fills in
// (qisa_*.cpp compile block_linear_tile.h for one each; block_pack.cpp packs; block_linear.cpp divides a product over the
// threads). core's mvllm/ops/block_formats.py describes the blocks of a file.
//
// A file's block belongs to one column of the product and has 32 or 256 values of k. Here neighbouring columns are
// interleaved in tiles, with as many bytes as in the file, except that 6-bit scales of groups take a byte each. A tile is one
// stream of memory. A part of the columns that has its own format begins with a tile; the last tile's missing columns are
// zero.
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
//               q8_0: eight rows instead: byte i of row j is k = 4j + i, value + 128
//               e4m3: likewise, the 8-bit float; no format of a file, blocks of 128 values, for weight-only kernels
//
// So four k of one column become the bytes of a lane with a shift and a mask: the form of the byte dot products.
//
// *Int8 activations*: each run of 32 k of a row of x is rounded to int8 with a scale. Sums within a group are exact integers.
// *Weight-only*: weights become float32 and are multiplied with float32 x.

#pragma once

#include "kernels.h"

namespace mvllm {

enum BlockFormat : int32_t {
    Q4_0, Q4_1, Q8_0, Q4_K, Q5_K, Q6_K, MXFP4, Q5_0, Q5_1, Q3_K, IQ4_NL, IQ4_XS, E4M3, NUM_BLOCK_FORMATS
};

constexpr int BLOCK_GROUP = 32;  // k that share a scale of x; a group of the weight

// Bytes per column.
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
    int64_t offset;  // of its first tile, in bytes
    int64_t column, columns;
};

inline int64_t tiles_of(const BlockPart& part, int tile) { return (part.columns + tile - 1) / tile; }

inline int64_t tiles_of(const BlockPart* parts, int64_t num_parts, int tile) {
    int64_t all = 0;
    for (int64_t i = 0; i < num_parts; ++i) all += tiles_of(parts[i], tile);
    return all;
}

// Where tile `index` of a packed weight is; `columns` are the tile's.
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

// A run of 32 values of x that were rounded to int8: their scale, and the sums of the rounded values.
struct BlockInput {
    float scale, total, half[2];
};

struct BlockRows {
    const void* x;  // rows `x_stride` elements apart: int8, or float32 for weight-only kernels
    const BlockInput* inputs;  // [rows][in_features / 32], null for weight-only kernels
    int64_t x_stride;
    int32_t in_features, dtype;  // of the result
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
    int64_t x_stride, size, padded;  // elements of a row, and with the zeros behind them
    int64_t run;                     // elements that share a scale
    int32_t dtype;
    bool rounds, dynamic;  // to 8-bit floats; with scales by the largest magnitude of each run
    float scale;           // of all rows, where not `dynamic`
};

constexpr int BLOCK_ROWS = 96;  // most rows that one call of a kernel takes

struct BlockKernels {
    // Rows of x rounded to int8, without gaps between runs; rows of the result lie `stride` bytes apart.
    void (*quantize)(const void* x, int64_t x_stride, int32_t in_features, int32_t dtype, int8_t* out, int64_t stride,
                     BlockInput* inputs, int64_t rows);
    void (*int8)(const BlockRows&, const BlockTile&, int64_t row, int rows);
    // Rows of x as float32.
    void (*convert)(const void* x, int64_t x_stride, int32_t in_features, int32_t dtype, float* out, int64_t stride,
                    int64_t rows);
    void (*weight_only)(const BlockRows&, const BlockTile&, int64_t row, int rows);
    // Rows of x as float32 with zeros behind them, rounded to 8-bit floats where wanted.
    void (*convert_float8)(const Float8Inputs&, float* out, int64_t stride, int64_t rows);
    int32_t tile;
};

}  // namespace mvllm
