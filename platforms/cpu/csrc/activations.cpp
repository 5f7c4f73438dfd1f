// Activations, layer norms and the decay of delta rules, over the threads (activation_tile.h).

#include "entries.h"
#include "kernels.h"
#include "team.h"

namespace mvllm {
namespace {

constexpr int64_t SERIAL_ELEMENTS = 1 << 14;  // below which waking other threads costs more than it saves

template <class Work>
void over_rows(int64_t rows, int64_t size, const Work& work) {
    divide_range(rows == 1 || rows * size < SERIAL_ELEMENTS ? 1 : team_size(), rows, work);
}

}  // namespace
}  // namespace mvllm

using namespace mvllm;

extern "C" {

// out = f(x), or f(x) * other if it is not null. Rows of x and `other` are strided, those of `out` contiguous.
void mvllm_cpu_activate(const void* x, int64_t x_stride, const void* other, int64_t other_stride, void* out, int64_t rows,
                        int64_t size, int function, int dtype) {
    const Activate op{x, other, out, x_stride, other_stride, size, function, dtype};
    over_rows(rows, 4 * size, [&](int64_t begin, int64_t end) { current_isa().activate(op, begin, end); });
}

void mvllm_cpu_layer_norm(const void* x, int64_t x_stride, const void* weight, const void* bias, void* out, int64_t rows,
                          int64_t size, float eps, int dtype) {
    const LayerNorm op{x, weight, bias, out, x_stride, size, eps, dtype};
    over_rows(rows, size, [&](int64_t begin, int64_t end) { current_isa().layer_norm(op, begin, end); });
}

// out[t][w] = factors[w / group] * softplus(x[t][w] + bias[w]), float32.
void mvllm_cpu_log_decay(const void* x, int64_t x_stride, const float* factors, const float* bias, float* out, int64_t rows,
                         int64_t size, int64_t group, int dtype) {
    const LogDecay op{x, factors, bias, out, x_stride, size, group, dtype};
    over_rows(rows, 4 * size, [&](int64_t begin, int64_t end) { current_isa().log_decay(op, begin, end); });
}

}  // extern "C"
