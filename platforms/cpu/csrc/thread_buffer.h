// Memory that a thread reuses in later calls, so that calls of a decode step allocate nothing.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace mvllm {

struct Buffer {
    std::unique_ptr<char[]> data;
    size_t size = 0;

    // Aligned to 64 bytes; the previous contents may be lost.
    char* at_least(size_t bytes) {
        if (!bytes) return nullptr;
        if (bytes > size) {
            data.reset();
            size = 0;
            data.reset(new char[bytes + 64]);
            size = bytes;
        }
        return data.get() + (64 - reinterpret_cast<uintptr_t>(data.get()) % 64);
    }
};

}  // namespace mvllm
