// Work sharing among the threads of one parallel region, for single kernels and for recorded calls (program.cpp).

#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace mvllm {

// Which threads of a region execute a recorded call.
enum class ThreadMode {
    OWN_REGION,  // none: the call opens a parallel region of its own
    ONE_THREAD,  // the first thread, for small calls
    SHARED,      // all threads, a part each
};

struct Range {
    const char* begin;
    int64_t size;
};

// Part `index` of `count` equal parts of a call's work. `fresh`: the first part of this call that the thread executes.
struct Part {
    int64_t index, count;
    bool fresh;
};

constexpr int LINE = 64;
constexpr int64_t NEIGHBOURS = 4;  // threads whose pieces a thread may execute, itself included

// Number of pieces of one thread's part of one call that threads have claimed so far.
struct alignas(LINE) ClaimedPieces {
    std::atomic<int32_t> pieces{0};
};

// Work stealing: each thread executes its own pieces, then unclaimed pieces of its neighbours. A core that is slow or busy
// with another program then delays the others by one piece instead of its whole part.
template <class Work>
void claim_pieces(ClaimedPieces* claimed, int64_t pieces, int64_t thread, int64_t threads, const Work& work) {
    if (pieces <= 1) return work(Part{thread, threads, true});
    bool fresh = true;
    for (int64_t i = 0; i < std::min(threads, NEIGHBOURS); ++i) {
        const int64_t owner = (thread + i) % threads;
        std::atomic<int32_t>& next = claimed[owner].pieces;
        while (next.load(std::memory_order_relaxed) < pieces) {
            const int64_t piece = next.fetch_add(1, std::memory_order_relaxed);
            if (piece >= pieces) break;
            work(Part{owner * pieces + piece, threads * pieces, fresh});
            fresh = false;
        }
    }
}

// Executes work of `pieces` pieces in a parallel region of `threads` threads.
template <class Work>
void divide_pieces(int threads, int64_t pieces, const Work& work) {
    constexpr int64_t MAX_PIECES = 16;  // per thread
    if (threads == 1) return work(Part{0, 1, true});
    std::vector<ClaimedPieces> claimed{size_t(threads)};
    const int64_t each = std::min(pieces / threads, MAX_PIECES);
#pragma omp parallel num_threads(threads)
    claim_pieces(claimed.data(), each, omp_get_thread_num(), omp_get_num_threads(), work);
}

// How threads share a recorded call; the functions take the slots of its arguments.
struct WorkSharing {
    ThreadMode (*mode)(const int64_t* slots);
    void (*part)(const int64_t* slots, Part part);
    // Memory that the thread's first part reads first and that no earlier call of the step writes: a waiting thread
    // prefetches it. May be null.
    Range (*ahead)(const int64_t* slots, int64_t thread, int64_t threads);
    // Number of pieces of a useful size. Null if each thread executes one part and steals none.
    int64_t (*pieces)(const int64_t* slots);
};

// Records that a kernel runs now, so that background work pauses (page_prefault.cpp).
void record_kernel_use();

extern const WorkSharing one_thread, own_region;
extern const WorkSharing rms_norm_sharing, silu_and_mul_sharing, rotary_sharing;
extern const WorkSharing linear_sharing, linear_silu_sharing;
extern const WorkSharing qlinear_sharing, qlinear_silu_sharing;
extern const WorkSharing block_linear_sharing, block_linear_silu_sharing;

}  // namespace mvllm
