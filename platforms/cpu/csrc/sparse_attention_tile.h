// Sparse attention: the index scores of keys, and attention over selected positions. Included inside a namespace, after
// attention_tile.h and kv_store.h.
//
// The selected tokens of a chunk are copied to scratch memory in the layout of other caches, where each is read once per
// MAX_MR heads. From there on, attention is that of attention_tile.h.

// ---- selected tokens ---------------------------------------------------------------------------------------------------

typedef uint32_t word_mem __attribute__((aligned(2), may_alias));

// out[i][t] = rows[t][i] for STRIP rows of `size` words, a multiple of 16.
template <class Word>
INLINE void turn_rows(const Word* const* rows, int size, Word* out) {
#if LANES == 16
    if constexpr (sizeof(Word) == 4) {
        for (int i = 0; i < size; i += STRIP) {
            __m512i square[STRIP];
            for (int t = 0; t < STRIP; ++t) square[t] = _mm512_loadu_si512(rows[t] + i);
            turn_lanes(square);
            for (int t = 0; t < STRIP; ++t) _mm512_storeu_si512(out + (i + t) * STRIP, square[t]);
        }
        return;
    }
#endif
    for (int i = 0; i < size; ++i)
        for (int t = 0; t < STRIP; ++t) out[i * STRIP + t] = rows[t][i];
}

// STRIP tokens to keys [dk][STRIP], in pairs [dk / 2][STRIP][2].
template <class KV>
INLINE void gather_keys(const typename KV::T* const* tokens, int dk, typename KV::T* keys) {
    if constexpr (KV::paired || sizeof(typename KV::T) == 4) {
        const word_mem* words[STRIP];
        for (int t = 0; t < STRIP; ++t) words[t] = reinterpret_cast<const word_mem*>(tokens[t]);
        turn_rows<word_mem>(words, KV::paired ? dk / 2 : dk, reinterpret_cast<word_mem*>(keys));
    } else {
        turn_rows(tokens, dk, keys);
    }
}

// STRIP tokens to values [STRIP][dv], in pairs [STRIP / 2][dv][2]. Dimensions after the last one of values are not used.
template <class KV>
INLINE void gather_values(const typename KV::T* const* tokens, int dv, typename KV::T* values) {
    typedef typename KV::T T;
    if constexpr (KV::paired) {
        for (int t = 0; t < STRIP; t += 2)
            for (int d = 0; d < dv; d += LANES) {
                const vu low = __builtin_convertvector(*reinterpret_cast<const vh_mem*>(tokens[t] + d), vu);
                const vu high = __builtin_convertvector(*reinterpret_cast<const vh_mem*>(tokens[t + 1] + d), vu);
                *reinterpret_cast<vu_mem*>(values + (t / 2 * dv + d) * 2) = low | high << 16;
            }
    } else {
        for (int t = 0; t < STRIP; ++t) __builtin_memcpy(values + t * dv, tokens[t], sizeof(T) * size_t(dv));
    }
}

// Copies the tokens at these positions of a request, `chunk.tokens` of them, to scratch memory.
template <class KV, class Bytes>
static void gather_chunk(const Geometry& g, const Cache& cache, int request, const int32_t* positions, const Scratch& scratch,
                         Chunk<typename KV::T>& chunk) {
    typedef typename KV::T T;
    const int32_t* const table = g.batch.block_table + int64_t(request) * g.batch.block_table_stride;
    const int block = g.batch.block_size;
    for (int first = 0; first < chunk.tokens; first += STRIP) {
        const T* tokens[STRIP];
        for (int t = 0; t < STRIP; ++t) {
            if (first + t >= chunk.tokens) {  // not visible, but read
                tokens[t] = tokens[t - 1];
                continue;
            }
            const int position = positions[first + t];
            const int64_t slot = int64_t(table[position / block]) * block + position % block;
            if constexpr (Bytes::scaled) {
                T* const widened = scratch.widened + t * g.dk;
                widen_pairs<Bytes>(static_cast<const uint8_t*>(cache.keys) + slot * g.dk, widened, g.dk / 2);
                tokens[t] = widened;
                chunk.key_scales[first + t] = chunk.value_scales[first + t] = cache.key_scales[slot];
            } else {
                tokens[t] = static_cast<const T*>(cache.keys) + slot * g.dk;
            }
        }
        T* const keys = static_cast<T*>(scratch.keys) + first * g.dk;
        T* const values = static_cast<T*>(scratch.values) + first * g.dv;
        gather_keys<KV>(tokens, g.dk, keys);
        gather_values<KV>(tokens, g.dv, values);
        chunk.keys[first / STRIP] = keys;
        chunk.values[first / STRIP] = values;
    }
}

// Attention of one token over selected positions: `key_begin` and `key_end` are indices in its row of `positions`, whose
// last ones may be empty.
template <class KV, class Bytes, bool DOT, bool DOT_VALUES>
static void sparse_attention_tile(const Geometry& g, const Layer& layer, WorkItem item, const Scratch& scratch,
                                  float* partials) {
    constexpr int EVERYTHING_IS_EARLIER = 1 << 30;
    const int rows = g.group;
    const int32_t* const positions = layer.positions + token_of(g, item, 0) * g.spec.index_topk;
    int end = item.key_begin;
    while (end < item.key_end && positions[end] >= 0) ++end;
    item.key_end = end;
    read_rows<DOT>(g, layer, item, rows, scratch.query);
    clear_rows(g, scratch, rows);
    Chunk<typename KV::T> chunk;
    chunk.ahead = nullptr;
    chunk.stride = STRIP;
    for (int begin = item.key_begin; begin < end; begin += CHUNK) {
        chunk.begin = begin;
        chunk.tokens = least_of(end - begin, CHUNK);
        gather_chunk<KV, Bytes>(g, layer.cache, item.request, positions + begin, scratch, chunk);
        for (int row = 0; row < rows; row += MAX_MR)
            with_constant<MAX_MR>(least_of(rows - row, MAX_MR), [&](auto height) {
                paged_attention_rows<KV, Bytes, DOT, DOT_VALUES, decltype(height)::value>(g, item, chunk, scratch, row,
                                                                                          EVERYTHING_IS_EARLIER);
            });
    }
    if (item.partial >= 0) return store_partial(g, scratch, rows, partials + int64_t(item.partial) * g.partial_size);
    for (int m = 0; m < rows; ++m)
        finish_row(g, layer, item, m, scratch.acc + m * g.dv, scratch.row_max[m], total(scratch.row_sum + m * STRIP));
}

template <class Bytes>
static void sparse_attention_paired(const Geometry& g, const Layer& layer, const WorkItem& item, const Scratch& scratch,
                                    float* partials) {
#if HAS_BF16_DOT
    if (g.spec.dtype == BF16) {
        if (rounds_probabilities(g, item, Bytes::scaled))
            return sparse_attention_tile<Paired, Bytes, true, true>(g, layer, item, scratch, partials);
        return sparse_attention_tile<Paired, Bytes, true, false>(g, layer, item, scratch, partials);
    }
#endif
    sparse_attention_tile<Paired, Bytes, false, false>(g, layer, item, scratch, partials);
}

static void sparse_attention(const Geometry& g, const Layer& layer, const WorkItem& item, const WorkItem*,
                             const Scratch& scratch, float* partials) {
    switch (g.spec.kv_dtype) {
        case F32: return sparse_attention_tile<Plain<Float32>, NoBytes, false, false>(g, layer, item, scratch, partials);
        case F16: return sparse_attention_tile<Plain<Float16>, NoBytes, false, false>(g, layer, item, scratch, partials);
        case INT8: return sparse_attention_paired<Int8>(g, layer, item, scratch, partials);
        case FP8: return sparse_attention_paired<Fp8>(g, layer, item, scratch, partials);
        default: return sparse_attention_paired<NoBytes>(g, layer, item, scratch, partials);
    }
}

// ---- index scores ------------------------------------------------------------------------------------------------------

// The score of a key is the sum over heads of weight * max(0, scale * query * key), added in the order of heads. It depends
// neither on the other queries nor on the other keys of the item, so that a selection does not depend on how a prompt is cut.
template <class KV, class Bytes, bool DOT>
static void index_scores_tile(const Geometry& g, const IndexLayer& index, const IndexItem& part, const Scratch& scratch) {
    const WorkItem& item = part.item;
    const int tokens = item.query_end - item.query_begin, heads = g.spec.num_heads;
    const int new_tokens = g.batch.query_start_loc[item.request + 1] - g.batch.query_start_loc[item.request];
    const int first_position = g.batch.seq_lens[item.request] - new_tokens + item.query_begin;
    const float scale = g.spec.scale;
    read_rows<DOT>(g, index.layer, item, tokens * heads, scratch.query);
    Chunk<typename KV::T> chunk;
    chunk.ahead = nullptr;
    for (int begin = item.key_begin; begin < item.key_end; begin += CHUNK) {
        find_chunk<KV, Bytes>(g, index.layer, item, begin, scratch, chunk);
        const int end = round_up(chunk.tokens, STRIP);
        for (int t = 0; t < tokens; ++t) {
            if (first_position + t < begin) continue;
            float* const sums = index.scores + part.scores + t * part.stride + begin;
            const float* const weights = index.weights + token_of(g, item, t * heads) * index.weights_stride;
            for (int j = 0; j < end; j += LANES) store(sums + j, vf{});
            for (int head = 0; head < heads; head += MAX_MR) {
                const int count = least_of(heads - head, MAX_MR);
                const float* const query = scratch.query + (t * heads + head) * (DOT ? g.dk / 2 : g.dk);
                with_constant<MAX_MR>(count, [&](auto height) {
                    score_rows<KV, DOT, decltype(height)::value>(query, g.dk, chunk, 0, end, scratch.scores, nullptr);
                });
                for (int j = 0; j < end; j += LANES) {
                    vf sum = load(sums + j);
                    for (int m = 0; m < count; ++m) {
                        vf product = load(scratch.scores + m * CHUNK + j) * scale;
                        if (Bytes::scaled) product = product * load(chunk.key_scales + j);
                        sum += weights[head + m] * vmax(vf{}, product);
                    }
                    store(sums + j, sum);
                }
            }
        }
    }
}

template <class Bytes>
static void index_scores_pairs(const Geometry& g, const IndexLayer& index, const IndexItem& part, const Scratch& scratch) {
#if HAS_BF16_DOT
    if (g.spec.dtype == BF16) return index_scores_tile<Paired, Bytes, true>(g, index, part, scratch);
#endif
    index_scores_tile<Paired, Bytes, false>(g, index, part, scratch);
}

static void index_scores(const Geometry& g, const IndexLayer& index, const IndexItem& part, const Scratch& scratch) {
    switch (g.spec.kv_dtype) {
        case F32: return index_scores_tile<Plain<Float32>, NoBytes, false>(g, index, part, scratch);
        case F16: return index_scores_tile<Plain<Float16>, NoBytes, false>(g, index, part, scratch);
        case INT8: return index_scores_pairs<Int8>(g, index, part, scratch);
        case FP8: return index_scores_pairs<Fp8>(g, index, part, scratch);
        default: return index_scores_pairs<NoBytes>(g, index, part, scratch);
    }
}
