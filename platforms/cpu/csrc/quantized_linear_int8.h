// Products of rows quantized to int8 with packed integer weights. Included by quantized_linear_tile.h.
//
// Sums over a row, or over each block of columns that share a float32 scale, are exact integers. The sum of a block is
// scaled and added to the sum of the previous blocks, in the same order for any number of rows.

// Four products per lane. x86 byte products require one unsigned operand. With VNNI this is the weight + OFFSET.
// Without VNNI, pairs of products could overflow 16 bits, so the operand is |weight|, and its sign is moved to x.
#if HAS_VNNI
struct Quads {
    vu w;
    static constexpr int OFFSET = 128;
    INLINE Quads of(vu lanes) { return {lanes}; }
    INLINE vi add(vi acc, Quads q, uint32_t x) {
#if LANES == 16
        return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)q.w, _mm512_set1_epi32(int(x)));
#else
        return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)q.w, _mm256_set1_epi32(int(x)));
#endif
    }
};
#elif LANES == 16
struct Quads {
    __m512i size;
    __mmask64 negative;
    static constexpr int OFFSET = 0;
    INLINE Quads of(vu lanes) {
        const __m512i w = (__m512i)(lanes ^ 0x80808080u);
        return {_mm512_abs_epi8(w), _mm512_movepi8_mask(w)};
    }
    INLINE vi add(vi acc, Quads q, uint32_t x) {
        const __m512i b = _mm512_set1_epi32(int(x));
        const __m512i twos = _mm512_maddubs_epi16(q.size, _mm512_mask_sub_epi8(b, q.negative, _mm512_setzero_si512(), b));
        return acc + (vi)_mm512_madd_epi16(twos, _mm512_set1_epi16(1));
    }
};
#elif LANES == 8
struct Quads {
    __m256i size, w;
    static constexpr int OFFSET = 0;
    INLINE Quads of(vu lanes) {
        const __m256i w = (__m256i)(lanes ^ 0x80808080u);
        return {_mm256_abs_epi8(w), w};
    }
    INLINE vi add(vi acc, Quads q, uint32_t x) {
        const __m256i twos = _mm256_maddubs_epi16(q.size, _mm256_sign_epi8(_mm256_set1_epi32(int(x)), q.w));
        return acc + (vi)_mm256_madd_epi16(twos, _mm256_set1_epi16(1));
    }
};
#else
struct Quads {
    vi w[4];
    static constexpr int OFFSET = 0;
    INLINE Quads of(vu lanes) {
        const vi v = (vi)(lanes ^ 0x80808080u);
        return {{v << 24 >> 24, v << 16 >> 24, v << 8 >> 24, v >> 24}};
    }
    INLINE vi add(vi acc, const Quads& q, uint32_t x) {
        for (int i = 0; i < 4; ++i) acc += q.w[i] * int32_t(int8_t(x >> 8 * i));
        return acc;
    }
};
#endif

INLINE int32_t sum_ints(vi v) {
#if LANES == 16
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    int32_t total = 0;
    for (int i = 0; i < LANES; ++i) total += v[i];
    return total;
#endif
}

// The sum of each block of a row's values.
INLINE void sum_blocks(const int8_t* values, int size, int block_size, int32_t* sums) {
    for (int k = 0; k < size;) {
        const int end = block_size < size - k ? k + block_size : size;
        vi sum = {};
        for (; k + LANES <= end; k += LANES) sum += widen_bytes(values + k);
        int32_t total = sum_ints(sum);
        for (; k < end; ++k) total += values[k];
        *sums++ = total;
    }
}

template <class E>
static void quantize_rows(const QuantizedLinear& op, int8_t* out, int64_t stride, float* scales, int32_t* sums, int64_t begin,
                          int64_t end) {
    typedef typename E::type T;
    const int size = op.in_features, whole = size / LANES * LANES;
    const float magic = 12582912.f;  // adding it leaves the nearest integer, ties to even, in the low bits
    for (int64_t row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(op.x) + row * op.x_stride;
        int8_t* to = out + row * stride;
        // The largest magnitude, compared as bits: infinity is greater than every number, NaN greater than infinity.
        vu most = {};
        int k = 0;
        for (; k < whole; k += LANES) {
            const vu bits = (vu)E::widen(x + k) & 0x7fffffffu;
            most = bits > most ? bits : most;
        }
        uint32_t top = 0;
        for (int i = 0; i < LANES; ++i) top = most[i] > top ? most[i] : top;
        for (; k < size; ++k) {
            const uint32_t bits = as_bits(E::get(x[k])) & 0x7fffffffu;
            top = bits > top ? bits : top;
        }
        const float scale = as_float(top) / 127.f, divisor = scale > 0 ? scale : 1.f;
        const bool finite = top < 0x7f800000u;
        scales[row] = finite ? scale : as_float(0x7fc00000u);
        int32_t* row_sums = sums + row * op.blocks;
        if (!finite) {
            __builtin_memset(to, 0, size_t(stride));
            __builtin_memset(row_sums, 0, size_t(op.blocks) * sizeof(int32_t));
            continue;
        }
        for (k = 0; k < whole; k += LANES) {
            const vf v = vmax(vmin(E::widen(x + k) / divisor, splat(127.f)), splat(-127.f));
            store_bytes(to + k, (vu)(v + magic));
        }
        for (; k < size; ++k) {
            float v = E::get(x[k]) / divisor;
            v = v > 127.f ? 127.f : v < -127.f ? -127.f : v;
            to[k] = int8_t(as_bits(v + magic));
        }
        for (; k < stride; ++k) to[k] = 0;
        sum_blocks(to, size, op.block_size, row_sums);
    }
}

template <int MR, int NV>
static void int8_unit(const int8_t* x, int64_t ldx, const uint32_t* w, int steps, int32_t* sums, bool first, Ahead ahead) {
    vi acc[MR][NV] = {};
    do {  // `steps` is at least 1; a `while` loop would make the compiler save the sums for the case of 0
        Quads q[NV];
        for (int v = 0; v < NV; ++v) q[v] = Quads::of(load_lanes(w + v * LANES));
        for (int m = 0; m < MR; ++m) {
            uint32_t quad;
            __builtin_memcpy(&quad, x + m * ldx, 4);
            for (int v = 0; v < NV; ++v) acc[m][v] = Quads::add(acc[m][v], q[v], quad);
        }
        w += QTILE;
        x += 4;
        fetch(ahead);
    } while (--steps);
    for (int m = 0; m < MR; ++m)
        for (int v = 0; v < NV; ++v) {
            vi_mem* sum = reinterpret_cast<vi_mem*>(sums + m * QTILE + v * LANES);
            *sum = first ? acc[m][v] : acc[m][v] + *sum;
        }
}

INLINE void int8_group(int rows, int strips, const int8_t* x, int64_t ldx, const uint32_t* w, int steps, int32_t* sums,
                       bool first, Ahead ahead) {
    QGROUP(int8_unit, rows, strips, x, ldx, w, steps, sums, first, ahead);
}

// Scales the sums [rows][QTILE] of strips of one tile, and stores them as results.
template <class E>
static void store_int8_rows(const QuantizedLinear& op, int64_t row_begin, int rows, int64_t strip, int64_t next,
                            const int32_t* sums) {
    typedef typename E::type T;
    const int64_t tile = strip / QTILE_STRIPS;
    const int within = int(strip % QTILE_STRIPS) * STRIP;
    const int64_t column = strip * STRIP, end = next * STRIP < op.out_features ? next * STRIP : op.out_features;
    const T* bias = op.bias ? static_cast<const T*>(op.bias) + column : nullptr;
    const float* scales = static_cast<const float*>(op.scales) + tile * QTILE + within;
    const int8_t* zeros = op.zeros ? op.zeros + tile * QTILE + within : nullptr;
    for (int m = 0; m < rows; ++m) {
        T* out = static_cast<T*>(op.out) + (row_begin + m) * op.out_stride + column;
        const int32_t total = op.row_sums[row_begin + m];
        const float row_scale = op.row_scales[row_begin + m];
        const int32_t* sum = sums + m * QTILE;
        store_row<E>(out, bias, int(end - column), [&](int c) __attribute__((always_inline)) {
            vi exact = load_ints(sum + c) - Quads::OFFSET * total;
            if (zeros) exact -= widen_bytes(zeros + c) * total;
            return __builtin_convertvector(exact, vf) * load(scales + c) * row_scale;
        });
    }
}

// Weights with one scale per row.
template <class E>
static void int8_block(const QuantizedLinear& op, int64_t row_begin, int64_t row_end, int64_t strip_begin, int64_t strip_end) {
    typedef typename E::type T;
    alignas(64) int32_t sums[QUANTIZED_LINEAR_ROWS * QTILE];
    const int rows = int(row_end - row_begin), groups = (rows + QMR - 1) / QMR;
    const int depth = round_up(op.in_features, 4);
    const int8_t* x = static_cast<const int8_t*>(op.x) + row_begin * op.x_stride;
    for (int64_t strip = strip_begin, next; strip < strip_end; strip = next) {
        const int64_t tile = strip / QTILE_STRIPS;
        next = (tile + 1) * QTILE_STRIPS < strip_end ? (tile + 1) * QTILE_STRIPS : strip_end;
        const int within = int(strip % QTILE_STRIPS) * STRIP;
        const uint32_t* weight = op.weight + tile * (depth / 4) * QTILE + within;
        for (int k = 0; k < depth; k += INT8_DEPTH) {
            const int steps = (depth - k < INT8_DEPTH ? depth - k : INT8_DEPTH) / 4;
            const uint32_t* w = weight + k / 4 * QTILE;
            const char* ahead = reinterpret_cast<const char*>(w + steps * QTILE);
            for (int g = 0, m = 0; g < groups; ++g) {
                const int height = (rows - m + groups - g - 1) / (groups - g);
                const int lines = qlines(QTILE * 4 / 64, g, groups);
                int8_group(height, int(next - strip), x + m * op.x_stride + k, op.x_stride, w, steps, sums + m * QTILE,
                           k == 0, Ahead{groups == 1 ? near(w) : ahead, lines});
                ahead += int64_t(steps) * lines * 64;
                m += height;
            }
        }
        store_int8_rows<E>(op, row_begin, rows, strip, next, sums);
    }
}

// ---- one scale per block of columns --------------------------------------------------------------------------------------
// A block has at most INT8_DEPTH columns. Nibbles are unpacked to bytes, (value - zero point) * factor + 128: with few
// rows in registers; with more rows into memory, once per piece for all rows. All bytes of a lane are multiplied at
// once: no product exceeds a byte, so there is no carry into the next byte.

constexpr int NIBBLE_ROWS = 4;  // maximum number of rows for which nibbles are unpacked in registers

typedef uint16_t vw __attribute__((vector_size(LANES * 4)));

// Adjacent blocks, at most INT8_DEPTH columns together. `block` is the index of the first one. The last block of the
// matrix may be shorter.
struct Blocks {
    int size, block_size, block;
};

INLINE int least(int a, int b) { return a < b ? a : b; }

INLINE vf scales_at(const QuantizedLinear& op, int64_t at) {
    return op.bf16_scales ? BFloat16::widen(static_cast<const uint16_t*>(op.scales) + at)
                          : load(static_cast<const float*>(op.scales) + at);
}

// Initial value of a sum: it corrects for the OFFSET of the weights.
INLINE vi begin_sum(int32_t total) { return vi{} - Quads::OFFSET * total; }

template <int MR, int NV>
INLINE void begin_block(vi (&acc)[MR][NV], const int32_t* totals, int64_t stride) {
    for (int m = 0; m < MR; ++m)
        for (int v = 0; v < NV; ++v) acc[m][v] = begin_sum(totals[m * stride]);
}

template <int MR, int NV>
INLINE void add_block(const QuantizedLinear& op, const vi (&acc)[MR][NV], float* sums, int64_t at) {
    for (int v = 0; v < NV; ++v) {
        const vf scales = scales_at(op, at + v * LANES);
        for (int m = 0; m < MR; ++m) {
            float* sum = sums + m * QTILE + v * LANES;
            store(sum, load(sum) + __builtin_convertvector(acc[m][v], vf) * scales);
        }
    }
}

// Weights in bytes: packed as bytes, or unpacked from nibbles. `at` is the index of the scales of the tile's first
// block.
template <int MR, int NV>
static void bytes_unit(const QuantizedLinear& op, const int8_t* x, const int32_t* totals, const uint32_t* w, Blocks blocks,
                       int64_t at, float* sums, Ahead ahead) {
    for (int k = 0; k < blocks.size; k += blocks.block_size, ++blocks.block) {
        vi acc[MR][NV];
        begin_block<MR, NV>(acc, totals + blocks.block, op.blocks);
        int steps = (least(blocks.size - k, blocks.block_size) + 3) / 4;
        do {
            Quads q[NV];
            for (int v = 0; v < NV; ++v) q[v] = Quads::of(load_lanes(w + v * LANES));
            for (int m = 0; m < MR; ++m) {
                uint32_t quad;
                __builtin_memcpy(&quad, x + m * op.x_stride, 4);
                for (int v = 0; v < NV; ++v) acc[m][v] = Quads::add(acc[m][v], q[v], quad);
            }
            w += QTILE;
            x += 4;
            fetch(ahead);
        } while (--steps);
        const int64_t here = at + int64_t(blocks.block) * QTILE;
        if (op.zeros && op.bits == 8)
            for (int v = 0; v < NV; ++v) {
                const vi zeros = widen_bytes(op.zeros + here + v * LANES);
                for (int m = 0; m < MR; ++m) acc[m][v] -= zeros * totals[int64_t(m) * op.blocks + blocks.block];
            }
        add_block<MR, NV>(op, acc, sums, here);
    }
}

INLINE void bytes_group(int rows, int strips, const QuantizedLinear& op, const int8_t* x, const int32_t* totals,
                        const uint32_t* w, const Blocks& blocks, int64_t at, float* sums, Ahead ahead) {
    QGROUP(bytes_unit, rows, strips, op, x, totals, w, blocks, at, sums, ahead);
}

// Factor and offset that convert a group's nibbles to bytes.
struct Unpacking {
    vw factor;   // in both halves of a lane
    vu offset;   // in its four bytes

    // `at` is the index of the group's zero points and factors.
    INLINE Unpacking of(const QuantizedLinear& op, int64_t at) {
        if (!op.zeros) return {vw{} + 1, vu{} + 0x78787878u};
        const vu both = (vu)widen_bytes(op.zeros + at), factor = (both >> 4 & 15u) + 1u;
        return {(vw)(factor | factor << 16), (128u - (both & 15u) * factor) * 0x01010101u};
    }
};

INLINE vu bytes_of(vu nibbles, const Unpacking& unpacking) {
    return (vu)((vw)(nibbles & 0x0f0f0f0fu) * unpacking.factor) + unpacking.offset;
}

template <int MR, int NV>
static void nibbles_unit(const QuantizedLinear& op, const int8_t* x, const int32_t* totals, const uint32_t* w, Blocks blocks,
                         int64_t at, int64_t zeros_at, float* sums, Ahead ahead) {
    for (int k = 0; k < blocks.size; k += blocks.block_size, ++blocks.block) {
        vi acc[MR][NV];
        begin_block<MR, NV>(acc, totals + blocks.block, op.blocks);
        for (int left = least(blocks.size - k, blocks.block_size); left > 0; left -= op.group_size, zeros_at += QTILE) {
            Unpacking unpacking[NV];
            for (int v = 0; v < NV; ++v) unpacking[v] = Unpacking::of(op, zeros_at + v * LANES);
            int steps = (least(left, op.group_size) + 7) / 8;
            do {
                for (int v = 0; v < NV; ++v) {
                    const vu lanes = load_lanes(w + v * LANES);
                    const Quads first = Quads::of(bytes_of(lanes, unpacking[v])), second = Quads::of(bytes_of(lanes >> 4, unpacking[v]));
                    for (int m = 0; m < MR; ++m) {
                        uint32_t quads[2];
                        __builtin_memcpy(quads, x + m * op.x_stride, 8);
                        acc[m][v] = Quads::add(Quads::add(acc[m][v], first, quads[0]), second, quads[1]);
                    }
                }
                w += QTILE;
                x += 8;
                fetch(ahead);
            } while (--steps);
        }
        add_block<MR, NV>(op, acc, sums, at + int64_t(blocks.block) * QTILE);
    }
}

INLINE void nibbles_group(int rows, int strips, const QuantizedLinear& op, const int8_t* x, const int32_t* totals,
                          const uint32_t* w, const Blocks& blocks, int64_t at, int64_t zeros_at, float* sums, Ahead ahead) {
    switch (rows) {
        case 1: QVECTORS(nibbles_unit, 1, strips, op, x, totals, w, blocks, at, zeros_at, sums, ahead);
        case 2: QVECTORS(nibbles_unit, 2, strips, op, x, totals, w, blocks, at, zeros_at, sums, ahead);
        case 3: QVECTORS(nibbles_unit, 3, strips, op, x, totals, w, blocks, at, zeros_at, sums, ahead);
        default: QVECTORS(nibbles_unit, 4, strips, op, x, totals, w, blocks, at, zeros_at, sums, ahead);
    }
}

// Unpacks the nibbles of `size` k to bytes, in the layout of packed 8-bit weights.
INLINE void unpack_nibbles(const QuantizedLinear& op, const uint32_t* w, int size, int64_t zeros_at, int columns,
                           uint32_t* panel) {
    for (int k = 0; k < size; k += op.group_size, zeros_at += QTILE) {
        const int steps = (least(size - k, op.group_size) + 7) / 8;
        for (int c = 0; c < columns; c += LANES) {
            const Unpacking unpacking = Unpacking::of(op, zeros_at + c);
            for (int s = 0; s < steps; ++s) {
                const vu lanes = load_lanes(w + s * QTILE + c);
                store_lanes(panel + 2 * s * QTILE + c, bytes_of(lanes, unpacking));
                store_lanes(panel + (2 * s + 1) * QTILE + c, bytes_of(lanes >> 4, unpacking));
            }
        }
        w += steps * QTILE;
        panel += 2 * steps * QTILE;
    }
}

// Scales the sums [rows][QTILE] of strips of one tile by the scale of each row, and stores them as results.
template <class E>
static void store_block_scaled_rows(const QuantizedLinear& op, int64_t row_begin, int rows, int64_t strip, int64_t next,
                                    const float* sums) {
    typedef typename E::type T;
    const int64_t column = strip * STRIP, end = next * STRIP < op.out_features ? next * STRIP : op.out_features;
    const T* bias = op.bias ? static_cast<const T*>(op.bias) + column : nullptr;
    for (int m = 0; m < rows; ++m) {
        const float* sum = sums + m * QTILE;
        const float row_scale = op.row_scales[row_begin + m];
        store_row<E>(static_cast<T*>(op.out) + (row_begin + m) * op.out_stride + column, bias, int(end - column),
                     [&](int c) __attribute__((always_inline)) { return load(sum + c) * row_scale; });
    }
}

// Weights with one scale per block of columns.
template <class E>
static void blocks_block(const QuantizedLinear& op, int64_t row_begin, int64_t row_end, int64_t strip_begin,
                         int64_t strip_end) {
    typedef typename E::type T;
    alignas(64) float sums[QUANTIZED_LINEAR_ROWS * QTILE];
    alignas(64) uint32_t panel[INT8_DEPTH / 4 * QTILE];
    const int rows = int(row_end - row_begin), teams = (rows + QMR - 1) / QMR;
    const int lane = op.bits == 4 ? 8 : 4, depth = round_up(op.in_features, lane);
    const int piece = INT8_DEPTH / op.block_size * op.block_size;
    const int8_t* x = static_cast<const int8_t*>(op.x) + row_begin * op.x_stride;
    const int32_t* totals = op.row_sums + row_begin * op.blocks;
    for (int64_t strip = strip_begin, next; strip < strip_end; strip = next) {
        const int64_t tile = strip / QTILE_STRIPS;
        next = (tile + 1) * QTILE_STRIPS < strip_end ? (tile + 1) * QTILE_STRIPS : strip_end;
        const int within = int(strip % QTILE_STRIPS) * STRIP, strips = int(next - strip);
        const uint32_t* weight = op.weight + tile * (depth / lane) * QTILE + within;
        const int64_t at = tile * op.blocks * QTILE + within;
        for (int i = 0; i < rows * QTILE; i += LANES) store(sums + i, vf{});
        for (int k = 0; k < op.in_features; k += piece) {
            const int size = op.in_features - k < piece ? op.in_features - k : piece, steps = (size + 3) / 4;
            const Blocks blocks{size, op.block_size, k / op.block_size};
            const int64_t zeros_at = (tile * op.groups + k / op.group_size) * QTILE + within;
            const uint32_t* w = weight + k / lane * QTILE;
            const char* ahead = reinterpret_cast<const char*>(w + (size + lane - 1) / lane * QTILE);
            if (op.bits == 4 && rows <= NIBBLE_ROWS) {
                nibbles_group(rows, strips, op, x + k, totals, w, blocks, at, zeros_at, sums, while_unpacking(w));
                continue;
            }
            int lines = QTILE * 4 / 64;  // per step of bytes
            if (op.bits == 4) {
                unpack_nibbles(op, w, size, zeros_at, strips * STRIP, panel);
                w = panel;
                lines = (lines + 1) / 2;
            }
            if (op.bits == 8 && teams == 1) ahead = near(w);
            for (int t = 0, m = 0; t < teams; ++t) {
                const int height = (rows - m + teams - t - 1) / (teams - t), share = qlines(lines, t, teams);
                bytes_group(height, strips, op, x + m * op.x_stride + k, totals + int64_t(m) * op.blocks, w, blocks, at,
                            sums + m * QTILE, Ahead{ahead, share});
                ahead += int64_t(steps) * share * 64;
                m += height;
            }
        }
        store_block_scaled_rows<E>(op, row_begin, rows, strip, next, sums);
    }
}
