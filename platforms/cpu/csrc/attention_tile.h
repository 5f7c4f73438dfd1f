// Attention of one tile: up to TILE_ROWS rows (query tokens x the query heads of a key/value head) are computed in one
// pass over their keys, CHUNK at a time, with a running softmax (maximum, sum, weighted values) per row.
//
// For each chunk and MR rows at a time:
//
//     scores = rows x keys      lanes are keys, one row of K per dimension
//     running softmax           per row
//     acc += probabilities x V  lanes are dimensions, one row of V per token
//
// Both products use register tiles of MR rows x NV vectors: each K and V vector is loaded (and widened) once per MR
// rows, each element of a row once per NV vectors. Keys that are masked for all MR rows are not read. Included inside a
// namespace, after simd.h.

#include "attention_cache.h"

// Width of a register tile in vectors.
#if !MVLLM_SMALL_TILES && (LANES == 16 || (LANES == 4 && defined(__aarch64__)))
#define MAX_NV 4
#else
#define MAX_NV 2
#endif

#if HAS_BF16_DOT
INLINE vf dot_pairs(vf acc, vu a, uint32_t b) { return dot_pair(acc, a, b); }
#else
INLINE vf dot_pairs(vf acc, vu, uint32_t) { return acc; }
#endif

constexpr int READ_AHEAD_ROWS = 16;

// Calls `body` with N as a constant, for N in 1 .. LIMIT.
template <int N>
struct Constant {
    static constexpr int value = N;
};
template <int LIMIT, class Body>
INLINE void with_constant(int n, Body body) {
    if constexpr (LIMIT > 1) {
        if (n < LIMIT) return with_constant<LIMIT - 1>(n, body);
    }
    body(Constant<LIMIT>());
}

// ---- scores ------------------------------------------------------------------------------------------------------------

constexpr int AHEAD_STEP = 4;  // pairs of dimensions between two prefetches

// Scores of MR rows and NV vectors of keys. Queries are floats, or pairs of bfloat16 with DOT. Meanwhile it prefetches
// the values of `num_ahead` strips.
template <class KV, bool DOT, int MR, int NV>
static void score_unit(const float* query, int dk, const typename KV::T* const* keys, int stride, float* scores,
                       const Strip* ahead, int num_ahead) {
    vf acc[MR][NV] = {};
    const int bits = (dk / 2 + AHEAD_STEP - 1) / AHEAD_STEP, lines = num_ahead ? (ahead->value_lines + bits - 1) / bits : 0;
    auto read_ahead = [&](int p) {
        if (lines && p % AHEAD_STEP == 0)
            for (int i = 0; i < num_ahead; ++i) ahead[i].prefetch_values(p / AHEAD_STEP * lines, lines);
    };
    if constexpr (DOT) {
        const uint32_t* q = reinterpret_cast<const uint32_t*>(query);
        for (int p = 0; p < dk / 2; ++p) {
            read_ahead(p);
            vu k[NV];
            for (int v = 0; v < NV; ++v) k[v] = Paired::raw(reinterpret_cast<const uint16_t*>(keys[v]) + p * stride * 2);
            for (int m = 0; m < MR; ++m)
                for (int v = 0; v < NV; ++v) acc[m][v] = dot_pairs(acc[m][v], k[v], q[m * (dk / 2) + p]);
        }
    } else {
        for (int p = 0; p < dk / 2; ++p) {
            read_ahead(p);
            for (int v = 0; v < NV; ++v) {
                vf a, b;
                KV::key_pair(keys[v], stride, p, a, b);
                for (int m = 0; m < MR; ++m) {
                    acc[m][v] += a * query[m * dk + 2 * p];
                    acc[m][v] += b * query[m * dk + 2 * p + 1];
                }
            }
        }
    }
    for (int m = 0; m < MR; ++m)
        for (int v = 0; v < NV; ++v) store(scores + m * CHUNK + v * LANES, acc[m][v]);
}

// Scores of tokens [first, end) of the chunk; both are multiples of STRIP.
template <class KV, bool DOT, int MR>
static void score_rows(const float* query, int dk, const Chunk<typename KV::T>& chunk, int first, int end, float* scores,
                       const Strip* ahead) {
    for (int t = first; t < end; t += MAX_NV * LANES) {
        const int count = end - t < MAX_NV * LANES ? (end - t) / LANES : MAX_NV;
        const typename KV::T* keys[MAX_NV];
        for (int v = 0; v < count; ++v)
            keys[v] = KV::key_at(chunk.keys[(t + v * LANES) / STRIP], (t + v * LANES) % STRIP);
        with_constant<MAX_NV>(count, [&](auto n) {
            const int num_ahead = ahead && t % STRIP == 0 ? round_up(count * LANES, STRIP) / STRIP : 0;
            score_unit<KV, DOT, MR, decltype(n)::value>(query, dk, keys, chunk.stride, scores + t,
                                                        num_ahead ? ahead + t / STRIP : nullptr, num_ahead);
        });
    }
}

// ---- weighted values ---------------------------------------------------------------------------------------------------

// acc[m][d .. d + NV * LANES) += sum over tokens [first, end) of p[m][token] * v[token][d ..). Probabilities are floats
// [MR, CHUNK], or pairs [MR, CHUNK / 2] with DOT, zero after an odd end. `first` is a multiple of STRIP.
template <class KV, bool DOT, int MR, int NV>
static void value_unit(const void* probabilities, const Chunk<typename KV::T>& chunk, int first, int end, int dv, int d,
                       float* acc, const Strip* ahead) {
    typedef typename KV::T T;
    constexpr int BITS = STRIP / 2;
    const int lines = ahead ? (ahead->key_lines + BITS - 1) / BITS : 0;
    vf o[MR][NV];
    for (int m = 0; m < MR; ++m)
        for (int v = 0; v < NV; ++v) o[m][v] = load(acc + m * dv + d + v * LANES);
    for (int t = first; t < end; t += STRIP) {
        const T* values = KV::value_at(chunk.values[t / STRIP], d);
        const int n = end - t < STRIP ? end - t : STRIP;
        if constexpr (DOT) {
            const uint32_t* p = static_cast<const uint32_t*>(probabilities) + t / 2;
            auto add = [&](int j, uint32_t keep) {
                if (lines) ahead[t / STRIP].prefetch_keys(j * lines, lines);
                vu x[NV];
                for (int v = 0; v < NV; ++v)
                    x[v] = Paired::raw(reinterpret_cast<const uint16_t*>(values) + (j * dv + v * LANES) * 2) & keep;
                for (int m = 0; m < MR; ++m)
                    for (int v = 0; v < NV; ++v) o[m][v] = dot_pairs(o[m][v], x[v], p[m * (CHUNK / 2) + j]);
            };
            for (int j = 0; j < n / 2; ++j) add(j, 0xffffffffu);
            if (n & 1) add(n / 2, 0x0000ffffu);
        } else {
            const float* p = static_cast<const float*>(probabilities) + t;
            for (int j = 0; j < n / 2; ++j) {
                if (lines) ahead[t / STRIP].prefetch_keys(j * lines, lines);
                for (int v = 0; v < NV; ++v) {
                    vf a, b;
                    KV::value_pair(KV::value_at(values, v * LANES), dv, j, a, b);
                    for (int m = 0; m < MR; ++m) {
                        o[m][v] += a * p[m * CHUNK + 2 * j];
                        o[m][v] += b * p[m * CHUNK + 2 * j + 1];
                    }
                }
            }
            if (n & 1) {
                for (int v = 0; v < NV; ++v) {
                    const vf a = KV::value_first(KV::value_at(values, v * LANES), dv, n / 2);
                    for (int m = 0; m < MR; ++m) o[m][v] += a * p[m * CHUNK + n - 1];
                }
            }
        }
    }
    for (int m = 0; m < MR; ++m)
        for (int v = 0; v < NV; ++v) store(acc + m * dv + d + v * LANES, o[m][v]);
}

template <class KV, bool DOT, int MR>
static void value_rows(const void* probabilities, const Chunk<typename KV::T>& chunk, int first, int end, int dv,
                       float* acc, const Strip* ahead) {
    for (int d = 0; d < dv; d += MAX_NV * LANES) {
        const int count = dv - d < MAX_NV * LANES ? (dv - d) / LANES : MAX_NV;
        with_constant<MAX_NV>(count, [&](auto n) {
            value_unit<KV, DOT, MR, decltype(n)::value>(probabilities, chunk, first, end, dv, d, acc, d ? nullptr : ahead);
        });
    }
}

// ---- running softmax ---------------------------------------------------------------------------------------------------

// Scores are exponents of 2. A row's sums are relative to 2^row_max. row_max is updated only when the maximum exceeds
// it by SLACK: smaller excesses neither overflow nor cost precision.
constexpr float SLACK = 8.f;

// Converts one row's scores of tokens [first, end), of which [low, high) are visible to it, to probabilities, in place
// or as pairs of bfloat16. `first` and `end` are multiples of STRIP.
template <bool SCALED, bool PAIRS, class T>
INLINE void softmax_row(const Spec& spec, const Chunk<T>& chunk, int first, int end, int low, int high, float* s,
                        uint32_t* pairs, float& row_max, float* row_sum, float* acc, int dv) {
    const float infinity = __builtin_inff();
    vi lane;
    for (int i = 0; i < LANES; ++i) lane[i] = i;
    // The maximum score gives the maximum exponent, unless scores are modified first.
    const bool changed = SCALED || spec.soft_cap != 0 || !(spec.scale > 0);
    const float factor = changed ? 1.f : spec.scale * LOG2E;
    vf top = splat(-infinity);
    for (int j = first; j < end; j += LANES) {
        vf x = load(s + j);
        if (changed) {
            if (SCALED) x = x * load(chunk.key_scales + j);
            if (spec.soft_cap != 0) {
                x = vtanh(x * (spec.scale / spec.soft_cap)) * (spec.soft_cap * LOG2E);
            } else {
                x = x * (spec.scale * LOG2E);
            }
        }
        const bool edge = j < low || j + LANES > high;
        if (edge) {
            const vi at = lane + j;
            x = ((at >= low) & (at < high)) ? x : splat(-infinity);
        }
        if (changed || edge) store(s + j, x);
        top = vmax(x, top);
    }
    top = top * factor;
    if (any_greater(top, splat(row_max + SLACK))) {
        const float new_max = max_lanes(top);
        if (row_max != -infinity) {
            const float shrink = exp2_one(row_max - new_max);
            for (int i = 0; i < LANES; i += LANES) store(row_sum + i, load(row_sum + i) * shrink);
            for (int d = 0; d < dv; d += LANES) store(acc + d, load(acc + d) * shrink);
        }
        row_max = new_max;
    }
    const float base = row_max == -infinity ? 0.f : row_max;
    vf sum = load(row_sum);
    for (int j = first; j < end; j += LANES) {
        vf e = vexp2<!PAIRS>(load(s + j) * factor - base);
        sum += e;
        if (SCALED) {
            e = e * load(chunk.value_scales + j);
            if (j < low || j + LANES > high) {  // scales of unused slots are undefined
                const vi at = lane + j;
                e = ((at >= low) & (at < high)) ? e : vf{};
            }
        }
        if (PAIRS) {
            BFloat16::narrow(reinterpret_cast<uint16_t*>(pairs) + j, e);
        } else {
            store(s + j, e);
        }
    }
    store(row_sum, sum);
}

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
INLINE int64_t token_of(const Geometry& g, const WorkItem& item, int m) {
    return g.batch.query_start_loc[item.request] + item.query_begin + m / g.group;
}

template <bool DOT>
static void read_rows(const Geometry& g, const Layer& layer, const WorkItem& item, int rows, float* query) {
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

INLINE float sink_of(const Layer& layer, int head) {
    switch (layer.sinks_dtype) {
        case F32: return static_cast<const float*>(layer.sinks)[head];
        case BF16: return BFloat16::get(static_cast<const uint16_t*>(layer.sinks)[head]);
        default: return Float16::get(static_cast<const uint16_t*>(layer.sinks)[head]);
    }
}

INLINE void finish_row(const Geometry& g, const Layer& layer, const WorkItem& item, int m, const float* acc, float row_max,
                       float row_sum) {
    const int head = item.kv_head * g.group + m % g.group, size = g.spec.value_size;
    float factor = 1.f;
    if (layer.sinks) {
        const float sink = sink_of(layer, head) * LOG2E, top = sink > row_max ? sink : row_max;
        factor = exp2_one(row_max - top);
        row_sum = row_sum * factor + exp2_one(sink - top);
    }
    factor = row_sum > 0 ? factor / row_sum : row_sum == row_sum ? 0.f : row_sum;
    int64_t at = (token_of(g, item, m) * g.spec.num_heads + head) * size;
    switch (g.spec.dtype) {
        case F32: write_row<Float32>(acc, factor, size, static_cast<float*>(layer.out) + at); break;
        case BF16: write_row<BFloat16>(acc, factor, size, static_cast<uint16_t*>(layer.out) + at); break;
        default: write_row<Float16>(acc, factor, size, static_cast<uint16_t*>(layer.out) + at); break;
    }
}

// ---- a tile ------------------------------------------------------------------------------------------------------------

INLINE int least_of(int a, int b) { return a < b ? a : b; }

// The tokens of a chunk that rows [row, row + count) attend to: row m to [low, high), all within [first, last); `first` is a
// multiple of STRIP. `last` is 0 if there are none.
template <int MOST>
struct Visible {
    int low[MOST], high[MOST], first, last = 0;

    template <class T>
    Visible(const Geometry& g, const WorkItem& item, const Chunk<T>& chunk, int row, int count, int first_position) {
        first = chunk.tokens;
        for (int m = 0; m < count; ++m) {
            const int position = first_position + (row + m) / g.group;
            const int begin = g.spec.window ? position - g.spec.window + 1 : 0;
            const int seen = g.batch.visible_lens ? g.batch.visible_lens[token_of(g, item, row + m)] : position + 1;
            low[m] = (begin > item.key_begin ? begin : item.key_begin) - chunk.begin;
            low[m] = low[m] > 0 ? low[m] : 0;
            high[m] = (seen < item.key_end ? seen : item.key_end) - chunk.begin;
            high[m] = high[m] < chunk.tokens ? high[m] : chunk.tokens;
            if (low[m] >= high[m]) continue;
            first = low[m] < first ? low[m] : first;
            last = high[m] > last ? high[m] : last;
        }
        first = first / STRIP * STRIP;
    }
};

#if HAS_TILES
#include "amx_attention_tile.h"
#endif

// Attention of MR rows, from `row` on, over one chunk.
template <class KV, class Bytes, bool DOT, bool DOT_VALUES, int MR>
static void paged_attention_rows(const Geometry& g, const WorkItem& item, const Chunk<typename KV::T>& chunk,
                                 const Scratch& scratch, int row, int first_position) {
    const Visible<MR> visible(g, item, chunk, row, MR, first_position);
    const int first = visible.first, last = visible.last;
    if (last == 0) return;
    const int end = round_up(last, STRIP);
    const float* query = scratch.query + row * (DOT ? g.dk / 2 : g.dk);
    float* acc = scratch.acc + row * g.dv;
    // Values are prefetched while keys are read, and the next keys while values are read.
    const Strip* ahead = row || Bytes::scaled ? nullptr : chunk.ahead;
    score_rows<KV, DOT, MR>(query, g.dk, chunk, first, end, scratch.scores, ahead);
    for (int m = 0; m < MR; ++m)
        softmax_row<Bytes::scaled, DOT_VALUES>(g.spec, chunk, first, end, visible.low[m], visible.high[m],
                                               scratch.scores + m * CHUNK, scratch.pairs + m * (CHUNK / 2), scratch.row_max[row + m],
                                               scratch.row_sum + (row + m) * STRIP, acc + m * g.dv, g.dv);
    const void* probabilities = DOT_VALUES ? static_cast<void*>(scratch.pairs) : scratch.scores;
    value_rows<KV, DOT_VALUES, MR>(probabilities, chunk, first, last, g.dv, acc, ahead ? ahead + CHUNK / STRIP : nullptr);
}

// Loads (TAKE) or saves the state of the rows of the tile's token `t`.
template <bool TAKE>
static void copy_state(const Geometry& g, float* state, const Scratch& scratch, int t) {
    const int first = t * g.group;
    auto copy = [&](float* here, int count) {
        __builtin_memcpy(TAKE ? here : state, TAKE ? state : here, sizeof(float) * size_t(count));
        state += count;
    };
    copy(scratch.acc + first * g.dv, g.group * g.dv);
    copy(scratch.row_max + first, g.group);
    copy(scratch.row_sum + first * STRIP, g.group * STRIP);
}

INLINE float total(const float* row_sum) { return sum_lanes(load(row_sum)); }

// ---- segments (Spec::batch_invariant) ----------------------------------------------------------------------------------

// Adds the sums of a row's next segment to those of the earlier ones. Not inlined: an item that covers several segments and
// the combination of several items execute the same instructions.
static __attribute__((noinline)) void add_segment(float* acc, float& top, float& sum, const float* part, float part_top,
                                                  float part_sum, int dv) {
    if (part_sum == 0) return;  // the row sees no key of the segment
    if (sum == 0) {
        __builtin_memcpy(acc, part, sizeof(float) * size_t(dv));
        top = part_top;
        sum = part_sum;
        return;
    }
    const float both = part_top > top ? part_top : top;
    const float factor = exp2_one(top - both), part_factor = exp2_one(part_top - both);
    for (int d = 0; d < dv; d += LANES) store(acc + d, load(acc + d) * factor + load(part + d) * part_factor);
    sum = sum * factor + part_sum * part_factor;
    top = both;
}

INLINE void clear_rows(const Geometry& g, const Scratch& scratch, int rows) {
    for (int m = 0; m < rows; ++m) scratch.row_max[m] = -__builtin_inff();
    for (int i = 0; i < rows * STRIP; ++i) scratch.row_sum[i] = 0;
    for (int i = 0; i < rows * g.dv; ++i) scratch.acc[i] = 0;
}

// Stores the rows' sums over the keys of a part.
static void store_partial(const Geometry& g, const Scratch& scratch, int rows, float* to) {
    __builtin_memcpy(to, scratch.acc, sizeof(float) * size_t(rows * g.dv));
    __builtin_memcpy(to + g.tile_rows * g.dv, scratch.row_max, sizeof(float) * size_t(rows));
    for (int m = 0; m < rows; ++m) to[g.tile_rows * (g.dv + 1) + m] = total(scratch.row_sum + m * STRIP);
}

// Adds the segment in `acc` to `total`, which is empty if it is the first.
static void end_segment(const Geometry& g, const Scratch& scratch, int rows, bool is_first) {
    for (int m = 0; m < rows; ++m) {
        const float sum = total(scratch.row_sum + m * STRIP);
        if (is_first) {
            scratch.total_max[m] = -__builtin_inff();
            scratch.total_sum[m] = 0;
            if (sum == 0) __builtin_memset(scratch.total + m * g.dv, 0, sizeof(float) * size_t(g.dv));
        }
        add_segment(scratch.total + m * g.dv, scratch.total_max[m], scratch.total_sum[m], scratch.acc + m * g.dv,
                    scratch.row_max[m], sum, g.dv);
    }
}

// Moves the sums of earlier segments from `acc` to `total`, or back.
static void take_total(const Geometry& g, const Scratch& scratch, int rows) {
    __builtin_memcpy(scratch.total, scratch.acc, sizeof(float) * size_t(rows * g.dv));
    for (int m = 0; m < rows; ++m) {
        scratch.total_max[m] = scratch.row_max[m];
        scratch.total_sum[m] = scratch.row_sum[m * STRIP];
    }
    clear_rows(g, scratch, rows);
}

static void give_total(const Geometry& g, const Scratch& scratch, int rows) {
    __builtin_memcpy(scratch.acc, scratch.total, sizeof(float) * size_t(rows * g.dv));
    for (int m = 0; m < rows; ++m) {
        scratch.row_max[m] = scratch.total_max[m];
        for (int i = 0; i < STRIP; ++i) scratch.row_sum[m * STRIP + i] = i ? 0 : scratch.total_sum[m];
    }
}

template <class KV, class Bytes, bool DOT, bool DOT_VALUES>
static void paged_attention_tile(const Geometry& g, const Layer& layer, const WorkItem& item, const WorkItem* next,
                                 const Scratch& scratch, float* partials) {
    const int rows = (item.query_end - item.query_begin) * g.group;
    const int new_tokens = g.batch.query_start_loc[item.request + 1] - g.batch.query_start_loc[item.request];
    const int first_position = g.batch.seq_lens[item.request] - new_tokens + item.query_begin;

    read_rows<DOT>(g, layer, item, rows, scratch.query);
    if (item.load_state >= 0) {
        copy_state<true>(g, g.states + int64_t(item.load_state) * g.state_size, scratch, 0);
    } else {
        clear_rows(g, scratch, rows);
    }
    const bool by_segments = g.spec.batch_invariant != 0;
    bool has_total = by_segments && item.load_state >= 0;
    if (has_total) take_total(g, scratch, rows);
    int partial = item.partial;

    // Tiles with few rows are memory-bound, so only these prefetch.
    Strip strips[2 * CHUNK / STRIP];
    Chunk<typename KV::T> chunk;
    chunk.ahead = rows <= READ_AHEAD_ROWS ? strips : nullptr;
    const int alignment = by_segments ? CHUNK : STRIP;
    const int first_chunk = item.key_begin / alignment * alignment;
    for (int begin = first_chunk; begin < item.key_end; begin += CHUNK) {
        if (by_segments && begin % SEGMENT == 0 && begin > first_chunk) {
            if (partial < 0) {
                end_segment(g, scratch, rows, !has_total);
                has_total = true;
            } else {
                store_partial(g, scratch, rows, partials + int64_t(partial++) * g.partial_size);
            }
            clear_rows(g, scratch, rows);
        }
        if (chunk.ahead) {
            if (begin == first_chunk) {
                find_strips<KV, Bytes>(g, layer, item, begin, strips);
            } else {
                for (int i = 0; i < CHUNK / STRIP; ++i) strips[i] = strips[i + CHUNK / STRIP];
            }
            const bool done = begin + CHUNK >= item.key_end;
            if (!done) {
                find_strips<KV, Bytes>(g, layer, item, begin + CHUNK, strips + CHUNK / STRIP);
            } else if (next) {
                find_strips<KV, Bytes>(g, layer, *next, next->key_begin / STRIP * STRIP, strips + CHUNK / STRIP);
            } else {
                for (int i = CHUNK / STRIP; i < 2 * CHUNK / STRIP; ++i) strips[i] = {};
            }
        }
        find_chunk<KV, Bytes>(g, layer, item, begin, scratch, chunk);
#if HAS_TILES
        if constexpr (DOT) {
            if (suits_tiles(g)) {
                paged_attention_chunk_on_tiles<Bytes, DOT_VALUES>(g, item, chunk, scratch, rows, first_position);
                continue;
            }
        }
#endif
        for (int row = 0; row < rows; row += MAX_MR) {
            with_constant<MAX_MR>(rows - row < MAX_MR ? rows - row : MAX_MR, [&](auto height) {
                paged_attention_rows<KV, Bytes, DOT, DOT_VALUES, decltype(height)::value>(g, item, chunk, scratch, row,
                                                                                          first_position);
            });
        }
    }

    if (has_total || (by_segments && item.save_state >= 0)) end_segment(g, scratch, rows, !has_total);
    if (item.save_state >= 0) {
        if (by_segments) give_total(g, scratch, rows);
        for (int t = 0; t < item.query_end - item.query_begin; ++t)
            copy_state<false>(g, g.states + int64_t(item.save_state + t) * g.state_size, scratch, t);
        return;
    }
    if (has_total) {
        for (int m = 0; m < rows; ++m)
            finish_row(g, layer, item, m, scratch.total + m * g.dv, scratch.total_max[m], scratch.total_sum[m]);
        return;
    }
    if (item.partial < 0) {
        for (int m = 0; m < rows; ++m)
            finish_row(g, layer, item, m, scratch.acc + m * g.dv, scratch.row_max[m], total(scratch.row_sum + m * STRIP));
        return;
    }
    store_partial(g, scratch, rows, partials + int64_t(partial) * g.partial_size);
}

// Whether probabilities of bfloat16 queries, whose products with keys are exact, are rounded to bfloat16. That loses precision,
// so it is done only in compute-bound tiles (of several tokens, or of very many heads), and with 8-bit keys and values, whose
// precision is lower anyway. With `batch_invariant` it is done in all tiles: a prompt may end with a tile of one token.
INLINE bool rounds_probabilities(const Geometry& g, const WorkItem& item, bool bytes) {
    const bool is_prompt = item.save_state < 0 && item.query_end - item.query_begin > 1;
    return bytes || is_prompt || g.group >= 16 || g.spec.batch_invariant;
}

template <class Bytes>
static void paged_attention_paired(const Geometry& g, const Layer& layer, const WorkItem& item, const WorkItem* next,
                                   const Scratch& scratch, float* partials) {
#if HAS_BF16_DOT
    if (g.spec.dtype == BF16) {
        if (rounds_probabilities(g, item, Bytes::scaled))
            return paged_attention_tile<Paired, Bytes, true, true>(g, layer, item, next, scratch, partials);
        return paged_attention_tile<Paired, Bytes, true, false>(g, layer, item, next, scratch, partials);
    }
#endif
    paged_attention_tile<Paired, Bytes, false, false>(g, layer, item, next, scratch, partials);
}

static void paged_attention(const Geometry& g, const Layer& layer, const WorkItem& item, const WorkItem* next,
                            const Scratch& scratch, float* partials) {
    switch (g.spec.kv_dtype) {
        case F32: return paged_attention_tile<Plain<Float32>, NoBytes, false, false>(g, layer, item, next, scratch, partials);
        case F16: return paged_attention_tile<Plain<Float16>, NoBytes, false, false>(g, layer, item, next, scratch, partials);
        case INT8: return paged_attention_paired<Int8>(g, layer, item, next, scratch, partials);
        case FP8: return paged_attention_paired<Fp8>(g, layer, item, next, scratch, partials);
        default: return paged_attention_paired<NoBytes>(g, layer, item, next, scratch, partials);
    }
}

// Combines the parts of a split tile: the weight of each part is 2^(its maximum - the overall maximum).
static void paged_attention_reduce(const Geometry& g, const Layer& layer, const SplitTile& tile, const Scratch& scratch,
                                   const float* partials) {
    const int rows = (tile.item.query_end - tile.item.query_begin) * g.group;
    float* acc = scratch.acc;
    for (int m = 0; m < rows; ++m) {
        const float* first = partials + int64_t(tile.first_partial) * g.partial_size;
        float top = -__builtin_inff(), sum = 0;
        if (g.spec.batch_invariant) {
            for (int d = 0; d < g.dv; ++d) acc[d] = 0;
            for (int i = 0; i < tile.num_partials; ++i) {
                const float* part = first + int64_t(i) * g.partial_size;
                add_segment(acc, top, sum, part + m * g.dv, part[g.tile_rows * g.dv + m],
                            part[g.tile_rows * (g.dv + 1) + m], g.dv);
            }
            finish_row(g, layer, tile.item, m, acc, top, sum);
            continue;
        }
        for (int i = 0; i < tile.num_partials; ++i) {
            float one = first[int64_t(i) * g.partial_size + g.tile_rows * g.dv + m];
            top = one > top ? one : top;
        }
        float base = top == -__builtin_inff() ? 0.f : top;
        for (int d = 0; d < g.dv; ++d) acc[d] = 0;
        for (int i = 0; i < tile.num_partials; ++i) {
            const float* part = first + int64_t(i) * g.partial_size;
            float factor = exp2_one(part[g.tile_rows * g.dv + m] - base);
            sum += factor * part[g.tile_rows * (g.dv + 1) + m];
            for (int d = 0; d < g.dv; ++d) acc[d] += factor * part[m * g.dv + d];
        }
        finish_row(g, layer, tile.item, m, acc, top, sum);
    }
}
