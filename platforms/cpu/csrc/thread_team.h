// Threads that share the work of kernels.
//
// A call is divided into pieces, and every thread claims pieces until none is left. No thread waits for another one to start:
// a preempted thread delays the others only if it has claimed a piece. The calling thread takes part, so a call makes
// progress even if no other thread runs.
//
// The division depends on the configured number of threads, not on how many take part, so results do not depend on the load
// of the machine.

#pragma once

#include <algorithm>
#include <cstdint>

namespace mvllm {

constexpr int64_t LINE = 64;

struct Range {
    const char* begin;
    int64_t size;
};

// Part `index` of `count` equal parts of a call's work. `fresh`: the first part of this call that the thread executes.
struct Part {
    int64_t index, count;
    bool fresh;
};

// Configured number of threads for calls of this thread (torch.set_num_threads()).
int team_size();

// Memory that a thread reads first in its next call; a waiting thread prefetches it. `thread` is the thread's number.
struct Ahead {
    Range (*range)(const void* work, int64_t thread, int64_t threads);
    const void* work;
};

// Calls function(work, part) for all `threads` * `pieces` parts. Thread i prefers parts [i * pieces, (i + 1) * pieces).
// Within a piece, calls run in the calling thread alone.
void run_pieces(int64_t threads, int64_t pieces, void (*function)(const void* work, Part part), const void* work,
                Ahead ahead = {nullptr, nullptr});

// Calls work(Part) for all parts of work that divides into about `pieces` pieces of a useful size.
template <class Work>
void divide_pieces(int threads, int64_t pieces, const Work& work) {
    constexpr int64_t MAX_PIECES = 16;  // per thread
    if (threads == 1) return work(Part{0, 1, true});
    const int64_t each = std::clamp<int64_t>(pieces / threads, 1, MAX_PIECES);
    run_pieces(threads, each, [](const void* w, Part part) { (*static_cast<const Work*>(w))(part); }, &work);
}

// Calls work(begin, end) for ranges that make up [0, count).
template <class Work>
void divide_range(int threads, int64_t count, const Work& work) {
    divide_pieces(threads, count, [&](Part part) {
        const int64_t begin = count * part.index / part.count, end = count * (part.index + 1) / part.count;
        if (begin < end) work(begin, end);
    });
}

}  // namespace mvllm
