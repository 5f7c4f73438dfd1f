// Products of rows with a quantized matrix of one expert, tile by tile; quantized_moe.cpp divides them among threads. A
// matrix is packed as block_linear.h or quantized_linear.h describes.

#pragma once

#include <algorithm>
#include <cstring>

#include "moe_routing.h"
#include "quantized_linear.h"

namespace mvllm {

// One expert's packed matrix; for integers with two halves (gate and up), one half. Mirrored in Python.
struct ExpertMatrix {
    const char* weight;
    const void* scales;    // integers: scales; 8-bit floats: the static scale of the inputs, or null
    const int8_t* zeros;   // integers only, or null
    int64_t bf16_scales;   // integers only
};

// The same matrix of all experts. Mirrored in Python.
struct ExpertMatrices {
    int64_t kind;  // ExpertKind
    int64_t in_features, out_features, int8_activations;
    const ExpertMatrix* experts;  // [experts], for integers [experts][halves]
    const BlockPart* parts;       // blocks only; with two halves, each consists of half of the parts
    int64_t num_parts;
    int64_t group_size, bits;     // integers; 8-bit floats: number of columns that share a scale, and Float8Rounding
};

enum ExpertKind : int64_t { BLOCKS, INTEGERS, FLOATS };
enum Float8Rounding : int64_t { NOT_ROUNDED, DYNAMIC, STATIC };

// Quantized or converted rows of x, which the kernels read, in one allocation:
//
//     values [rows][value_bytes]  |  sides [rows][side_bytes]  |  scales [rows]
//
// `sides`: scales and sums of runs rounded to int8 (BlockInput), or the sums of blocks (QuantizedLinear::row_sums).
struct ExpertRows {
    char* values;
    char* sides;
    float* scales;
};

struct ExpertRowFormat {
    int64_t stride, value_bytes, side_bytes;  // `stride` in elements

    int64_t bytes(int64_t rows) const { return rows * (value_bytes + side_bytes) + aligned(rows * 4); }
    ExpertRows place(char* memory, int64_t rows) const {
        char* const sides = memory + rows * value_bytes;
        return {memory, sides, reinterpret_cast<float*>(sides + rows * side_bytes)};
    }
    ExpertRows from(const ExpertRows& rows, int64_t row) const {
        return {rows.values + row * value_bytes, rows.sides + row * side_bytes, rows.scales + row};
    }
    void copy(const ExpertRows& from, const ExpertRows& to) const {
        std::memcpy(to.values, from.values, size_t(value_bytes));
        std::memcpy(to.sides, from.sides, size_t(side_bytes));
        *to.scales = *from.scales;
    }
};

// A range of columns of one half of the matrix.
struct ExpertColumns {
    int64_t begin, count;
};

// The product with one of the two matrices. `halves` is 2 for gate and up, whose tiles have the same columns.
class ExpertProduct {
  public:
    ExpertProduct(const QuantizedIsa& isa, const ExpertMatrices& matrices, int halves, int dtype)
        : isa_(isa), matrices_(matrices), halves_(halves), dtype_(dtype) {
        int8_ = matrices.int8_activations && (matrices.kind == INTEGERS || dtype != F32);
        tile_ = matrices.kind == INTEGERS ? isa.tile : isa.blocks.tile;
        size_ = matrices.out_features / halves;
        tiles_ = matrices.kind == INTEGERS ? (size_ + tile_ - 1) / tile_
                                           : tiles_of(matrices.parts, matrices.num_parts, tile_) / halves;
        const int64_t size = matrices.in_features, whole = BLOCK_LAYOUTS[E4M3].groups * BLOCK_GROUP;
        depth_ = matrices.kind == FLOATS ? (size + whole - 1) / whole * whole : size;
        const bool bf16 = matrices.kind == INTEGERS && dtype == BF16 && isa.bf16_dot;
        // A stride of whole pages would map all rows to a few cache sets.
        rows_.stride = round_up(int(depth_), 64) + 64;
        rows_.value_bytes = rows_.stride * (int8_ ? 1 : bf16 ? 2 : 4);
        const int64_t sides = matrices.kind == BLOCKS ? size / BLOCK_GROUP * int64_t(sizeof(BlockInput)) : groups() * 4;
        rows_.side_bytes = int8_ ? sides : 0;
    }

    int tile() const { return tile_; }
    int64_t tiles() const { return tiles_; }  // of a half
    int64_t size() const { return size_; }    // columns of a half
    const ExpertRowFormat& rows() const { return rows_; }

    // Whether rows of x are converted differently for each expert (static scales).
    bool converts_by_expert() const { return matrices_.kind == FLOATS && matrices_.bits == STATIC; }

    // Converts `count` rows of x, `stride` elements apart, to the format of the kernels.
    void convert(int64_t expert, const char* x, int64_t stride, const ExpertRows& to, int64_t count) const {
        const int32_t size = int32_t(matrices_.in_features);
        if (matrices_.kind == FLOATS) {
            const void* scale = matrices_.experts[expert].scales;
            const Float8Inputs op{x, stride, size, depth_, matrices_.group_size, dtype_, matrices_.bits != NOT_ROUNDED,
                                  matrices_.bits == DYNAMIC, scale ? *static_cast<const float*>(scale) : 1.f};
            return isa_.blocks.convert_float8(op, reinterpret_cast<float*>(to.values), rows_.stride, count);
        }
        if (matrices_.kind == BLOCKS) {
            if (int8_)
                return isa_.blocks.quantize(x, stride, size, dtype_, reinterpret_cast<int8_t*>(to.values), rows_.stride,
                                            reinterpret_cast<BlockInput*>(to.sides), count);
            return isa_.blocks.convert(x, stride, size, dtype_, reinterpret_cast<float*>(to.values), rows_.stride, count);
        }
        QuantizedLinear op = integers();
        op.x = x;
        op.x_stride = stride;
        if (int8_)
            isa_.quantize(op, reinterpret_cast<int8_t*>(to.values), rows_.stride, to.scales,
                          reinterpret_cast<int32_t*>(to.sides), 0, count);
        else
            isa_.convert(op, to.values, rows_.stride, 0, count);
    }

    // Columns of tiles [begin, end) of a half.
    ExpertColumns columns(int64_t begin, int64_t end) const {
        if (matrices_.kind == INTEGERS) return {begin * tile_, std::min(size_, end * tile_) - begin * tile_};
        const BlockPlace first = place(nullptr, begin), last = place(nullptr, end - 1);
        return {first.column, last.column + last.columns - first.column};
    }

    // Computes tile `t` of a half for `count` rows, at most LINEAR_ROWS. `bias`: the expert's [out_features] or null; `out`:
    // the first row and column of the tile's result.
    void multiply(int64_t expert, int half, int64_t t, const ExpertRows& rows, int count, const char* bias, char* out,
                  int64_t out_stride) const {
        const int element = element_size(dtype_);
        if (matrices_.kind != INTEGERS) {
            const BlockPlace at = place(matrices_.experts[expert].weight, half * tiles_ + t);
            const BlockRows op{rows.values, int8_ ? reinterpret_cast<const BlockInput*>(rows.sides) : nullptr, rows_.stride,
                               int32_t(depth_), dtype_};
            const BlockTile one{at.weight, bias ? bias + at.column * element : nullptr, out, out_stride, at.format, at.columns};
            return (int8_ ? isa_.blocks.int8 : isa_.blocks.weight_only)(op, one, 0, count);
        }
        const ExpertMatrix& matrix = matrices_.experts[expert * halves_ + half];
        QuantizedLinear op = integers();
        op.x = rows.values;
        op.x_stride = rows_.stride;
        op.weight = reinterpret_cast<const uint32_t*>(matrix.weight);
        op.scales = matrix.scales;
        op.zeros = matrix.zeros;
        op.bf16_scales = matrix.bf16_scales != 0;
        op.bias = bias ? bias + half * size_ * element : nullptr;
        // Kernels index `out` from the first column of the whole result.
        op.out = reinterpret_cast<void*>(reinterpret_cast<intptr_t>(out) - t * tile_ * element);
        op.out_stride = out_stride;
        op.row_scales = rows.scales;
        op.row_sums = reinterpret_cast<const int32_t*>(rows.sides);
        const int64_t strips = (size_ + STRIP - 1) / STRIP, width = tile_ / STRIP;
        (int8_ ? isa_.int8 : isa_.weight_only)(op, 0, count, t * width, std::min(strips, (t + 1) * width));
    }

  private:
    int64_t groups() const { return (matrices_.in_features + matrices_.group_size - 1) / matrices_.group_size; }

    BlockPlace place(const char* weight, int64_t index) const {
        return place_of(weight, matrices_.parts, depth_, index, tile_);
    }

    QuantizedLinear integers() const {
        QuantizedLinear op{};
        op.in_features = int32_t(matrices_.in_features);
        op.out_features = int32_t(size_);
        op.group_size = op.block_size = int32_t(matrices_.group_size);
        op.groups = op.blocks = int32_t(groups());
        op.bits = int32_t(matrices_.bits);
        op.dtype = dtype_;
        op.int8_activations = int8_;
        return op;
    }

    const QuantizedIsa& isa_;
    const ExpertMatrices& matrices_;
    int halves_, dtype_, tile_;
    bool int8_;
    int64_t tiles_, size_, depth_;  // the last: columns of the packed matrix
    ExpertRowFormat rows_;
};

}  // namespace mvllm
