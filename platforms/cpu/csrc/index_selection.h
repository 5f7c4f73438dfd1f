// The selection of an indexer of sparse attention: for each query of a step, the positions with the highest scores.

#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace mvllm {

// A query, and the index of its scores; it sees the positions [0, visible).
struct IndexRow {
    int64_t token, scores;
    int32_t visible;
};

// A step's selection. Passes limit the memory for scores.
struct IndexWork {
    struct Pass {
        size_t items_end = 0, rows_end = 0;
        int64_t scores = 0;
    };
    std::vector<IndexItem> items;
    std::vector<IndexRow> rows;
    std::vector<Pass> passes;
    int threads = 1;
};

IndexWork divide_selection(const Geometry& g, int threads);

// out[token] = the positions of the index_topk highest scores in ascending order, of equal scores the earlier ones; -1 at
// the end if fewer are visible.
void select_positions(const Geometry& g, const IndexWork& work, IndexLayer index, int32_t* out);

}  // namespace mvllm
