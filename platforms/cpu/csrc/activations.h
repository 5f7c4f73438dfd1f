// Arguments of the kernels in activation_tile.h.

#pragma once

#include <cstdint>

namespace mvllm {

enum Activation : int32_t { RELU, RELU_SQUARED, GELU, GELU_TANH, QUICK_GELU, SILU, TANH, SIGMOID };

// out = f(x), or f(x) * other; rows of x and `other` are strided, those of `out` contiguous.
struct Activate {
    const void* x;
    const void* other;  // or null
    void* out;
    int64_t x_stride, other_stride, size;
    int32_t function, dtype;
};

struct LayerNorm {
    const void* x;  // rows `x_stride` elements apart
    const void* weight;  // or null, with bias
    const void* bias;
    void* out;
    int64_t x_stride, size;
    float eps;
    int32_t dtype;
};

// out[t][w] = factors[w / group] * softplus(x[t][w] + bias[w]), float32.
struct LogDecay {
    const void* x;  // rows `x_stride` elements apart
    const float* factors;
    const float* bias;
    float* out;
    int64_t x_stride, size, group;
    int32_t dtype;
};

}  // namespace mvllm
