// Arguments of the kernel in head_product_tile.h.

#pragma once

#include <cstdint>

namespace mvllm {

// out[t][h] = x[t][h] * weight[h], where weight[h] is [in_size, out_size] with columns (`out_size`) or rows (`in_size`)
// contiguous.
struct HeadProduct {
    const void* x;
    const void* weight;
    void* out;  // [tokens, heads, out_size], contiguous
    int64_t x_stride, x_head_stride, head_stride;
    int64_t row_stride, column_stride;  // one of them is 1
    int64_t tokens, heads, in_size, out_size;
    int32_t dtype;
};

constexpr int64_t HEAD_PRODUCT_COLUMNS = 64;  // of a unit of work

}  // namespace mvllm
