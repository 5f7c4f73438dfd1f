// Storing new keys and values in the cache. Included inside a namespace, after simd.h and attention_tile.h.

template <class From>
INLINE uint32_t bf16_pair(const typename From::type* p, int d, int size) {
    return uint32_t(From::bf16(p[d])) | (d + 1 < size ? uint32_t(From::bf16(p[d + 1])) << 16 : 0);
}

template <class From>
static void store_paired(const typename From::type* key, const typename From::type* value, uint16_t* keys,
                         uint16_t* values, int offset, int block, int dv, int size) {
    uint32_t* k = reinterpret_cast<uint32_t*>(keys) + offset;
    for (int d = 0; d < size; d += 2) k[int64_t(d / 2) * block] = bf16_pair<From>(key, d, size);
    uint16_t* v = values + int64_t(offset / 2) * dv * 2 + (offset & 1);
    for (int d = 0; d < size; ++d) v[2 * d] = From::bf16(value[d]);
}

template <class From, class To>
static void store_plain(const typename From::type* key, const typename From::type* value, typename To::type* keys,
                        typename To::type* values, int offset, int block, int dv, int size) {
    for (int d = 0; d < size; ++d) keys[int64_t(d) * block + offset] = To::put(From::get(key[d]));
    typename To::type* v = values + int64_t(offset) * dv;
    for (int d = 0; d < size; ++d) v[d] = To::put(From::get(value[d]));
}

template <class From>
static void store_tokens(const Geometry& g, const NewKV& kv, int begin, int end) {
    typedef typename From::type T;
    const int block = g.batch.block_size, size = g.spec.head_size;
    // Heads outside, tokens inside: neighbouring tokens fill the same cache lines of the keys.
    for (int h = 0; h < g.spec.num_kv_heads; ++h) {
        for (int t = begin; t < end; ++t) {
            const int slot = g.batch.slot_mapping[t];
            if (slot < 0) continue;
            const T* key = static_cast<const T*>(kv.key) + t * kv.key_stride + int64_t(h) * size;
            const T* value = static_cast<const T*>(kv.value) + t * kv.value_stride + int64_t(h) * size;
            const int64_t head = int64_t(slot / block) * g.spec.num_kv_heads + h;
            const int offset = slot % block;
            const int64_t at_key = head * g.key_head, at_value = head * g.value_head;
            switch (g.spec.kv_dtype) {
                case F32:
                    store_plain<From, Float32>(key, value, static_cast<float*>(kv.keys) + at_key,
                                               static_cast<float*>(kv.values) + at_value, offset, block, g.dv, size);
                    break;
                case F16:
                    store_plain<From, Float16>(key, value, static_cast<uint16_t*>(kv.keys) + at_key,
                                               static_cast<uint16_t*>(kv.values) + at_value, offset, block, g.dv, size);
                    break;
                default:
                    store_paired<From>(key, value, static_cast<uint16_t*>(kv.keys) + at_key,
                                       static_cast<uint16_t*>(kv.values) + at_value, offset, block, g.dv, size);
            }
        }
    }
}

static void store_kv(const Geometry& g, const NewKV& kv, int begin, int end) {
    switch (g.spec.dtype) {
        case F32: return store_tokens<Float32>(g, kv, begin, end);
        case BF16: return store_tokens<BFloat16>(g, kv, begin, end);
        default: return store_tokens<Float16>(g, kv, begin, end);
    }
}
