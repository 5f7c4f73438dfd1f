// Row-wise operations on logits over the threads, see sampling_rows.h.

#include "kernels.h"
#include "team.h"
#include "thread_buffer.h"

namespace mvllm {
namespace {

constexpr int64_t SERIAL_ELEMENTS = 1 << 14;  // below which waking other threads costs more than it saves

int threads_for(int64_t rows, int64_t size) { return rows == 1 || rows * size < SERIAL_ELEMENTS ? 1 : team_size(); }

}  // namespace
}  // namespace mvllm

using namespace mvllm;

extern "C" {

// out[i] = log(sum of exp(x[i])), float32.
void mvllm_cpu_logsumexp(const void* x, int64_t x_stride, float* out, int64_t rows, int64_t size, int dtype) {
    const LogSumExp op{x, out, x_stride, size, dtype};
    divide_range(threads_for(rows, size), rows, [&](int64_t begin, int64_t end) { current_isa().logsumexp(op, begin, end); });
}

// See `filtered_draw` of mvllm.ops.draw. Rows of `logits` are `stride` elements apart.
void mvllm_cpu_filtered_draw(const float* logits, int64_t stride, const float* peaks, const float* inv_temperature,
                             const float* min_p_gap, const int64_t* top_k, const float* top_p, const float* coarse,
                             const float* fine, int64_t* out, int64_t rows, int64_t size, int64_t block_size) {
    const FilteredDraw op{logits, peaks, inv_temperature, min_p_gap, top_k, top_p, coarse, fine, out, stride, size, block_size};
    divide_range(threads_for(rows, size), rows, [&](int64_t begin, int64_t end) {
        thread_local Buffer memory;
        float* const scratch = reinterpret_cast<float*>(memory.at_least(size_t(3 * (size + STRIP)) * sizeof(float)));
        current_isa().filtered_draw(op, begin, end, scratch);
    });
}

}  // extern "C"
