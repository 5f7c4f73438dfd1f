// Replay of recorded kernel calls: the calls of a decode step, recorded once and executed by one function call
// (src/mvllm_cpu/replay.py records them).
//
// A call is the number of a function in `entries` and its arguments, one 64-bit slot each. Arguments that change from run
// to run (addresses of inputs, results and intermediate tensors, the plan of a step) are listed as patches: before the
// calls are executed, argument `at` becomes bases[slot] + offset.
//
// A call that waits for other ranks may time out. Then the program returns; the caller handles the timeout and resumes
// the program at the same call.

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "entries.h"
#include "team.h"

namespace mvllm {
namespace {

template <class T>
T argument(int64_t slot) {
    if constexpr (sizeof(T) == sizeof(slot)) {
        T value;
        std::memcpy(&value, &slot, sizeof(value));
        return value;
    } else if constexpr (std::is_same_v<T, float>) {
        const int32_t bits = int32_t(slot);
        float value;
        std::memcpy(&value, &bits, sizeof(value));
        return value;
    } else {
        return T(slot);
    }
}

// Calls the function. False if it has to be called again.
template <class R, class... Ts, size_t... I>
bool call(R (*function)(Ts...), const int64_t* slots, std::index_sequence<I...>) {
    if constexpr (std::is_void_v<R>) {
        function(argument<Ts>(slots[I])...);
        return true;
    } else {
        return function(argument<Ts>(slots[I])...) != 0;
    }
}

template <class R, class... Ts>
constexpr int count_of(R (*)(Ts...)) {
    return int(sizeof...(Ts));
}

struct Entry {
    const char* name;
    int count;  // of arguments
    bool (*run)(const int64_t* slots);  // false: call it again; only functions with OWN_REGION return it
    const WorkSharing* sharing;
};

template <auto function>
struct Caller;

template <class R, class... Ts, R (*function)(Ts...)>
struct Caller<function> {
    static bool run(const int64_t* slots) { return call(function, slots, std::index_sequence_for<Ts...>()); }
};

#define ENTRY(name, sharing) {#name, count_of(name), Caller<name>::run, &sharing}

// Functions that programs may call. They take pointers and numbers, and return nothing or whether they are done.
const Entry entries[] = {
    ENTRY(mvllm_cpu_rms_norm, rms_norm_sharing),
    ENTRY(mvllm_cpu_embedding, one_thread),
    ENTRY(mvllm_cpu_packed_embedding, one_thread),
    ENTRY(mvllm_cpu_argmax, one_thread),
    ENTRY(mvllm_cpu_silu_and_mul, silu_and_mul_sharing),
    ENTRY(mvllm_cpu_rotary, rotary_sharing),
    ENTRY(mvllm_cpu_linear, linear_sharing),
    ENTRY(mvllm_cpu_linear_silu, linear_silu_sharing),
    ENTRY(mvllm_cpu_qlinear, qlinear_sharing),
    ENTRY(mvllm_cpu_qlinear_silu, qlinear_silu_sharing),
    ENTRY(mvllm_cpu_block_linear, block_linear_sharing),
    ENTRY(mvllm_cpu_block_linear_silu, block_linear_silu_sharing),
    ENTRY(mvllm_cpu_block_embedding, one_thread),
    ENTRY(mvllm_cpu_write_kv, one_thread),
    ENTRY(mvllm_cpu_attention, own_region),
#if defined(__linux__)
    ENTRY(mvllm_cpu_shared_all_reduce, own_region),  // within a region the other threads would spin for as long as it waits
#endif
};

struct Patch {
    int32_t at, slot;
    int64_t offset;
};

constexpr int SPINS = 4096;                   // polls before a waiting thread yields its core
constexpr int64_t PREFETCH_BYTES = 128 << 10;  // that a waiting thread prefetches into its L2 cache
constexpr int64_t MAX_PIECES = 8;             // per thread

// Spinning barrier for the threads of one parallel region. It is cheaper than the OpenMP runtime's barrier, and a waiting
// thread prefetches the memory that it reads next.
class TeamBarrier {
  public:
    void wait(int64_t threads, Range& prefetch) {
        const int round = round_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
            for (int i = 0; i < 4 && prefetch.size > 0; ++i, prefetch.begin += LINE, prefetch.size -= LINE)
                __builtin_prefetch(prefetch.begin, 0, 2);
            if (spins >= SPINS) std::this_thread::yield();
        }
    }

  private:
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> round_{0};
};

// One call of a program.
struct Stage {
    const Entry* entry;
    const int64_t* slots;
    ThreadMode mode;
    int64_t pieces;  // per thread
};

// Executes `count` stages in one parallel region; every thread calls it. `claimed` has an entry per stage and thread.
void run_in_region(const Stage* stages, int64_t count, int64_t thread, int64_t threads, TeamBarrier& barrier,
                   ClaimedPieces* claimed) {
    Range prefetch{nullptr, 0};
    int64_t known = 0;  // the stage that `prefetch` is for
    for (int64_t i = 0; i < count; ++i) {
        const Stage& stage = stages[i];
        if (stage.mode == ThreadMode::ONE_THREAD) {
            if (thread == 0) stage.entry->run(stage.slots);
        } else {
            claim_pieces(claimed + i * threads, stage.pieces, thread, threads,
                         [&](Part part) { stage.entry->sharing->part(stage.slots, part); });
        }
        if (i + 1 == count || (stage.mode == ThreadMode::ONE_THREAD && stages[i + 1].mode == ThreadMode::ONE_THREAD)) continue;
        if (known <= i) {
            for (known = i + 1; known < count && !stages[known].entry->sharing->ahead; ++known) {
            }
            prefetch = {nullptr, 0};
            if (known < count && stages[known].mode == ThreadMode::SHARED)
                prefetch = stages[known].entry->sharing->ahead(stages[known].slots, thread, threads);
            prefetch.size = std::min(prefetch.size, PREFETCH_BYTES);
        }
        barrier.wait(threads, prefetch);
    }
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

// Executes calls [first_call, count). `slots` holds the arguments of all calls, one call after the other. Returns `count`,
// or the index of a call that has to be executed again, at which the next run starts.
int64_t mvllm_cpu_program_run(const int32_t* calls, int64_t first_call, int64_t count, int64_t* slots, const Patch* patches,
                              int64_t num_patches, const int64_t* bases) {
    for (int64_t i = 0; i < num_patches; ++i) slots[patches[i].at] = bases[patches[i].slot] + patches[i].offset;
    for (int64_t i = 0; i < first_call; ++i) slots += entries[calls[i]].count;
    thread_local std::vector<Stage> stages;
    stages.clear();
    const int threads = omp_get_max_threads();
    for (int64_t i = first_call; i < count; ++i) {
        const Entry& entry = entries[calls[i]];
        const ThreadMode mode = threads == 1 ? ThreadMode::OWN_REGION : entry.sharing->mode(slots);
        const bool shared = mode == ThreadMode::SHARED && entry.sharing->pieces;
        const int64_t pieces = shared ? std::min(entry.sharing->pieces(slots) / threads, MAX_PIECES) : 1;
        stages.push_back({&entry, slots, mode, pieces});
        slots += entry.count;
    }
    for (size_t i = 0, end; i < stages.size(); i = end) {
        bool is_shared = false;
        for (end = i; end < stages.size() && stages[end].mode != ThreadMode::OWN_REGION; ++end)
            is_shared |= stages[end].mode == ThreadMode::SHARED;
        if (end == i) {
            if (!stages[i].entry->run(stages[i].slots)) return first_call + int64_t(i);
            end = i + 1;
        } else if (!is_shared) {
            for (size_t j = i; j < end; ++j) stages[j].entry->run(stages[j].slots);
        } else {
            const Stage* first = stages.data() + i;
            const int64_t length = int64_t(end - i);
            TeamBarrier barrier;
            std::vector<ClaimedPieces> claimed(size_t(length * threads));
#pragma omp parallel num_threads(threads)
            run_in_region(first, length, omp_get_thread_num(), omp_get_num_threads(), barrier, claimed.data());
        }
    }
    return count;
}

}  // extern "C"
