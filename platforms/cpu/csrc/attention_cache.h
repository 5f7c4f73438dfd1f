// The layout of keys and values in the cache, and the preparation of a chunk of them for the products. Included inside
// a namespace, after simd.h.
//
// Most caches are read in place. 8-bit caches are first widened into the thread's scratch memory, once for all rows of
// a tile. So are the values of latent attention, which are transposed keys.

// ---- how each storage type is read -------------------------------------------------------------------------------------

template <class E>
struct Plain {
    typedef E Element;
    typedef typename E::type T;
    static constexpr bool paired = false;
    // Dimensions 2p and 2p + 1 of LANES keys.
    INLINE void key_pair(const T* k, int block, int p, vf& a, vf& b) {
        a = E::widen(k + (2 * p) * block);
        b = E::widen(k + (2 * p + 1) * block);
    }
    // LANES dimensions of tokens 2p and 2p + 1.
    INLINE void value_pair(const T* v, int dv, int p, vf& a, vf& b) {
        a = E::widen(v + (2 * p) * dv);
        b = E::widen(v + (2 * p + 1) * dv);
    }
    INLINE vf value_first(const T* v, int dv, int p) { return E::widen(v + (2 * p) * dv); }
    INLINE const T* key_at(const T* k, int offset) { return k + offset; }
    INLINE const T* value_at(const T* v, int d) { return v + d; }
};

struct Paired {
    typedef BFloat16 Element;
    typedef uint16_t T;
    static constexpr bool paired = true;
    INLINE vu raw(const T* p) { return *reinterpret_cast<const vu_mem*>(p); }
    INLINE void split(vu r, vf& a, vf& b) {
        a = (vf)(r << 16);
        b = (vf)(r & 0xffff0000u);
    }
    INLINE void key_pair(const T* k, int block, int p, vf& a, vf& b) { split(raw(k + p * block * 2), a, b); }
    INLINE void value_pair(const T* v, int dv, int p, vf& a, vf& b) { split(raw(v + p * dv * 2), a, b); }
    INLINE vf value_first(const T* v, int dv, int p) { return (vf)(raw(v + p * dv * 2) << 16); }
    INLINE const T* key_at(const T* k, int offset) { return k + offset * 2; }
    INLINE const T* value_at(const T* v, int d) { return v + d * 2; }
};

// ---- 8 bits ------------------------------------------------------------------------------------------------------------

struct NoBytes {
    static constexpr bool scaled = false;
    INLINE vu widen(vu r) { return r; }
};

// `widen` converts pairs of codes, in the lower halves of its lanes, to pairs of bfloat16; `floats` sign-extended codes to
// floats.
struct Int8 {
    static constexpr bool scaled = true;
    INLINE vf floats(vi codes) { return __builtin_convertvector(codes, vf); }
    INLINE vu widen(vu r) {
        const vf a = __builtin_convertvector((vi)(r << 24) >> 24, vf), b = __builtin_convertvector((vi)(r << 16) >> 24, vf);
        return (vu)a >> 16 | ((vu)b & 0xffff0000u);
    }
};

// 4 exponent and 3 mantissa bits, shifted to those of float32; a factor of 2^120 corrects the exponent and subnormals.
struct Fp8 {
    static constexpr bool scaled = true;
    INLINE vf floats(vi codes) { return (vf)((vu)(codes << 20) & 0x87f00000u) * as_float(0x7b800000u); }
    INLINE vu widen(vu r) {
        const float bias = as_float(0x7b800000u);
        const vf a = (vf)((r & 0x7f) << 20) * bias, b = (vf)((r & 0x7f00) << 12) * bias;
        return (vu)a >> 16 | ((vu)b & 0xffff0000u) | (r & 0x80) << 8 | (r & 0x8000) << 16;
    }
};

#if LANES == 16 && HAS_BF16_DOT
INLINE vi signed_codes(const uint8_t* p) {
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
#endif

// `count` pairs, a multiple of STRIP.
template <class Bytes>
INLINE void widen_pairs(const uint8_t* in, uint16_t* out, int count) {
    for (int i = 0; i < count; i += LANES) {
#if LANES == 16 && HAS_BF16_DOT  // one instruction rounds two vectors, here exactly
        const vf low = Bytes::floats(signed_codes(in + 2 * i)), high = Bytes::floats(signed_codes(in + 2 * i + LANES));
        const __m512bh pairs = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
        __builtin_memcpy(out + 2 * i, &pairs, sizeof(pairs));
#else
        const vu r = __builtin_convertvector(*reinterpret_cast<const vh_mem*>(in + 2 * i), vu);
        *reinterpret_cast<vu_mem*>(out + 2 * i) = Bytes::widen(r);
#endif
    }
}

// ---- values that are the first dimensions of the keys ------------------------------------------------------------------

#if LANES == 16
typedef uint64_t vq __attribute__((vector_size(64)));
typedef uint64_t vq_mem __attribute__((vector_size(64), aligned(2), may_alias));

INLINE vq swap_middle(vq x) {
    return (x & 0xffff00000000ffffull) | (x & 0xffff0000ull) << 16 | (x >> 16 & 0xffff0000ull);
}
INLINE void interleave(vq a, vq b, vq& low, vq& high) {
    low = __builtin_shuffle(a, b, vq{0, 8, 1, 9, 2, 10, 3, 11});
    high = __builtin_shuffle(a, b, vq{4, 12, 5, 13, 6, 14, 7, 15});
}

// Transposes 16 dimensions of 16 keys from [d / 2][t][2] to [t / 2][d][2]: pairs are exchanged within 64 bits, which
// are then transposed like the elements of an 8 x 8 matrix.
INLINE void turn_square(const uint16_t* k, int stride, uint16_t* v, int dv) {
    vq a[8], b[8];
    for (int i = 0; i < 8; ++i) a[i] = swap_middle(*reinterpret_cast<const vq_mem*>(k + i * stride * 2));
    for (int i = 0; i < 4; ++i) interleave(a[i], a[i + 4], b[2 * i], b[2 * i + 1]);
    for (int i = 0; i < 2; ++i) {
        interleave(b[i], b[i + 4], a[2 * i], a[2 * i + 1]);
        interleave(b[i + 2], b[i + 6], a[2 * i + 4], a[2 * i + 5]);
    }
    for (int i = 0; i < 4; ++i) {
        vq low, high;
        interleave(a[i], a[i + 4], low, high);
        *reinterpret_cast<vq_mem*>(v + (2 * i) * dv * 2) = low;
        *reinterpret_cast<vq_mem*>(v + (2 * i + 1) * dv * 2) = high;
    }
}
#endif

// Transposes a strip of keys, with rows of `stride` tokens, to a strip of values of `size` dimensions, zero up to dv.
template <class KV>
static void turn_strip(const typename KV::T* k, int stride, int size, typename KV::T* v, int dv) {
    int d = 0;
    if (KV::paired) {
#if LANES == 16
        for (; d + 16 <= size; d += 16)
            turn_square(reinterpret_cast<const uint16_t*>(k) + d * stride, stride, reinterpret_cast<uint16_t*>(v) + d * 2, dv);
#endif
        for (; d < dv; ++d)
            for (int t = 0; t < STRIP; ++t)
                v[((t >> 1) * dv + d) * 2 + (t & 1)] = d < size ? k[((d >> 1) * stride + t) * 2 + (d & 1)] : 0;
        return;
    }
    for (; d < dv; ++d)
        for (int t = 0; t < STRIP; ++t) v[t * dv + d] = d < size ? k[d * stride + t] : 0;
}

// ---- one chunk ---------------------------------------------------------------------------------------------------------

constexpr int LINE = 64;  // bytes

// Location of a strip in the cache.
struct Strip {
    const char* keys;
    const char* values;
    int key_step, key_lines, value_lines;  // numbers of cache lines; `key_step`: bytes between those of the keys

    // Prefetching in small pieces keeps the memory busy during the computation.
    void prefetch_keys(int begin, int count) const {
        const int end = begin + count < key_lines ? begin + count : key_lines;
        for (int i = begin; i < end; ++i) prefetch(keys + i * key_step);
    }
    void prefetch_values(int begin, int count) const {
        const int end = begin + count < value_lines ? begin + count : value_lines;
        for (int i = begin; i < end; ++i) prefetch(values + i * LINE);
    }
};

template <class T>
struct Chunk {
    const T* keys[CHUNK / STRIP];  // first key of each strip
    const T* values[CHUNK / STRIP];
    int stride;                    // tokens per row of keys
    int begin;                     // position of its first token, a multiple of STRIP
    int tokens;                    // number of tokens, up to the last one visible to any row
    const Strip* ahead;            // [2][CHUNK / STRIP]: its own strips, then the next ones; null: no prefetch
    alignas(64) float key_scales[CHUNK];
    alignas(64) float value_scales[CHUNK];
};

template <class KV, class Bytes>
INLINE Strip strip_at(const Geometry& g, const Layer& layer, const WorkItem& item, int position) {
    const int32_t* table = g.batch.block_table + int64_t(item.request) * g.batch.block_table_stride;
    const int block = g.batch.block_size, offset = position % block;
    const int element = Bytes::scaled ? 1 : sizeof(typename KV::T), row = KV::paired ? 2 : 1;
    const int64_t head = int64_t(table[position / block]) * g.spec.num_kv_heads + item.kv_head;
    const char* keys = static_cast<const char*>(layer.cache.keys) + (head * g.key_head + offset * row) * element;
    const char* values = g.spec.latent ? nullptr
                                       : static_cast<const char*>(layer.cache.values) +
                                             (head * g.value_head + int64_t(offset) * g.dv) * element;
    const int rows = g.dk / row, apart = block * row * element, step = apart < LINE ? LINE : apart;
    return {keys, values, step, (rows * apart + step - 1) / step, values ? STRIP * g.dv * element / LINE : 0};
}

// The strips of the chunk of `item` that begins at `begin`; strips after the item's last key have null pointers.
template <class KV, class Bytes>
INLINE void find_strips(const Geometry& g, const Layer& layer, const WorkItem& item, int begin, Strip* strips) {
    for (int i = 0; i < CHUNK / STRIP; ++i)
        strips[i] = begin + i * STRIP < item.key_end ? strip_at<KV, Bytes>(g, layer, item, begin + i * STRIP) : Strip{};
}

template <class KV, class Bytes>
static void find_chunk(const Geometry& g, const Layer& layer, const WorkItem& item, int begin, const Scratch& scratch,
                       Chunk<typename KV::T>& chunk) {
    typedef typename KV::T T;
    const int block = g.batch.block_size;
    const bool latent = g.spec.latent;
    chunk.begin = begin;
    chunk.tokens = item.key_end - begin < CHUNK ? item.key_end - begin : CHUNK;
    chunk.stride = Bytes::scaled ? STRIP : block;
    for (int first = 0; first < chunk.tokens; first += STRIP) {
        const int strip = first / STRIP;
        const Strip at = chunk.ahead ? chunk.ahead[strip] : strip_at<KV, Bytes>(g, layer, item, begin + first);
        if constexpr (Bytes::scaled) {
            // The strip of the next chunk is prefetched line by line: many prefetches at once would wait for each other.
            const Strip* const later = chunk.ahead ? chunk.ahead + strip + CHUNK / STRIP : nullptr;
            T* keys = static_cast<T*>(scratch.keys) + first * g.dk;
            for (int p = 0; p < g.dk / 2; ++p) {
                if (later) later->prefetch_keys(p, 1);
                widen_pairs<Bytes>(reinterpret_cast<const uint8_t*>(at.keys) + p * block * 2, keys + p * STRIP * 2, STRIP);
            }
            chunk.keys[strip] = keys;
            const int64_t scale = (at.keys - static_cast<const char*>(layer.cache.keys)) / g.key_head * block +
                                  (begin + first) % block;
            const float* key_scales = layer.cache.key_scales + scale;
            const float* value_scales = latent ? key_scales : layer.cache.value_scales + scale;
            for (int i = 0; i < STRIP; i += LANES) {
                store(chunk.key_scales + first + i, load(key_scales + i));
                store(chunk.value_scales + first + i, load(value_scales + i));
            }
            if (!latent) {
                T* values = static_cast<T*>(scratch.values) + first * g.dv;
                const int lines = later ? (later->value_lines + STRIP / 2 - 1) / (STRIP / 2) : 0;
                for (int p = 0; p < STRIP / 2; ++p) {
                    if (later) later->prefetch_values(p * lines, lines);
                    widen_pairs<Bytes>(reinterpret_cast<const uint8_t*>(at.values) + p * g.dv * 2, values + p * g.dv * 2, g.dv);
                }
                chunk.values[strip] = values;
            }
        } else {
            chunk.keys[strip] = reinterpret_cast<const T*>(at.keys);
            if (!latent) chunk.values[strip] = reinterpret_cast<const T*>(at.values);
        }
        if (latent) {
            T* values = static_cast<T*>(scratch.values) + first * g.dv;
            turn_strip<KV>(chunk.keys[strip], chunk.stride, g.spec.value_size, values, g.dv);
            chunk.values[strip] = values;
        }
    }
}
