// Scratch memory of the threads that compute attention.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels.h"

namespace mvllm {

// One thread's scratch memory, reused by later steps.
class ScratchMemory {
  public:
    Scratch carve(const Geometry& g) {
        const bool bytes = is_byte(g.spec.kv_dtype), selected = reads_selected(g.spec);
        const size_t rows = g.tile_rows, item = g.spec.kv_dtype == F32 ? 4 : 2;
        const size_t sizes[] = {
            rows * g.dk * 4,                          // query
            MAX_MR * CHUNK * 4,                       // scores
            MAX_MR * CHUNK * 2,                       // pairs
            rows * g.dv * 4,                          // acc
            rows * 4,                                 // row_max
            rows * STRIP * 4,                         // row_sum
            g.spec.batch_invariant ? rows * g.dv * 4 : 0,  // total
            g.spec.batch_invariant ? rows * 4 : 0,    // total_max
            g.spec.batch_invariant ? rows * 4 : 0,    // total_sum
            bytes || selected ? CHUNK * g.dk * item : 0,   // keys
            bytes || g.spec.latent ? CHUNK * g.dv * item : 0,  // values
            bytes && selected ? size_t(STRIP) * g.dk * 2 : 0,  // widened
        };
        size_t total = 64;
        for (size_t size : sizes) total += size + 64;
        if (size_ < total) memory_.reset(new char[total]), size_ = total;
        uintptr_t at = reinterpret_cast<uintptr_t>(memory_.get());
        void* parts[12];
        for (int i = 0; i < 12; ++i) {
            at = (at + 63) & ~uintptr_t(63);
            parts[i] = reinterpret_cast<void*>(at);
            at += sizes[i];
        }
        auto floats = [&](int i) { return static_cast<float*>(parts[i]); };
        return {floats(0), floats(1), static_cast<uint32_t*>(parts[2]), floats(3), floats(4), floats(5),
                floats(6), floats(7), floats(8), parts[9], parts[10], static_cast<uint16_t*>(parts[11])};
    }

  private:
    std::unique_ptr<char[]> memory_;
    size_t size_ = 0;
};

}  // namespace mvllm
