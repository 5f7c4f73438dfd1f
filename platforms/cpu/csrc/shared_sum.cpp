// Sums over the ranks of one machine, through memory that all of them have mapped.
//
//     | word of rank 0 | word of rank 1 | ...    64 bytes each: rounds that the rank has posted, ranks that sleep on it
//     | rank 0: slot A | slot B | rank 1: slot A | slot B | ...
//
// A round: every rank copies its numbers into its own slot, raises its word, waits until all words are as high, and adds
// up all slots in rank order. All ranks add the same numbers in the same order, so all get the same bits.
//
// Rounds alternate between the two slots. A rank overwrites the slot of round k in round k + 2, for which it must have
// seen all words of round k + 1; whoever has posted that is done reading round k. So nobody waits for readers.

#include <cstdint>
#include <cstring>

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
constexpr int64_t AHEAD = 256 << 10;  // bytes that a waiting rank fetches into its second cache
constexpr int64_t LINE = 64;
constexpr int64_t BLOCK = 1024;  // elements added up at a time: their sum stays in the first cache

struct Word {
    std::atomic<uint32_t> rounds;
    std::atomic<uint32_t> sleepers;
};
static_assert(sizeof(Word) <= WORD_BYTES && std::atomic<uint32_t>::is_always_lock_free, "a word is shared by processes");

struct Place {
    char* base;
    int64_t world_size, slot_bytes;

    Word& word(int64_t rank) const { return *reinterpret_cast<Word*>(base + rank * WORD_BYTES); }
    char* slot(int64_t rank, uint32_t round) const {
        return base + world_size * WORD_BYTES + (2 * rank + (round & 1)) * slot_bytes;
    }
};

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

int64_t now_ms() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t(t.tv_sec) * 1000 + t.tv_nsec / 1000000;
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

void add_up(const Place& place, uint32_t round, float* out, int64_t count) {
    for (int64_t begin = 0; begin < count; begin += BLOCK) {
        const int64_t n = std::min(BLOCK, count - begin);
        float* sum = out + begin;
        std::memcpy(sum, reinterpret_cast<const float*>(place.slot(0, round)) + begin, n * sizeof(float));
        for (int64_t rank = 1; rank < place.world_size; ++rank) {
            const float* part = reinterpret_cast<const float*>(place.slot(rank, round)) + begin;
            for (int64_t i = 0; i < n; ++i) sum[i] += part[i];
        }
    }
}

void add_up(const Place& place, uint32_t round, uint16_t* out, int64_t count) {
    float sum[BLOCK];
    for (int64_t begin = 0; begin < count; begin += BLOCK) {
        const int64_t n = std::min(BLOCK, count - begin);
        std::fill(sum, sum + n, 0.0f);
        for (int64_t rank = 0; rank < place.world_size; ++rank) {
            const uint16_t* part = reinterpret_cast<const uint16_t*>(place.slot(rank, round)) + begin;
            add_bf16(sum, part, n);
        }
        round_to_bf16(out + begin, sum, n);
    }
}

}  // namespace

extern "C" {

// Shows this rank's bytes to the others, as its part of `round`. Rounds count up from 0.
void mvllm_cpu_shared_post(char* base, int64_t world_size, int64_t slot_bytes, int64_t rank, uint32_t round,
                           const void* data, int64_t bytes) {
    const Place place{base, world_size, slot_bytes};
    std::memcpy(place.slot(rank, round), data, bytes);
    Word& word = place.word(rank);
    word.rounds.store(round + 1);
    if (word.sleepers.load()) syscall(SYS_futex, &word.rounds, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Waits until every rank has posted `round`. Returns -1, or the first rank that had not after `milliseconds`. While it
// waits it fetches what lies at `ahead`, which is read next, unless that is null.
int64_t mvllm_cpu_shared_wait(char* base, int64_t world_size, int64_t slot_bytes, uint32_t round, int64_t spins,
                              int64_t milliseconds, const char* ahead) {
    int64_t to_fetch = ahead ? AHEAD : 0;
    const Place place{base, world_size, slot_bytes};
    const int64_t deadline = now_ms() + milliseconds;
    for (int64_t rank = 0; rank < world_size; ++rank) {
        Word& word = place.word(rank);
        for (int64_t i = 0; i < spins && !posted(word, round); ++i) {
            if (to_fetch > 0) {
                for (int line = 0; line < 4; ++line, ahead += LINE) __builtin_prefetch(ahead, 0, 2);
                to_fetch -= 4 * LINE;
                continue;
            }
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
        while (!posted(word, round)) {
            const int64_t left = deadline - now_ms();
            if (left <= 0) return rank;
            sleep_on(word, round, left);
        }
    }
    return -1;
}

// The sum of what all ranks have posted, for a round that has been waited for.
void mvllm_cpu_shared_sum(char* base, int64_t world_size, int64_t slot_bytes, uint32_t round, void* out, int64_t count,
                          int32_t dtype) {
    const Place place{base, world_size, slot_bytes};
    if (dtype == mvllm::F32)
        add_up(place, round, static_cast<float*>(out), count);
    else
        add_up(place, round, static_cast<uint16_t*>(out), count);
}

}  // extern "C"

#endif  // elsewhere the symbols are missing, and ranks talk through sockets
