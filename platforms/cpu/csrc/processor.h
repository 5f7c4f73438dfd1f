// Features of the processor, and the choice of a kernel table by them.

#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace mvllm {

// Instruction set extensions that the kernels need; each requires those that it is based on.
struct Features {
#if MVLLM_X86
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
                      __builtin_cpu_supports("bmi2");
    const bool avx2_vnni = avx2 && __builtin_cpu_supports("avxvnni");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vl");
    const bool avx512_vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    const bool avx512_bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
#if __has_include(<amxtileintrin.h>)  // else the compiler does not know the name
    const bool amx = avx512_bf16 && __builtin_cpu_supports("amx-tile");  // whether or not the system allows tiles
#else
    const bool amx = false;
#endif
#endif
};

// One table of kernels (null if the library was linked without it), and whether it runs here.
template <class Table>
struct Candidate {
    const Table* table;
    bool runs_here;
    const char* also = nullptr;  // an additional name in MVLLM_CPU_ISA
};

// The table that MVLLM_CPU_ISA names if it runs here, else the first one that does. The last one always does.
template <class Table, size_t N>
const Table& chosen(const Candidate<Table> (&best_first)[N]) {
    const char* asked = std::getenv("MVLLM_CPU_ISA");
    const Table* best = nullptr;
    for (const Candidate<Table>& candidate : best_first) {
        if (!candidate.table || !candidate.runs_here) continue;
        if (!best) best = candidate.table;
        if (!asked) continue;
        if (!std::strcmp(asked, candidate.table->name) || (candidate.also && !std::strcmp(asked, candidate.also)))
            return *candidate.table;
    }
    return *best;
}

}  // namespace mvllm
