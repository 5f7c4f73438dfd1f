// Products of each head's rows with a matrix of its own, over the threads (head_product_tile.h).

#include <algorithm>

#include "entries.h"
#include "kernels.h"
#include "team.h"
#include "thread_buffer.h"

namespace mvllm {
namespace {

constexpr int64_t SERIAL_PRODUCTS = 1 << 16;  // below which waking other threads costs more than it saves

}  // namespace
}  // namespace mvllm

using namespace mvllm;

extern "C" {

// out[t][h] = x[t][h] * weight[h]; one of `row_stride` and `column_stride` is 1.
void mvllm_cpu_head_product(const void* x, int64_t x_stride, int64_t x_head_stride, const void* weight, int64_t head_stride,
                            int64_t row_stride, int64_t column_stride, void* out, int64_t tokens, int64_t heads,
                            int64_t in_size, int64_t out_size, int dtype) {
    record_kernel_use();
    const HeadProduct op{x, weight, out, x_stride, x_head_stride, head_stride, row_stride, column_stride,
                         tokens, heads, in_size, out_size, dtype};
    const int64_t blocks = (out_size + HEAD_PRODUCT_COLUMNS - 1) / HEAD_PRODUCT_COLUMNS;
    const int threads = tokens * heads * in_size * out_size < SERIAL_PRODUCTS ? 1 : team_size();
    divide_range(threads, heads * blocks, [&](int64_t begin, int64_t end) {
        thread_local Buffer memory;
        const size_t padded = size_t((in_size + STRIP - 1) / STRIP * STRIP);
        float* const scratch = reinterpret_cast<float*>(memory.at_least(size_t(tokens) * padded * sizeof(float)));
        for (int64_t unit = begin; unit < end; ++unit) {
            const int64_t first = unit % blocks * HEAD_PRODUCT_COLUMNS;
            current_isa().head_product(op, unit / blocks, first, std::min(first + HEAD_PRODUCT_COLUMNS, out_size), scratch);
        }
    });
}

}  // extern "C"
