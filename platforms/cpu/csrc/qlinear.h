// Matrix products with weights of small integers: the packing, and the table of kernels that each instruction set fills in
// (qisa_*.cpp compile qlinear_tile.h for one each; qlinear.cpp picks one, packs, and divides a product over the threads).
//
// A weight of 8 bits is kept as a byte, value + 128; one of 4 bits as a nibble, value + 8. A 32-bit lane holds neighbouring
// k of one column, and a vector the lanes of neighbouring columns; columns come in tiles, a tile's last ones zero:
//
//     8 bits    [tiles][in_features / 4, rounded up][tile]     bytes k0 k1 k2 k3, the form of the byte dot products
//     4 bits    [tiles][in_features / 8, rounded up][tile]     nibbles k0 k2 k4 k6 | k1 k3 k5 k7: shifting by 0, 4, 8, 12
//                                                              leaves a pair of k in the two halves of the lane
//               for int8 activations                           nibbles k0 k4 | k1 k5 | k2 k6 | k3 k7: shifting by 0 and 4
//                                                              leaves four k in the bytes of the lane
//     scales    [tiles][blocks][tile]   float32; for int8 activations in blocks bfloat16 where that is exact
//     zeros     [tiles][groups][tile]   int8, counted like the values; null where all are zero; for nibbles and int8
//                                       activations zero + 8, and a factor less one in the upper half of the byte
//
// A block is a group, except where scales of neighbouring groups are small multiples of one number: then nibbles are
// multiplied by the factor first, and the block has that number for its scale.
//
// With *int8 activations* rows of x are rounded to int8, a scale each, and sums (of a row, or of a block of columns) are exact
// integers. *Weight-only* x stays as it is: value less zero point is exact in bfloat16, so that is multiplied unscaled, and
// each group's sum is scaled in float32.

#pragma once

#include "block_linear.h"
#include "kernels.h"

namespace mvllm {

struct QLinear {
    const void* x;  // rows `x_stride` elements apart: the caller's, or what `prepare` made of them
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

constexpr int QLINEAR_ROWS = 96;     // most rows that one call of a kernel takes
constexpr int QLINEAR_PIECE = 128;  // most k that weight-only kernels sum before they scale

struct QIsa {
    const char* name;
    // Rows rounded to int8 behind `x_stride` bytes, padded with zeros, with their scales and sums.
    void (*quantize)(const QLinear&, int8_t* out, int64_t stride, float* scales, int32_t* sums, int64_t begin, int64_t end);
    void (*int8)(const QLinear&, int64_t row_begin, int64_t row_end, int64_t strip_begin, int64_t strip_end);
    // Rows as weight-only kernels take them, padded with zeros: bfloat16 for themselves where `bf16_dot`, else float32.
    void (*convert)(const QLinear&, void* out, int64_t stride, int64_t begin, int64_t end);
    void (*weight_only)(const QLinear&, int64_t row_begin, int64_t row_end, int64_t strip_begin, int64_t strip_end);
    int32_t tile;
    bool bf16_dot;
    BlockKernels blocks;
};

// The best that the processor has, or what MVLLM_CPU_ISA names if the processor has it.
const QIsa& current_qisa();

extern const QIsa qisa_generic;
#if MVLLM_X86
extern const QIsa qisa_avx2;
extern const QIsa qisa_avx2_vnni;
extern const QIsa qisa_avx512;
extern const QIsa qisa_avx512_vnni;
extern const QIsa qisa_avx512_bf16;
#endif

}  // namespace mvllm
