// Products of int8 rows with block-quantized weights on AMX tiles. Packing, rounding, products of few rows and weight-only
// products are those of avx512_bf16; a panel of unpacked weights (block_linear_tile.h) has the layout of the second operand
// of a tile product:
//
//     panel [group][8 quads of k][32 columns]:  tile = 8 rows, 128 bytes apart, of 16 quads
//     x     [rows][k]:                          tile = 16 rows of 32 k
//
// A tile product gives the exact sums of one group for 16 rows by 16 columns, which vectors scale and add in the order of the
// other kernels: results are bit-identical. Weights are unpacked as signed bytes, so that no offset is subtracted from sums.

#include "amx.h"
#include "quantized_linear.h"

#if MVLLM_AMX && MVLLM_AMX_EMULATED != 1
#include "amx_tiles.h"

#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c,bmi2,prefer-vector-width=512")

#define LANES 16
#define HAS_F16C 1
#define HAS_BF16_DOT 1
#define HAS_VNNI 1
namespace mvllm {
// Weak, as in dispatch.cpp.
extern const QuantizedIsa quantized_isa_avx512_bf16 __attribute__((weak));

namespace q_amx_int8 {
#pragma GCC diagnostic ignored "-Wunused-function"
#include "simd.h"
#include "quantized_linear_tile.h"
#include "block_linear_tile.h"

constexpr int SIDE = 16;  // rows and columns of a tile of sums

// Tile 0 holds sums of 16 rows, 1 of the remaining rows; 2 and 3 these rows; 4 weights.
static void configure(int last_rows) {
    TileConfig config;
    const int rows[5] = {SIDE, last_rows, SIDE, last_rows, BLOCK_GROUP / 4};
    for (int t = 0; t < 5; ++t) {
        config.rows[t] = uint8_t(rows[t]);
        config.row_bytes[t] = uint16_t(t == 2 || t == 3 ? BLOCK_GROUP : 64);
    }
    TILE_CONFIG(config);
}

constexpr int64_t PANEL_BYTES = BTILE * 4;  // from one quad of k to the next

// sums[16 rows][16 columns] of one group.
template <bool LAST>
INLINE void tile_sums(const int8_t* x, int64_t stride, const uint32_t* quads, int32_t* sums) {
    TILE_LOAD(4, quads, PANEL_BYTES);
    if constexpr (LAST) {
        TILE_ZERO(1);
        TILE_LOAD(3, x, stride);
        TILE_DOT_S8S8(1, 3, 4);
        TILE_STORE(1, sums, 64);
    } else {
        TILE_ZERO(0);
        TILE_LOAD(2, x, stride);
        TILE_DOT_S8S8(0, 2, 4);
        TILE_STORE(0, sums, 64);
    }
}

// Adds the products of a panel's groups to the sums of up to 16 rows and one vector of columns: first the exact sums of all
// groups, because a vector that was stored by a tile cannot be loaded at once.
template <BlockKind KIND, bool LAST>
static void amx_unit(const BlockPanel& panel, int column, int groups, const int8_t* x, int64_t stride,
                     const BlockInput* inputs, int64_t inputs_stride, int rows, float* sums) {
    alignas(64) int32_t exact[BLOCK_PIECE][SIDE * SIDE];
    for (int g = 0; g < groups; ++g)
        tile_sums<LAST>(x + g * BLOCK_GROUP, stride, panel.quads + g * 8 * BTILE + column, exact[g]);
    vf total[SIDE];
    for (int m = 0; m < SIDE; ++m) total[m] = LAST && m >= rows ? vf{} : load(sums + m * BTILE + column);
    for (int g = 0; g < groups; ++g) {
        const BlockScale scale = {load(panel.a + g * BTILE + column), load(panel.b + g * BTILE + column)};
        auto add = [&](int m) __attribute__((always_inline)) {
            const vi sum = load_ints(exact[g] + m * SIDE);
            const BlockInput& input = inputs[m * inputs_stride + g];
            if constexpr (KIND == BlockKind::OFFSET)
                total[m] = multiply_add(__builtin_convertvector(sum, vf) * scale.a, splat(input.scale), total[m]);
            else
                total[m] = add_group<KIND>(total[m], &sum, scale, 0.f, input);
        };
        if constexpr (LAST) {
            for (int m = 0; m < rows; ++m) add(m);
        } else {
#pragma GCC unroll 16
            for (int m = 0; m < SIDE; ++m) add(m);
        }
    }
    for (int m = 0; m < rows; ++m) store(sums + m * BTILE + column, total[m]);
}

template <class F>
static void amx_tile(const BlockRows& op, const BlockTile& tile, int64_t row, int rows) {
    if (rows < 2 * SIDE) return quantized_isa_avx512_bf16.blocks.int8(op, tile, row, rows);
    alignas(64) float sums[BLOCK_ROWS * BTILE];
    alignas(64) BlockPanel panel;
    const int groups = op.in_features / BLOCK_GROUP, last = rows % SIDE, whole = rows - last;
    const int8_t* x = static_cast<const int8_t*>(op.x) + row * op.x_stride;
    const BlockInput* inputs = op.inputs + row * groups;
    for (int i = 0; i < rows * BTILE; i += LANES) store(sums + i, vf{});
    configure(last ? last : SIDE);
    for (int first = 0; first < groups; first += BLOCK_PIECE) {
        const int count = least(BLOCK_PIECE, groups - first);
        unpack_block_panel<F, F::OFFSET>(tile.weight, first, count, panel);
        for (int m = 0; m < rows; m += SIDE)
            for (int column = 0; column < BTILE; column += LANES)
                (m < whole ? amx_unit<F::KIND, false> : amx_unit<F::KIND, true>)(
                    panel, column, count, x + m * op.x_stride + first * BLOCK_GROUP, op.x_stride,
                    inputs + int64_t(m) * groups + first, groups, m < whole ? SIDE : last, sums + m * BTILE);
    }
    TILE_RELEASE();
    store_block_tile(tile, sums, rows, op.dtype);
}

static void block_int8_on_tiles(const BlockRows& op, const BlockTile& tile, int64_t row, int rows) {
    switch (tile.format) {
        case Q4_0: return amx_tile<FormatQ4_0>(op, tile, row, rows);
        case Q4_1: return amx_tile<FormatQ4_1>(op, tile, row, rows);
        case Q5_0: return amx_tile<FormatQ5_0>(op, tile, row, rows);
        case Q5_1: return amx_tile<FormatQ5_1>(op, tile, row, rows);
        case IQ4_NL: return amx_tile<FormatIQ4_NL>(op, tile, row, rows);
        case IQ4_XS: return amx_tile<FormatIQ4_XS>(op, tile, row, rows);
        case Q8_0: return amx_tile<FormatQ8_0>(op, tile, row, rows);
        case Q4_K: return amx_tile<FormatQ4_K>(op, tile, row, rows);
        case Q5_K: return amx_tile<FormatQ5_K>(op, tile, row, rows);
        case MXFP4: return amx_tile<FormatMXFP4>(op, tile, row, rows);
        // Two scales per group: slower than products of vectors.
        default: return quantized_isa_avx512_bf16.blocks.int8(op, tile, row, rows);
    }
}

}  // namespace q_amx_int8
#pragma GCC pop_options

void amx_block_int8(const BlockRows& op, const BlockTile& tile, int64_t row, int rows) {
    q_amx_int8::block_int8_on_tiles(op, tile, row, rows);
}

}  // namespace mvllm
#endif
