// Storing new keys and values in the cache. Included inside a namespace, after simd.h and attention_tile.h.

template <class From>
INLINE uint32_t bf16_pair(const typename From::type* p, int d, int size) {
    return uint32_t(From::bf16(p[d])) | (d + 1 < size ? uint32_t(From::bf16(p[d + 1])) << 16 : 0);
}

// Location of one token's key and value of one head; `offset` is the token's index in the block.
struct Place {
    int64_t key, value, scale;
    int offset, block, dv;
};

template <class From>
static void store_paired(const typename From::type* key, int size, const typename From::type* value, int value_size,
                         const Cache& cache, const Place& at) {
    uint32_t* k = reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(cache.keys) + at.key) + at.offset;
    for (int d = 0; d < size; d += 2) k[int64_t(d / 2) * at.block] = bf16_pair<From>(key, d, size);
    uint16_t* v = static_cast<uint16_t*>(cache.values) + at.value + int64_t(at.offset / 2) * at.dv * 2 + (at.offset & 1);
    for (int d = 0; d < value_size; ++d) v[2 * d] = From::bf16(value[d]);
}

#if LANES == 16
// Transposes 16 x 16 lanes: lane j of row i becomes lane i of row j.
INLINE void turn_lanes(__m512i (&r)[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; ++j) {
            r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; ++j) {
            t[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0x88);
            t[i + j + 4] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0xdd);
        }
    for (int j = 0; j < 8; ++j) {
        r[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
        r[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd);
    }
}

constexpr int RUN = 16;  // tokens

// Whether the first RUN of `count` tokens have consecutive slots in one block, of which the first is even.
INLINE bool is_run(const int32_t* slots, int count, int block) {
    if (count < RUN || slots[0] % block > block - RUN || slots[0] % 2) return false;
    for (int i = 1; i < RUN; ++i)
        if (slots[i] != slots[0] + i) return false;
    return true;
}

// Stores RUN tokens with consecutive slots, of which the first is even; bfloat16, with sizes that are multiples of 32.
static void store_run(const uint16_t* key, int64_t key_stride, int size, const uint16_t* value, int64_t value_stride,
                      int value_size, const Cache& cache, const Place& at) {
    uint32_t* k = reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(cache.keys) + at.key) + at.offset;
    for (int p = 0; p < size / 2; p += RUN) {
        __m512i rows[RUN];
        for (int t = 0; t < RUN; ++t) rows[t] = _mm512_loadu_si512(key + t * key_stride + 2 * p);
        turn_lanes(rows);
        for (int i = 0; i < RUN; ++i) _mm512_storeu_si512(k + int64_t(p + i) * at.block, rows[i]);
    }
    uint16_t* v = static_cast<uint16_t*>(cache.values) + at.value + int64_t(at.offset) * at.dv;
    for (int t = 0; t < RUN; t += 2, v += 2 * at.dv) {
        const uint16_t *a = value + t * value_stride, *b = a + value_stride;
        for (int d = 0; d < value_size; d += LANES) {
            const vu low = __builtin_convertvector(*reinterpret_cast<const vh_mem*>(a + d), vu);
            const vu high = __builtin_convertvector(*reinterpret_cast<const vh_mem*>(b + d), vu);
            *reinterpret_cast<vu_mem*>(v + 2 * d) = low | high << 16;
        }
    }
}
#endif

template <class From, class To>
static void store_plain(const typename From::type* key, int size, const typename From::type* value, int value_size,
                        const Cache& cache, const Place& at) {
    typename To::type* k = static_cast<typename To::type*>(cache.keys) + at.key + at.offset;
    for (int d = 0; d < size; ++d) k[int64_t(d) * at.block] = To::put(From::get(key[d]));
    typename To::type* v = static_cast<typename To::type*>(cache.values) + at.value + int64_t(at.offset) * at.dv;
    for (int d = 0; d < value_size; ++d) v[d] = To::put(From::get(value[d]));
}

// ---- 8 bits ------------------------------------------------------------------------------------------------------------

// The codes of LANES numbers within the type's range. The code of NaN is arbitrary, because its scale is NaN.
INLINE vu codes(Int8, vf x) { return (vu)(x + 12582912.f) & 0xff; }

// To the nearest, ties to even. Below 2^-6 a code counts steps of 2^-9.
INLINE vu codes(Fp8, vf x) {
    const vu bits = (vu)x & 0x7fffffffu, sign = ((vu)x & 0x80000000u) >> 24;
    const vu normal = ((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - (120 << 3);
    const vu small = (vu)((vf)bits * 512.f + 12582912.f) & 0xf;
    const vu code = bits < 0x3c800000u ? small : normal;
    return (code > 0x7e ? vu{} + 0x7e : code) | sign;
}

constexpr float largest(Int8) { return 127.f; }
constexpr float largest(Fp8) { return 448.f; }

// The scale of one token's key or value: its largest magnitude becomes the type's largest number.
template <class From, class Bytes>
INLINE float scale_of(const typename From::type* x, int size) {
    vf top = {};
    bool nan = false;
    int d = 0;
    for (; d + LANES <= size; d += LANES) {
        const vf v = From::widen(x + d), a = (vf)((vu)v & 0x7fffffffu);
        nan |= any_greater((vf)((vu)(vi)(v != v) & 0x3f800000u), vf{});
        top = vmax(a, top);
    }
    float found = max_lanes(top);
    for (; d < size; ++d) {
        const float v = From::get(x[d]), a = v < 0 ? -v : v;
        nan |= v != v;
        found = a > found ? a : found;
    }
    return nan ? __builtin_nanf("") : found / largest(Bytes());
}

// Calls `put(d, code)` for each of a token's numbers.
template <class From, class Bytes, class Put>
INLINE void encode(const typename From::type* x, int size, float scale, Put put) {
    const float divisor = scale > 0 ? scale : 1.f;
    for (int d = 0; d < size; d += LANES) {
        vf v;
        if (d + LANES <= size) {
            v = From::widen(x + d);
        } else {
            v = vf{};
            for (int i = 0; d + i < size; ++i) v[i] = From::get(x[d + i]);
        }
        const vu c = codes(Bytes(), v / divisor);
        for (int i = 0; i < LANES && d + i < size; ++i) put(d + i, uint8_t(c[i]));
    }
}

template <class From, class Bytes>
static void store_bytes(const typename From::type* key, int size, const typename From::type* value, int value_size,
                        const Cache& cache, const Place& at) {
    uint8_t* k = static_cast<uint8_t*>(cache.keys) + at.key + at.offset * 2;
    const float key_scale = scale_of<From, Bytes>(key, size);
    cache.key_scales[at.scale] = key_scale;
    encode<From, Bytes>(key, size, key_scale, [&](int d, uint8_t c) { k[int64_t(d / 2) * at.block * 2 + (d & 1)] = c; });
    if (!value_size) return;
    uint8_t* v = static_cast<uint8_t*>(cache.values) + at.value + int64_t(at.offset / 2) * at.dv * 2 + (at.offset & 1);
    const float value_scale = scale_of<From, Bytes>(value, value_size);
    cache.value_scales[at.scale] = value_scale;
    encode<From, Bytes>(value, value_size, value_scale, [&](int d, uint8_t c) { v[2 * d] = c; });
}

// ---- sparse attention --------------------------------------------------------------------------------------------------

// Stores one token with its dimensions adjacent.
template <class From>
static void store_selectable(const typename From::type* key, int size, const Geometry& g, const Cache& cache, int64_t slot) {
    const int64_t at = slot * g.dk;
    const auto put = [&](auto to, auto* keys) {
        for (int d = 0; d < size; ++d) keys[at + d] = decltype(to)::put(From::get(key[d]));
    };
    const auto put_bytes = [&](auto bytes) {
        typedef decltype(bytes) Bytes;
        uint8_t* const keys = static_cast<uint8_t*>(cache.keys) + at;
        const float scale = cache.key_scales[slot] = scale_of<From, Bytes>(key, size);
        encode<From, Bytes>(key, size, scale, [&](int d, uint8_t code) { keys[d] = code; });
    };
    switch (g.spec.kv_dtype) {
        case F32: return put(Float32(), static_cast<float*>(cache.keys));
        case F16: return put(Float16(), static_cast<uint16_t*>(cache.keys));
        case INT8: return put_bytes(Int8());
        case FP8: return put_bytes(Fp8());
        default: return put(BFloat16(), static_cast<uint16_t*>(cache.keys));
    }
}

// ------------------------------------------------------------------------------------------------------------------------

template <class From>
static void store_tokens(const Geometry& g, const NewKV& kv, int begin, int end) {
    typedef typename From::type T;
    const int block = g.batch.block_size, size = g.spec.head_size;
    const int value_size = g.spec.latent ? 0 : g.spec.value_size;  // 0: no values are stored
#if LANES == 16
    const bool in_runs = g.spec.dtype == BF16 && g.spec.kv_dtype == BF16 && size % 32 == 0 && value_size % 32 == 0;
#endif
    if (reads_selected(g.spec)) {
        for (int t = begin; t < end; ++t) {
            const int slot = g.batch.slot_mapping[t];
            if (slot >= 0) store_selectable<From>(static_cast<const T*>(kv.key) + t * kv.key_stride, size, g, kv.cache, slot);
        }
        return;
    }
    // Tokens are the inner loop, because adjacent tokens share cache lines of the keys.
    for (int h = 0; h < g.spec.num_kv_heads; ++h) {
        for (int t = begin; t < end; ++t) {
            const int slot = g.batch.slot_mapping[t];
            if (slot < 0) continue;
#if LANES == 16
            if constexpr (sizeof(T) == 2) {
                if (in_runs && is_run(g.batch.slot_mapping + t, end - t, block)) {
                    const int64_t head = int64_t(slot / block) * g.spec.num_kv_heads + h;
                    const Place at{head * g.key_head, head * g.value_head, 0, slot % block, block, g.dv};
                    store_run(static_cast<const T*>(kv.key) + t * kv.key_stride + int64_t(h) * size, kv.key_stride, size,
                              static_cast<const T*>(kv.value) + t * kv.value_stride + int64_t(h) * value_size,
                              kv.value_stride, value_size, kv.cache, at);
                    t += RUN - 1;
                    continue;
                }
            }
#endif
            const T* key = static_cast<const T*>(kv.key) + t * kv.key_stride + int64_t(h) * size;
            const T* value = static_cast<const T*>(kv.value) + t * kv.value_stride + int64_t(h) * value_size;
            const int64_t head = int64_t(slot / block) * g.spec.num_kv_heads + h;
            const int offset = slot % block;
            const Place at{head * g.key_head, head * g.value_head, head * block + offset, offset, block, g.dv};
            switch (g.spec.kv_dtype) {
                case F32: store_plain<From, Float32>(key, size, value, value_size, kv.cache, at); break;
                case F16: store_plain<From, Float16>(key, size, value, value_size, kv.cache, at); break;
                case INT8: store_bytes<From, Int8>(key, size, value, value_size, kv.cache, at); break;
                case FP8: store_bytes<From, Fp8>(key, size, value, value_size, kv.cache, at); break;
                default: store_paired<From>(key, size, value, value_size, kv.cache, at);
            }
        }
    }
}

static void reshape_and_cache(const Geometry& g, const NewKV& kv, int begin, int end) {
    switch (g.spec.dtype) {
        case F32: return store_tokens<Float32>(g, kv, begin, end);
        case BF16: return store_tokens<BFloat16>(g, kv, begin, end);
        default: return store_tokens<Float16>(g, kv, begin, end);
    }
}
