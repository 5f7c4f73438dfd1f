// All-reduce over the ranks of one machine, through memory that all ranks have mapped.
//
//     | word of rank 0 | word of rank 1 | ...    64 bytes each: rounds that the rank has posted, number of sleeping waiters
//     | rank 0: buffer A | buffer B | rank 1: buffer A | buffer B | ...
//
// In a round every rank copies its numbers into its own buffer, increments its word, waits until all words have the same
// count, and adds up all buffers in rank order. All ranks add the same numbers in the same order, so the results are
// bit-identical.
//
// Rounds alternate between the two buffers. A rank overwrites the buffer of round k in round k + 2, after it has seen all
// words of round k + 1. A rank that has posted round k + 1 has finished reading round k, so a writer never waits for
// readers.
//
// A wait has a timeout: the caller checks the ranks that are late and calls again. The progress of a sum is stored
// with the count of rounds, so that the second call continues where the first one stopped.

#include <cstdint>
#include <cstring>

#include "entries.h"
#include "kernels.h"

#if defined(__linux__)

#include <climits>
#include <ctime>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

namespace {

constexpr int64_t WORD_BYTES = 64;
constexpr int64_t AHEAD = 256 << 10;  // bytes that a waiting rank prefetches into its L2 cache
constexpr int64_t LINE = 64;
constexpr int POLLS = 64;        // polls of another rank's word between two readings of the clock
constexpr int64_t BLOCK = 1024;  // elements added up at a time: their sum stays in the L1 cache

struct Word {
    std::atomic<uint32_t> rounds;
    std::atomic<uint32_t> sleepers;
};
static_assert(sizeof(Word) <= WORD_BYTES && std::atomic<uint32_t>::is_always_lock_free, "a word is shared by processes");

}  // namespace

// One rank's view of a group. Mirrored in Python (shared_memory_communicator.py).
struct mvllm::SharedGroup {
    char* base;
    int64_t world_size, buffer_bytes, rank;
    int64_t spin_ns;       // time that a wait spins before it sleeps
    int64_t timeout_ms;    // of a wait
    int64_t done;          // elements of the current sum that are complete
    int64_t late;          // the first rank that had not posted when a wait timed out
    uint32_t round;        // number of finished rounds; may wrap
    int32_t is_posted;     // whether this rank has posted its part of the next round

    Word& word(int64_t rank) const { return *reinterpret_cast<Word*>(base + rank * WORD_BYTES); }
    char* buffer(int64_t rank) const { return base + world_size * WORD_BYTES + (2 * rank + (round & 1)) * buffer_bytes; }
};

namespace {

using mvllm::SharedGroup;

bool posted(const Word& word, uint32_t round) {
    return int32_t(word.rounds.load(std::memory_order_acquire) - round) > 0;  // counts may wrap
}

void sleep_on(Word& word, uint32_t round, int64_t milliseconds) {
    word.sleepers.fetch_add(1);
    const uint32_t seen = word.rounds.load();
    if (int32_t(seen - round) <= 0) {
        timespec limit{time_t(milliseconds / 1000), long(milliseconds % 1000) * 1000000};
        syscall(SYS_futex, &word.rounds, FUTEX_WAIT, seen, &limit, nullptr, 0);
    }
    word.sleepers.fetch_sub(1);
}

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

void add_bf16(float* sum, const uint16_t* part, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t wide = uint32_t(part[i]) << 16;
        float value;
        std::memcpy(&value, &wide, 4);
        sum[i] += value;
    }
}

void round_to_bf16(uint16_t* out, const float* sum, int64_t n) {  // to the nearest, ties to even; NaN stays NaN
    for (int64_t i = 0; i < n; ++i) {
        uint32_t bits;
        std::memcpy(&bits, sum + i, 4);
        const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1), nan = bits | 0x400000;
        out[i] = uint16_t(((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded) >> 16);
    }
}

void add_up(const SharedGroup& group, float* out, int64_t count) {
    for (int64_t begin = 0; begin < count; begin += BLOCK) {
        const int64_t n = std::min(BLOCK, count - begin);
        float* sum = out + begin;
        std::memcpy(sum, reinterpret_cast<const float*>(group.buffer(0)) + begin, n * sizeof(float));
        for (int64_t rank = 1; rank < group.world_size; ++rank) {
            const float* part = reinterpret_cast<const float*>(group.buffer(rank)) + begin;
            for (int64_t i = 0; i < n; ++i) sum[i] += part[i];
        }
    }
}

void add_up(const SharedGroup& group, uint16_t* out, int64_t count) {
    float sum[BLOCK];
    for (int64_t begin = 0; begin < count; begin += BLOCK) {
        const int64_t n = std::min(BLOCK, count - begin);
        std::fill(sum, sum + n, 0.0f);
        for (int64_t rank = 0; rank < group.world_size; ++rank) {
            const uint16_t* part = reinterpret_cast<const uint16_t*>(group.buffer(rank)) + begin;
            add_bf16(sum, part, n);
        }
        round_to_bf16(out + begin, sum, n);
    }
}

void post(SharedGroup& group, const void* data, int64_t bytes) {
    std::memcpy(group.buffer(group.rank), data, bytes);
    Word& word = group.word(group.rank);
    word.rounds.store(group.round + 1);
    if (word.sleepers.load()) syscall(SYS_futex, &word.rounds, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    group.is_posted = 1;
}

// Polls the rank's word for at most `spin_ns`. Meanwhile it prefetches from `ahead`.
void spin(const SharedGroup& group, const Word& word, const char*& ahead, int64_t& to_fetch) {
    if (group.spin_ns <= 0) return;
    const int64_t end = now_ns() + group.spin_ns;
    do {
        for (int i = 0; i < POLLS; ++i) {
            if (posted(word, group.round)) return;
            if (to_fetch > 0) {
                for (int line = 0; line < 4; ++line, ahead += LINE) __builtin_prefetch(ahead, 0, 2);
                to_fetch -= 4 * LINE;
                continue;
            }
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
    } while (now_ns() < end);
}

// Waits until every rank has posted the round. False after `timeout_ms`; `late` is then the first that has not.
bool wait(SharedGroup& group, const char* ahead) {
    int64_t to_fetch = ahead ? AHEAD : 0;
    int64_t deadline = 0;  // set when it is first needed: most waits end while they spin
    for (int64_t rank = 0; rank < group.world_size; ++rank) {
        Word& word = group.word(rank);
        if (posted(word, group.round)) continue;
        spin(group, word, ahead, to_fetch);
        while (!posted(word, group.round)) {
            const int64_t now = now_ns();
            if (!deadline) deadline = now + group.timeout_ms * 1000000;
            if (now >= deadline) {
                group.late = rank;
                return false;
            }
            sleep_on(word, group.round, (deadline - now + 999999) / 1000000);
        }
    }
    return true;
}

bool exchange(SharedGroup& group, const void* data, int64_t bytes, const char* ahead) {
    if (!group.is_posted) post(group, data, bytes);
    return wait(group, ahead);
}

void end_round(SharedGroup& group) {
    ++group.round;
    group.is_posted = 0;
}

template <class T>
bool all_reduce(SharedGroup& group, T* data, int64_t count, const char* ahead) {
    const int64_t at_once = group.buffer_bytes / int64_t(sizeof(T));
    while (group.done < count) {
        T* part = data + group.done;
        const int64_t length = std::min(at_once, count - group.done);
        if (!exchange(group, part, length * int64_t(sizeof(T)), ahead)) return false;
        add_up(group, part, length);
        end_round(group);
        group.done += length;
    }
    group.done = 0;
    return true;
}

}  // namespace

extern "C" {

// Replaces `data` by the sum over all ranks, in as many rounds as needed. While it waits it prefetches from `ahead`,
// the memory that is read next, unless that is null. Returns 1, or 0 on a timeout: call again with the same arguments.
int mvllm_cpu_shared_all_reduce(SharedGroup* group, void* data, int64_t count, int dtype, const char* ahead) {
    return dtype == mvllm::F32 ? all_reduce(*group, static_cast<float*>(data), count, ahead)
                               : all_reduce(*group, static_cast<uint16_t*>(data), count, ahead);
}

// Posts this rank's bytes and waits for those of the others, which stay in the round's buffers until `end_round`. Returns
// 1, or 0 on a timeout: call again.
int mvllm_cpu_shared_exchange(SharedGroup* group, const void* data, int64_t bytes) {
    return exchange(*group, data, bytes, nullptr);
}

// Ends the round, after the buffers have been read.
void mvllm_cpu_shared_end_round(SharedGroup* group) { end_round(*group); }

}  // extern "C"

#endif  // on other systems the symbols are missing, and ranks communicate through sockets
