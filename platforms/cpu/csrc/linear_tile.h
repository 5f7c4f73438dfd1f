// Products of rows with packed weights (kernels.h describes the packing): out = x * weight^T + bias. Included inside a
// namespace, after simd.h.
//
// A register tile is up to LINEAR_MR rows by a tile of columns. Each step loads the tile's weights for one k (or a
// pair), and adds their products with each row's broadcast x. A row is summed over k in the same order with any other
// rows, so its result depends neither on their number nor on its index among them.
//
// Products with few rows are bound by reading the weights. All groups of rows pass over one piece of the weights, which
// the first pass loads into the L2 cache; meanwhile they prefetch the next piece into it, so memory is read during the
// computation. A piece is larger than the L1 cache: the L2 cache delivers weights as fast as rows use them, and smaller
// pieces would store and reload sums more often, which costs more. A single group is bound by memory only, and
// prefetches a fixed distance ahead (`prefetch_distance`).

#define LINEAR_MR 6
#if LANES == 16
#define LINEAR_TILE 64
#else
#define LINEAR_TILE 16
#endif

constexpr int linear_tile = LINEAR_TILE;
constexpr bool bf16_dot = HAS_BF16_DOT;
constexpr int LINEAR_DEPTH = 768;  // k per piece: 96 KiB in bfloat16

// Reads and multiplies the weights of one step, which covers `STEP` values of k.
template <class E>
struct PlainWeight {
    typedef typename E::type T;
    typedef float X;
    static constexpr int STEP = 1;
    template <int MR, int NV>
    INLINE void add(vf (&acc)[MR][NV], const T* w, const float* x, int64_t ldx) {
        vf b[NV];
        for (int v = 0; v < NV; ++v) b[v] = E::widen(w + v * LANES);
        for (int m = 0; m < MR; ++m)
            for (int v = 0; v < NV; ++v) acc[m][v] += b[v] * x[m * ldx];
    }
};

INLINE vu linear_pairs(const uint16_t* p) { return *reinterpret_cast<const vu_mem*>(p); }

#if HAS_BF16_DOT
struct PairedWeight {
    typedef uint16_t T;
    typedef uint16_t X;
    static constexpr int STEP = 2;
    template <int MR, int NV>
    INLINE void add(vf (&acc)[MR][NV], const T* w, const uint16_t* x, int64_t ldx) {
        vu b[NV];
        for (int v = 0; v < NV; ++v) b[v] = linear_pairs(w + v * LANES * 2);
        for (int m = 0; m < MR; ++m) {
            uint32_t pair;
            __builtin_memcpy(&pair, x + m * ldx, 4);
            for (int v = 0; v < NV; ++v) acc[m][v] = dot_pair(acc[m][v], b[v], pair);
        }
    }
};
#else
struct PairedWeight {
    typedef uint16_t T;
    typedef float X;
    static constexpr int STEP = 2;
    template <int MR, int NV>
    INLINE void add(vf (&acc)[MR][NV], const T* w, const float* x, int64_t ldx) {
        vf even[NV], odd[NV];
        for (int v = 0; v < NV; ++v) even[v] = (vf)(linear_pairs(w + v * LANES * 2) << 16);
        for (int m = 0; m < MR; ++m)
            for (int v = 0; v < NV; ++v) acc[m][v] += even[v] * x[m * ldx];
        for (int v = 0; v < NV; ++v) odd[v] = (vf)(linear_pairs(w + v * LANES * 2) & 0xffff0000u);
        for (int m = 0; m < MR; ++m)
            for (int v = 0; v < NV; ++v) acc[m][v] += odd[v] * x[m * ldx + 1];
    }
};
#endif

template <class W, int MR, int NV>
static void linear_unit(const typename W::X* x, int64_t ldx, const typename W::T* w, int steps, float* sums, bool first,
                        const char* ahead, int ahead_lines) {
    vf acc[MR][NV];
    for (int m = 0; m < MR; ++m)
        for (int v = 0; v < NV; ++v) acc[m][v] = first ? vf{} : load(sums + m * LINEAR_TILE + v * LANES);
    for (int i = 0; i < steps; ++i) {
        W::template add<MR, NV>(acc, w, x, ldx);
        w += LINEAR_TILE * W::STEP;
        x += W::STEP;
        if (ahead_lines) {
            __builtin_prefetch(ahead, 0, 2);
            if (ahead_lines > 1) __builtin_prefetch(ahead + 64, 0, 2);
            if (ahead_lines > 2) {
                __builtin_prefetch(ahead + 128, 0, 2);
                __builtin_prefetch(ahead + 192, 0, 2);
            }
            ahead += ahead_lines * 64;
        }
    }
    for (int m = 0; m < MR; ++m)
        for (int v = 0; v < NV; ++v) store(sums + m * LINEAR_TILE + v * LANES, acc[m][v]);
}

template <class W, int NV>
INLINE void linear_group(int rows, const typename W::X* x, int64_t ldx, const typename W::T* w, int steps, float* sums,
                         bool first, const char* ahead, int ahead_lines) {
    switch (rows) {
        case 1: return linear_unit<W, 1, NV>(x, ldx, w, steps, sums, first, ahead, ahead_lines);
        case 2: return linear_unit<W, 2, NV>(x, ldx, w, steps, sums, first, ahead, ahead_lines);
        case 3: return linear_unit<W, 3, NV>(x, ldx, w, steps, sums, first, ahead, ahead_lines);
        case 4: return linear_unit<W, 4, NV>(x, ldx, w, steps, sums, first, ahead, ahead_lines);
        case 5: return linear_unit<W, 5, NV>(x, ldx, w, steps, sums, first, ahead, ahead_lines);
        default: return linear_unit<W, 6, NV>(x, ldx, w, steps, sums, first, ahead, ahead_lines);
    }
}

// Adds the bias, rounds, and stores `columns` sums per row.
template <class E>
INLINE void linear_store(const float* sums, int rows, int columns, const typename E::type* bias, typename E::type* out,
                         int64_t ldo) {
    for (int m = 0; m < rows; ++m, sums += LINEAR_TILE, out += ldo) {
        int c = 0;
        for (; c + LANES <= columns; c += LANES) {
            vf sum = load(sums + c);
            E::narrow(out + c, bias ? sum + E::widen(bias + c) : sum);
        }
        for (; c < columns; ++c) out[c] = E::put(bias ? sums[c] + E::get(bias[c]) : sums[c]);
    }
}

// Number of cache lines that group `g` prefetches per step. The groups share the `lines` lines of a step of the next
// piece, so that each line is prefetched once.
INLINE int lines_ahead(int lines, int g, int groups) {
    const int sharing = groups < lines ? groups : lines;
    return g < sharing ? (lines - g + sharing - 1) / sharing : 0;
}

// The product of rows [row_begin, row_end), at most LINEAR_ROWS, and the columns of strips [strip_begin, strip_end).
template <class E, class W>
static void linear_block(const Linear& op, int64_t row_begin, int64_t row_end, int64_t strip_begin, int64_t strip_end) {
    typedef typename E::type T;
    typedef typename W::X X;
    constexpr int TILE_STRIPS = LINEAR_TILE / STRIP;
    alignas(64) float sums[LINEAR_ROWS * LINEAR_TILE];
    const int rows = int(row_end - row_begin), groups = (rows + LINEAR_MR - 1) / LINEAR_MR;
    const int64_t depth = round_up(op.in_features, W::STEP), ldo = op.out_stride ? op.out_stride : op.out_features;
    const X* x = static_cast<const X*>(op.x) + row_begin * op.x_stride;
    for (int64_t strip = strip_begin, next; strip < strip_end; strip = next) {
        const int64_t tile = strip / TILE_STRIPS;
        next = (tile + 1) * TILE_STRIPS < strip_end ? (tile + 1) * TILE_STRIPS : strip_end;
        const int within = int(strip % TILE_STRIPS) * STRIP;
        const T* weight = static_cast<const T*>(op.weight) + tile * depth * LINEAR_TILE + within * W::STEP;
        for (int64_t k = 0; k < depth; k += LINEAR_DEPTH) {
            const int steps = int((depth - k < LINEAR_DEPTH ? depth - k : LINEAR_DEPTH) / W::STEP);
            const T* w = weight + k * LINEAR_TILE;
            const char* ahead = reinterpret_cast<const char*>(w + int64_t(steps) * W::STEP * LINEAR_TILE);
            for (int g = 0, m = 0; g < groups; ++g) {
                const int height = (rows - m + groups - g - 1) / (groups - g);
                const X* group_x = x + m * op.x_stride + k;
                float* group_sums = sums + m * LINEAR_TILE;
                const int lines = lines_ahead(LINEAR_TILE * W::STEP * int(sizeof(T)) / 64, g, groups);
                const char* from = groups == 1 ? reinterpret_cast<const char*>(w) + prefetch_distance.near : ahead;
                ahead += int64_t(steps) * lines * 64;
#define LINEAR_GROUP(NV) \
    linear_group<W, NV>(height, group_x, op.x_stride, w, steps, group_sums, k == 0, from, lines)
#if LANES == 16
                switch (next - strip) {
                    case 1: LINEAR_GROUP(1); break;
                    case 2: LINEAR_GROUP(2); break;
                    case 3: LINEAR_GROUP(3); break;
                    default: LINEAR_GROUP(4);
                }
#else
                LINEAR_GROUP(STRIP / LANES);
#endif
#undef LINEAR_GROUP
                m += height;
            }
        }
        const int64_t column = strip * STRIP, end = next * STRIP < op.out_features ? next * STRIP : op.out_features;
        const T* bias = op.bias ? static_cast<const T*>(op.bias) + column : nullptr;
        T* out = static_cast<T*>(op.out) + row_begin * ldo + column;
        linear_store<E>(sums, rows, int(end - column), bias, out, ldo);
    }
}

static void linear(const Linear& op, int64_t row_begin, int64_t row_end, int64_t strip_begin, int64_t strip_end) {
    switch (op.dtype) {
        case F32: return linear_block<Float32, PlainWeight<Float32>>(op, row_begin, row_end, strip_begin, strip_end);
        case BF16: return linear_block<BFloat16, PairedWeight>(op, row_begin, row_end, strip_begin, strip_end);
        default: return linear_block<Float16, PlainWeight<Float16>>(op, row_begin, row_end, strip_begin, strip_end);
    }
}

// Converts rows of x to float32, with zero padding, for kernels of this instruction set that do not read x directly.
// Rows of `out` are `ldo` elements apart.
template <class E>
static void widen_x(const Linear& op, float* out, int64_t ldo, int64_t begin, int64_t end) {
    const int size = op.in_features;
    for (int64_t row = begin; row < end; ++row) {
        const typename E::type* x = static_cast<const typename E::type*>(op.x) + row * op.x_stride;
        float* to = out + row * ldo;
        int k = 0;
        for (; k + LANES <= size; k += LANES) store(to + k, E::widen(x + k));
        for (; k < size; ++k) to[k] = E::get(x[k]);
        for (; k < ldo; ++k) to[k] = 0;
    }
}

static void linear_x(const Linear& op, void* out, int64_t ldo, int64_t begin, int64_t end) {
#if HAS_BF16_DOT
    if (op.dtype == BF16) {
        for (int64_t row = begin; row < end; ++row) {
            uint16_t* to = static_cast<uint16_t*>(out) + row * ldo;
            __builtin_memcpy(to, static_cast<const uint16_t*>(op.x) + row * op.x_stride, size_t(op.in_features) * 2);
            for (int64_t k = op.in_features; k < ldo; ++k) to[k] = 0;
        }
        return;
    }
#endif
    if (op.dtype == BF16) return widen_x<BFloat16>(op, static_cast<float*>(out), ldo, begin, end);
    return widen_x<Float16>(op, static_cast<float*>(out), ldo, begin, end);
}
