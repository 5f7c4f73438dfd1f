// Arguments of the kernels in strided_tile.h.

#pragma once

#include <cstdint>

namespace mvllm {

enum Arithmetic : int32_t { CONVERT, ADD, SUBTRACT, MULTIPLY, DIVIDE };

enum IntegerOperation : int32_t { SUM, DIFFERENCE, PRODUCT, GREATER, GREATER_EQUAL, LESS, LESS_EQUAL, EQUAL, LARGER, SMALLER };

constexpr int MAX_DIMS = 4;

// out = x op y in float32, rounded once; `out` is contiguous. Strides in elements; 0 repeats an element.
struct Elementwise {
    const void* x;
    const void* y;  // null for CONVERT
    void* out;
    int64_t sizes[MAX_DIMS], x_strides[MAX_DIMS], y_strides[MAX_DIMS];
    int32_t operation, x_dtype, y_dtype, dtype;
};

}  // namespace mvllm
