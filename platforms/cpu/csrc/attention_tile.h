// Attention of one tile: up to TILE_ROWS rows (query tokens x the heads that share a key/value head) walk once over their
// keys, CHUNK at a time, and keep a running softmax (maximum, sum, weighted values) per row.
//
// For each chunk:   scores = rows x keys      lanes are keys, one row of K per dimension
//                   running softmax           per row
//                   acc += probabilities x V  lanes are dimensions, one row of V per token
// Both products work on register tiles of MR rows, so each K and V vector is loaded and widened once per MR rows. Included
// inside a namespace, after simd.h.

#if LANES == 16
#define MAX_MR 16
#else
#define MAX_MR 8
#endif

// ---- how each storage type lies in the cache -----------------------------------------------------------------------------

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

// ---- scores ------------------------------------------------------------------------------------------------------------

// MR rows against LANES keys. Few rows mean few independent sums, so those keep several sums each.
template <class KV, int MR>
INLINE void score_unit(const float* q, int ldq, const typename KV::T* k, int block, int pairs, float* s) {
    constexpr int SUMS = MR >= 4 ? 1 : MR >= 2 ? 2 : 4;
    constexpr int STEP = SUMS == 4 ? 2 : 1;
    vf acc[MR][SUMS] = {};
    for (int p = 0; p < pairs; p += STEP) {
        for (int u = 0; u < STEP; ++u) {
            vf a, b;
            KV::key_pair(k, block, p + u, a, b);
            for (int m = 0; m < MR; ++m) {
                const float* row = q + m * ldq + 2 * (p + u);
                acc[m][(2 * u) % SUMS] += a * row[0];
                acc[m][(2 * u + 1) % SUMS] += b * row[1];
            }
        }
    }
    for (int m = 0; m < MR; ++m) {
        vf sum = acc[m][0];
        for (int i = 1; i < SUMS; ++i) sum += acc[m][i];
        store(s + m * CHUNK, sum);
    }
}

#if HAS_BF16_DOT
INLINE vf dot_pairs(vf acc, vu a, uint32_t b) {
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)_mm512_set1_epi32(int(b)));
}

template <class KV, int MR>
INLINE void score_unit_dot(const uint32_t* q, int ldq, const uint16_t* k, int block, int pairs, float* s) {
    constexpr int STEP = MR >= 8 ? 1 : 2;  // `pairs` is even
    vf acc[MR][STEP] = {};
    for (int p = 0; p < pairs; p += STEP) {
        for (int u = 0; u < STEP; ++u) {
            vu r = Paired::raw(k + (p + u) * block * 2);
            for (int m = 0; m < MR; ++m) acc[m][u] = dot_pairs(acc[m][u], r, q[m * ldq + p + u]);
        }
    }
    for (int m = 0; m < MR; ++m) store(s + m * CHUNK, STEP == 2 ? acc[m][0] + acc[m][STEP - 1] : acc[m][0]);
}
#endif

// ---- weighted values ---------------------------------------------------------------------------------------------------

// acc[m][d .. d + NU * LANES) += sum over the chunk's tokens of p[m][token] * v[token][d ..).
template <class KV, int MR, int NU>
INLINE void value_unit(const float* p, const typename KV::T* const* strips, int tokens, int dv, int d, float* acc) {
    vf o[MR][NU];
    for (int m = 0; m < MR; ++m)
        for (int u = 0; u < NU; ++u) o[m][u] = load(acc + m * dv + d + u * LANES);
    for (int first = 0; first < tokens; first += STRIP) {
        const typename KV::T* v = KV::value_at(strips[first / STRIP], d);
        int n = tokens - first < STRIP ? tokens - first : STRIP;
        const float* row = p + first;
        for (int j = 0; j < n / 2; ++j) {
            for (int u = 0; u < NU; ++u) {
                vf a, b;
                KV::value_pair(KV::value_at(v, u * LANES), dv, j, a, b);
                for (int m = 0; m < MR; ++m) {
                    o[m][u] += a * row[m * CHUNK + 2 * j];
                    o[m][u] += b * row[m * CHUNK + 2 * j + 1];
                }
            }
        }
        if (n & 1) {
            for (int u = 0; u < NU; ++u) {
                vf a = KV::value_first(KV::value_at(v, u * LANES), dv, n / 2);
                for (int m = 0; m < MR; ++m) o[m][u] += a * row[m * CHUNK + n - 1];
            }
        }
    }
    for (int m = 0; m < MR; ++m)
        for (int u = 0; u < NU; ++u) store(acc + m * dv + d + u * LANES, o[m][u]);
}

#if HAS_BF16_DOT
template <int MR, int NU>
INLINE void value_unit_dot(const uint32_t* p, const uint16_t* const* strips, int tokens, int dv, int d, float* acc) {
    vf o[MR][NU];
    for (int m = 0; m < MR; ++m)
        for (int u = 0; u < NU; ++u) o[m][u] = load(acc + m * dv + d + u * LANES);
    for (int first = 0; first < tokens; first += STRIP) {
        const uint16_t* v = strips[first / STRIP] + d * 2;
        int n = tokens - first < STRIP ? tokens - first : STRIP;
        const uint32_t* row = p + first / 2;
        for (int j = 0; j < (n + 1) / 2; ++j) {
            uint32_t keep = 2 * j + 1 < n ? 0xffffffffu : 0x0000ffffu;
            for (int u = 0; u < NU; ++u) {
                vu r = Paired::raw(v + j * dv * 2 + u * LANES * 2) & keep;
                for (int m = 0; m < MR; ++m) o[m][u] = dot_pairs(o[m][u], r, row[m * (CHUNK / 2) + j]);
            }
        }
    }
    for (int m = 0; m < MR; ++m)
        for (int u = 0; u < NU; ++u) store(acc + m * dv + d + u * LANES, o[m][u]);
}
#endif

// ---- one chunk ---------------------------------------------------------------------------------------------------------

template <class T>
struct Chunk {
    const T* keys[CHUNK / STRIP];    // first key of each strip
    const T* values[CHUNK / STRIP];
    int begin;                       // position of its first token, a multiple of STRIP
    int tokens;                      // up to the last one that any row may see
};

template <class KV, int MR, bool DOT>
static void score_rows(const float* query, int row, const Chunk<typename KV::T>& chunk, int block, int dk, float* scores) {
    for (int first = 0; first < chunk.tokens; first += STRIP) {
        for (int u = 0; u < STRIP; u += LANES) {
            const typename KV::T* k = KV::key_at(chunk.keys[first / STRIP], u);
            float* s = scores + row * CHUNK + first + u;
#if HAS_BF16_DOT
            if constexpr (DOT) {
                const uint32_t* q = reinterpret_cast<const uint32_t*>(query) + row * (dk / 2);
                score_unit_dot<KV, MR>(q, dk / 2, k, block, dk / 2, s);
                continue;
            }
#endif
            score_unit<KV, MR>(query + row * dk, dk, k, block, dk / 2, s);
        }
    }
}

template <class KV, int MR, bool DOT>
static void value_rows(const Scratch& scratch, int row, const Chunk<typename KV::T>& chunk, int dv) {
    constexpr int NU = MR >= 8 ? 1 : MR >= 4 ? 2 : 4;
    float* acc = scratch.acc + row * dv;
    int d = 0;
#if HAS_BF16_DOT
    if constexpr (DOT) {
        const uint32_t* p = scratch.pairs + row * (CHUNK / 2);
        for (; d + NU * LANES <= dv; d += NU * LANES) value_unit_dot<MR, NU>(p, chunk.values, chunk.tokens, dv, d, acc);
        for (; d < dv; d += LANES) value_unit_dot<MR, 1>(p, chunk.values, chunk.tokens, dv, d, acc);
        return;
    }
#endif
    const float* p = scratch.scores + row * CHUNK;
    for (; d + NU * LANES <= dv; d += NU * LANES) value_unit<KV, MR, NU>(p, chunk.values, chunk.tokens, dv, d, acc);
    for (; d < dv; d += LANES) value_unit<KV, MR, 1>(p, chunk.values, chunk.tokens, dv, d, acc);
}

// Calls `body` with std::integral_constant-like register heights that cover `rows`.
template <int N>
struct Height {
    static constexpr int value = N;
};
template <class Body>
INLINE void by_height(int rows, Body body) {
    int row = 0;
    for (; rows - row >= MAX_MR; row += MAX_MR) body(row, Height<MAX_MR>());
#if MAX_MR == 16
    if (rows - row >= 8) body(row, Height<8>()), row += 8;
#endif
    switch (rows - row) {
        case 1: body(row, Height<1>()); break;
        case 2: body(row, Height<2>()); break;
        case 3: body(row, Height<3>()); break;
        case 4: body(row, Height<4>()); break;
        case 5: body(row, Height<5>()); break;
        case 6: body(row, Height<6>()); break;
        case 7: body(row, Height<7>()); break;
        default: break;
    }
}

// Turns one row's scores of a chunk into probabilities relative to the row's running maximum.
// Keys [low, high) of the chunk are visible to the row; the others get probability 0.
INLINE void softmax_row(float* s, int tokens, int low, int high, float scale, float soft_cap, float& row_max,
                        float& row_sum, float* acc, int dv) {
    const vf none = splat(-__builtin_inff());
    vi lane;
    for (int i = 0; i < LANES; ++i) lane[i] = i;
    vf top = none;
    for (int j = 0; j < tokens; j += LANES) {
        vf x = load(s + j) * scale;
        if (soft_cap != 0) x = vtanh(x * (1.f / soft_cap)) * soft_cap;
        if (j < low || j + LANES > high) {
            vi at = lane + j;
            x = ((at >= low) & (at < high)) ? x : none;
        }
        store(s + j, x);
        top = vmax(x, top);
    }
    float old_max = row_max, new_max = max_lanes(top);
    new_max = new_max > old_max ? new_max : old_max;
    float base = new_max == -__builtin_inff() ? 0.f : new_max;
    vf sum = {};
    for (int j = 0; j < tokens; j += LANES) {
        vf e = vexp(load(s + j) - base);
        store(s + j, e);
        sum += e;
    }
    if (new_max != old_max) {
        float shrink = exp_one(old_max - base);
        row_sum *= shrink;
        for (int d = 0; d < dv; d += LANES) store(acc + d, load(acc + d) * shrink);
        row_max = new_max;
    }
    row_sum += sum_lanes(sum);
}

#if HAS_BF16_DOT
INLINE void pack_row(const float* p, uint32_t* pairs, int tokens) {
    for (int j = 0; j < tokens; j += STRIP) {
        BFloat16::narrow(reinterpret_cast<uint16_t*>(pairs) + j, load(p + j));
    }
}
#endif

// ---- rows in and out ---------------------------------------------------------------------------------------------------

template <class E>
INLINE void read_query(const typename E::type* in, int size, int padded, float* out) {
    int d = 0;
    for (; d + LANES <= size; d += LANES) store(out + d, E::widen(in + d));
    for (; d < size; ++d) out[d] = E::get(in[d]);
    for (; d < padded; ++d) out[d] = 0;
}

template <class E>
INLINE void write_row(const float* acc, float factor, int size, typename E::type* out) {
    int d = 0;
    for (; d + LANES <= size; d += LANES) E::narrow(out + d, load(acc + d) * factor);
    for (; d < size; ++d) out[d] = E::put(acc[d] * factor);
}

// Row m of a tile is head `kv_head * group + m % group` of token `query_begin + m / group`.
INLINE int64_t token_of(const Geometry& g, const Item& item, int m) {
    return g.batch.query_start_loc[item.request] + item.query_begin + m / g.group;
}

template <bool DOT>
static void read_rows(const Geometry& g, const Layer& layer, const Item& item, int rows, float* query) {
    for (int m = 0; m < rows; ++m) {
        int64_t at = token_of(g, item, m) * layer.query_stride +
                     int64_t(item.kv_head * g.group + m % g.group) * g.spec.head_size;
        int size = g.spec.head_size;
        if (DOT) {
            uint16_t* out = reinterpret_cast<uint16_t*>(query) + m * g.dk;
            __builtin_memcpy(out, static_cast<const uint16_t*>(layer.query) + at, size_t(size) * 2);
            for (int d = size; d < g.dk; ++d) out[d] = 0;
            continue;
        }
        float* out = query + m * g.dk;
        switch (g.spec.dtype) {
            case F32: read_query<Float32>(static_cast<const float*>(layer.query) + at, size, g.dk, out); break;
            case BF16: read_query<BFloat16>(static_cast<const uint16_t*>(layer.query) + at, size, g.dk, out); break;
            default: read_query<Float16>(static_cast<const uint16_t*>(layer.query) + at, size, g.dk, out); break;
        }
    }
}

INLINE void finish_row(const Geometry& g, const Layer& layer, const Item& item, int m, const float* acc, float row_max,
                       float row_sum) {
    int head = item.kv_head * g.group + m % g.group;
    float factor = 1.f;
    if (layer.sinks) {
        float sink = layer.sinks[head], top = sink > row_max ? sink : row_max;
        factor = exp_one(row_max - top);
        row_sum = row_sum * factor + exp_one(sink - top);
    }
    factor = row_sum > 0 ? factor / row_sum : row_sum == row_sum ? 0.f : row_sum;
    int64_t at = (token_of(g, item, m) * g.spec.num_heads + head) * g.spec.head_size;
    switch (g.spec.dtype) {
        case F32: write_row<Float32>(acc, factor, g.spec.head_size, static_cast<float*>(layer.out) + at); break;
        case BF16: write_row<BFloat16>(acc, factor, g.spec.head_size, static_cast<uint16_t*>(layer.out) + at); break;
        default: write_row<Float16>(acc, factor, g.spec.head_size, static_cast<uint16_t*>(layer.out) + at); break;
    }
}

// ---- a tile ------------------------------------------------------------------------------------------------------------

template <class KV, bool DOT, bool DOT_VALUES>
static void attend_tile(const Geometry& g, const Layer& layer, const Item& item, const Scratch& scratch, float* partials) {
    typedef typename KV::T T;
    const int rows = (item.query_end - item.query_begin) * g.group, block = g.batch.block_size;
    const int32_t* table = g.batch.block_table + int64_t(item.request) * g.batch.block_table_stride;
    const int new_tokens = g.batch.query_start_loc[item.request + 1] - g.batch.query_start_loc[item.request];
    const int first_position = g.batch.seq_lens[item.request] - new_tokens + item.query_begin;

    read_rows<DOT>(g, layer, item, rows, scratch.query);
    for (int m = 0; m < rows; ++m) scratch.row_max[m] = -__builtin_inff(), scratch.row_sum[m] = 0;
    for (int i = 0; i < rows * g.dv; ++i) scratch.acc[i] = 0;

    Chunk<T> chunk;
    for (int begin = item.key_begin / STRIP * STRIP; begin < item.key_end; begin += CHUNK) {
        chunk.begin = begin;
        chunk.tokens = item.key_end - begin < CHUNK ? item.key_end - begin : CHUNK;
        for (int first = 0; first < chunk.tokens; first += STRIP) {
            int64_t id = table[(begin + first) / block];
            int offset = (begin + first) % block;
            int64_t head = id * g.spec.num_kv_heads + item.kv_head;
            chunk.keys[first / STRIP] = KV::key_at(static_cast<const T*>(layer.keys) + head * g.key_head, offset);
            chunk.values[first / STRIP] = static_cast<const T*>(layer.values) + head * g.value_head + offset * g.dv;
        }
        by_height(rows, [&](int row, auto height) {
            score_rows<KV, decltype(height)::value, DOT>(scratch.query, row, chunk, block, g.dk, scratch.scores);
        });
        const int covered = round_up(chunk.tokens, STRIP);
        for (int m = 0; m < rows; ++m) {
            int position = first_position + m / g.group;
            int high = position + 1 < item.key_end ? position + 1 : item.key_end;
            int low = g.spec.window ? position - g.spec.window + 1 : 0;
            low = low > item.key_begin ? low : item.key_begin;
            softmax_row(scratch.scores + m * CHUNK, covered, low - begin, high - begin, g.spec.scale, g.spec.soft_cap,
                        scratch.row_max[m], scratch.row_sum[m], scratch.acc + m * g.dv, g.dv);
#if HAS_BF16_DOT
            if (DOT_VALUES) pack_row(scratch.scores + m * CHUNK, scratch.pairs + m * (CHUNK / 2), covered);
#endif
        }
        by_height(rows, [&](int row, auto height) {
            value_rows<KV, decltype(height)::value, DOT_VALUES>(scratch, row, chunk, g.dv);
        });
    }

    if (item.partial < 0) {
        for (int m = 0; m < rows; ++m)
            finish_row(g, layer, item, m, scratch.acc + m * g.dv, scratch.row_max[m], scratch.row_sum[m]);
        return;
    }
    float* to = partials + int64_t(item.partial) * g.partial_size;
    __builtin_memcpy(to, scratch.acc, sizeof(float) * rows * g.dv);
    __builtin_memcpy(to + g.tile_rows * g.dv, scratch.row_max, sizeof(float) * rows);
    __builtin_memcpy(to + g.tile_rows * (g.dv + 1), scratch.row_sum, sizeof(float) * rows);
}

static void attend(const Geometry& g, const Layer& layer, const Item& item, const Scratch& scratch, float* partials) {
    switch (g.spec.kv_dtype) {
        case F32: return attend_tile<Plain<Float32>, false, false>(g, layer, item, scratch, partials);
        case F16: return attend_tile<Plain<Float16>, false, false>(g, layer, item, scratch, partials);
        default: break;
    }
#if HAS_BF16_DOT
    // A bfloat16 query loses nothing in the dot product. Probabilities do lose bits, so they are narrowed only where
    // arithmetic, not memory, sets the pace: in tiles of several tokens.
    if (g.spec.dtype == BF16) {
        if (item.query_end - item.query_begin > 1)
            return attend_tile<Paired, true, true>(g, layer, item, scratch, partials);
        return attend_tile<Paired, true, false>(g, layer, item, scratch, partials);
    }
#endif
    attend_tile<Paired, false, false>(g, layer, item, scratch, partials);
}

// Puts a split tile together: each partial result counts by e^(its maximum - the overall maximum).
static void combine(const Geometry& g, const Layer& layer, const SplitTile& tile, const Scratch& scratch,
                    const float* partials) {
    const int rows = (tile.item.query_end - tile.item.query_begin) * g.group;
    float* acc = scratch.acc;
    for (int m = 0; m < rows; ++m) {
        const float* first = partials + int64_t(tile.first_partial) * g.partial_size;
        float top = -__builtin_inff(), sum = 0;
        for (int i = 0; i < tile.num_partials; ++i) {
            float one = first[int64_t(i) * g.partial_size + g.tile_rows * g.dv + m];
            top = one > top ? one : top;
        }
        float base = top == -__builtin_inff() ? 0.f : top;
        for (int d = 0; d < g.dv; ++d) acc[d] = 0;
        for (int i = 0; i < tile.num_partials; ++i) {
            const float* part = first + int64_t(i) * g.partial_size;
            float factor = exp_one(part[g.tile_rows * g.dv + m] - base);
            sum += factor * part[g.tile_rows * (g.dv + 1) + m];
            for (int d = 0; d < g.dv; ++d) acc[d] += factor * part[m * g.dv + d];
        }
        finish_row(g, layer, tile.item, m, acc, top, sum);
    }
}
