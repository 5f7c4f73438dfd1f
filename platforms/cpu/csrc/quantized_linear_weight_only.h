// ---- weight-only: activations are not quantized --------------------------------------------------------------------------
// `Unpacked` weights, value - zero point, are the operands of one step of the sum: each lane holds float32 of one k, or
// bfloat16 of a pair of k. `Zero` is a vector of zero points in the form that the subtraction needs.

struct Floats {
    typedef float X;
    typedef float Unpacked;
    typedef vf V;
    static constexpr int STEP = 1;
    INLINE V get(const Unpacked* p) { return load(p); }
    INLINE void put(Unpacked* p, V v) { store(p, v); }
    template <int MR, int NV>
    INLINE void add(vf (&acc)[MR][NV], const V (&w)[NV], const X* x, int64_t ldx) {
        for (int m = 0; m < MR; ++m)
            for (int v = 0; v < NV; ++v) acc[m][v] += w[v] * x[m * ldx];
    }
};

#if HAS_BF16_DOT
struct Pairs {
    typedef uint16_t X;
    typedef uint32_t Unpacked;
    typedef vu V;
    static constexpr int STEP = 2;
    INLINE V get(const Unpacked* p) { return load_lanes(p); }
    INLINE void put(Unpacked* p, V v) { *reinterpret_cast<vu_mem*>(p) = v; }
    template <int MR, int NV>
    INLINE void add(vf (&acc)[MR][NV], const V (&w)[NV], const X* x, int64_t ldx) {
        for (int m = 0; m < MR; ++m) {
            uint32_t pair;
            __builtin_memcpy(&pair, x + m * ldx, 4);
            const __m512bh a = (__m512bh)_mm512_set1_epi32(int(pair));
            for (int v = 0; v < NV; ++v) acc[m][v] = (vf)_mm512_dpbf16_ps((__m512)acc[m][v], a, (__m512bh)w[v]);
        }
    }
};
#endif

// A lane of packed weights holds DEPTH values; `at<J>` returns the operand of step J. 2^23 + n is a float whose low
// bits are n.
struct Bytes {
    static constexpr int DEPTH = 4;
    template <class K>
    struct Zero {
        vf least;
        INLINE Zero of(vi zeros) { return {__builtin_convertvector(zeros, vf) + 8388736.f}; }
    };
    template <int J>
    INLINE vf one(vu lanes, vf least) {
        return (vf)((lanes >> 8 * J & 0xffu) | 0x4b000000u) - least;
    }
    template <int J>
    INLINE vf at(vu lanes, const Zero<Floats>& zero) {
        return one<J>(lanes, zero.least);
    }
#if HAS_BF16_DOT
    template <int J>
    INLINE vu at(vu lanes, const Zero<Pairs>& zero) {
        return (vu)one<2 * J>(lanes, zero.least) >> 16 | ((vu)one<2 * J + 1>(lanes, zero.least) & 0xffff0000u);
    }
#endif
};

struct Nibbles {
    static constexpr int DEPTH = 8;
    template <class K>
    struct Zero {
        vf least;
        INLINE Zero of(vi zeros) { return {__builtin_convertvector(zeros, vf) + 8388616.f}; }
    };
    template <int J>
    INLINE vf at(vu lanes, const Zero<Floats>& zero) {
        return (vf)((lanes >> (J % 2 * 16 + J / 2 * 4) & 15u) | 0x4b000000u) - zero.least;
    }
#if HAS_BF16_DOT
    template <int J>
    INLINE vu at(vu lanes, const Zero<Pairs>& zero);
#endif
};

#if HAS_BF16_DOT
// Offset of a nibble, in both halves of a lane: nibble + offset is the index of its value in the bfloat16 table of -16
// to 15.
template <>
struct Nibbles::Zero<Pairs> {
    vu offset;
    INLINE Zero of(vi zeros) {
        const vu offset = (vu)(8 - zeros);
        return {offset | offset << 16};
    }
};

template <int J>
inline __attribute__((always_inline)) vu Nibbles::at(vu lanes, const Zero<Pairs>& zero) {
    alignas(64) static const uint16_t values[32] = {
        0xc180, 0xc170, 0xc160, 0xc150, 0xc140, 0xc130, 0xc120, 0xc110, 0xc100, 0xc0e0, 0xc0c0,
        0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
        0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
    };
    const vu nibbles = lanes >> 4 * J & 0x000f000fu;
    const __m512i index = _mm512_add_epi16((__m512i)nibbles, (__m512i)zero.offset);
    return (vu)_mm512_permutexvar_epi16(index, _mm512_load_si512(values));
}
#endif

template <class W, class K, int J, int MR, int NV>
INLINE void add_steps(vf (&acc)[MR][NV], const vu (&lanes)[NV], const typename W::template Zero<K> (&zeros)[NV],
                      const typename K::X* x, int64_t ldx) {
    if constexpr (J * K::STEP < W::DEPTH) {
        typename K::V w[NV];
        for (int v = 0; v < NV; ++v) w[v] = W::template at<J>(lanes[v], zeros[v]);
        K::template add<MR, NV>(acc, w, x + J * K::STEP, ldx);
        add_steps<W, K, J + 1, MR, NV>(acc, lanes, zeros, x, ldx);
    }
}

template <class W, class K, int J>
INLINE void unpack_steps(vu lanes, const typename W::template Zero<K>& zero, typename K::Unpacked* to) {
    if constexpr (J * K::STEP < W::DEPTH) {
        K::put(to + J * QTILE, W::template at<J>(lanes, zero));
        unpack_steps<W, K, J + 1>(lanes, zero, to);
    }
}

template <class W, class K>
INLINE typename W::template Zero<K> zeros_at(const int8_t* zeros) {
    return W::template Zero<K>::of(zeros ? widen_bytes(zeros) : vi{});
}

// Up to QUANTIZED_LINEAR_PIECE consecutive k: pieces of `piece` k with one scale each; the last may be shorter. The scales of
// consecutive pieces are QTILE elements apart, as are their zero points (null if there are none).
struct Span {
    int size, piece;
    const float* scales;
    const int8_t* zeros;
};

template <int MR, int NV>
INLINE void scale_piece(const vf (&acc)[MR][NV], float* sums, const float* scales) {
    for (int v = 0; v < NV; ++v) {
        const vf scale = load(scales + v * LANES);
        for (int m = 0; m < MR; ++m) {
            float* sum = sums + m * QTILE + v * LANES;
            store(sum, load(sum) + acc[m][v] * scale);
        }
    }
}

// Weights packed as W, unpacked in registers.
template <class W, class K>
struct Direct {
    template <int MR, int NV>
    static void unit(const typename K::X* x, int64_t ldx, const uint32_t* w, Span span, float* sums, Ahead ahead) {
        for (int k = 0; k < span.size; k += span.piece, span.scales += QTILE) {
            const int size = span.size - k < span.piece ? span.size - k : span.piece;
            typename W::template Zero<K> zeros[NV];
            for (int v = 0; v < NV; ++v) zeros[v] = zeros_at<W, K>(span.zeros ? span.zeros + v * LANES : nullptr);
            if (span.zeros) span.zeros += QTILE;
            vf acc[MR][NV] = {};
            int steps = (size + W::DEPTH - 1) / W::DEPTH;
            do {
                vu lanes[NV];
                for (int v = 0; v < NV; ++v) lanes[v] = load_lanes(w + v * LANES);
                add_steps<W, K, 0, MR, NV>(acc, lanes, zeros, x, ldx);
                w += QTILE;
                x += W::DEPTH;
                fetch(ahead);
            } while (--steps);
            scale_piece<MR, NV>(acc, sums, span.scales);
        }
    }
    INLINE void group(int rows, int strips, const typename K::X* x, int64_t ldx, const uint32_t* w, const Span& span,
                      float* sums, Ahead ahead) {
        switch (rows) {
            case 1: QVECTORS(unit, 1, strips, x, ldx, w, span, sums, ahead);
            default: QVECTORS(unit, 2, strips, x, ldx, w, span, sums, ahead);
        }
    }
};
constexpr int DIRECT_ROWS = 2;  // maximum number of rows for which weights are unpacked in registers

// Weights unpacked by `unpack`.
template <class K>
struct FromPanel {
    template <int MR, int NV>
    static void unit(const typename K::X* x, int64_t ldx, const typename K::Unpacked* panel, Span span, float* sums,
                     Ahead ahead) {
        for (int k = 0; k < span.size; k += span.piece, span.scales += QTILE) {
            const int size = span.size - k < span.piece ? span.size - k : span.piece;
            vf acc[MR][NV] = {};
            int steps = (size + K::STEP - 1) / K::STEP;
            do {
                typename K::V w[NV];
                for (int v = 0; v < NV; ++v) w[v] = K::get(panel + v * LANES);
                K::template add<MR, NV>(acc, w, x, ldx);
                panel += QTILE;
                x += K::STEP;
                fetch(ahead);
            } while (--steps);
            scale_piece<MR, NV>(acc, sums, span.scales);
        }
    }
    INLINE void group(int rows, int strips, const typename K::X* x, int64_t ldx, const typename K::Unpacked* panel,
                      const Span& span, float* sums, Ahead ahead) {
        QGROUP(unit, rows, strips, x, ldx, panel, span, sums, ahead);
    }
};

// Unpacks the weights of a span, one row of QTILE per step.
template <class W, class K>
INLINE void unpack(const uint32_t* w, const Span& span, int columns, typename K::Unpacked* panel) {
    const int8_t* from = span.zeros;
    for (int k = 0; k < span.size; k += span.piece) {
        const int size = span.size - k < span.piece ? span.size - k : span.piece;
        const int steps = (size + W::DEPTH - 1) / W::DEPTH;
        for (int v = 0; v < columns; v += LANES) {
            const typename W::template Zero<K> zero = zeros_at<W, K>(from ? from + v : nullptr);
            for (int s = 0; s < steps; ++s)
                unpack_steps<W, K, 0>(load_lanes(w + s * QTILE + v), zero, panel + s * (W::DEPTH / K::STEP) * QTILE + v);
        }
        w += steps * QTILE;
        panel += steps * (W::DEPTH / K::STEP) * QTILE;
        if (from) from += QTILE;
    }
}

// The span that begins at k: as many whole groups as fit into QUANTIZED_LINEAR_PIECE, or a part of one larger group.
INLINE Span span_at(const QuantizedLinear& op, int k, const float* scales, const int8_t* zeros) {
    const int group = k / op.group_size, most = QUANTIZED_LINEAR_PIECE / op.group_size * op.group_size;
    int end = op.in_features;
    if (most && k + most < end) end = k + most;
    if (!most && (group + 1) * int64_t(op.group_size) < end) end = (group + 1) * op.group_size;
    const int size = end - k < QUANTIZED_LINEAR_PIECE ? end - k : QUANTIZED_LINEAR_PIECE;
    return {size, most ? op.group_size : size, scales + int64_t(group) * QTILE, zeros ? zeros + int64_t(group) * QTILE : nullptr};
}

template <class E, class W, class K>
static void weight_only_block(const QuantizedLinear& op, int64_t row_begin, int64_t row_end, int64_t strip_begin,
                              int64_t strip_end) {
    typedef typename E::type T;
    alignas(64) float sums[QUANTIZED_LINEAR_ROWS * QTILE];
    alignas(64) typename K::Unpacked panel[QUANTIZED_LINEAR_PIECE / K::STEP * QTILE];
    const int rows = int(row_end - row_begin), groups = (rows + QMR - 1) / QMR;
    const int depth = round_up(op.in_features, W::DEPTH);
    const typename K::X* x = static_cast<const typename K::X*>(op.x) + row_begin * op.x_stride;
    for (int64_t strip = strip_begin, next; strip < strip_end; strip = next) {
        const int64_t tile = strip / QTILE_STRIPS;
        next = (tile + 1) * QTILE_STRIPS < strip_end ? (tile + 1) * QTILE_STRIPS : strip_end;
        const int within = int(strip % QTILE_STRIPS) * STRIP, strips = int(next - strip);
        const uint32_t* weight = op.weight + tile * (depth / W::DEPTH) * QTILE + within;
        const float* scales = static_cast<const float*>(op.scales) + tile * op.groups * QTILE + within;
        const int8_t* zeros = op.zeros ? op.zeros + tile * op.groups * QTILE + within : nullptr;
        for (int i = 0; i < rows * QTILE; i += LANES) store(sums + i, vf{});
        for (int k = 0, size; k < op.in_features; k += size) {
            const Span span = span_at(op, k, scales, zeros);
            size = span.size;
            const uint32_t* w = weight + k / W::DEPTH * QTILE;
            if (rows <= DIRECT_ROWS) {
                Direct<W, K>::group(rows, strips, x + k, op.x_stride, w, span, sums, while_unpacking(w));
                continue;
            }
            const char* ahead = reinterpret_cast<const char*>(w + QTILE * (2 * QUANTIZED_LINEAR_PIECE / W::DEPTH));
            unpack<W, K>(w, span, strips * STRIP, panel);
            const int panel_steps = (size + K::STEP - 1) / K::STEP;
            int lines = QTILE * 4 / 64 * ((size + W::DEPTH - 1) / W::DEPTH);
            for (int g = 0, m = 0; g < groups; ++g) {
                const int height = (rows - m + groups - g - 1) / (groups - g);
                const int per_step = lines <= 0 ? 0 : lines <= panel_steps || g + 1 < groups ? 1 : lines <= 2 * panel_steps ? 2 : 4;
                FromPanel<K>::group(height, strips, x + m * op.x_stride + k, op.x_stride, panel, span, sums + m * QTILE,
                                    Ahead{ahead, per_step});
                ahead += panel_steps * per_step * 64;
                lines -= panel_steps * per_step;
                m += height;
            }
        }
        const int64_t column = strip * STRIP, end = next * STRIP < op.out_features ? next * STRIP : op.out_features;
        const T* bias = op.bias ? static_cast<const T*>(op.bias) + column : nullptr;
        for (int m = 0; m < rows; ++m) {
            const float* sum = sums + m * QTILE;
            store_row<E>(static_cast<T*>(op.out) + (row_begin + m) * op.out_stride + column, bias, int(end - column),
                         [&](int c) __attribute__((always_inline)) { return load(sum + c); });
        }
    }
}

template <class E, bool BF16>
static void convert_rows(const QuantizedLinear& op, void* out, int64_t stride, int64_t begin, int64_t end) {
    typedef typename E::type T;
    const int size = op.in_features;
    for (int64_t row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(op.x) + row * op.x_stride;
        if (BF16) {
            uint16_t* to = static_cast<uint16_t*>(out) + row * stride;
            for (int k = 0; k < size; ++k) to[k] = E::bf16(x[k]);
            for (int64_t k = size; k < stride; ++k) to[k] = 0;
        } else {
            float* to = static_cast<float*>(out) + row * stride;
            int k = 0;
            for (; k + LANES <= size; k += LANES) store(to + k, E::widen(x + k));
            for (; k < size; ++k) to[k] = E::get(x[k]);
            for (; k < stride; ++k) to[k] = 0;
        }
    }
}

