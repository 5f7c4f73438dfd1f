// Products of rows quantized to int8 with integer weights on AMX tiles, and the table of kernels for processors with tiles of
// bytes. All other kernels, the packing, and products of fewer than 16 rows are those of avx512_bf16, whose results these kernels repeat bit by bit: sums of
// integers are exact, and they are scaled in the same order.
//
// Four consecutive k of 16 columns of a packed weight have the layout of the second operand of a tile product:
//
//     weight [quads of k][tile of columns][4]:  tile = up to 16 rows, one packed row apart, of 64 bytes
//     x      [rows][k]:                         tile = 16 rows of up to 64 k
//
// Two by two tiles of sums are computed at once: 32 rows by 32 columns. If the number of rows is not a multiple of 16, the
// last tile begins earlier and repeats rows of the tile before.

#include "amx.h"

#if MVLLM_AMX && MVLLM_AMX_EMULATED != 1
#include "amx_tiles.h"
#include "quantized_linear.h"

#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c,bmi2,prefer-vector-width=512")

#define LANES 16
#define HAS_F16C 1
#define HAS_BF16_DOT 1
#define HAS_VNNI 1
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"

namespace mvllm {
namespace q_amx {
#include "simd.h"
#include "quantized_linear_tile.h"

constexpr int SIDE = 16;       // rows and columns of a tile of sums
constexpr int MOST_DEPTH = 64;  // k of one product of tiles

// Configures the tiles for products of `depth` k, and releases them at the end: tiles 0 to 3 hold sums, 4 and 5 rows of x,
// 6 and 7 weights.
class Tiles {
  public:
    explicit Tiles(int depth) {
        TileConfig config;
        for (int t = 0; t < 8; ++t) {
            config.rows[t] = uint8_t(t < 6 ? SIDE : depth / 4);
            config.row_bytes[t] = uint16_t(t == 4 || t == 5 ? depth : 64);
        }
        TILE_CONFIG(config);
    }
    ~Tiles() { TILE_RELEASE(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

// Up to 32 rows of x: the first row of each of the two tiles. `rows` of the second one is 0 if there is none.
struct RowPair {
    int first, second;
    int skip;  // rows of the last tile that the tile before has, too
    bool both;

    RowPair(int row, int rows) : first(row < rows - SIDE ? row : rows - SIDE), second(rows - SIDE), skip(row - first), both(row + SIDE < rows) {
        if (!both) return;
        if (row + 2 * SIDE <= rows) second = row + SIDE;
        skip = row + SIDE - second;
    }
};

// `steps` products of tiles: `depth` k each, rows of x `stride` bytes apart, rows of weights `pitch` lanes.
template <bool ROWS, bool COLUMNS>
INLINE void multiply_tiles(const int8_t* x0, const int8_t* x1, int64_t stride, const uint32_t* w, int64_t pitch, int depth,
                           int steps) {
    TILE_ZERO(0);
    if (COLUMNS) TILE_ZERO(1);
    if (ROWS) TILE_ZERO(2);
    if (ROWS && COLUMNS) TILE_ZERO(3);
    for (; steps > 0; --steps, x0 += depth, x1 += depth, w += depth / 4 * pitch) {
        TILE_LOAD(4, x0, stride);
        TILE_LOAD(6, w, pitch * 4);
        TILE_DOT_S8U8(0, 4, 6);
        if (COLUMNS) {
            TILE_LOAD(7, w + SIDE, pitch * 4);
            TILE_DOT_S8U8(1, 4, 7);
        }
        if (!ROWS) continue;
        TILE_LOAD(5, x1, stride);
        TILE_DOT_S8U8(2, 5, 6);
        if (COLUMNS) TILE_DOT_S8U8(3, 5, 7);
    }
}

// The same, with the sums stored: those of the first tile of rows at `first`, of the second one at `second`, `pitch_out`
// integers from row to row.
INLINE void multiply_rows(const RowPair& pair, bool columns, const int8_t* x, int64_t stride, const uint32_t* w,
                          int64_t pitch, int depth, int steps, int32_t* first, int32_t* second, int64_t pitch_out) {
    const int8_t *x0 = x + pair.first * stride, *x1 = x + pair.second * stride;
    const int64_t bytes = pitch_out * 4;
    if (pair.both) {
        if (columns) multiply_tiles<true, true>(x0, x1, stride, w, pitch, depth, steps);
        else multiply_tiles<true, false>(x0, x1, stride, w, pitch, depth, steps);
        TILE_STORE(2, second, bytes);
        if (columns) TILE_STORE(3, second + SIDE, bytes);
    } else if (columns) {
        multiply_tiles<false, true>(x0, x1, stride, w, pitch, depth, steps);
    } else {
        multiply_tiles<false, false>(x0, x1, stride, w, pitch, depth, steps);
    }
    TILE_STORE(0, first, bytes);
    if (columns) TILE_STORE(1, first + SIDE, bytes);
}

// ---- integer weights -----------------------------------------------------------------------------------------------------

// Weights with one scale per row: all k are summed in tiles.
template <class E>
static void rows_with_one_scale(const QuantizedLinear& op, int64_t row_begin, int64_t row_end, int64_t strip_begin,
                                int64_t strip_end) {
    alignas(64) int32_t sums[QUANTIZED_LINEAR_ROWS * QTILE];
    const int rows = int(row_end - row_begin), steps = op.in_features / MOST_DEPTH;
    const int8_t* x = static_cast<const int8_t*>(op.x) + row_begin * op.x_stride;
    const Tiles tiles(MOST_DEPTH);
    for (int64_t strip = strip_begin, next; strip < strip_end; strip = next) {
        const int64_t tile = strip / QTILE_STRIPS;
        next = (tile + 1) * QTILE_STRIPS < strip_end ? (tile + 1) * QTILE_STRIPS : strip_end;
        const int within = int(strip % QTILE_STRIPS) * STRIP, strips = int(next - strip);
        const uint32_t* weight = op.weight + tile * (op.in_features / 4) * QTILE + within;
        for (int s = 0; s < strips; s += 2)
            for (int row = 0; row < rows; row += 2 * SIDE) {
                const RowPair pair(row, rows);
                int32_t* to = sums + s * STRIP;
                multiply_rows(pair, s + 1 < strips, x, op.x_stride, weight + s * STRIP, QTILE, MOST_DEPTH, steps,
                                     to + pair.first * QTILE, to + pair.second * QTILE, QTILE);
            }
        store_int8_rows<E>(op, row_begin, rows, strip, next, sums);
    }
}

// Scales the sums of a block and adds them to the sums of the rows.
INLINE void add_scaled(const QuantizedLinear& op, const int32_t* exact, int rows, int columns, const int32_t* totals,
                       int64_t here, float* sums) {
    for (int c = 0; c < columns; c += LANES) {
        const vf scales = scales_at(op, here + c);
        const vi zeros = op.zeros && op.bits == 8 ? widen_bytes(op.zeros + here + c) : vi{};
        for (int m = 0; m < rows; ++m) {
            const vi total = vi{} + totals[int64_t(m) * op.blocks];
            const vi value = load_ints(exact + m * 2 * SIDE + c) - (zeros + Quads::OFFSET) * total;
            float* sum = sums + m * QTILE + c;
            store(sum, load(sum) + __builtin_convertvector(value, vf) * scales);
        }
    }
}

// Weights with one scale per block of columns. A piece of nibbles is unpacked once for all rows.
template <class E>
static void rows_with_block_scales(const QuantizedLinear& op, int64_t row_begin, int64_t row_end, int64_t strip_begin,
                                   int64_t strip_end) {
    alignas(64) float sums[QUANTIZED_LINEAR_ROWS * QTILE];
    alignas(64) uint32_t panel[INT8_DEPTH / 4 * QTILE];
    alignas(64) int32_t exact[4 * SIDE * SIDE];
    const int rows = int(row_end - row_begin), lane = op.bits == 4 ? 8 : 4;
    const int piece = INT8_DEPTH / op.block_size * op.block_size;
    const int depth = op.block_size % MOST_DEPTH ? MOST_DEPTH / 2 : MOST_DEPTH, steps = op.block_size / depth;
    const int8_t* x = static_cast<const int8_t*>(op.x) + row_begin * op.x_stride;
    const Tiles tiles(depth);
    for (int64_t strip = strip_begin, next; strip < strip_end; strip = next) {
        const int64_t tile = strip / QTILE_STRIPS;
        next = (tile + 1) * QTILE_STRIPS < strip_end ? (tile + 1) * QTILE_STRIPS : strip_end;
        const int within = int(strip % QTILE_STRIPS) * STRIP, strips = int(next - strip);
        const uint32_t* weight = op.weight + tile * (op.in_features / lane) * QTILE + within;
        for (int i = 0; i < rows * QTILE; i += LANES) store(sums + i, vf{});
        for (int k = 0; k < op.in_features; k += piece) {
            const int size = op.in_features - k < piece ? op.in_features - k : piece;
            const uint32_t* w = weight + k / lane * QTILE;
            if (op.bits == 4) {
                unpack_nibbles(op, w, size, (tile * op.groups + k / op.group_size) * QTILE + within, strips * STRIP, panel);
                w = panel;
            }
            for (int begin = 0; begin < size; begin += op.block_size) {
                const int64_t block = (k + begin) / op.block_size;
                const int64_t here = (tile * op.blocks + block) * QTILE + within;
                for (int s = 0; s < strips; s += 2)
                    for (int row = 0; row < rows; row += 2 * SIDE) {
                        const RowPair pair(row, rows);
                        const bool both = s + 1 < strips;
                        multiply_rows(pair, both, x + k + begin, op.x_stride, w + begin / 4 * QTILE + s * STRIP, QTILE,
                                             depth, steps, exact, exact + 2 * SIDE * SIDE, 2 * SIDE);
                        auto add = [&](int from, int first, int skip) {
                            const int at = first + skip;
                            add_scaled(op, exact + (from + skip) * 2 * SIDE, SIDE - skip, both ? 2 * SIDE : SIDE,
                                       op.row_sums + (row_begin + at) * op.blocks + block, here + s * STRIP,
                                       sums + at * QTILE + s * STRIP);
                        };
                        add(0, pair.first, pair.both ? 0 : pair.skip);
                        if (pair.both) add(SIDE, pair.second, pair.skip);
                    }
            }
        }
        store_block_scaled_rows<E>(op, row_begin, rows, strip, next, sums);
    }
}

template <class E>
static void int8_rows(const QuantizedLinear& op, int64_t row_begin, int64_t row_end, int64_t strip_begin, int64_t strip_end) {
    if (op.blocks == 1 && op.bits == 8) return rows_with_one_scale<E>(op, row_begin, row_end, strip_begin, strip_end);
    rows_with_block_scales<E>(op, row_begin, row_end, strip_begin, strip_end);
}

static void int8_or_vectors(const QuantizedLinear& op, int64_t row_begin, int64_t row_end, int64_t strip_begin,
                            int64_t strip_end) {
    const bool one_scale = op.blocks == 1 && op.bits == 8;
    const int depth = one_scale ? MOST_DEPTH : MOST_DEPTH / 2;
    const bool whole = op.in_features % depth == 0 && (one_scale || (op.block_size % depth == 0 && op.in_features % op.block_size == 0 && op.block_size <= INT8_DEPTH));
    if (row_end - row_begin < SIDE || !whole)
        return quantized_isa_avx512_bf16.int8(op, row_begin, row_end, strip_begin, strip_end);
    switch (op.dtype) {
        case F32: return int8_rows<Float32>(op, row_begin, row_end, strip_begin, strip_end);
        case BF16: return int8_rows<BFloat16>(op, row_begin, row_end, strip_begin, strip_end);
        default: return int8_rows<Float16>(op, row_begin, row_end, strip_begin, strip_end);
    }
}
}  // namespace q_amx

#pragma GCC diagnostic pop
#pragma GCC pop_options

// Weak, as in dispatch.cpp.
extern const QuantizedIsa quantized_isa_avx512_bf16 __attribute__((weak));

const QuantizedIsa* amx_quantized_isa() {
    if (!&quantized_isa_avx512_bf16 || !__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vnni") ||
        !amx_runs_here(AMX_INT8))
        return nullptr;
    static const QuantizedIsa isa = [] {
        QuantizedIsa own = quantized_isa_avx512_bf16;
        own.name = "amx_int8";
        own.int8 = q_amx::int8_or_vectors;
        own.blocks.int8 = amx_block_int8;
        return own;
    }();
    return &isa;
}

}  // namespace mvllm
#endif
