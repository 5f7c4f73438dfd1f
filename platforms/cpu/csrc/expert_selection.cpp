// The experts of each token and their weights, from a router's logits; core's mvllm/ops/select_experts.py specifies it.

#include <algorithm>
#include <cmath>
#include <vector>

#include "entries.h"
#include "kernels.h"
#include "thread_team.h"

#define LANES 4
#define HAS_F16C 0
#define HAS_BF16_DOT 0
namespace mvllm {
namespace {
#include "simd.h"

enum Scores : int32_t { SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN };

struct ExpertSelection {
    const void* logits;  // rows `stride` elements apart
    int64_t stride;
    const float* correction;  // [experts] or null
    float* weights;           // [rows, top_k]
    int64_t* ids;             // likewise
    int64_t experts, top_k, groups, top_groups;
    int32_t scores, dtype;
    bool normalize, by_best_two;
    float scale;
};

// The order of torch.topk: NaN is larger than any number.
bool is_larger(float a, float b) { return a > b || (a != a && b == b); }

// The largest of the values whose `is_left` is set, which is then cleared.
int64_t take_largest(const std::vector<float>& values, std::vector<char>& is_left) {
    int64_t best = -1;
    for (size_t i = 0; i < values.size(); ++i)
        if (is_left[i] && (best < 0 || is_larger(values[i], values[size_t(best)]))) best = int64_t(i);
    is_left[size_t(best)] = 0;
    return best;
}

// values[i] = exp(values[i] - max) / sum
void softmax(float* values, int64_t count) {
    float max = values[0], sum = 0;
    for (int64_t i = 1; i < count; ++i)
        if (is_larger(values[i], max)) max = values[i];
    for (int64_t i = 0; i < count; ++i) sum += values[i] = std::exp(values[i] - max);
    for (int64_t i = 0; i < count; ++i) values[i] /= sum;
}

class Selector {
  public:
    explicit Selector(const ExpertSelection& op) : op_(op), scores_(size_t(op.experts)), corrected_(scores_), is_left_(scores_.size()) {}

    void select(int64_t row) {
        read(row);
        if (op_.scores == SOFTMAX) softmax(scores_.data(), op_.experts);
        if (op_.scores == SIGMOID)
            for (float& score : scores_) score = 1.f / (1.f + std::exp(-score));
        corrected_ = scores_;
        if (op_.correction && op_.scores != SOFTMAX_OF_CHOSEN)
            for (int64_t e = 0; e < op_.experts; ++e) corrected_[size_t(e)] += op_.correction[e];
        keep_best_groups();
        int64_t* const ids = op_.ids + row * op_.top_k;
        float* const weights = op_.weights + row * op_.top_k;
        for (int64_t k = 0; k < op_.top_k; ++k) {
            ids[k] = take_largest(corrected_, is_left_);
            weights[k] = scores_[size_t(ids[k])];
        }
        if (op_.scores == SOFTMAX_OF_CHOSEN) softmax(weights, op_.top_k);
        float sum = 0;
        for (int64_t k = 0; k < op_.top_k; ++k) sum += weights[k];
        const float divisor = op_.normalize ? sum + 1e-20f : 1.f;
        for (int64_t k = 0; k < op_.top_k; ++k) weights[k] = weights[k] / divisor * op_.scale;
    }

  private:
    template <class E>
    void widen(int64_t row) {
        const auto* from = static_cast<const typename E::type*>(op_.logits) + row * op_.stride;
        for (int64_t e = 0; e < op_.experts; ++e) scores_[size_t(e)] = E::get(from[e]);
    }

    void read(int64_t row) {
        if (op_.dtype == F32) return widen<Float32>(row);
        return op_.dtype == BF16 ? widen<BFloat16>(row) : widen<Float16>(row);
    }

    // Sets `is_left_` for the experts that may be selected.
    void keep_best_groups() {
        if (op_.top_groups == op_.groups) return is_left_.assign(is_left_.size(), 1);
        const int64_t size = op_.experts / op_.groups;
        std::vector<float> values;
        for (int64_t first = 0; first < op_.experts; first += size) {
            std::vector<float> members(corrected_.begin() + first, corrected_.begin() + first + size);
            std::vector<char> others(members.size(), 1);
            float value = members[size_t(take_largest(members, others))];
            if (op_.by_best_two) value += members[size_t(take_largest(members, others))];
            values.push_back(value);
        }
        is_left_.assign(is_left_.size(), 0);
        std::vector<char> groups(values.size(), 1);
        for (int64_t g = 0; g < op_.top_groups; ++g) {
            const auto first = is_left_.begin() + take_largest(values, groups) * size;
            std::fill(first, first + size, 1);
        }
    }

    const ExpertSelection& op_;
    std::vector<float> scores_, corrected_;
    std::vector<char> is_left_;
};

}  // namespace
}  // namespace mvllm

using namespace mvllm;

extern "C" {

void mvllm_cpu_select_experts(const void* logits, int64_t stride, const float* correction, float* weights, int64_t* ids,
                              int64_t rows, int64_t experts, int64_t top_k, int scores, int normalize, float scale,
                              int64_t groups, int64_t top_groups, int by_best_two, int dtype) {
    constexpr int64_t SERIAL_LOGITS = 1 << 12;
    const ExpertSelection op{logits, stride,     correction, weights, ids,            experts,          top_k,
                             groups, top_groups, scores,     dtype,   normalize != 0, by_best_two != 0, scale};
    divide_range(rows * experts < SERIAL_LOGITS ? 1 : team_size(), rows, [&](int64_t begin, int64_t end) {
        Selector selector(op);
        for (int64_t row = begin; row < end; ++row) selector.select(row);
    });
}

}  // extern "C"
