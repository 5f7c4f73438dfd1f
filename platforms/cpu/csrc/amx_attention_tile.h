// Attention of one chunk on AMX tiles, 16 rows at a time, for bfloat16 queries. Included by attention_tile.h where HAS_TILES
// is 1.
//
//     scores [16 rows][16 keys]  = query [16][32 dimensions]   x keys of a strip [16 pairs of dimensions][16 keys]
//     acc [16 rows][16 values]  += probabilities [16][32 keys] x values [16 pairs of keys][16 values]
//
// Probabilities are rounded to bfloat16, or, where they must not be rounded, the sum of two: the nearest bfloat16, and the
// nearest one to the difference, which keeps 16 bits.
//
// Keys are read in place. The values of a chunk are first copied together, because strips are apart in the cache, unless
// they already are in scratch memory. What follows the last key is undefined and is set to zero. A row's result does not depend on the other rows.

constexpr int SIDE = 16;
constexpr int TILE_KEYS = 32;            // keys of one product with values
constexpr int TILE_DIMENSIONS = 32;      // dimensions of one product with keys
constexpr int MOST_TILE_VALUES = 256;    // larger heads are left to vectors

INLINE bool suits_tiles(const Geometry& g) { return g.dk % TILE_DIMENSIONS == 0 && g.dv <= MOST_TILE_VALUES; }

INLINE vu load_pairs(const uint32_t* p) { return *reinterpret_cast<const vu_mem*>(p); }
INLINE void store_pairs(uint32_t* p, vu v) { *reinterpret_cast<vu_mem*>(p) = v; }

// Tiles 0 to 3 hold sums, 4 rows of queries or probabilities, 6 and 7 keys or values.
static void configure_tiles(int rows) {
    TileConfig config;
    for (int t = 0; t < 8; ++t) {
        config.rows[t] = uint8_t(t < 6 ? rows : SIDE);
        config.row_bytes[t] = 64;
    }
    TILE_CONFIG(config);
}

// One to four tiles of sums: `first` by the tiles at `at(0)` to `at(count - 1)`.
template <class Place>
INLINE void multiply_by(int count, int64_t pitch, Place at) {
    TILE_LOAD(6, at(0), pitch);
    TILE_DOT_BF16(0, 4, 6);
    if (count > 1) {
        TILE_LOAD(7, at(1), pitch);
        TILE_DOT_BF16(1, 4, 7);
    }
    if (count > 2) {
        TILE_LOAD(6, at(2), pitch);
        TILE_DOT_BF16(2, 4, 6);
    }
    if (count > 3) {
        TILE_LOAD(7, at(3), pitch);
        TILE_DOT_BF16(3, 4, 7);
    }
}

INLINE void store_tiles(int count, float* to, int64_t pitch) {
    TILE_STORE(0, to, pitch);
    if (count > 1) TILE_STORE(1, to + SIDE, pitch);
    if (count > 2) TILE_STORE(2, to + 2 * SIDE, pitch);
    if (count > 3) TILE_STORE(3, to + 3 * SIDE, pitch);
}

// scores [16, CHUNK] of tokens [first, end), multiples of STRIP. Few rows are bound by reading the cache; then it prefetches
// the values of the strips `ahead` meanwhile. Prefetching the next keys while values are copied was slower.
static void score_on_tiles(const uint16_t* query, int dk, const Chunk<uint16_t>& chunk, int first, int end, float* scores,
                           const Strip* ahead) {
    const int steps = dk / TILE_DIMENSIONS, lines = ahead ? (ahead->value_lines + steps - 1) / steps : 0;
    for (int t = first; t < end; t += 4 * STRIP) {
        const int count = least_of((end - t) / STRIP, 4);
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
        for (int d = 0; d < dk; d += TILE_DIMENSIONS) {
            TILE_LOAD(4, query + d, dk * 2);
            multiply_by(count, chunk.stride * 4, [&](int s) {
                if (lines) ahead[t / STRIP + s].prefetch_values(d / TILE_DIMENSIONS * lines, lines);
                return chunk.keys[t / STRIP + s] + d * chunk.stride;
            });
        }
        store_tiles(count, scores + t, CHUNK * 4);
    }
}

// acc [16, dv] += probabilities x values, for tokens [first, end), multiples of TILE_KEYS. `pairs` [PARTS, 16, CHUNK / 2].
template <int PARTS>
static void add_values_on_tiles(const uint32_t* pairs, const uint32_t* values, int dv, int first, int end, float* acc) {
    for (int d = 0; d < dv; d += 4 * SIDE) {
        const int count = least_of((dv - d) / SIDE, 4);
        float* to = acc + d;
        TILE_LOAD(0, to, dv * 4);
        if (count > 1) TILE_LOAD(1, to + SIDE, dv * 4);
        if (count > 2) TILE_LOAD(2, to + 2 * SIDE, dv * 4);
        if (count > 3) TILE_LOAD(3, to + 3 * SIDE, dv * 4);
        for (int t = first; t < end; t += TILE_KEYS) {
            const uint32_t* from = values + t / 2 * dv + d;
            for (int part = 0; part < PARTS; ++part) {
                TILE_LOAD(4, pairs + part * (SIDE * CHUNK / 2) + t / 2, CHUNK * 2);
                multiply_by(count, dv * 4, [&](int s) { return from + s * SIDE; });
            }
        }
        store_tiles(count, to, dv * 4);
    }
}

// values [CHUNK / 2 pairs of keys][dv]: those of the chunk, then zeros.
static void copy_values(const Chunk<uint16_t>& chunk, int dv, uint32_t* values) {
    for (int t = 0; t < CHUNK; t += 2, values += dv) {
        const uint32_t* from = nullptr;
        if (t < chunk.tokens) from = reinterpret_cast<const uint32_t*>(chunk.values[t / STRIP]) + t % STRIP / 2 * dv;
        if (t + 2 <= chunk.tokens)
            for (int i = 0; i < dv; i += LANES) store_pairs(values + i, load_pairs(from + i));
        else if (t < chunk.tokens)
            for (int i = 0; i < dv; i += LANES) store_pairs(values + i, load_pairs(from + i) & 0xffffu);
        else
            for (int i = 0; i < dv; i += LANES) store_pairs(values + i, vu{});
    }
}

// The bfloat16 pairs of tokens [first, end) of a row's probabilities, and of what these lack.
INLINE void split_probabilities(const float* probabilities, int first, int end, uint32_t* pairs, uint32_t* rest) {
    for (int j = first; j < end; j += LANES) {
        const vf p = load(probabilities + j);
        uint16_t* nearest = reinterpret_cast<uint16_t*>(pairs) + j;
        BFloat16::narrow(nearest, p);
        BFloat16::narrow(reinterpret_cast<uint16_t*>(rest) + j, p - BFloat16::widen(nearest));
    }
}

// Sets the values after the last key to zero, in scratch memory.
static void clear_values(int tokens, int dv, uint32_t* values) {
    if (tokens % 2)
        for (int i = tokens / 2 * dv; i < (tokens / 2 + 1) * dv; ++i) values[i] &= 0xffffu;
    const int begin = (tokens + 1) / 2 * dv, end = round_up(tokens, TILE_KEYS) / 2 * dv;
    if (begin < end) __builtin_memset(values + begin, 0, size_t(end - begin) * 4);
}

template <class Bytes, bool ROUND>
static void paged_attention_chunk_on_tiles(const Geometry& g, const WorkItem& item, const Chunk<uint16_t>& chunk,
                                           const Scratch& scratch, int rows, int first_position) {
    alignas(64) float scores[SIDE * CHUNK];
    constexpr int PARTS = ROUND ? 1 : 2, PART = SIDE * (CHUNK / 2);
    alignas(64) uint32_t pairs[PARTS * PART];
    alignas(64) static thread_local uint32_t copies[CHUNK / 2 * MOST_TILE_VALUES];
    const bool in_place = Bytes::scaled || g.spec.latent;
    uint32_t* const values = in_place ? static_cast<uint32_t*>(scratch.values) : copies;
    if (in_place) clear_values(chunk.tokens, g.dv, values);
    bool copied = in_place;
    int configured = 0;
    for (int row = 0; row < rows; row += SIDE) {
        const int height = least_of(rows - row, SIDE);
        const Visible<SIDE> visible(g, item, chunk, row, height, first_position);
        if (visible.last == 0) continue;
        if (configured != height) configure_tiles(height);
        configured = height;
        const int first = visible.first, end = round_up(visible.last, STRIP);
        const int begin = first / TILE_KEYS * TILE_KEYS, stop = round_up(end, TILE_KEYS);
        score_on_tiles(reinterpret_cast<const uint16_t*>(scratch.query) + row * g.dk, g.dk, chunk, first, end, scores,
                       row || in_place ? nullptr : chunk.ahead);
        for (int m = 0; m < height; ++m) {
            uint32_t* p = pairs + m * (CHUNK / 2);
            for (int part = 0; part < PARTS; ++part) {
                for (int i = begin / 2; i < first / 2; ++i) p[part * PART + i] = 0;
                for (int i = end / 2; i < stop / 2; ++i) p[part * PART + i] = 0;
            }
            softmax_row<Bytes::scaled, ROUND>(g.spec, chunk, first, end, visible.low[m], visible.high[m], scores + m * CHUNK, p,
                                              scratch.row_max[row + m], scratch.row_sum + (row + m) * STRIP,
                                              scratch.acc + (row + m) * g.dv, g.dv);
            if (!ROUND) split_probabilities(scores + m * CHUNK, first, end, p, p + PART);
        }
        if (!copied) copy_values(chunk, g.dv, values);
        copied = true;
        add_values_on_tiles<PARTS>(pairs, values, g.dv, begin, stop, scratch.acc + row * g.dv);
    }
    if (configured) TILE_RELEASE();
}
