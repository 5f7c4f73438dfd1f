// How threads share the recorded calls of a program (program.cpp).

#pragma once

#include <cstdint>

#include "thread_team.h"

namespace mvllm {

// Which threads execute a recorded call.
enum class ThreadMode {
    OWN_DIVISION,  // the call divides its work itself
    ONE_THREAD,    // the calling thread, for small calls
    SHARED,        // all threads, a part each
};

// How threads share a recorded call; the functions take its arguments, a 64-bit word each.
struct WorkSharing {
    ThreadMode (*mode)(const int64_t* words);
    void (*part)(const int64_t* words, Part part);
    // Memory that the thread's first part reads first and that no earlier call of the step writes: a waiting thread
    // prefetches it. May be null.
    Range (*ahead)(const int64_t* words, int64_t thread, int64_t threads);
    // Number of pieces of a useful size. Null if each thread executes one part and steals none.
    int64_t (*pieces)(const int64_t* words);
};

// Records that a kernel runs now, so that background work pauses (page_prefault.cpp).
void record_kernel_use();

extern const WorkSharing one_thread, own_division;
extern const WorkSharing rms_norm_sharing, silu_and_mul_sharing, gelu_tanh_and_mul_sharing, rotary_embedding_sharing;
extern const WorkSharing linear_sharing, linear_silu_and_mul_sharing;
extern const WorkSharing quantized_linear_sharing, quantized_linear_silu_and_mul_sharing;
extern const WorkSharing block_linear_sharing, block_linear_silu_and_mul_sharing;

}  // namespace mvllm
