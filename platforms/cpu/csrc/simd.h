// Vectors of LANES floats for the instruction set that the including file is compiled for. Included inside a namespace.
// GCC's vector types do the arithmetic; only the float16 conversions and the bfloat16 dot product need intrinsics.
//
// The including file defines LANES, HAS_F16C and HAS_BF16_DOT; LANES of 8 or 16 requires HAS_F16C. The compiler's
// macros (__AVX2__ and so on) must not be used: g++ before 13 preprocesses a whole file before `#pragma GCC target`
// takes effect, so they describe the command line.

#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));
typedef float vf_mem __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t vu_mem __attribute__((vector_size(LANES * 4), aligned(2), may_alias));
typedef uint16_t vh_mem __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

INLINE vf splat(float x) { return x - vf{}; }
INLINE vf load(const float* p) { return *reinterpret_cast<const vf_mem*>(p); }
INLINE void store(float* p, vf v) { *reinterpret_cast<vf_mem*>(p) = v; }

INLINE float as_float(uint32_t bits) {
    float f;
    __builtin_memcpy(&f, &bits, 4);
    return f;
}
INLINE uint32_t as_bits(float f) {
    uint32_t bits;
    __builtin_memcpy(&bits, &f, 4);
    return bits;
}

// ---- scalar conversions ------------------------------------------------------------------------------------------------

INLINE float from_bf16(uint16_t h) { return as_float(uint32_t(h) << 16); }

// Rounds to the nearest, ties to even; NaN stays NaN.
INLINE uint16_t to_bf16(float f) {
    uint32_t bits = as_bits(f);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#if HAS_F16C
INLINE float from_f16(uint16_t h) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h))); }
INLINE uint16_t to_f16(float f) { return uint16_t(_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(f), 0))); }
#elif defined(__aarch64__)
INLINE float from_f16(uint16_t h) {
    __fp16 x;
    __builtin_memcpy(&x, &h, 2);
    return float(x);
}
INLINE uint16_t to_f16(float f) {
    __fp16 x = __fp16(f);
    uint16_t h;
    __builtin_memcpy(&h, &x, 2);
    return h;
}
#else
INLINE float from_f16(uint16_t h) {
    uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff;
    if (rest >= 0x7c00) return as_float(sign | 0x7f800000u | (rest & 0x3ff) << 13);
    // Multiplying by 2^112 adjusts the exponent bias and normalizes subnormals.
    return as_float(sign | as_bits(as_float(rest << 13) * as_float(0x77800000u)));
}
INLINE uint16_t to_f16(float f) {
    uint32_t bits = as_bits(f), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) return uint16_t(sign | 0x7e00);
    if (rest >= 0x477ff000u) return uint16_t(sign | 0x7c00);
    if (rest < 0x38800000u) {  // subnormal: adding 0.5 aligns the significand with float16's last place
        uint32_t shifted = as_bits(as_float(rest) + 0.5f) - 0x3f000000u;
        return uint16_t(sign | shifted);
    }
    return uint16_t(sign | ((rest + 0xfff + (rest >> 13 & 1) - 0x38000000u) >> 13));
}
#endif

// ---- element types -----------------------------------------------------------------------------------------------------
// `widen` reads LANES elements, `narrow` writes them, `round` rounds them to the type; `get` and `put` convert one
// element; `bf16` converts one element to bfloat16.

struct Float32 {
    typedef float type;
    INLINE vf widen(const float* p) { return load(p); }
    INLINE vf round(vf v) { return v; }
    INLINE void narrow(float* p, vf v) { store(p, v); }
    INLINE float get(float x) { return x; }
    INLINE float put(float x) { return x; }
    INLINE uint16_t bf16(float x) { return to_bf16(x); }
};

struct BFloat16 {
    typedef uint16_t type;
    INLINE vf widen(const uint16_t* p) {
#if LANES == 16  // g++ converts 16 lanes in two halves
        return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16);
#else
        vh h = *reinterpret_cast<const vh_mem*>(p);
        return (vf)(__builtin_convertvector(h, vu) << 16);
#endif
    }
    // The nearest bfloat16, ties to even, as a float; NaN stays NaN.
    INLINE vf round(vf v) {
        vu bits = (vu)v;
        vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
        vu nan = (bits & 0xffff0000u) | 0x400000u;
        return (vf)((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
    }
    INLINE void narrow(uint16_t* p, vf v) {
#if HAS_BF16_DOT && LANES == 16
        __m256bh h = _mm512_cvtneps_pbh((__m512)v);
        __builtin_memcpy(p, &h, sizeof(h));
#elif LANES == 16
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16((__m512i)((vu)round(v) >> 16)));
#else
        *reinterpret_cast<vh_mem*>(p) = __builtin_convertvector((vu)round(v) >> 16, vh);
#endif
    }
    INLINE float get(uint16_t x) { return from_bf16(x); }
    INLINE uint16_t put(float x) { return to_bf16(x); }
    INLINE uint16_t bf16(uint16_t x) { return x; }
};

struct Float16 {
    typedef uint16_t type;
    INLINE vf widen(const uint16_t* p) {
#if LANES == 16
        return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif LANES == 8
        return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
        vf v;
        for (int i = 0; i < LANES; ++i) v[i] = from_f16(p[i]);
        return v;
#endif
    }
    INLINE void narrow(uint16_t* p, vf v) {
#if LANES == 16
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)v, 0));
#elif LANES == 8
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)v, 0));
#else
        for (int i = 0; i < LANES; ++i) p[i] = to_f16(v[i]);
#endif
    }
    INLINE vf round(vf v) {
        uint16_t stored[LANES];
        narrow(stored, v);
        return widen(stored);
    }
    INLINE float get(uint16_t x) { return from_f16(x); }
    INLINE uint16_t put(float x) { return to_f16(x); }
    INLINE uint16_t bf16(uint16_t x) { return to_bf16(from_f16(x)); }
};

// ---- functions ---------------------------------------------------------------------------------------------------------

// If one argument is NaN, the result is the second argument, like that of the instructions.
#if LANES == 16
INLINE vf vmax(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vf vmin(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
#elif LANES == 8
INLINE vf vmax(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vf vmin(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
#else
INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
INLINE vf vmin(vf a, vf b) { return a < b ? a : b; }
#endif

INLINE float sum_lanes(vf v) {
    float s = 0;
    for (int i = 0; i < LANES; ++i) s += v[i];
    return s;
}
INLINE float max_lanes(vf v) {
    float m = v[0];
    for (int i = 1; i < LANES; ++i) m = v[i] > m ? v[i] : m;
    return m;
}

// e^x to about 2 units in the last place; 0 below -87, and for -infinity. x <= 88. NaN stays NaN.
INLINE vf vexp(vf x) {
    const float magic = 12582912.f;  // adding and subtracting it rounds to an integer
    vf low = splat(-87.f);
    vf y = x < low ? low : x;
    vf n = (y * 1.44269504f + magic) - magic;
    vf r = y - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.f;
    vi exponent = (__builtin_convertvector(n, vi) + 127) << 23;
    vf e = p * (vf)exponent;
    return x < low ? vf{} : e;
}

INLINE vf vtanh(vf x) {
    vf y = vmin(vmax(x, splat(-15.f)), splat(15.f));
    y = x == x ? y : x;
    return 1.f - 2.f / (vexp(y * 2.f) + 1.f);
}

constexpr float LOG2E = 1.44269504f;

// 2^x; 0 for -infinity and below -126; x <= 127. NaN stays NaN. The error is at most 2 units in the last place with
// EXACT, else 2^-13, which is below bfloat16's precision.
template <bool EXACT>
INLINE vf vexp2(vf x) {
#if LANES == 16
    const __m512 r = _mm512_reduce_ps((__m512)x, 1);  // x - floor(x)
    const vf f = (vf)r;
#else
    const float magic = 12582912.f;
    const vf low = splat(-126.f);
    const vf y = x < low ? low : x;
    const vf n = (y + magic) - magic;
    const vf f = y - n;
#endif
    vf p;
    if (EXACT) {
#if LANES == 16
        p = f * 2.1702249e-4f + 1.24396897e-3f;
        p = p * f + 9.67884080e-3f;
        p = p * f + 5.54833421e-2f;
        p = p * f + 2.40229836e-1f;
        p = p * f + 6.93146984e-1f;
#else
        p = f * 1.53458076e-4f + 1.33999312e-3f;
        p = p * f + 9.61848897e-3f;
        p = p * f + 5.55032878e-2f;
        p = p * f + 2.40226469e-1f;
        p = p * f + 6.93147206e-1f;
#endif
        p = p * f + 1.f;
    } else {
#if LANES == 16
        p = f * 7.8024459e-2f + 2.26067247e-1f;
        p = p * f + 6.95833510e-1f;
        p = p * f + 9.99925220e-1f;
#else
        p = f * 5.5171624e-2f + 2.42611119e-1f;
        p = p * f + 6.93260994e-1f;
        p = p * f + 9.99928074e-1f;
#endif
    }
#if LANES == 16
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
    const vi exponent = (__builtin_convertvector(n, vi) + 127) << 23;
    const vf e = p * (vf)exponent;
    return x < low ? vf{} : e;
#endif
}

INLINE float exp2_one(float x) { return vexp2<true>(splat(x))[0]; }

// Whether a lane of `a` is greater than its lane of `b`.
INLINE bool any_greater(vf a, vf b) {
#if LANES == 16
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ) != 0;
#elif LANES == 8
    return _mm256_movemask_ps((__m256)(a > b)) != 0;
#else
    const vi greater = a > b;
    int32_t any = 0;
    for (int i = 0; i < LANES; ++i) any |= greater[i];
    return any != 0;
#endif
}

// Prefetches into the L2 cache.
INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

#if HAS_BF16_DOT
// acc plus the products of each lane's pair of bfloat16 with `pair`.
INLINE vf dot_pair(vf acc, vu pairs, uint32_t pair) {
#if LANES == 16
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32(int(pair)));
#else
    return (vf)vbfdotq_f32((float32x4_t)acc, vreinterpretq_bf16_u32((uint32x4_t)pairs),
                           vreinterpretq_bf16_u32(vdupq_n_u32(pair)));
#endif
}
#endif
