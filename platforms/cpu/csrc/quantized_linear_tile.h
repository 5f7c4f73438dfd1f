// Products of rows with packed integer weights (quantized_linear.h describes the packing). Included inside a namespace, after
// simd.h, by files that also define HAS_VNNI.
//
// As in linear_tile.h, a register tile is a few rows by a tile of columns, and a row is summed in the same order with
// any other rows. All groups of rows use a piece of the weights while it is in the L1 cache. With few rows, kernels
// unpack weights in registers; with more rows, they unpack a piece once for all groups. Both do the same arithmetic.

#if LANES == 16
#define QTILE 64
#define QMR 6
#else
#define QTILE 16
#define QMR 4
#endif
#define QNV (QTILE / LANES)

constexpr int quantized_linear_tile = QTILE;
constexpr bool quantized_linear_bf16_dot = HAS_BF16_DOT;
constexpr int QTILE_STRIPS = QTILE / STRIP;
constexpr int INT8_DEPTH = 256;  // k per piece of an integer product: 16 KiB of weights, half of a 32 KiB L1 cache

typedef int8_t vb __attribute__((vector_size(LANES)));
typedef int8_t vb_mem __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int32_t vi_mem __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

INLINE vu load_lanes(const uint32_t* p) { return *reinterpret_cast<const vu_mem*>(p); }
INLINE void store_lanes(uint32_t* p, vu v) { *reinterpret_cast<vu_mem*>(p) = v; }
INLINE vi load_ints(const int32_t* p) { return *reinterpret_cast<const vi_mem*>(p); }

// Uses intrinsics because some compilers do not vectorize __builtin_convertvector.
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
// While several groups of rows use a piece of the weights, they prefetch the next piece. The groups share its cache
// lines, so that each line is prefetched once. A single group of rows prefetches a fixed distance ahead (`prefetch_distance`);
// one that unpacks weights in registers prefetches nothing where the processor's own prefetching is then faster.

struct Ahead {
    const char* from;
    int lines;  // per step
};

INLINE const char* near(const uint32_t* w) { return reinterpret_cast<const char*>(w) + prefetch_distance.near; }

// For a single group of rows that unpacks weights in registers.
INLINE Ahead while_unpacking(const uint32_t* w) {
    const int64_t distance = prefetch_distance.unpacking;
    return {reinterpret_cast<const char*>(w) + distance, distance ? QTILE * 4 / 64 : 0};
}

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

// `v`, rounded. Without it, the compiler may contract the product that `v` is and the addition of the bias, in one kernel and
// not in another, but their results must be bit-identical.
INLINE vf rounded_product(vf v) {
#if LANES == 16
    asm("" : "+v"(v));
#elif defined(__x86_64__)
    asm("" : "+x"(v));
#elif defined(__aarch64__)
    asm("" : "+w"(v));
#endif
    return v;
}

// Adds the bias to `columns` results of one row, rounds and stores them. `value(c)` returns the vector at column c.
template <class E, class Vector>
INLINE void store_row(typename E::type* out, const typename E::type* bias, int columns, Vector value) {
    int c = 0;
    for (; c + LANES <= columns; c += LANES) {
        const vf v = rounded_product(value(c));
        E::narrow(out + c, bias ? v + E::widen(bias + c) : v);
    }
    if (c == columns) return;
    const vf v = rounded_product(value(c));  // scales and sums of a tile are padded to whole vectors
    for (int i = 0; c < columns; ++c, ++i) out[c] = E::put(bias ? v[i] + E::get(bias[c]) : v[i]);
}

#include "quantized_linear_int8.h"
#include "quantized_linear_weight_only.h"

// ---- by dtype ------------------------------------------------------------------------------------------------------------

static void quantize(const QuantizedLinear& op, int8_t* out, int64_t stride, float* scales, int32_t* sums, int64_t begin,
                     int64_t end) {
    switch (op.dtype) {
        case F32: return quantize_rows<Float32>(op, out, stride, scales, sums, begin, end);
        case BF16: return quantize_rows<BFloat16>(op, out, stride, scales, sums, begin, end);
        default: return quantize_rows<Float16>(op, out, stride, scales, sums, begin, end);
    }
}

template <class E>
INLINE void int8_by_blocks(const QuantizedLinear& op, int64_t row_begin, int64_t row_end, int64_t strip_begin,
                           int64_t strip_end) {
    if (op.blocks > 1 || op.bits == 4) return blocks_block<E>(op, row_begin, row_end, strip_begin, strip_end);
    return int8_block<E>(op, row_begin, row_end, strip_begin, strip_end);
}

static void int8(const QuantizedLinear& op, int64_t row_begin, int64_t row_end, int64_t strip_begin, int64_t strip_end) {
    switch (op.dtype) {
        case F32: return int8_by_blocks<Float32>(op, row_begin, row_end, strip_begin, strip_end);
        case BF16: return int8_by_blocks<BFloat16>(op, row_begin, row_end, strip_begin, strip_end);
        default: return int8_by_blocks<Float16>(op, row_begin, row_end, strip_begin, strip_end);
    }
}

static void convert(const QuantizedLinear& op, void* out, int64_t stride, int64_t begin, int64_t end) {
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
INLINE void weight_only_bits(const QuantizedLinear& op, int64_t row_begin, int64_t row_end, int64_t strip_begin,
                             int64_t strip_end) {
    switch (op.dtype) {
        case F32: return weight_only_block<Float32, W, Floats>(op, row_begin, row_end, strip_begin, strip_end);
        case BF16: return weight_only_block<BFloat16, W, BFloat16Factors>(op, row_begin, row_end, strip_begin, strip_end);
        default: return weight_only_block<Float16, W, Floats>(op, row_begin, row_end, strip_begin, strip_end);
    }
}

static void weight_only(const QuantizedLinear& op, int64_t row_begin, int64_t row_end, int64_t strip_begin, int64_t strip_end) {
    if (op.bits == 4) return weight_only_bits<Nibbles>(op, row_begin, row_end, strip_begin, strip_end);
    return weight_only_bits<Bytes>(op, row_begin, row_end, strip_begin, strip_end);
}

#undef QVECTORS
#undef QGROUP
#undef QGROUP_MORE
