// Matrix products with 8-bit and 4-bit integer weights: the packed layout of the weights, and the kernels of one
// instruction set. Each quantized_isa_*.cpp compiles quantized_linear_tile.h for one instruction set. quantized_linear.cpp
// chooses one, packs weights, and divides products among threads.
//
// An 8-bit weight is stored as a byte, value + 128; a 4-bit weight as a nibble, value + 8. A 32-bit lane holds
// consecutive k of one column; a vector holds the lanes of adjacent columns. Columns are grouped in tiles, the last
// padded with zeros:
//
//     8 bits    [tiles][in_features / 4, rounded up][tile]     bytes k0 k1 k2 k3, the operand layout of byte dot products
//     4 bits    [tiles][in_features / 8, rounded up][tile]     nibbles k0 k2 k4 k6 | k1 k3 k5 k7: shifting by 0, 4, 8, 12
//                                                              leaves a pair of k in the two halves of the lane
//               for int8 activations                           nibbles k0 k4 | k1 k5 | k2 k6 | k3 k7: shifting by 0 and 4
//                                                              leaves four k in the bytes of the lane
//     scales    [tiles][blocks][tile]   float32; for int8 activations in blocks bfloat16 where that is exact
//     zeros     [tiles][groups][tile]   int8 zero points of the signed values; null if all are zero; for nibbles and int8
//                                       activations: zero point + 8, and in the upper half of the byte factor - 1
//
// A block is one group, or several adjacent groups whose scales are small multiples of one number. That number is then
// the scale of the block, and the nibbles of each group are multiplied by its factor first.
//
// With *int8 activations*, each row of x is quantized to int8 with one scale, and sums (of a row, or of a block of
// columns) are exact integers. *Weight-only* kernels read x unquantized: value - zero point is exact in bfloat16, so
// the products are unscaled, and each group's sum is scaled in float32.

#pragma once

#include "block_linear.h"
#include "kernels.h"

namespace mvllm {

struct QuantizedLinear {
    const void* x;  // rows `x_stride` elements apart: the caller's, or the output of `quantize` or `convert`
    const uint32_t* weight;
    const void* scales;
    const int8_t* zeros;
    const void* bias;  // [out_features] or null
    void* out;         // rows `out_stride` elements apart
    const float* row_scales;  // int8 activations: [rows]
    const int32_t* row_sums;  // int8 activations: [rows][blocks], sums of the rounded values of a block
    int64_t x_stride, out_stride;
    int32_t in_features, out_features, group_size, groups, block_size, blocks, bits, dtype;
    bool int8_activations, bf16_scales;
};

constexpr int QUANTIZED_LINEAR_ROWS = 96;     // maximum number of rows per kernel call
constexpr int QUANTIZED_LINEAR_PIECE = 128;  // maximum number of k that weight-only kernels sum before they scale

struct QuantizedIsa {
    const char* name;
    // Quantizes rows [begin, end) of x to int8; computes their scales and the sums of their blocks. Rows of `out` are
    // `stride` bytes apart and zero-padded.
    void (*quantize)(const QuantizedLinear&, int8_t* out, int64_t stride, float* scales, int32_t* sums, int64_t begin,
                     int64_t end);
    void (*int8)(const QuantizedLinear&, int64_t row_begin, int64_t row_end, int64_t strip_begin, int64_t strip_end);
    // Converts rows of x for weight-only kernels, zero-padded: bfloat16 stays if `bf16_dot`, all else becomes float32.
    void (*convert)(const QuantizedLinear&, void* out, int64_t stride, int64_t begin, int64_t end);
    void (*weight_only)(const QuantizedLinear&, int64_t row_begin, int64_t row_end, int64_t strip_begin, int64_t strip_end);
    int32_t tile;
    bool bf16_dot;
    BlockKernels blocks;
};

// The best instruction set of the processor, or the one named by MVLLM_CPU_ISA if the processor has it.
const QuantizedIsa& current_quantized_isa();

extern const QuantizedIsa quantized_isa_generic;
#if MVLLM_X86
extern const QuantizedIsa quantized_isa_avx2;
extern const QuantizedIsa quantized_isa_avx2_vnni;
extern const QuantizedIsa quantized_isa_avx512;
extern const QuantizedIsa quantized_isa_avx512_vnni;
extern const QuantizedIsa quantized_isa_avx512_bf16;
#endif

}  // namespace mvllm
