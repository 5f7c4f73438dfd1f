// Index scores and the selection of positions, over the threads. mvllm/attention/selection.py in core specifies them.
//
// The scores of a pass are in memory. They are computed in items, which are ranges of keys of a tile of queries, and then
// each row is selected by one thread. A query that sees at most index_topk positions selects all, without scores.

#include "index_selection.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "attention_scratch.h"
#include "team.h"
#include "thread_buffer.h"

namespace mvllm {
namespace {

constexpr int64_t SERIAL_PRODUCTS = 1 << 16;  // multiply-adds below which waking other threads costs more than it saves
constexpr int64_t MOST_SCORES = 1 << 22;      // of a pass, unless one tile has more
constexpr int64_t SERIAL_SCORES = 1 << 14;    // to select from, likewise

struct Tile {
    WorkItem item;
    int64_t stride;
};

std::vector<Tile> tiles_of(const Geometry& g, IndexWork& work) {
    std::vector<Tile> tiles;
    const int per_tile = std::max(TILE_ROWS / g.spec.num_heads, 1);
    for (int r = 0; r < g.batch.num_requests; ++r) {
        const int first = g.batch.query_start_loc[r], new_tokens = g.batch.query_start_loc[r + 1] - first;
        const int earlier = g.batch.seq_lens[r] - new_tokens;
        const int unscored = std::clamp(g.spec.index_topk - earlier, 0, new_tokens);
        for (int t = 0; t < unscored; ++t) work.rows.push_back({first + t, 0, earlier + t + 1});
        for (int begin = unscored; begin < new_tokens; begin += per_tile) {
            const int end = std::min(begin + per_tile, new_tokens);
            tiles.push_back({{r, 0, begin, end, 0, earlier + end, -1}, round_up(earlier + end, CHUNK)});
        }
    }
    return tiles;
}

// An integer of the same order, in which 0.0 and -0.0 are equal, as in core; NaN is beyond all numbers.
uint32_t ordered(float score) {
    uint32_t bits;
    score += 0.f;  // -0.0 becomes 0.0
    std::memcpy(&bits, &score, sizeof(bits));
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

void select_row(const float* scores, int visible, int top_k, int32_t* out) {
    if (visible <= top_k) {
        for (int i = 0; i < top_k; ++i) out[i] = i < visible ? i : -1;
        return;
    }
    thread_local Buffer memory;
    uint32_t* const keys = reinterpret_cast<uint32_t*>(memory.at_least(size_t(visible) * 2 * sizeof(uint32_t)));
    uint32_t* const parted = keys + visible;
    for (int i = 0; i < visible; ++i) keys[i] = ordered(scores[i]);
    std::copy(keys, keys + visible, parted);
    std::nth_element(parted, parted + (top_k - 1), parted + visible, [](uint32_t a, uint32_t b) { return a > b; });
    const uint32_t last = parted[top_k - 1];
    int of_last = top_k;  // positions whose score equals the last selected one
    for (int i = 0; i < top_k; ++i) of_last -= parted[i] > last;
    for (int i = 0, count = 0; count < top_k; ++i) {
        out[count] = i;
        count += keys[i] > last || (keys[i] == last && of_last-- > 0);
    }
}

}  // namespace

IndexWork divide_selection(const Geometry& g, int threads) {
    IndexWork work;
    std::vector<Tile> tiles = tiles_of(g, work);
    work.passes.push_back({0, work.rows.size(), 0});
    int64_t cost = 0;
    for (const Tile& tile : tiles) cost += int64_t(tile.item.query_end - tile.item.query_begin) * tile.item.key_end;
    if (cost * g.spec.num_heads * g.dk >= SERIAL_PRODUCTS) work.threads = threads;
    const int64_t fair = std::max<int64_t>(1, cost / (work.threads * 4));
    for (const Tile& tile : tiles) {
        const int queries = tile.item.query_end - tile.item.query_begin;
        if (work.passes.back().scores && work.passes.back().scores + queries * tile.stride > MOST_SCORES)
            work.passes.push_back({work.items.size(), work.rows.size(), 0});
        IndexWork::Pass& pass = work.passes.back();
        const int64_t length = work.threads == 1 ? tile.stride : round_up(int(std::min(fair / queries + 1, tile.stride)), CHUNK);
        for (int64_t begin = 0; begin < tile.item.key_end; begin += length) {
            IndexItem part{tile.item, pass.scores, tile.stride};
            part.item.key_begin = int(begin);
            part.item.key_end = int(std::min<int64_t>(begin + length, tile.item.key_end));
            work.items.push_back(part);
        }
        const int new_tokens = g.batch.query_start_loc[tile.item.request + 1] - g.batch.query_start_loc[tile.item.request];
        for (int t = tile.item.query_begin; t < tile.item.query_end; ++t) {
            work.rows.push_back({g.batch.query_start_loc[tile.item.request] + t, pass.scores,
                                 g.batch.seq_lens[tile.item.request] - new_tokens + t + 1});
            pass.scores += tile.stride;
        }
        pass.items_end = work.items.size();
        pass.rows_end = work.rows.size();
    }
    return work;
}

void select_positions(const Geometry& g, const IndexWork& work, IndexLayer index, int32_t* out) {
    record_kernel_use();
    thread_local Buffer memory;
    const Isa& isa = current_isa();
    size_t first_item = 0, first_row = 0;
    for (const IndexWork::Pass& pass : work.passes) {
        index.scores = reinterpret_cast<float*>(memory.at_least(size_t(pass.scores) * sizeof(float)));
        std::atomic<size_t> next{first_item};
        if (first_item < pass.items_end)
            divide_pieces(work.threads, work.threads, [&](Part) {
                thread_local ScratchMemory scratch_memory;
                const Scratch scratch = scratch_memory.carve(g);
                for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < pass.items_end;)
                    isa.index_scores(g, index, work.items[i], scratch);
            });
        const int64_t num_rows = int64_t(pass.rows_end - first_row);
        divide_range(pass.scores < SERIAL_SCORES ? 1 : work.threads, num_rows, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) {
                const IndexRow& row = work.rows[first_row + size_t(i)];
                select_row(index.scores + row.scores, row.visible, g.spec.index_topk, out + row.token * g.spec.index_topk);
            }
        });
        first_item = pass.items_end;
        first_row = pass.rows_end;
    }
}

}  // namespace mvllm
