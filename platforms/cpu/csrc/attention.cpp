// A step's attention: divides it into items, and runs them over the threads.
//
// An item is a tile of rows (query tokens x the query heads of one key/value head) of one request. Decodes have one
// small tile per request and key/value head; a prompt has many large ones. If there are too few items to occupy all
// threads, long items are split along their keys; their partial results are combined afterwards.
//
// With `Spec::batch_invariant` long items are split between segments only, and leave one partial result per segment.
//
// Adjacent decodes of a batch may share a prefix, that is, their first blocks. Then one item processes the shared
// blocks for all of them, as if they were the rows of one request, and each request continues from the saved softmax
// state. The result of a row is bit-identical to that without sharing.

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "attention_scratch.h"
#include "entries.h"
#include "index_selection.h"
#include "kernels.h"
#include "team.h"

namespace mvllm {
namespace {

constexpr int64_t SERIAL_WORK = 1 << 17;     // multiply-adds below which waking other threads costs more than it saves
constexpr int SMALLEST_SPLIT = 2 * CHUNK;    // keys
constexpr int FEWEST_COMMON = 2 * CHUNK;     // keys

struct Step {
    Geometry geometry;
    std::vector<WorkItem> common;  // run before all other items
    std::vector<WorkItem> items;
    std::unique_ptr<float[]> states;
    std::vector<SplitTile> split_tiles;
    std::unique_ptr<float[]> partials;
    IndexWork selection;  // of an indexer, which has no items
    int64_t work = 0;
    int threads = 1;
};

int64_t work_of(const Geometry& g, const WorkItem& item) {
    return int64_t(item.query_end - item.query_begin) * g.group * (item.key_end - item.key_begin) * g.dv * 2;
}

// The cost includes reading the cache, which dominates with few rows.
int64_t cost_of(const Geometry& g, const WorkItem& item) {
    return int64_t((item.query_end - item.query_begin) * g.group + 4) * (item.key_end - item.key_begin);
}

// Number of keys at whose multiples the keys of an item or of several requests may be divided.
int granularity(const Geometry& g) { return g.spec.batch_invariant ? SEGMENT : CHUNK; }

void add_request(Step& step, int request, int per_tile, std::vector<WorkItem>& tiles) {
    const Geometry& g = step.geometry;
    const int new_tokens = g.batch.query_start_loc[request + 1] - g.batch.query_start_loc[request];
    const int earlier = g.batch.seq_lens[request] - new_tokens;
    for (int begin = 0; begin < new_tokens; begin += per_tile) {
        const int end = std::min(begin + per_tile, new_tokens);
        if (reads_selected(g.spec)) {
            tiles.push_back({request, 0, begin, end, 0, std::min(g.spec.index_topk, earlier + end), -1});
            continue;
        }
        const int low = g.spec.window ? std::max(0, earlier + begin - g.spec.window + 1) : 0;
        int high = earlier + end;
        if (g.batch.visible_lens) {
            const int32_t* seen = g.batch.visible_lens + g.batch.query_start_loc[request];
            high = *std::max_element(seen + begin, seen + end);
        }
        for (int h = 0; h < g.spec.num_kv_heads; ++h) tiles.push_back({request, h, begin, end, low, high, -1});
    }
}

// Number of leading keys of request `first` that are in blocks shared with `other`.
int shared_keys(const Batch& batch, int first, int other) {
    const int32_t* a = batch.block_table + int64_t(first) * batch.block_table_stride;
    const int32_t* b = batch.block_table + int64_t(other) * batch.block_table_stride;
    const int keys = std::min(batch.seq_lens[first], batch.seq_lens[other]) - 1;  // keys that both see
    int blocks = 0;
    while ((blocks + 1) * batch.block_size <= keys && a[blocks] == b[blocks]) ++blocks;
    return blocks * batch.block_size;
}

bool is_decode(const Batch& batch, int request) {
    return batch.query_start_loc[request + 1] - batch.query_start_loc[request] == 1;
}

// Finds adjacent decodes that share at least half of their keys, and creates items for the shared keys. `tiles` are
// the requests' own tiles in request order, one per head for requests of one token; they keep the remaining keys.
void find_common(Step& step, std::vector<WorkItem>& tiles) {
    Geometry& g = step.geometry;
    const Batch& batch = g.batch;
    const int heads = g.spec.num_kv_heads, unit = granularity(g);
    int num_states = 0;
    for (int first = 0, end; g.spec.window == 0 && first < batch.num_requests; first = end) {
        end = first + 1;
        if (!is_decode(batch, first)) continue;
        int keys = batch.seq_lens[first];
        for (; end < batch.num_requests && is_decode(batch, end); ++end) {
            const int both = std::min(keys, shared_keys(batch, first, end) / unit * unit);
            if (both < FEWEST_COMMON || both < std::max(keys, batch.seq_lens[end]) / 2) break;
            keys = both;
        }
        const int count = end - first;
        if (count < 2) continue;
        int per_tile = std::max(TILE_ROWS / g.group, 1);
        auto num_tiles = [&] { return heads * ((count + per_tile - 1) / per_tile); };
        while (per_tile * g.group > MAX_MR && per_tile > 1 && num_tiles() < step.threads * 4) per_tile = (per_tile + 1) / 2;
        if (num_tiles() < step.threads) continue;
        for (int h = 0; h < heads; ++h)
            for (int begin = 0; begin < count; begin += per_tile)
                step.common.push_back({first + begin, h, 0, std::min(per_tile, count - begin), 0, keys, -1,
                                       num_states + h * count + begin});
        for (WorkItem& tile : tiles)
            if (tile.request >= first && tile.request < end) {
                tile.key_begin = keys;
                tile.load_state = num_states + tile.kv_head * count + tile.request - first;
            }
        num_states += heads * count;
    }
    if (!num_states) return;
    step.states.reset(new float[size_t(num_states) * g.state_size]);
    g.states = step.states.get();
}

// Tokens per tile: many, so that they share the reads of keys, but few enough that every thread gets several tiles.
int tokens_per_tile(const Step& step) {
    const Geometry& g = step.geometry;
    if (reads_selected(g.spec)) return 1;  // each token reads keys of its own
    const int64_t tokens = g.batch.query_start_loc[g.batch.num_requests];
    int rows = TILE_ROWS;
    while (rows > TILE_ROWS / 4 && tokens * g.spec.num_heads < int64_t(rows) * step.threads * 4) rows /= 2;
    return std::max(rows / g.group, 1);
}

void divide(Step& step) {
    const Geometry& g = step.geometry;
    std::vector<WorkItem> tiles;
    const int per_tile = tokens_per_tile(step);
    for (int r = 0; r < g.batch.num_requests; ++r) add_request(step, r, per_tile, tiles);
    if (!reads_selected(g.spec)) find_common(step, tiles);
    int64_t cost = 0;
    for (const WorkItem& tile : step.common) cost += cost_of(g, tile), step.work += work_of(g, tile);
    for (const WorkItem& tile : tiles) cost += cost_of(g, tile), step.work += work_of(g, tile);
    if (step.threads == 1 || step.work < SERIAL_WORK) {
        step.threads = 1;
        step.items = std::move(tiles);
        return;
    }
    const int64_t fair = std::max<int64_t>(1, cost / (step.threads * 4));
    int num_partials = 0;
    step.items.reserve(tiles.size());
    for (WorkItem tile : tiles) {
        const int unit = granularity(g), step_size = g.spec.batch_invariant ? SEGMENT : STRIP;
        const int first = tile.key_begin / step_size * step_size, keys = tile.key_end - first;
        int64_t parts = std::min<int64_t>((cost_of(g, tile) + fair - 1) / fair, keys / SMALLEST_SPLIT);
        if (parts <= 1 || tile.load_state >= 0) {
            step.items.push_back(tile);
            continue;
        }
        const int length = round_up(int((keys + parts - 1) / parts), unit);
        SplitTile split{tile, num_partials, 0};
        for (int begin = first; begin < tile.key_end; begin += length) {
            WorkItem part = tile;
            part.key_begin = std::max(begin, tile.key_begin);
            part.key_end = std::min(begin + length, tile.key_end);
            part.partial = num_partials;
            step.items.push_back(part);
            const int count = g.spec.batch_invariant ? (part.key_end - begin + SEGMENT - 1) / SEGMENT : 1;
            num_partials += count;
            split.num_partials += count;
        }
        step.split_tiles.push_back(split);
    }
    std::stable_sort(step.items.begin(), step.items.end(),
                     [&](const WorkItem& a, const WorkItem& b) { return cost_of(g, a) > cost_of(g, b); });
    if (num_partials) step.partials.reset(new float[size_t(num_partials) * g.partial_size]);
}

// Attention of one layer.
void run(const Step& step, const Layer& layer) {
    const Geometry& g = step.geometry;
    record_kernel_use();
    const Isa& isa = current_isa();
    const auto compute_item = reads_selected(g.spec) ? isa.sparse_attention : isa.paged_attention;
    // Heads of one request are adjacent in each block. A thread claims adjacent items, so that the hardware prefetcher
    // reads memory of the same thread.
    auto compute_items = [&](const std::vector<WorkItem>& items, std::atomic<int>& next) {
        thread_local ScratchMemory memory;
        const Scratch scratch = memory.carve(g);
        const int count = int(items.size());
        const int at_once = std::max(1, std::min(g.spec.num_kv_heads, count / (step.threads * 8)));
        auto claim = [&] { return next.fetch_add(at_once, std::memory_order_relaxed); };
        for (int first = claim(), following; first < count; first = following) {
            following = claim();
            const int end = std::min(first + at_once, count);
            for (int i = first; i < end; ++i) {
                const int after = i + 1 < end ? i + 1 : following;
                compute_item(g, layer, items[i], after < count ? &items[after] : nullptr, scratch, step.partials.get());
            }
        }
    };
    auto compute_all = [&](const std::vector<WorkItem>& items) {
        std::atomic<int> next{0};
        if (!items.empty()) divide_pieces(step.threads, step.threads, [&](Part) { compute_items(items, next); });
    };
    compute_all(step.common);
    compute_all(step.items);
    divide_range(step.threads, int64_t(step.split_tiles.size()), [&](int64_t begin, int64_t end) {
        thread_local ScratchMemory memory;
        const Scratch scratch = memory.carve(g);
        for (int64_t i = begin; i < end; ++i)
            isa.paged_attention_reduce(g, layer, step.split_tiles[size_t(i)], scratch, step.partials.get());
    });
}

}  // namespace
}  // namespace mvllm

using namespace mvllm;

extern "C" {

// Plans a step. The batch's arrays stay in use until the step is freed.
void* mvllm_cpu_step_new(const Spec* spec, const Batch* batch) {
    record_kernel_use();
    auto* step = new Step;
    Geometry& g = step->geometry;
    g.spec = *spec;
    g.batch = *batch;
    g.group = spec->num_heads / spec->num_kv_heads;
    g.dk = round_up(spec->head_size, reads_selected(*spec) ? SELECTED_ALIGNMENT : 4);
    g.dv = round_up(spec->value_size, 16);
    g.tile_rows = std::max(TILE_ROWS / g.group, 1) * g.group;
    g.key_head = int64_t(g.dk) * batch->block_size;
    g.value_head = spec->latent ? 0 : int64_t(g.dv) * batch->block_size;
    g.partial_size = g.tile_rows * (g.dv + 2);
    g.state_size = g.group * (g.dv + 1 + STRIP);
    g.states = nullptr;
    step->threads = team_size();
    if (spec->indexer)
        step->selection = divide_selection(g, step->threads);
    else
        divide(*step);
    return step;
}

// Number of requests of the step whose leading keys are read once for several requests.
int mvllm_cpu_step_sharing(const void* handle) {
    const Step& step = *static_cast<const Step*>(handle);
    int count = 0;
    for (const WorkItem& item : step.common) count += item.kv_head ? 0 : item.query_end;
    return count;
}

void mvllm_cpu_step_free(void* step) { delete static_cast<Step*>(step); }

void mvllm_cpu_reshape_and_cache(const void* handle, const void* key, int64_t key_stride, const void* value,
                                 int64_t value_stride, const Cache* cache) {
    const Step& step = *static_cast<const Step*>(handle);
    const Geometry& g = step.geometry;
    const NewKV kv{key, value, key_stride, value_stride, *cache};
    const Isa& isa = current_isa();
    const int tokens = g.batch.num_tokens;
    const bool small = int64_t(tokens) * g.spec.num_kv_heads * g.spec.head_size * 4 < SERIAL_WORK;
    divide_range(small ? 1 : team_size(), tokens,
                 [&](int64_t begin, int64_t end) { isa.reshape_and_cache(g, kv, int(begin), int(end)); });
}

void mvllm_cpu_paged_attention(const void* handle, const void* query, int64_t query_stride, const Cache* cache,
                               const void* sinks, int sinks_dtype, void* out) {
    run(*static_cast<const Step*>(handle), Layer{query, query_stride, *cache, sinks, sinks_dtype, out});
}

// `positions`: [tokens, index_topk].
void mvllm_cpu_sparse_attention(const void* handle, const void* query, int64_t query_stride, const int32_t* positions,
                                const Cache* cache, void* out) {
    run(*static_cast<const Step*>(handle), Layer{query, query_stride, *cache, nullptr, F32, out, positions});
}

// `positions`: [tokens, index_topk], written.
void mvllm_cpu_select_positions(const void* handle, const void* query, int64_t query_stride, const float* weights,
                                int64_t weights_stride, const Cache* cache, int32_t* positions) {
    const Step& step = *static_cast<const Step*>(handle);
    const Layer layer{query, query_stride, *cache, nullptr, F32, nullptr};
    select_positions(step.geometry, step.selection, IndexLayer{layer, weights, weights_stride, nullptr}, positions);
}

}  // extern "C"
