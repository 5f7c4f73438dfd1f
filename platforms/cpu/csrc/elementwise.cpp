// Row-wise operations over the threads. Small ones stay on the calling thread: a parallel region costs microseconds.

#include <omp.h>

#include "kernels.h"

namespace mvllm {
namespace {

constexpr int64_t SERIAL_ELEMENTS = 1 << 15;

template <class Op>
void over_rows(void (*kernel)(const Op&, int64_t, int64_t), const Op& op, int64_t rows, int64_t elements_per_row) {
    const int64_t wanted = rows * elements_per_row / SERIAL_ELEMENTS;
    int64_t threads = omp_get_max_threads();
    threads = threads < wanted ? threads : wanted;
    threads = threads < rows ? threads : rows;
    if (threads <= 1) {
        kernel(op, 0, rows);
        return;
    }
#pragma omp parallel num_threads(int(threads))
    {
        const int64_t i = omp_get_thread_num(), n = omp_get_num_threads();
        kernel(op, rows * i / n, rows * (i + 1) / n);
    }
}

}  // namespace
}  // namespace mvllm

using namespace mvllm;

extern "C" {

int mvllm_cpu_abi_version() { return 3; }

const char* mvllm_cpu_isa() { return current_isa().name; }

void mvllm_cpu_rms_norm(const void* x, int64_t x_stride, void* residual, const void* weight, void* out, int64_t rows,
                        int64_t size, int dtype, float eps) {
    const RmsNorm op{x, residual, weight, out, x_stride, int32_t(size), dtype, eps};
    over_rows(current_isa().rms_norm, op, rows, size);
}

void mvllm_cpu_silu_and_mul(const void* x, int64_t x_stride, void* out, int64_t rows, int64_t size, int dtype) {
    const SiluAndMul op{x, out, x_stride, size, dtype};
    over_rows(current_isa().silu_and_mul, op, rows, 4 * size);
}

void mvllm_cpu_rotary(const void* index, int wide_index, const float* cos_sin, int rotary_dim, void* query,
                      int64_t query_stride, int64_t query_head_stride, int num_heads, void* key, int64_t key_stride,
                      int64_t key_head_stride, int num_kv_heads, int64_t tokens, int dtype) {
    const Rotary op{index,      cos_sin,         query,      key,       query_stride, query_head_stride,
                    key_stride, key_head_stride, wide_index, num_heads, num_kv_heads, rotary_dim,
                    dtype};
    over_rows(current_isa().rotary, op, tokens, int64_t(num_heads + num_kv_heads) * rotary_dim);
}

}  // extern "C"
