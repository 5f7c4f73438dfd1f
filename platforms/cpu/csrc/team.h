// How the threads of a team share work, and make recorded calls together (program.cpp), without a parallel region for each.

#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace mvllm {

enum class Way {
    APART,     // the call opens a region of its own
    BY_ONE,    // too little work to share: the first thread makes the call
    TOGETHER,  // each thread does its part
};

struct Range {
    const char* begin;
    int64_t size;
};

// Part `index` of `count` equal ones of a call's work; `fresh` where the thread has done none of this call's yet.
struct Part {
    int64_t index, count;
    bool fresh;
};

constexpr int LINE = 64;
constexpr int64_t NEIGHBOURS = 4;  // threads whose parts a thread looks at, its own among them

// How many pieces of one thread's part of one call have been taken, by whomever.
struct alignas(LINE) Taken {
    std::atomic<int32_t> pieces{0};
};

// A thread does its own part piece by piece. One that is through takes what its neighbours have not begun: a core that
// has something else to do, or that memory serves less well, then costs the others a piece, not a wait for its whole part.
template <class Work>
void claim_pieces(Taken* taken, int64_t pieces, int64_t thread, int64_t threads, const Work& work) {
    if (pieces <= 1) return work(Part{thread, threads, true});
    bool fresh = true;
    for (int64_t i = 0; i < std::min(threads, NEIGHBOURS); ++i) {
        const int64_t owner = (thread + i) % threads;
        std::atomic<int32_t>& next = taken[owner].pieces;
        while (next.load(std::memory_order_relaxed) < pieces) {
            const int64_t piece = next.fetch_add(1, std::memory_order_relaxed);
            if (piece >= pieces) break;
            work(Part{owner * pieces + piece, threads * pieces, fresh});
            fresh = false;
        }
    }
}

// A region of `threads` that shares work of `pieces` pieces in all.
template <class Work>
void divide_pieces(int threads, int64_t pieces, const Work& work) {
    constexpr int64_t MOST = 16;  // of each thread's part
    if (threads == 1) return work(Part{0, 1, true});
    std::vector<Taken> taken{size_t(threads)};
    const int64_t each = std::min(pieces / threads, MOST);
#pragma omp parallel num_threads(threads)
    claim_pieces(taken.data(), each, omp_get_thread_num(), omp_get_num_threads(), work);
}

// A kind of call, given by the slots of its arguments.
struct Sharing {
    Way (*way)(const int64_t* slots);
    void (*part)(const int64_t* slots, Part part);
    // What the first of a thread's parts will read first and nobody has written lately: what a waiting thread may fetch.
    // May be null.
    Range (*ahead)(const int64_t* slots, int64_t thread, int64_t threads);
    // How many pieces of a useful size the work has. Null where each thread does one part and no other's.
    int64_t (*pieces)(const int64_t* slots);
};

// Says that a step computes: what can wait, waits (first_touch.cpp).
void note_use();

extern const Sharing by_one, apart;
extern const Sharing rms_norm_sharing, silu_and_mul_sharing, rotary_sharing;
extern const Sharing linear_sharing, linear_silu_sharing;
extern const Sharing qlinear_sharing, qlinear_silu_sharing;

}  // namespace mvllm
