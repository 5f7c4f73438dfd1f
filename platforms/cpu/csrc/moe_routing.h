// Assigns the rows of x to the experts of a mixture-of-experts layer. A *pair* is a token and one of its top_k experts; pairs
// are sorted by expert.

#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels.h"

namespace mvllm {

inline int element_size(int dtype) { return dtype == F32 ? 4 : 2; }
inline int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Number of tokens that are processed together if each needs `token_bytes` of intermediate memory.
inline int64_t tokens_at_once(int64_t token_bytes) {
    constexpr int64_t BUFFER_BYTES = 64 << 20, FEWEST_TOKENS = 256;
    return std::max(FEWEST_TOKENS, BUFFER_BYTES / token_bytes);
}

// Rows of one expert that are processed together.
struct Block {
    int32_t expert;
    int64_t begin, end;  // pairs
};

struct Routing {
    std::vector<int32_t> tokens;     // of each pair
    std::vector<int32_t> positions;  // [tokens, top_k]: pairs of each token, in order of expert ids
    std::vector<float> weights;      // likewise
    std::vector<Block> blocks;

    Routing(const int64_t* ids, const float* chosen, int64_t num_tokens, int64_t top_k, int64_t experts)
        : tokens(size_t(num_tokens * top_k)), positions(tokens.size()), weights(tokens.size()) {
        std::vector<int64_t> next(size_t(experts) + 1, 0);
        for (size_t i = 0; i < tokens.size(); ++i) ++next[size_t(ids[i]) + 1];
        for (int64_t e = 0; e < experts; ++e) {
            const int64_t begin = next[size_t(e)], n = next[size_t(e) + 1];
            const int64_t parts = (n + LINEAR_ROWS - 1) / LINEAR_ROWS;
            for (int64_t p = 0; p < parts; ++p)
                blocks.push_back({int32_t(e), begin + n * p / parts, begin + n * (p + 1) / parts});
            next[size_t(e) + 1] += begin;
        }
        std::vector<std::pair<int64_t, float>> of_token(static_cast<size_t>(top_k));
        for (int64_t t = 0; t < num_tokens; ++t) {
            const int64_t first = t * top_k;
            for (int64_t k = 0; k < top_k; ++k) of_token[size_t(k)] = {ids[first + k], chosen[first + k]};
            std::sort(of_token.begin(), of_token.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
            for (int64_t k = 0; k < top_k; ++k) {
                const int64_t pair = next[size_t(of_token[size_t(k)].first)]++;
                tokens[size_t(pair)] = int32_t(t);
                positions[size_t(first + k)] = int32_t(pair);
                weights[size_t(first + k)] = of_token[size_t(k)].second;
            }
        }
    }
};

}  // namespace mvllm
