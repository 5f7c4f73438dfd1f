// Products of rows with packed integer weights (qlinear.h describes the packing). Included inside a namespace, after simd.h,
// by files that define HAS_VNNI as well.
//
// As in linear_tile.h a register tile is a few rows by a tile of columns, a row's sum is made in the same order whatever
// other rows are there, and rows that share a piece of the weight pass over it while it is in the first cache. With one
// group of rows, weight-only kernels unpack weights in registers; with more they unpack a piece once and all groups use it.
// Both do the same arithmetic.

#if LANES == 16
#define QTILE 64
#define QMR 6
#else
#define QTILE 16
#define QMR 4
#endif
#define QNV (QTILE / LANES)

constexpr int qlinear_tile = QTILE;
constexpr bool qlinear_bf16_dot = HAS_BF16_DOT;
constexpr int QTILE_STRIPS = QTILE / STRIP;
constexpr int INT8_DEPTH = 256;  // k per piece of an integer product: half of a first cache of 32 KiB

typedef int8_t vb __attribute__((vector_size(LANES)));
typedef int8_t vb_mem __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int32_t vi_mem __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

INLINE vu load_lanes(const uint32_t* p) { return *reinterpret_cast<const vu_mem*>(p); }
INLINE vi load_ints(const int32_t* p) { return *reinterpret_cast<const vi_mem*>(p); }

// Some compilers widen bytes one by one unless told the instruction.
INLINE vi widen_bytes(const int8_t* p) {
#if LANES == 16
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif LANES == 8
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
    return __builtin_convertvector(*reinterpret_cast<const vb_mem*>(p), vi);
#endif
}

// The low bytes of the lanes.
INLINE void store_bytes(int8_t* p, vu v) {
#if LANES == 16
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)v));
#elif LANES == 8
    const __m256i order = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4, 8, 12, -1, -1,
                                           -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m256i bytes = _mm256_shuffle_epi8((__m256i)v, order);
    const int32_t halves[2] = {_mm256_extract_epi32(bytes, 0), _mm256_extract_epi32(bytes, 4)};
    __builtin_memcpy(p, halves, 8);
#else
    for (int i = 0; i < LANES; ++i) p[i] = int8_t(v[i]);
#endif
}

// ---- prefetching ---------------------------------------------------------------------------------------------------------
// While rows pass over a piece of the weight they fetch the one that follows in memory: each line once, over the groups.

struct Ahead {
    const char* from;
    int lines;  // per step
};

INLINE void fetch(Ahead& ahead) {
    if (!ahead.lines) return;
    __builtin_prefetch(ahead.from, 0, 2);
    if (ahead.lines > 1) __builtin_prefetch(ahead.from + 64, 0, 2);
    if (ahead.lines > 2) {
        __builtin_prefetch(ahead.from + 128, 0, 2);
        __builtin_prefetch(ahead.from + 192, 0, 2);
    }
    ahead.from += ahead.lines * 64;
}

INLINE int qlines(int lines, int g, int groups) {
    const int sharing = groups < lines ? groups : lines;
    return g < sharing ? (lines - g + sharing - 1) / sharing : 0;
}

// ---- integer activations -------------------------------------------------------------------------------------------------

// Four products per lane. `OFFSET` is what a weight's factor is above its value: the x86 byte products want one unsigned
// factor, and where their sums of two could overflow 16 bits, the sign of the weight moves to x instead.
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

template <class E>
static void quantize_rows(const QLinear& op, int8_t* out, int64_t stride, float* scales, int32_t* sums, int64_t begin,
                          int64_t end) {
    typedef typename E::type T;
    const int size = op.in_features, whole = size / LANES * LANES;
    const float magic = 12582912.f;  // adding it leaves the nearest integer, ties to even, in the low bits
    for (int64_t row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(op.x) + row * op.x_stride;
        int8_t* to = out + row * stride;
        // The largest magnitude, compared as bits: an infinity is above every number, a NaN above that.
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
        if (!finite) {
            __builtin_memset(to, 0, size_t(stride));
            sums[row] = 0;
            continue;
        }
        vi sum = {};
        for (k = 0; k < whole; k += LANES) {
            const vf v = vmax(vmin(E::widen(x + k) / divisor, splat(127.f)), splat(-127.f));
            const vu bits = (vu)(v + magic);
            sum += (vi)(bits - 0x4b400000u);
            store_bytes(to + k, bits);
        }
        int32_t total = 0;
        for (int i = 0; i < LANES; ++i) total += sum[i];
        for (; k < size; ++k) {
            float v = E::get(x[k]) / divisor;
            v = v > 127.f ? 127.f : v < -127.f ? -127.f : v;
            to[k] = int8_t(as_bits(v + magic));
            total += to[k];
        }
        for (; k < stride; ++k) to[k] = 0;
        sums[row] = total;
    }
}

template <int MR, int NV>
static void int8_unit(const int8_t* x, int64_t ldx, const uint32_t* w, int steps, int32_t* sums, bool first, Ahead ahead) {
    vi acc[MR][NV] = {};
    do {  // there is a step: the compiler need not keep sums for a way around
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

// Calls UNIT<rows, vectors>(...).
#if LANES == 16
#define QVECTORS(UNIT, MR, strips, ...)                \
    switch (strips) {                                  \
        case 1: return UNIT<MR, 1>(__VA_ARGS__);       \
        case 2: return UNIT<MR, 2>(__VA_ARGS__);       \
        case 3: return UNIT<MR, 3>(__VA_ARGS__);       \
        default: return UNIT<MR, 4>(__VA_ARGS__);      \
    }
#else
#define QVECTORS(UNIT, MR, strips, ...) return UNIT<MR, QNV>(__VA_ARGS__)
#endif
#if QMR == 6
#define QGROUP_MORE(UNIT, strips, ...)                    \
    case 5: QVECTORS(UNIT, 5, strips, __VA_ARGS__);       \
    case 6: QVECTORS(UNIT, 6, strips, __VA_ARGS__);
#else
#define QGROUP_MORE(UNIT, strips, ...)
#endif
#define QGROUP(UNIT, rows, strips, ...)                   \
    switch (rows) {                                       \
        case 1: QVECTORS(UNIT, 1, strips, __VA_ARGS__);   \
        case 2: QVECTORS(UNIT, 2, strips, __VA_ARGS__);   \
        case 3: QVECTORS(UNIT, 3, strips, __VA_ARGS__);   \
        default: QVECTORS(UNIT, 4, strips, __VA_ARGS__);  \
        QGROUP_MORE(UNIT, strips, __VA_ARGS__)            \
    }

INLINE void int8_group(int rows, int strips, const int8_t* x, int64_t ldx, const uint32_t* w, int steps, int32_t* sums,
                       bool first, Ahead ahead) {
    QGROUP(int8_unit, rows, strips, x, ldx, w, steps, sums, first, ahead);
}

// Rounds and stores `columns` results of one row, adding the bias. `value(c)` gives a vector, `one(c)` a single one.
template <class E, class Vector>
INLINE void store_row(typename E::type* out, const typename E::type* bias, int columns, Vector value) {
    int c = 0;
    for (; c + LANES <= columns; c += LANES) {
        const vf v = value(c);
        E::narrow(out + c, bias ? v + E::widen(bias + c) : v);
    }
    if (c == columns) return;
    const vf v = value(c);  // a tile's scales and sums are there in whole vectors
    for (int i = 0; c < columns; ++c, ++i) out[c] = E::put(bias ? v[i] + E::get(bias[c]) : v[i]);
}

template <class E>
static void int8_block(const QLinear& op, int64_t row_begin, int64_t row_end, int64_t strip_begin, int64_t strip_end) {
    typedef typename E::type T;
    alignas(64) int32_t sums[QLINEAR_ROWS * QTILE];
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
                           k == 0, Ahead{ahead, lines});
                ahead += int64_t(steps) * lines * 64;
                m += height;
            }
        }
        const int64_t column = strip * STRIP, end = next * STRIP < op.out_features ? next * STRIP : op.out_features;
        const T* bias = op.bias ? static_cast<const T*>(op.bias) + column : nullptr;
        const float* scales = op.scales + tile * QTILE + within;
        const int8_t* zeros = op.zeros ? op.zeros + tile * QTILE + within : nullptr;
        for (int m = 0; m < rows; ++m) {
            T* out = static_cast<T*>(op.out) + (row_begin + m) * op.out_features + column;
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
}

// ---- activations as they are ---------------------------------------------------------------------------------------------
// `Unpacked` weights, value less zero point, are what one step of the sum takes: float32 of one k, or bfloat16 of a pair of k
// in each lane. `Zero` is a vector of zero points in the form that taking them away wants.

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

// A lane of packed weights holds DEPTH of them; `at<J>` gives what step J takes. 2^23 + n is a float whose low bits are n.
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
// What is to be added to a nibble, in both halves of a lane, so that it names its bfloat16 among those of -16 to 15.
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

// Up to QLINEAR_PIECE neighbouring k: pieces of `piece` k with a scale each, of which the last may be shorter. Their scales
// and zero points (null where there are none) lie QTILE apart.
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
constexpr int DIRECT_ROWS = 2;  // most rows for which weights are unpacked in registers

// Weights that were unpacked before.
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

// The weights of a span, unpacked one row of QTILE per step.
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

// The span that begins at k: what is left of a group of more than QLINEAR_PIECE, or as many smaller groups as it holds.
INLINE Span span_at(const QLinear& op, int k, const float* scales, const int8_t* zeros) {
    const int group = k / op.group_size, most = QLINEAR_PIECE / op.group_size * op.group_size;
    int end = op.in_features;
    if (most && k + most < end) end = k + most;
    if (!most && (group + 1) * int64_t(op.group_size) < end) end = (group + 1) * op.group_size;
    const int size = end - k < QLINEAR_PIECE ? end - k : QLINEAR_PIECE;
    return {size, most ? op.group_size : size, scales + int64_t(group) * QTILE, zeros ? zeros + int64_t(group) * QTILE : nullptr};
}

template <class E, class W, class K>
static void weight_only_block(const QLinear& op, int64_t row_begin, int64_t row_end, int64_t strip_begin, int64_t strip_end) {
    typedef typename E::type T;
    alignas(64) float sums[QLINEAR_ROWS * QTILE];
    alignas(64) typename K::Unpacked panel[QLINEAR_PIECE / K::STEP * QTILE];
    const int rows = int(row_end - row_begin), groups = (rows + QMR - 1) / QMR;
    const int depth = round_up(op.in_features, W::DEPTH);
    const typename K::X* x = static_cast<const typename K::X*>(op.x) + row_begin * op.x_stride;
    for (int64_t strip = strip_begin, next; strip < strip_end; strip = next) {
        const int64_t tile = strip / QTILE_STRIPS;
        next = (tile + 1) * QTILE_STRIPS < strip_end ? (tile + 1) * QTILE_STRIPS : strip_end;
        const int within = int(strip % QTILE_STRIPS) * STRIP, strips = int(next - strip);
        const uint32_t* weight = op.weight + tile * (depth / W::DEPTH) * QTILE + within;
        const float* scales = op.scales + tile * op.groups * QTILE + within;
        const int8_t* zeros = op.zeros ? op.zeros + tile * op.groups * QTILE + within : nullptr;
        for (int i = 0; i < rows * QTILE; i += LANES) store(sums + i, vf{});
        for (int k = 0, size; k < op.in_features; k += size) {
            const Span span = span_at(op, k, scales, zeros);
            size = span.size;
            const uint32_t* w = weight + k / W::DEPTH * QTILE;
            const char* ahead = reinterpret_cast<const char*>(w + QTILE * (2 * QLINEAR_PIECE / W::DEPTH));
            if (rows <= DIRECT_ROWS) {
                Direct<W, K>::group(rows, strips, x + k, op.x_stride, w, span, sums, Ahead{ahead, QTILE * 4 / 64});
                continue;
            }
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
            store_row<E>(static_cast<T*>(op.out) + (row_begin + m) * op.out_features + column, bias, int(end - column),
                         [&](int c) __attribute__((always_inline)) { return load(sum + c); });
        }
    }
}

template <class E, bool BF16>
static void convert_rows(const QLinear& op, void* out, int64_t stride, int64_t begin, int64_t end) {
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

// ---- by dtype ------------------------------------------------------------------------------------------------------------

static void quantize(const QLinear& op, int8_t* out, int64_t stride, float* scales, int32_t* sums, int64_t begin,
                     int64_t end) {
    switch (op.dtype) {
        case F32: return quantize_rows<Float32>(op, out, stride, scales, sums, begin, end);
        case BF16: return quantize_rows<BFloat16>(op, out, stride, scales, sums, begin, end);
        default: return quantize_rows<Float16>(op, out, stride, scales, sums, begin, end);
    }
}

static void int8(const QLinear& op, int64_t row_begin, int64_t row_end, int64_t strip_begin, int64_t strip_end) {
    switch (op.dtype) {
        case F32: return int8_block<Float32>(op, row_begin, row_end, strip_begin, strip_end);
        case BF16: return int8_block<BFloat16>(op, row_begin, row_end, strip_begin, strip_end);
        default: return int8_block<Float16>(op, row_begin, row_end, strip_begin, strip_end);
    }
}

static void convert(const QLinear& op, void* out, int64_t stride, int64_t begin, int64_t end) {
    switch (op.dtype) {
        case F32: return convert_rows<Float32, false>(op, out, stride, begin, end);
        case BF16: return convert_rows<BFloat16, HAS_BF16_DOT>(op, out, stride, begin, end);
        default: return convert_rows<Float16, false>(op, out, stride, begin, end);
    }
}

#if HAS_BF16_DOT
typedef Pairs BFloat16Factors;
#else
typedef Floats BFloat16Factors;
#endif

template <class W>
INLINE void weight_only_bits(const QLinear& op, int64_t row_begin, int64_t row_end, int64_t strip_begin, int64_t strip_end) {
    switch (op.dtype) {
        case F32: return weight_only_block<Float32, W, Floats>(op, row_begin, row_end, strip_begin, strip_end);
        case BF16: return weight_only_block<BFloat16, W, BFloat16Factors>(op, row_begin, row_end, strip_begin, strip_end);
        default: return weight_only_block<Float16, W, Floats>(op, row_begin, row_end, strip_begin, strip_end);
    }
}

static void weight_only(const QLinear& op, int64_t row_begin, int64_t row_end, int64_t strip_begin, int64_t strip_end) {
    if (op.bits == 4) return weight_only_bits<Nibbles>(op, row_begin, row_end, strip_begin, strip_end);
    return weight_only_bits<Bytes>(op, row_begin, row_end, strip_begin, strip_end);
}

#undef QVECTORS
#undef QGROUP
#undef QGROUP_MORE
