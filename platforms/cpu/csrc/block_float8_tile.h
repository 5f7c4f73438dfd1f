// Products with 8-bit floats (E4M3), in the packing of block_linear.h. Included by block_linear_tile.h.
//
// Shifting the bits of a weight converts it to float32; a factor of 2^120 corrects the exponent and subnormals. If a weight is
// NaN, packing has stored NaN as the scale.

template <int I>
INLINE vf float8_at(vu lanes, vf scale) {
    const vu bits = (vu)((vi)(lanes << (24 - 8 * I)) >> 4) & 0x87f00000u;
    return (vf)bits * as_float(0x7b800000u) * scale;
}

static void unpack_float8_panel(const char* weight, int first, int groups, float* panel) {
    constexpr BlockLayout LAYOUT = BLOCK_LAYOUTS[E4M3];
    for (int g = first; g < first + groups; ++g, panel += BLOCK_GROUP * BTILE) {
        const char* head = weight + int64_t(g / LAYOUT.groups) * LAYOUT.block() * BTILE;
        const char* at = head + (LAYOUT.head + g % LAYOUT.groups * LAYOUT.group()) * BTILE;
        for (int i = 0; i < LAYOUT.group() * BTILE; i += 64) __builtin_prefetch(at + prefetch_distance.near + i, 0, 2);
        for (int c = 0; c < BTILE; c += LANES) {
            const vf scale = load(reinterpret_cast<const float*>(head) + c);
            float* to = panel + c;
            for (int row = 0; row < LAYOUT.rows; ++row, to += 4 * BTILE) {
                const vu lanes = row_at(at, row, c);
                store(to, float8_at<0>(lanes, scale));
                store(to + BTILE, float8_at<1>(lanes, scale));
                store(to + 2 * BTILE, float8_at<2>(lanes, scale));
                store(to + 3 * BTILE, float8_at<3>(lanes, scale));
            }
        }
    }
}

// Adds the products of the four k of one row of lanes, in order.
template <int I, int MR>
INLINE void add_float8(vf (&acc)[MR][BNV], const vu (&lanes)[BNV], const vf (&scale)[BNV], const float* x, int64_t stride) {
    for (int v = 0; v < BNV; ++v) {
        const vf w = float8_at<I>(lanes[v], scale[v]);
        for (int m = 0; m < MR; ++m) acc[m][v] = multiply_add(w, splat(x[m * stride + I]), acc[m][v]);
    }
    if constexpr (I < 3) add_float8<I + 1, MR>(acc, lanes, scale, x, stride);
}

// Few rows: unpacks in registers, one block at a time, with the same arithmetic as with a panel.
template <int MR>
static void float8_direct(const BlockRows& op, const char* weight, int64_t row, float* sums) {
    constexpr BlockLayout LAYOUT = BLOCK_LAYOUTS[E4M3];
    static_assert(LAYOUT.groups == BLOCK_FLOAT_PIECE && LAYOUT.sub == 0, "sums of a panel are those of a block");
    const float* x = static_cast<const float*>(op.x) + row * op.x_stride;
    vf total[MR][BNV] = {};
    for (int first = 0; first < op.in_features; first += LAYOUT.groups * BLOCK_GROUP) {
        vf scale[BNV], acc[MR][BNV] = {};
        for (int v = 0; v < BNV; ++v) scale[v] = load(reinterpret_cast<const float*>(weight) + v * LANES);
        const char* at = weight + LAYOUT.head * BTILE;
        for (int r = 0; r < LAYOUT.groups * LAYOUT.rows; ++r, at += 4 * BTILE, x += 4) {
            for (int i = 0; i < 4 * BTILE; i += 64) __builtin_prefetch(at + prefetch_distance.near + i, 0, 2);
            vu lanes[BNV];
            for (int v = 0; v < BNV; ++v) lanes[v] = row_at(at, 0, v * LANES);
            add_float8<0, MR>(acc, lanes, scale, x, op.x_stride);
        }
        for (int m = 0; m < MR; ++m)
            for (int v = 0; v < BNV; ++v) total[m][v] += acc[m][v];
        weight += LAYOUT.block() * BTILE;
    }
    for (int m = 0; m < MR; ++m)
        for (int v = 0; v < BNV; ++v) store(sums + m * BTILE + v * LANES, total[m][v]);
}

// The nearest numbers of E4M3, ties to even, at most 448. NaN stays NaN.
INLINE vf round_to_float8(vf x) {
    const vu bits = (vu)x & 0x7fffffffu, sign = (vu)x & 0x80000000u;
    const vf normal = (vf)((bits + 0x7ffffu + (bits >> 20 & 1u)) & 0xfff00000u);
    const vf small = (((vf)bits * 512.f + 12582912.f) - 12582912.f) * 0x1p-9f;  // below 2^-6 in steps of 2^-9
    const vf nearest = vmin(bits < 0x3c800000u ? small : normal, splat(448.f));
    return x == x ? (vf)((vu)nearest | sign) : x;
}

template <class E>
static void scaled_fp8_quant_rows(const Float8Inputs& op, float* out, int64_t stride, int64_t rows) {
    typedef typename E::type T;
    for (int64_t row = 0; row < rows; ++row, out += stride) {
        const T* x = static_cast<const T*>(op.x) + row * op.x_stride;
        for (int64_t first = 0, end; first < op.size; first = end) {
            end = first + op.run < op.size ? first + op.run : op.size;
            if (!op.rounds) {
                for (int64_t k = first; k < end; k += LANES) store(out + k, E::widen(x + k));
                continue;
            }
            float scale = op.scale;
            if (op.dynamic) {
                // The largest magnitude, compared as bits: infinity is greater than every number, NaN greater than infinity.
                vu most = {};
                for (int64_t k = first; k < end; k += LANES) {
                    const vu bits = (vu)E::widen(x + k) & 0x7fffffffu;
                    most = bits > most ? bits : most;
                }
                const uint32_t top = max_bits(most);
                scale = top < 0x7f800000u ? as_float(top) / 448.f : as_float(0x7fc00000u);
            }
            const float divisor = op.dynamic && !(scale > 0) ? 1.f : scale;
            for (int64_t k = first; k < end; k += LANES)
                store(out + k, round_to_float8(E::widen(x + k) / divisor) * scale);
        }
        for (int64_t k = op.size; k < op.padded; ++k) out[k] = 0;
    }
}

static void block_convert_float8(const Float8Inputs& op, float* out, int64_t stride, int64_t rows) {
    switch (op.dtype) {
        case F32: return scaled_fp8_quant_rows<Float32>(op, out, stride, rows);
        case BF16: return scaled_fp8_quant_rows<BFloat16>(op, out, stride, rows);
        default: return scaled_fp8_quant_rows<Float16>(op, out, stride, rows);
    }
}
