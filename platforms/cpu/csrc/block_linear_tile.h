// Products of rows with block-quantized weights (block_linear.h describes the packing). Included inside a namespace, after
// quantized_linear_tile.h.
//
// A kernel computes one tile of the result for some rows. With few rows, it unpacks weights in registers. With more rows, it
// unpacks a piece of the weight once into a panel in the L1 cache, which all rows read. Both do the same arithmetic, so a
// row's result does not depend on the other rows.

#include "block_formats_tile.h"

#if LANES == 16
#define BMR (MVLLM_SMALL_TILES ? 2 : 6)  // rows of a register tile
#else
#define BMR (MVLLM_SMALL_TILES ? 2 : 3)
#endif

constexpr int BLOCK_PIECE = 8;        // groups of a panel of bytes
constexpr int BLOCK_FLOAT_PIECE = 4;  // groups of a panel of floats

// With wide vectors, an integer sum of a group starts at the bits of MAGIC less the offset of its bytes. Its bits are then those
// of the float MAGIC + sum, because sums have less than 22 bits: one exact subtraction replaces a conversion and an FMA.
#if LANES >= 8
constexpr bool SUMS_ARE_FLOATS = true;
#else
constexpr bool SUMS_ARE_FLOATS = false;
#endif
constexpr float MAGIC = 12582912.f;  // adding it to a float leaves the nearest integer, ties to even, in the low bits

// Offsets of the bytes of formats with one scale. Without VNNI, products of bytes above 127 subtract theirs themselves.
constexpr int OFFSETS[] = {8, 12, 16, Quads::OFFSET};

// ---- rounding to int8 ----------------------------------------------------------------------------------------------------

INLINE uint32_t max_bits(vu v) {
#if LANES == 16
    return _mm512_reduce_max_epu32((__m512i)v);
#else
    uint32_t top = 0;
    for (int i = 0; i < LANES; ++i) top = v[i] > top ? v[i] : top;
    return top;
#endif
}

// Sums of 16 integers each, as floats.
INLINE void half_sums(const vi (&values)[2][16 / (LANES < 16 ? LANES : 16)], float (&half)[2]) {
#if LANES == 16
    const __m512i a = (__m512i)values[0][0], b = (__m512i)values[1][0];
    const __m512i both = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const __m256i eight = _mm256_add_epi32(_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64(both, 1));
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    _mm_storel_pi(reinterpret_cast<__m64*>(half), _mm_cvtepi32_ps(two));
#else
    for (int h = 0; h < 2; ++h) {
        vi sum = {};
        for (const vi& part : values[h]) sum += part;
        half[h] = float(sum_ints(sum));
    }
#endif
}

// Bits of the largest magnitude of a run: infinity is greater than every number, NaN greater than infinity.
template <class E>
INLINE uint32_t top_of_run(const typename E::type* x) {
    vu most = {};
    for (int i = 0; i < BLOCK_GROUP; i += LANES) {
        const vu bits = (vu)E::widen(x + i) & 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    return max_bits(most);
}

template <class E>
INLINE void round_run(const typename E::type* x, float scale, float divisor, int8_t* out, BlockInput& input) {
    constexpr int PARTS = 16 / (LANES < 16 ? LANES : 16);
    vi values[2][PARTS];
    for (int half = 0; half < 2; ++half)
        for (int i = 0; i < PARTS; ++i) {
            const int at = half * 16 + i * LANES;
            const vf v = vmax(vmin(E::widen(x + at) / divisor, splat(127.f)), splat(-127.f)) + MAGIC;
            store_bytes(out + at, (vu)v);
            values[half][i] = (vi)v - 0x4b400000;
        }
    half_sums(values, input.half);
    input.scale = scale;
    input.total = input.half[0] + input.half[1];
    for (int i = 0; i < 4; ++i) input.start[i] = MAGIC - float(OFFSETS[i]) * input.total;
}

template <class E>
static void block_quantize_rows(const typename E::type* x, int64_t x_stride, int size, int8_t* out, int64_t stride,
                                BlockInput* inputs, int64_t rows) {
    constexpr int RUNS = 8;  // the magnitudes of some runs first: processors cannot overlap whole runs, a chain of 100 cycles
    for (int64_t row = 0; row < rows; ++row, x += x_stride, out += stride)
        for (int k = 0; k < size; k += RUNS * BLOCK_GROUP, inputs += RUNS) {
            const int runs = least(RUNS, (size - k) / BLOCK_GROUP);
            uint32_t top[RUNS] = {};
            float scale[RUNS], divisor[RUNS];
            for (int i = 0; i < runs; ++i) top[i] = top_of_run<E>(x + k + i * BLOCK_GROUP);
            for (int i = 0; i < RUNS; ++i) {
                scale[i] = as_float(top[i]) / 127.f;
                divisor[i] = scale[i] > 0 ? scale[i] : 1.f;
            }
            for (int i = 0; i < runs; ++i) {
                int8_t* to = out + k + i * BLOCK_GROUP;
                if (top[i] < 0x7f800000u) {
                    round_run<E>(x + k + i * BLOCK_GROUP, scale[i], divisor[i], to, inputs[i]);
                } else {
                    inputs[i] = {as_float(0x7fc00000u), 0, {0, 0}, {MAGIC, MAGIC, MAGIC, MAGIC}};
                    __builtin_memset(to, 0, BLOCK_GROUP);
                }
            }
            if (runs < RUNS) inputs += runs - RUNS;
        }
}

static void block_quantize(const void* x, int64_t x_stride, int32_t size, int32_t dtype, int8_t* out, int64_t stride,
                           BlockInput* inputs, int64_t rows) {
    switch (dtype) {
        case F32: return block_quantize_rows<Float32>(static_cast<const float*>(x), x_stride, size, out, stride, inputs, rows);
        case BF16:
            return block_quantize_rows<BFloat16>(static_cast<const uint16_t*>(x), x_stride, size, out, stride, inputs, rows);
        default:
            return block_quantize_rows<Float16>(static_cast<const uint16_t*>(x), x_stride, size, out, stride, inputs, rows);
    }
}

template <class E>
static void block_convert_rows(const typename E::type* x, int64_t x_stride, int size, float* out, int64_t stride, int64_t rows) {
    for (int64_t row = 0; row < rows; ++row, x += x_stride, out += stride)
        for (int k = 0; k < size; k += LANES) store(out + k, E::widen(x + k));
}

static void block_convert(const void* x, int64_t x_stride, int32_t size, int32_t dtype, float* out, int64_t stride,
                          int64_t rows) {
    switch (dtype) {
        case F32: return block_convert_rows<Float32>(static_cast<const float*>(x), x_stride, size, out, stride, rows);
        case BF16: return block_convert_rows<BFloat16>(static_cast<const uint16_t*>(x), x_stride, size, out, stride, rows);
        default: return block_convert_rows<Float16>(static_cast<const uint16_t*>(x), x_stride, size, out, stride, rows);
    }
}

// ---- the result ----------------------------------------------------------------------------------------------------------

template <class E>
INLINE void store_block_rows(const BlockTile& tile, const float* sums, int rows) {
    typedef typename E::type T;
    for (int m = 0; m < rows; ++m, sums += BTILE)
        store_row<E>(static_cast<T*>(tile.out) + m * tile.out_stride, static_cast<const T*>(tile.bias), tile.columns,
                     [&](int c) __attribute__((always_inline)) { return load(sums + c); });
}

static void store_block_tile(const BlockTile& tile, const float* sums, int rows, int dtype) {
    switch (dtype) {
        case F32: return store_block_rows<Float32>(tile, sums, rows);
        case BF16: return store_block_rows<BFloat16>(tile, sums, rows);
        default: return store_block_rows<Float16>(tile, sums, rows);
    }
}

// ---- int8 activations ----------------------------------------------------------------------------------------------------

// Start of the block that contains a group, and of the group in its block.
template <class F>
INLINE const char* head_of(const char* weight, int group) {
    return weight + int64_t(group / F::LAYOUT.groups) * F::LAYOUT.block() * BTILE;
}
template <class F>
INLINE const char* group_of(const char* head, int group) {
    return head + (F::LAYOUT.head + group % F::LAYOUT.groups * F::LAYOUT.group()) * BTILE;
}

// Adds one group's product to `total`. `sums`: exact integer sums of the group, or of its two halves.
template <BlockKind KIND>
INLINE vf add_group(vf total, const vi* sums, const BlockScale& scale, float offset, const BlockInput& x) {
    const vf first = __builtin_convertvector(sums[0], vf);
    if constexpr (KIND == BlockKind::OFFSET)
        return multiply_add(multiply_add(splat(x.total), splat(-offset), first) * scale.a, splat(x.scale), total);
    if constexpr (KIND == BlockKind::MINIMUM)
        return multiply_add(multiply_add(first, scale.a, scale.b * -x.total), splat(x.scale), total);
    const vf second = __builtin_convertvector(sums[1], vf);
    const vf a = multiply_add(splat(x.half[0]), splat(-offset), first);
    const vf b = multiply_add(splat(x.half[1]), splat(-offset), second);
    return multiply_add(multiply_add(a, scale.a, b * scale.b), splat(x.scale), total);
}

// Offset of the bytes of a format, and its index in OFFSETS.
struct ByteOffset {
    float value;
    int index;

    constexpr ByteOffset(int offset) : value(float(offset == 128 ? Quads::OFFSET : offset)), index(0) {
        while (index < 3 && OFFSETS[index] != offset) ++index;
    }
};

// The first value of the integer sums of a row: of a group, or of its two halves.
template <BlockKind KIND, int HALVES>
INLINE void begin_group(vi (&start)[HALVES], const ByteOffset& offset, const BlockInput& x) {
    for (int half = 0; half < HALVES; ++half)
        if constexpr (!SUMS_ARE_FLOATS || KIND == BlockKind::MINIMUM) start[half] = vi{};
        else if constexpr (KIND == BlockKind::OFFSET) start[half] = (vi)splat(x.start[offset.index]);
        else start[half] = (vi)multiply_add(splat(x.half[half]), splat(-offset.value), splat(MAGIC));
}

// Adds one group's product to `total`, like add_group, from sums that begin_group() has started.
template <BlockKind KIND, int HALVES>
INLINE vf end_group(vf total, const vi (&sums)[HALVES], const BlockScale& scale, const ByteOffset& offset,
                    const BlockInput& x) {
    if constexpr (!SUMS_ARE_FLOATS || KIND == BlockKind::MINIMUM) {
        return add_group<KIND>(total, sums, scale, offset.value, x);
    } else {
        const vf first = (vf)sums[0] - MAGIC;
        if constexpr (KIND == BlockKind::OFFSET) return multiply_add(first * scale.a, splat(x.scale), total);
        const vf second = (vf)sums[HALVES - 1] - MAGIC;
        return multiply_add(multiply_add(first, scale.a, second * scale.b), splat(x.scale), total);
    }
}

INLINE uint32_t quad_at(const int8_t* x) {
    uint32_t quad;
    __builtin_memcpy(&quad, x, 4);
    return quad;
}

// Adds the products of a group, 8 k per step from step R on, to one sum or to one sum per half.
template <class F, int R, int MR, int HALVES>
INLINE void add_pairs(vi (&acc)[MR][BNV][HALVES], const char* lanes, const int8_t* x, int64_t stride) {
    constexpr int half = HALVES == 2 ? R / 2 : 0;
    for (int v = 0; v < BNV; ++v) {
        vu even, odd;
        F::template pair<R>(lanes, v * LANES, even, odd);
        const typename F::Dot first = F::Dot::of(even), second = F::Dot::of(odd);
        for (int m = 0; m < MR; ++m) {
            const int8_t* quads = x + m * stride + 8 * R;
            acc[m][v][half] = add_two(acc[m][v][half], first, second, quad_at(quads), quad_at(quads + 4));
        }
    }
    if constexpr (R < 3) add_pairs<F, R + 1, MR, HALVES>(acc, lanes, x, stride);
}

// Prefetches weights `ahead` bytes ahead, none if it is 0.
template <class F, int MR>
static void block_direct_unit(const BlockRows& op, const char* weight, int64_t row, float* sums, int64_t ahead) {
    constexpr int HALVES = F::KIND == BlockKind::HALVES ? 2 : 1;
    constexpr int BLOCK_BYTES = F::LAYOUT.block() * BTILE;
    constexpr int GROUP_BYTES = BLOCK_BYTES / F::LAYOUT.groups;
    const int groups = op.in_features / BLOCK_GROUP;
    const int8_t* x = static_cast<const int8_t*>(op.x) + row * op.x_stride;
    const BlockInput* inputs = op.inputs + row * groups;
    vf total[MR][BNV] = {};
    for (int first = 0; first < groups; first += F::LAYOUT.groups, weight += BLOCK_BYTES) {
        const char* at = weight + F::LAYOUT.head * BTILE;
        for (int g = 0; g < F::LAYOUT.groups; ++g, x += BLOCK_GROUP, ++inputs) {
            if (ahead)
                for (int i = 0; i < GROUP_BYTES; i += 64) prefetch(weight + g * GROUP_BYTES + ahead + i);
            vi acc[MR][BNV][HALVES];
            for (int m = 0; m < MR; ++m) {
                vi start[HALVES];
                begin_group<F::KIND>(start, ByteOffset(F::OFFSET), inputs[m * groups]);
                for (int v = 0; v < BNV; ++v)
                    for (int half = 0; half < HALVES; ++half) acc[m][v][half] = start[half];
            }
            add_pairs<F, 0, MR, HALVES>(acc, at + F::LAYOUT.sub * BTILE, x, op.x_stride);
            for (int v = 0; v < BNV; ++v) {
                const BlockScale scale = F::scale(weight, at, v * LANES);
                for (int m = 0; m < MR; ++m)
                    total[m][v] = end_group<F::KIND>(total[m][v], acc[m][v], scale, ByteOffset(F::OFFSET), inputs[m * groups]);
            }
            at += F::LAYOUT.group() * BTILE;
        }
    }
    for (int m = 0; m < MR; ++m)
        for (int v = 0; v < BNV; ++v) store(sums + m * BTILE + v * LANES, total[m][v]);
}

// Maximum number of rows for which the registers hold the sums and the unpacked weights.
template <class F>
constexpr int direct_unit() {
    return LANES != 16 || MVLLM_SMALL_TILES ? 2 : F::KIND == BlockKind::HALVES ? 4 : 6;
}

// Maximum number of rows for which weights are unpacked in registers. Two passes are still faster than a panel.
template <class F>
constexpr int direct_rows() {
    return 2 * direct_unit<F>();
}

template <class F>
INLINE void block_direct_pass(const BlockRows& op, const char* weight, int64_t row, int rows, float* sums, int64_t ahead) {
    switch (rows) {
        case 1: return block_direct_unit<F, 1>(op, weight, row, sums, ahead);
#if LANES == 16 && !MVLLM_SMALL_TILES
        case 3: return block_direct_unit<F, 3>(op, weight, row, sums, ahead);
        case 4: return block_direct_unit<F, 4>(op, weight, row, sums, ahead);
        case 5:
            if constexpr (direct_unit<F>() >= 5) return block_direct_unit<F, 5>(op, weight, row, sums, ahead);
            [[fallthrough]];
        case 6:
            if constexpr (direct_unit<F>() >= 6) return block_direct_unit<F, 6>(op, weight, row, sums, ahead);
            [[fallthrough]];
#endif
        default: return block_direct_unit<F, 2>(op, weight, row, sums, ahead);
    }
}

// A tile is contiguous. Where `prefetch_distance.unpacking` is 0, prefetches in a single pass made it up to twice as slow. Of
// two passes, the second one has weights in a cache and prefetches the next tile.
template <class F>
INLINE void block_direct(const BlockRows& op, const char* weight, int64_t row, int rows, float* sums) {
    const int64_t ahead = prefetch_distance.unpacking;
    if (rows <= direct_unit<F>()) return block_direct_pass<F>(op, weight, row, rows, sums, ahead);
    const int first = (rows + 1) / 2;
    block_direct_pass<F>(op, weight, row, first, sums, ahead);
    block_direct_pass<F>(op, weight, row + first, rows - first, sums + first * BTILE,
                         ahead ? ahead : head_of<F>(weight, op.in_features / BLOCK_GROUP) - weight);
}

// The bytes of the lanes less a constant. The upper bit is set first and restored, so that no byte borrows from the next.
template <int LESS>
INLINE vu less_bytes(vu lanes) {
    if constexpr (LESS == 0) return lanes;
    constexpr uint32_t high = 0x80808080u, less = LESS * 0x01010101u;
    return ((lanes | high) - (less & ~high)) ^ ((lanes ^ ~less) & high);
}

// Unpacked groups: eight rows of quads per group, and the scales.
struct BlockPanel {
    uint32_t quads[BLOCK_PIECE * 8 * BTILE];
    float a[BLOCK_PIECE * BTILE], b[BLOCK_PIECE * BTILE];
};

template <class F, int R, int LESS>
INLINE void unpack_pairs(const char* lanes, int column, uint32_t* quads) {
    vu even, odd;
    F::template pair<R>(lanes, column, even, odd);
    store_lanes(quads + 2 * R * BTILE, less_bytes<LESS>(even));
    store_lanes(quads + (2 * R + 1) * BTILE, less_bytes<LESS>(odd));
    if constexpr (R < 3) unpack_pairs<F, R + 1, LESS>(lanes, column, quads);
}

// LESS is subtracted from each byte.
template <class F, int LESS = 0>
static void unpack_block_panel(const char* weight, int first, int groups, BlockPanel& panel) {
    for (int g = 0; g < groups; ++g) {
        const char* head = head_of<F>(weight, first + g);
        const char* at = group_of<F>(head, first + g);
        for (int c = 0; c < BTILE; c += LANES) {
            unpack_pairs<F, 0, LESS>(at + F::LAYOUT.sub * BTILE, c, panel.quads + g * 8 * BTILE + c);
            const BlockScale scale = F::scale(head, at, c);
            store(panel.a + g * BTILE + c, scale.a);
            store(panel.b + g * BTILE + c, scale.b);
        }
    }
}

// Weights that a unit prefetches: `lines` cache lines during each group.
struct BlockAhead {
    const char* from;
    int lines;
};

template <class Dot, BlockKind KIND, int MR>
static void block_panel_unit(const BlockPanel& panel, int groups, const ByteOffset& offset, const int8_t* x, int64_t stride,
                             const BlockInput* inputs, int64_t inputs_stride, float* sums, BlockAhead ahead) {
    constexpr int HALVES = KIND == BlockKind::HALVES ? 2 : 1;
    vf total[MR][BNV];
    for (int m = 0; m < MR; ++m)
        for (int v = 0; v < BNV; ++v) total[m][v] = load(sums + m * BTILE + v * LANES);
    const uint32_t* quads = panel.quads;
    for (int g = 0; g < groups; ++g) {
        for (int i = 0; i < ahead.lines; ++i, ahead.from += 64) prefetch(ahead.from);
        vi acc[MR][BNV][HALVES];
        for (int m = 0; m < MR; ++m) {
            vi start[HALVES];
            begin_group<KIND>(start, offset, inputs[m * inputs_stride + g]);
            for (int v = 0; v < BNV; ++v)
                for (int half = 0; half < HALVES; ++half) acc[m][v][half] = start[half];
        }
        for (int half = 0; half < HALVES; ++half)
            for (int j = 0; j < 8 / HALVES; j += 2, quads += 2 * BTILE, x += 8) {
                Dot first[BNV], second[BNV];
                for (int v = 0; v < BNV; ++v) {
                    first[v] = Dot::of(load_lanes(quads + v * LANES));
                    second[v] = Dot::of(load_lanes(quads + BTILE + v * LANES));
                }
                for (int m = 0; m < MR; ++m) {
                    const uint32_t x0 = quad_at(x + m * stride), x1 = quad_at(x + m * stride + 4);
                    for (int v = 0; v < BNV; ++v) acc[m][v][half] = add_two(acc[m][v][half], first[v], second[v], x0, x1);
                }
            }
        for (int v = 0; v < BNV; ++v) {
            const BlockScale scale = {load(panel.a + g * BTILE + v * LANES), load(panel.b + g * BTILE + v * LANES)};
            for (int m = 0; m < MR; ++m)
                total[m][v] = end_group<KIND>(total[m][v], acc[m][v], scale, offset, inputs[m * inputs_stride + g]);
        }
    }
    for (int m = 0; m < MR; ++m)
        for (int v = 0; v < BNV; ++v) store(sums + m * BTILE + v * LANES, total[m][v]);
}

template <class Dot, BlockKind KIND>
INLINE void block_panel_group(int rows, const BlockPanel& panel, int groups, const ByteOffset& offset, const int8_t* x,
                              int64_t stride, const BlockInput* inputs, int64_t inputs_stride, float* sums,
                              BlockAhead ahead) {
    auto run = [&](auto unit) __attribute__((always_inline)) {
        unit(panel, groups, offset, x, stride, inputs, inputs_stride, sums, ahead);
    };
    switch (rows) {
        case 1: return run(block_panel_unit<Dot, KIND, 1>);
        case 2: return run(block_panel_unit<Dot, KIND, 2>);
#if !MVLLM_SMALL_TILES
        case 3: return run(block_panel_unit<Dot, KIND, 3>);
#if LANES == 16
        case 4: return run(block_panel_unit<Dot, KIND, 4>);
        case 5: return run(block_panel_unit<Dot, KIND, 5>);
        default: return run(block_panel_unit<Dot, KIND, 6>);
#endif
#endif
    }
}

// Rows of a register tile of a panel. Two sums per group leave registers for four rows.
template <class F>
constexpr int panel_rows() {
    return LANES == 16 && !MVLLM_SMALL_TILES && F::KIND == BlockKind::HALVES ? 4 : BMR;
}

template <class F>
static void block_int8_tile(const BlockRows& op, const BlockTile& tile, int64_t row, int rows) {
    alignas(64) float sums[BLOCK_ROWS * BTILE];
    alignas(64) BlockPanel panel;
    if (rows <= direct_rows<F>()) {
        block_direct<F>(op, tile.weight, row, rows, sums);
        return store_block_tile(tile, sums, rows, op.dtype);
    }
    constexpr int group_lines = (F::LAYOUT.block() * BTILE / F::LAYOUT.groups + 63) / 64;
    const int groups = op.in_features / BLOCK_GROUP, teams = (rows + panel_rows<F>() - 1) / panel_rows<F>();
    const int8_t* x = static_cast<const int8_t*>(op.x) + row * op.x_stride;
    const BlockInput* inputs = op.inputs + row * groups;
    for (int i = 0; i < rows * BTILE; i += LANES) store(sums + i, vf{});
    for (int first = 0; first < groups; first += BLOCK_PIECE) {
        const int count = least(BLOCK_PIECE, groups - first);
        unpack_block_panel<F>(tile.weight, first, count, panel);
        // The first unit prefetches the next piece, of this tile or of the next one.
        BlockAhead ahead{head_of<F>(tile.weight, first + count), group_lines};
        for (int t = 0, m = 0; t < teams; ++t) {
            const int height = (rows - m + teams - t - 1) / (teams - t);
            block_panel_group<typename F::Dot, F::KIND>(height, panel, count, ByteOffset(F::OFFSET),
                                                        x + m * op.x_stride + first * BLOCK_GROUP, op.x_stride,
                                                        inputs + int64_t(m) * groups + first, groups, sums + m * BTILE,
                                                        ahead);
            ahead.lines = 0;
            m += height;
        }
    }
    store_block_tile(tile, sums, rows, op.dtype);
}

static void block_int8(const BlockRows& op, const BlockTile& tile, int64_t row, int rows) {
    switch (tile.format) {
        case Q4_0: return block_int8_tile<FormatQ4_0>(op, tile, row, rows);
        case Q4_1: return block_int8_tile<FormatQ4_1>(op, tile, row, rows);
        case Q5_0: return block_int8_tile<FormatQ5_0>(op, tile, row, rows);
        case Q5_1: return block_int8_tile<FormatQ5_1>(op, tile, row, rows);
        case Q3_K: return block_int8_tile<FormatQ3_K>(op, tile, row, rows);
        case IQ4_NL: return block_int8_tile<FormatIQ4_NL>(op, tile, row, rows);
        case IQ4_XS: return block_int8_tile<FormatIQ4_XS>(op, tile, row, rows);
        case Q8_0: return block_int8_tile<FormatQ8_0>(op, tile, row, rows);
        case Q4_K: return block_int8_tile<FormatQ4_K>(op, tile, row, rows);
        case Q5_K: return block_int8_tile<FormatQ5_K>(op, tile, row, rows);
        case Q6_K: return block_int8_tile<FormatQ6_K>(op, tile, row, rows);
        default: return block_int8_tile<FormatMXFP4>(op, tile, row, rows);
    }
}

// ---- weight-only ---------------------------------------------------------------------------------------------------------

template <class F, int R>
INLINE void unpack_floats(const char* lanes, int column, const BlockScale& scale, float* panel) {
    vu pair[2];
    F::template pair<R>(lanes, column, pair[0], pair[1]);
    for (int j = 0; j < 2; ++j)
        for (int i = 0; i < 4; ++i) {
            const vf byte = __builtin_convertvector((vi)(pair[j] >> 8 * i & 0xffu), vf);
            vf w;
            if constexpr (F::KIND == BlockKind::MINIMUM) w = multiply_add(byte, scale.a, -scale.b);
            else w = (byte - float(F::OFFSET)) * (F::KIND == BlockKind::HALVES && R >= 2 ? scale.b : scale.a);
            store(panel + (8 * R + 4 * j + i) * BTILE, w);
        }
    if constexpr (R < 3) unpack_floats<F, R + 1>(lanes, column, scale, panel);
}

template <class F>
static void unpack_float_panel(const char* weight, int first, int groups, float* panel) {
    for (int g = 0; g < groups; ++g, panel += BLOCK_GROUP * BTILE) {
        const char* head = head_of<F>(weight, first + g);
        const char* at = group_of<F>(head, first + g);
        for (int c = 0; c < BTILE; c += LANES)
            unpack_floats<F, 0>(at + F::LAYOUT.sub * BTILE, c, F::scale(head, at, c), panel + c);
    }
}

template <int MR>
static void block_float_unit(const float* panel, int size, const float* x, int64_t stride, float* sums) {
    vf acc[MR][BNV] = {};
    for (int k = 0; k < size; ++k, panel += BTILE) {
        vf w[BNV];
        for (int v = 0; v < BNV; ++v) w[v] = load(panel + v * LANES);
        for (int m = 0; m < MR; ++m)
            for (int v = 0; v < BNV; ++v) acc[m][v] = multiply_add(w[v], splat(x[m * stride + k]), acc[m][v]);
    }
    for (int m = 0; m < MR; ++m)
        for (int v = 0; v < BNV; ++v) {
            float* sum = sums + m * BTILE + v * LANES;
            store(sum, load(sum) + acc[m][v]);
        }
}

INLINE void block_float_group(int rows, const float* panel, int size, const float* x, int64_t stride, float* sums) {
    switch (rows) {
        case 1: return block_float_unit<1>(panel, size, x, stride, sums);
        case 2: return block_float_unit<2>(panel, size, x, stride, sums);
#if !MVLLM_SMALL_TILES
        case 3: return block_float_unit<3>(panel, size, x, stride, sums);
#if LANES == 16
        case 4: return block_float_unit<4>(panel, size, x, stride, sums);
        case 5: return block_float_unit<5>(panel, size, x, stride, sums);
        default: return block_float_unit<6>(panel, size, x, stride, sums);
#endif
#endif
    }
}

#include "block_float8_tile.h"

static void block_weight_only(const BlockRows& op, const BlockTile& tile, int64_t row, int rows) {
    static constexpr void (*unpack[NUM_BLOCK_FORMATS])(const char*, int, int, float*) = {
        unpack_float_panel<FormatQ4_0>, unpack_float_panel<FormatQ4_1>, unpack_float_panel<FormatQ8_0>,
        unpack_float_panel<FormatQ4_K>, unpack_float_panel<FormatQ5_K>, unpack_float_panel<FormatQ6_K>,
        unpack_float_panel<FormatMXFP4>, unpack_float_panel<FormatQ5_0>, unpack_float_panel<FormatQ5_1>,
        unpack_float_panel<FormatQ3_K>, unpack_float_panel<FormatIQ4_NL>, unpack_float_panel<FormatIQ4_XS>,
        unpack_float8_panel,
    };
    alignas(64) float sums[BLOCK_ROWS * BTILE], panel[BLOCK_FLOAT_PIECE * BLOCK_GROUP * BTILE];
    const int groups = op.in_features / BLOCK_GROUP, teams = (rows + BMR - 1) / BMR;
    const float* x = static_cast<const float*>(op.x) + row * op.x_stride;
    if (tile.format == E4M3 && rows <= 2) {
        (rows == 1 ? float8_direct<1> : float8_direct<2>)(op, tile.weight, row, sums);
        return store_block_tile(tile, sums, rows, op.dtype);
    }
    for (int i = 0; i < rows * BTILE; i += LANES) store(sums + i, vf{});
    for (int first = 0; first < groups; first += BLOCK_FLOAT_PIECE) {
        const int count = least(BLOCK_FLOAT_PIECE, groups - first);
        unpack[tile.format](tile.weight, first, count, panel);
        for (int t = 0, m = 0; t < teams; ++t) {
            const int height = (rows - m + teams - t - 1) / (teams - t);
            block_float_group(height, panel, count * BLOCK_GROUP, x + m * op.x_stride + first * BLOCK_GROUP, op.x_stride,
                              sums + m * BTILE);
            m += height;
        }
    }
    store_block_tile(tile, sums, rows, op.dtype);
}

constexpr BlockKernels block_kernels = {block_quantize, block_int8, block_convert, block_weight_only,
                                       block_convert_float8, BTILE};
