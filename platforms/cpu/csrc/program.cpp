// Replay of recorded kernel calls: the calls of a decode step, recorded once and executed by one function call
// (src/mvllm_cpu/replay.py records them).
//
// A call is the number of a function in `entries` and its arguments, one 64-bit word each. Arguments that change from
// run to run (addresses of inputs, results and intermediate tensors, the metadata of a step) are listed as patches: before
// the calls are executed, argument `at` becomes bases[base] + offset.
//
// A call that waits for other ranks may time out. Then the program returns; the caller handles the timeout and resumes
// the program at the same call.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "entries.h"
#include "team.h"

namespace mvllm {
namespace {

template <class T>
T argument(int64_t word) {
    if constexpr (sizeof(T) == sizeof(word)) {
        T value;
        std::memcpy(&value, &word, sizeof(value));
        return value;
    } else if constexpr (std::is_same_v<T, float>) {
        const int32_t bits = int32_t(word);
        float value;
        std::memcpy(&value, &bits, sizeof(value));
        return value;
    } else {
        return T(word);
    }
}

// Calls the function. False if it has to be called again.
template <class R, class... Ts, size_t... I>
bool call(R (*function)(Ts...), const int64_t* words, std::index_sequence<I...>) {
    if constexpr (std::is_void_v<R>) {
        function(argument<Ts>(words[I])...);
        return true;
    } else {
        return function(argument<Ts>(words[I])...) != 0;
    }
}

template <class R, class... Ts>
constexpr int count_of(R (*)(Ts...)) {
    return int(sizeof...(Ts));
}

struct Entry {
    const char* name;
    int count;  // number of arguments
    bool (*run)(const int64_t* words);  // false: call it again; only functions with OWN_DIVISION return it
    const WorkSharing* sharing;
};

template <auto function>
struct Caller;

template <class R, class... Ts, R (*function)(Ts...)>
struct Caller<function> {
    static bool run(const int64_t* words) { return call(function, words, std::index_sequence_for<Ts...>()); }
};

#define ENTRY(name, sharing) {#name, count_of(name), Caller<name>::run, &sharing}

// Functions that programs may call. They take pointers and numbers, and return nothing or whether they are done.
const Entry entries[] = {
    ENTRY(mvllm_cpu_rms_norm, rms_norm_sharing),
    ENTRY(mvllm_cpu_embedding, one_thread),
    ENTRY(mvllm_cpu_packed_embedding, one_thread),
    ENTRY(mvllm_cpu_argmax, one_thread),
    ENTRY(mvllm_cpu_silu_and_mul, silu_and_mul_sharing),
    ENTRY(mvllm_cpu_gelu_tanh_and_mul, gelu_tanh_and_mul_sharing),
    ENTRY(mvllm_cpu_add, one_thread),
    ENTRY(mvllm_cpu_scale, one_thread),
    ENTRY(mvllm_cpu_rotary_embedding, rotary_embedding_sharing),
    ENTRY(mvllm_cpu_activate, own_division),
    ENTRY(mvllm_cpu_layer_norm, own_division),
    ENTRY(mvllm_cpu_log_decay, own_division),
    ENTRY(mvllm_cpu_elementwise, own_division),
    ENTRY(mvllm_cpu_copy, own_division),
    ENTRY(mvllm_cpu_integers, one_thread),
    ENTRY(mvllm_cpu_choose_rows, one_thread),
    ENTRY(mvllm_cpu_head_product, own_division),
    ENTRY(mvllm_cpu_take_columns, one_thread),
    ENTRY(mvllm_cpu_linear, linear_sharing),
    ENTRY(mvllm_cpu_linear_silu_and_mul, linear_silu_and_mul_sharing),
    ENTRY(mvllm_cpu_quantized_linear, quantized_linear_sharing),
    ENTRY(mvllm_cpu_quantized_linear_silu_and_mul, quantized_linear_silu_and_mul_sharing),
    ENTRY(mvllm_cpu_block_linear, block_linear_sharing),
    ENTRY(mvllm_cpu_block_linear_silu_and_mul, block_linear_silu_and_mul_sharing),
    ENTRY(mvllm_cpu_block_embedding, one_thread),
    ENTRY(mvllm_cpu_select_experts, own_division),
    ENTRY(mvllm_cpu_moe, own_division),
    ENTRY(mvllm_cpu_gelu_tanh_moe, own_division),
    ENTRY(mvllm_cpu_ungated_moe, own_division),
    ENTRY(mvllm_cpu_clamped_moe, own_division),
    ENTRY(mvllm_cpu_quantized_moe, own_division),
    ENTRY(mvllm_cpu_causal_conv1d, own_division),
    ENTRY(mvllm_cpu_ssd, own_division),
    ENTRY(mvllm_cpu_gated_delta_rule, own_division),
    ENTRY(mvllm_cpu_gated_rms_norm, own_division),
    ENTRY(mvllm_cpu_reshape_and_cache, one_thread),
    ENTRY(mvllm_cpu_paged_attention, own_division),
    ENTRY(mvllm_cpu_sparse_attention, own_division),
    ENTRY(mvllm_cpu_select_positions, own_division),
#if defined(__linux__)
    ENTRY(mvllm_cpu_shared_all_reduce, own_division),  // its wait may time out
#endif
};

struct Patch {
    int32_t at, base;
    int64_t offset;
};

constexpr int64_t MAX_PIECES = 8;  // per thread

// One call of a program.
struct Stage {
    const Entry* entry;
    const int64_t* words;
    ThreadMode mode;
    int64_t pieces;  // per thread
};

// Executes a call that all threads share. A waiting thread prefetches the memory that it reads first in the next such call.
void share(const Stage& stage, const Stage* next, int64_t threads) {
    const auto run = [](const void* work, Part part) {
        const Stage& own = *static_cast<const Stage*>(work);
        own.entry->sharing->part(own.words, part);
    };
    const auto range = [](const void* work, int64_t thread, int64_t count) {
        const Stage& following = *static_cast<const Stage*>(work);
        return following.entry->sharing->ahead(following.words, thread, count);
    };
    run_pieces(threads, stage.pieces, run, &stage, next ? Ahead{range, next} : Ahead{nullptr, nullptr});
}

// The next stage whose memory can be prefetched; null if it is not shared by all threads, or there is none.
const Stage* next_with_ahead(const Stage* stage, const Stage* end) {
    while (stage < end && (stage->mode == ThreadMode::OWN_DIVISION || !stage->entry->sharing->ahead)) ++stage;
    return stage < end && stage->mode == ThreadMode::SHARED ? stage : nullptr;
}

}  // namespace
}  // namespace mvllm

using namespace mvllm;

extern "C" {

// Index in `entries` of the function `name` with `count` arguments; -1 if there is none.
int mvllm_cpu_program_entry(const char* name, int count) {
    for (size_t i = 0; i < sizeof(entries) / sizeof(entries[0]); ++i)
        if (!std::strcmp(entries[i].name, name) && entries[i].count == count) return int(i);
    return -1;
}

// Executes calls [first_call, count). `words` holds the arguments of all calls, one call after the other. Returns
// `count`, or the index of a call that has to be executed again, at which the next run starts.
int64_t mvllm_cpu_program_run(const int32_t* calls, int64_t first_call, int64_t count, int64_t* words, const Patch* patches,
                              int64_t num_patches, const int64_t* bases) {
    for (int64_t i = 0; i < num_patches; ++i) words[patches[i].at] = bases[patches[i].base] + patches[i].offset;
    for (int64_t i = 0; i < first_call; ++i) words += entries[calls[i]].count;
    thread_local std::vector<Stage> stages;
    stages.clear();
    const int threads = team_size();
    for (int64_t i = first_call; i < count; ++i) {
        const Entry& entry = entries[calls[i]];
        const ThreadMode mode = threads == 1 ? ThreadMode::OWN_DIVISION : entry.sharing->mode(words);
        const bool shared = mode == ThreadMode::SHARED && entry.sharing->pieces;
        const int64_t pieces = shared ? std::clamp<int64_t>(entry.sharing->pieces(words) / threads, 1, MAX_PIECES) : 1;
        stages.push_back({&entry, words, mode, pieces});
        words += entry.count;
    }
    const Stage* const end = stages.data() + stages.size();
    for (const Stage* stage = stages.data(); stage < end; ++stage) {
        if (stage->mode == ThreadMode::SHARED)
            share(*stage, next_with_ahead(stage + 1, end), threads);
        else if (!stage->entry->run(stage->words))
            return first_call + (stage - stages.data());
    }
    return count;
}

}  // extern "C"
