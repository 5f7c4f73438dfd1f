// How the threads of a team make recorded calls together (program.cpp), without a parallel region for each.

#pragma once

#include <cstdint>

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

// A kind of call, given by the slots of its arguments.
struct Sharing {
    Way (*way)(const int64_t* slots);
    void (*part)(const int64_t* slots, int64_t thread, int64_t threads);
    // What a thread's part will read first and nobody has written lately: what a waiting thread may fetch. May be null.
    Range (*ahead)(const int64_t* slots, int64_t thread, int64_t threads);
};

// Says that a step computes: what can wait, waits (first_touch.cpp).
void note_use();

extern const Sharing by_one, apart;
extern const Sharing rms_norm_sharing, silu_and_mul_sharing, rotary_sharing;
extern const Sharing linear_sharing, linear_silu_sharing;
extern const Sharing qlinear_sharing, qlinear_silu_sharing;

}  // namespace mvllm
