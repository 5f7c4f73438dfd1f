// Unpacking of the formats of block_linear.h in registers. Included inside a namespace, after quantized_linear_tile.h.
//
// Each format returns, for a vector of columns, pairs of quads (four k as unsigned bytes in each lane) and the scales of a
// group. The weight w of a byte:
//
//     OFFSET    w = a * (byte - OFFSET)
//     MINIMUM   w = a * byte - b
//     HALVES    w = a * (byte - OFFSET) in the first 16 k, b * (byte - OFFSET) in the others

#define BTILE (LANES == 16 ? 32 : 16)
#define BNV (BTILE / LANES)

enum class BlockKind { OFFSET, MINIMUM, HALVES };

struct BlockScale {
    vf a, b;
};

// a * b + c, as one FMA instruction where the instruction set has it: the compiler might contract the formula in one kernel
// and not in another, but their results must be bit-identical.
INLINE vf multiply_add(vf a, vf b, vf c) {
#if LANES == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// Dot products of four unsigned bytes up to 63 with signed ones: sums of four products fit into 16 bits.
#if HAS_VNNI
typedef Quads SmallQuads;
#else
struct SmallQuads {
    vu w;
    INLINE SmallQuads of(vu lanes) { return {lanes}; }
    INLINE vi add(vi acc, SmallQuads q, uint32_t x) {
#if LANES == 16
        const __m512i twos = _mm512_maddubs_epi16((__m512i)q.w, _mm512_set1_epi32(int(x)));
        return acc + (vi)_mm512_madd_epi16(twos, _mm512_set1_epi16(1));
#elif LANES == 8
        const __m256i twos = _mm256_maddubs_epi16((__m256i)q.w, _mm256_set1_epi32(int(x)));
        return acc + (vi)_mm256_madd_epi16(twos, _mm256_set1_epi16(1));
#else
        for (int i = 0; i < 4; ++i) acc += (vi)(q.w >> 8 * i & 0xffu) * int32_t(int8_t(x >> 8 * i));
        return acc;
#endif
    }
};
#endif

// Two dot products added to a sum.
template <class Dot>
INLINE vi add_two(vi acc, const Dot& first, const Dot& second, uint32_t x0, uint32_t x1) {
    return Dot::add(Dot::add(acc, first, x0), second, x1);
}
#if !HAS_VNNI && LANES == 16
INLINE vi add_two(vi acc, const SmallQuads& first, const SmallQuads& second, uint32_t x0, uint32_t x1) {
    const __m512i a = _mm512_maddubs_epi16((__m512i)first.w, _mm512_set1_epi32(int(x0)));
    const __m512i b = _mm512_maddubs_epi16((__m512i)second.w, _mm512_set1_epi32(int(x1)));
    return acc + (vi)_mm512_madd_epi16(_mm512_add_epi16(a, b), _mm512_set1_epi16(1));
}
#elif !HAS_VNNI && LANES == 8
INLINE vi add_two(vi acc, const SmallQuads& first, const SmallQuads& second, uint32_t x0, uint32_t x1) {
    const __m256i a = _mm256_maddubs_epi16((__m256i)first.w, _mm256_set1_epi32(int(x0)));
    const __m256i b = _mm256_maddubs_epi16((__m256i)second.w, _mm256_set1_epi32(int(x1)));
    return acc + (vi)_mm256_madd_epi16(_mm256_add_epi16(a, b), _mm256_set1_epi16(1));
}
#endif

INLINE vf half_at(const char* field, int column) {
    return Float16::widen(reinterpret_cast<const uint16_t*>(field) + column);
}
INLINE vf byte_at(const char* field, int column) {
    return __builtin_convertvector(widen_bytes(reinterpret_cast<const int8_t*>(field) + column), vf);
}
INLINE vu row_at(const char* lanes, int row, int column) {
    return load_lanes(reinterpret_cast<const uint32_t*>(lanes) + row * BTILE + column);
}

template <int R>
INLINE void nibble_pair(const char* lanes, int column, vu& even, vu& odd) {
    const vu both = row_at(lanes, R, column);
    even = both & 0x0f0f0f0fu;
    odd = both >> 4 & 0x0f0f0f0fu;
}

// `v` shifted left by SHIFT, or right if SHIFT is negative.
template <int SHIFT>
INLINE vu shifted(vu v) {
    if constexpr (SHIFT >= 0) return v << SHIFT;
    else return v >> -SHIFT;
}

// Nibbles with their fifth bits, which follow in a separate row.
template <int R>
INLINE void five_bit_pair(const char* lanes, int column, vu& even, vu& odd) {
    nibble_pair<R>(lanes, column, even, odd);
    const vu high = row_at(lanes, 4, column);
    even |= shifted<4 - 2 * R>(high) & 0x10101010u;
    odd |= shifted<3 - 2 * R>(high) & 0x10101010u;
}

// Nibbles as indices of a table of bytes.
INLINE vu numbers_of(const uint8_t* table, vu nibbles) {
#if LANES == 16
    const __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    return (vu)_mm512_shuffle_epi8(all, (__m512i)nibbles);
#elif LANES == 8
    const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    return (vu)_mm256_shuffle_epi8(all, (__m256i)nibbles);
#else
    vu found;
    for (int lane = 0; lane < LANES; ++lane) {
        uint32_t bytes = 0;
        for (int i = 0; i < 32; i += 8) bytes |= uint32_t(table[nibbles[lane] >> i & 15u]) << i;
        found[lane] = bytes;
    }
    return found;
#endif
}

template <int R>
INLINE void number_pair(const uint8_t* table, const char* lanes, int column, vu& even, vu& odd) {
    nibble_pair<R>(lanes, column, even, odd);
    even = numbers_of(table, even);
    odd = numbers_of(table, odd);
}

template <BlockFormat FORMAT>
struct Blocks32 {
    static constexpr BlockLayout LAYOUT = BLOCK_LAYOUTS[FORMAT];
    typedef SmallQuads Dot;
    template <int R>
    INLINE void pair(const char* lanes, int column, vu& even, vu& odd) {
        nibble_pair<R>(lanes, column, even, odd);
    }
};

struct FormatQ4_0 : Blocks32<Q4_0> {
    static constexpr BlockKind KIND = BlockKind::OFFSET;
    static constexpr int OFFSET = 8;
    INLINE BlockScale scale(const char* head, const char*, int column) { return {half_at(head, column), vf{}}; }
};

struct FormatQ4_1 : Blocks32<Q4_1> {
    static constexpr BlockKind KIND = BlockKind::MINIMUM;
    static constexpr int OFFSET = 0;
    INLINE BlockScale scale(const char* head, const char*, int column) {
        return {half_at(head, column), -half_at(head + 2 * BTILE, column)};
    }
};

struct FormatQ5_0 : Blocks32<Q5_0> {
    static constexpr BlockKind KIND = BlockKind::OFFSET;
    static constexpr int OFFSET = 16;
    template <int R>
    INLINE void pair(const char* lanes, int column, vu& even, vu& odd) {
        five_bit_pair<R>(lanes, column, even, odd);
    }
    INLINE BlockScale scale(const char* head, const char*, int column) { return {half_at(head, column), vf{}}; }
};

struct FormatQ5_1 : FormatQ4_1 {
    static constexpr BlockLayout LAYOUT = BLOCK_LAYOUTS[Q5_1];
    template <int R>
    INLINE void pair(const char* lanes, int column, vu& even, vu& odd) {
        five_bit_pair<R>(lanes, column, even, odd);
    }
};

struct FormatQ8_0 : Blocks32<Q8_0> {
    static constexpr BlockKind KIND = BlockKind::OFFSET;
    static constexpr int OFFSET = 128;
    typedef Quads Dot;
    template <int R>
    INLINE void pair(const char* lanes, int column, vu& even, vu& odd) {
        even = row_at(lanes, 2 * R, column);
        odd = row_at(lanes, 2 * R + 1, column);
    }
    INLINE BlockScale scale(const char* head, const char*, int column) { return {half_at(head, column), vf{}}; }
};

struct FormatMXFP4 : Blocks32<MXFP4> {
    static constexpr BlockKind KIND = BlockKind::OFFSET;
    static constexpr int OFFSET = 12;
    // Twice the value of a code plus OFFSET; the scale is halved.
    static constexpr uint8_t NUMBERS[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    template <int R>
    INLINE void pair(const char* lanes, int column, vu& even, vu& odd) {
        number_pair<R>(NUMBERS, lanes, column, even, odd);
    }
    INLINE BlockScale scale(const char* head, const char*, int column) {
        const vi e = widen_bytes(reinterpret_cast<const int8_t*>(head) + column) & 255;
        const vi bits = (e - 1) << 23, one = vi{} + 0x00400000, zero = vi{} + 0x00200000;
        return {(vf)(e > 1 ? bits : e == 1 ? one : zero), vf{}};
    }
};

// Groups whose scale and minimum are multiples of the block's scale and minimum.
template <BlockFormat FORMAT>
struct Blocks256 : Blocks32<FORMAT> {
    static constexpr BlockKind KIND = BlockKind::MINIMUM;
    static constexpr int OFFSET = 0;
    INLINE BlockScale scale(const char* head, const char* sub, int column) {
        return {half_at(head, column) * byte_at(sub, column),
                half_at(head + 2 * BTILE, column) * byte_at(sub + BTILE, column)};
    }
};

struct FormatQ4_K : Blocks256<Q4_K> {};

struct FormatQ5_K : Blocks256<Q5_K> {
    template <int R>
    INLINE void pair(const char* lanes, int column, vu& even, vu& odd) {
        five_bit_pair<R>(lanes, column, even, odd);
    }
};

struct FormatQ6_K : Blocks32<Q6_K> {
    static constexpr BlockKind KIND = BlockKind::HALVES;
    static constexpr int OFFSET = 32;
    template <int R>
    INLINE void pair(const char* lanes, int column, vu& even, vu& odd) {
        nibble_pair<R>(lanes, column, even, odd);
        const vu high = row_at(lanes, 4 + R / 2, column);
        even |= shifted<4 - R % 2 * 4>(high) & 0x30303030u;
        odd |= shifted<2 - R % 2 * 4>(high) & 0x30303030u;
    }
    INLINE BlockScale scale(const char* head, const char* sub, int column) {
        const vf d = half_at(head, column);
        return {d * byte_at(sub, column), d * byte_at(sub + BTILE, column)};
    }
};

struct FormatQ3_K : Blocks32<Q3_K> {
    static constexpr BlockKind KIND = BlockKind::HALVES;
    static constexpr int OFFSET = 4;
    template <int R>
    INLINE void pair(const char* lanes, int column, vu& even, vu& odd) {
        const vu low = row_at(lanes, R / 2, column), high = row_at(lanes, 2, column);
        even = (shifted<-(R % 2 * 4)>(low) & 0x03030303u) | (shifted<2 - 2 * R>(high) & 0x04040404u);
        odd = (shifted<-(R % 2 * 4 + 2)>(low) & 0x03030303u) | (shifted<1 - 2 * R>(high) & 0x04040404u);
    }
    INLINE BlockScale scale(const char* head, const char* sub, int column) { return FormatQ6_K::scale(head, sub, column); }
};

// Non-uniform quantization levels, as bytes: value + 128.
template <BlockFormat FORMAT>
struct UnevenBlocks : Blocks32<FORMAT> {
    static constexpr BlockKind KIND = BlockKind::OFFSET;
    static constexpr int OFFSET = 128;
    typedef Quads Dot;
    static constexpr uint8_t NUMBERS[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
    template <int R>
    INLINE void pair(const char* lanes, int column, vu& even, vu& odd) {
        number_pair<R>(NUMBERS, lanes, column, even, odd);
    }
};

struct FormatIQ4_NL : UnevenBlocks<IQ4_NL> {
    INLINE BlockScale scale(const char* head, const char*, int column) { return {half_at(head, column), vf{}}; }
};

struct FormatIQ4_XS : UnevenBlocks<IQ4_XS> {
    INLINE BlockScale scale(const char* head, const char* sub, int column) {
        return {half_at(head, column) * byte_at(sub, column), vf{}};
    }
};
