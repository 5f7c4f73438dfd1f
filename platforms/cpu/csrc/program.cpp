// Programs: a step's calls, recorded once and made again in one go (src/mvllm_cpu/replay.py records them).
//
// A call is the number of a function below and its arguments, one 64-bit slot each, as they were given. What may change
// from run to run (where the inputs, the result and the intermediate tensors lie, the plan of a step) is named by
// patches: before the calls are made, argument `at` becomes bases[slot] + offset.
//
// A call that waits for other ranks may give up for the time being. Then the program stops; whoever runs it sees to the
// matter and has it go on with that very call.

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

// Whether the function has done its work.
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
    int count;  // arguments
    bool (*run)(const int64_t* slots);  // false: to be called again; only of those that are made apart
    const Sharing* sharing;
};

template <auto function>
struct Caller;

template <class R, class... Ts, R (*function)(Ts...)>
struct Caller<function> {
    static bool run(const int64_t* slots) { return call(function, slots, std::index_sequence_for<Ts...>()); }
};

#define ENTRY(name, sharing) {#name, count_of(name), Caller<name>::run, &sharing}

// Functions that programs may call: plain pointers and numbers in, nothing out; or whether they are through.
const Entry entries[] = {
    ENTRY(mvllm_cpu_rms_norm, rms_norm_sharing),
    ENTRY(mvllm_cpu_embedding, by_one),
    ENTRY(mvllm_cpu_packed_embedding, by_one),
    ENTRY(mvllm_cpu_argmax, by_one),
    ENTRY(mvllm_cpu_silu_and_mul, silu_and_mul_sharing),
    ENTRY(mvllm_cpu_rotary, rotary_sharing),
    ENTRY(mvllm_cpu_linear, linear_sharing),
    ENTRY(mvllm_cpu_linear_silu, linear_silu_sharing),
    ENTRY(mvllm_cpu_qlinear, qlinear_sharing),
    ENTRY(mvllm_cpu_qlinear_silu, qlinear_silu_sharing),
    ENTRY(mvllm_cpu_write_kv, by_one),
    ENTRY(mvllm_cpu_attention, apart),
#if defined(__linux__)
    ENTRY(mvllm_cpu_shared_all_reduce, apart),  // within a region the other threads would spin for as long as it waits
#endif
};

struct Patch {
    int32_t at, slot;
    int64_t offset;
};

constexpr int SPINS = 4096;             // looks at the others before a waiting thread gives its core away
constexpr int64_t AHEAD = 128 << 10;    // bytes that a waiting thread fetches into its second cache
constexpr int64_t PIECES = 8;           // of each thread's part, at most

// Where threads wait for each other. Regions end at the OpenMP runtime's own barrier; between calls this one is cheaper,
// and a thread that waits fetches what it will read next.
class Meeting {
  public:
    void wait(int64_t threads, Range& ahead) {
        const int round = round_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
            for (int i = 0; i < 4 && ahead.size > 0; ++i, ahead.begin += LINE, ahead.size -= LINE)
                __builtin_prefetch(ahead.begin, 0, 2);
            if (spins >= SPINS) std::this_thread::yield();
        }
    }

  private:
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> round_{0};
};

struct Stage {
    const Entry* entry;
    const int64_t* slots;
    Way way;
    int64_t pieces;  // of each thread's part
};

void work(const Stage& stage, Taken* taken, int64_t thread, int64_t threads) {
    claim_pieces(taken, stage.pieces, thread, threads, [&](Part part) { stage.entry->sharing->part(stage.slots, part); });
}

void share(const Stage* stages, int64_t count, int64_t thread, int64_t threads, Meeting& meeting, Taken* taken) {
    Range ahead{nullptr, 0};
    int64_t known = 0;  // the stage after the last one that `ahead` was made for
    for (int64_t i = 0; i < count; ++i) {
        const Stage& stage = stages[i];
        if (stage.way == Way::BY_ONE) {
            if (thread == 0) stage.entry->run(stage.slots);
        } else {
            work(stage, taken + i * threads, thread, threads);
        }
        if (i + 1 == count || (stage.way == Way::BY_ONE && stages[i + 1].way == Way::BY_ONE)) continue;
        if (known <= i) {
            for (known = i + 1; known < count && !stages[known].entry->sharing->ahead; ++known) {
            }
            ahead = {nullptr, 0};
            if (known < count && stages[known].way == Way::TOGETHER)
                ahead = stages[known].entry->sharing->ahead(stages[known].slots, thread, threads);
            ahead.size = std::min(ahead.size, AHEAD);
        }
        meeting.wait(threads, ahead);
    }
}

}  // namespace
}  // namespace mvllm

using namespace mvllm;

extern "C" {

// The number of the function called `name` if it takes `count` arguments; -1 where programs may not call it.
int mvllm_cpu_program_entry(const char* name, int count) {
    for (size_t i = 0; i < sizeof(entries) / sizeof(entries[0]); ++i)
        if (!std::strcmp(entries[i].name, name) && entries[i].count == count) return int(i);
    return -1;
}

// Makes the calls from `first_call` on, of `count`. `slots` holds the arguments of all, one call's after the other's. Returns `count`; or the
// number of a call that wants to be made again, with which the next run begins.
int64_t mvllm_cpu_program_run(const int32_t* calls, int64_t first_call, int64_t count, int64_t* slots, const Patch* patches,
                              int64_t num_patches, const int64_t* bases) {
    for (int64_t i = 0; i < num_patches; ++i) slots[patches[i].at] = bases[patches[i].slot] + patches[i].offset;
    for (int64_t i = 0; i < first_call; ++i) slots += entries[calls[i]].count;
    thread_local std::vector<Stage> stages;
    stages.clear();
    const int threads = omp_get_max_threads();
    for (int64_t i = first_call; i < count; ++i) {
        const Entry& entry = entries[calls[i]];
        const Way way = threads == 1 ? Way::APART : entry.sharing->way(slots);
        const bool shared = way == Way::TOGETHER && entry.sharing->pieces;
        const int64_t pieces = shared ? std::min(entry.sharing->pieces(slots) / threads, PIECES) : 1;
        stages.push_back({&entry, slots, way, pieces});
        slots += entry.count;
    }
    for (size_t i = 0, end; i < stages.size(); i = end) {
        bool together = false;
        for (end = i; end < stages.size() && stages[end].way != Way::APART; ++end)
            together |= stages[end].way == Way::TOGETHER;
        if (end == i) {
            if (!stages[i].entry->run(stages[i].slots)) return first_call + int64_t(i);
            end = i + 1;
        } else if (!together) {
            for (size_t j = i; j < end; ++j) stages[j].entry->run(stages[j].slots);
        } else {
            const Stage* first = stages.data() + i;
            const int64_t length = int64_t(end - i);
            Meeting meeting;
            std::vector<Taken> taken(size_t(length * threads));
#pragma omp parallel num_threads(threads)
            share(first, length, omp_get_thread_num(), omp_get_num_threads(), meeting, taken.data());
        }
    }
    return count;
}

}  // extern "C"
