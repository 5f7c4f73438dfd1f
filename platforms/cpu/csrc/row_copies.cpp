// Copies of rows that models make between operations: to another dtype, with a factor for each row, or with the
// elements in another order. Rows may be strided, results are contiguous. Results are those of torch, bit for bit.
//
// They run on the calling thread: steps that are recorded have few rows.

#include <cstdint>
#include <cstring>

#include "entries.h"
#include "kernels.h"

namespace mvllm {
namespace {

float to_float(uint16_t bits) {
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof(value));
    return value;
}

float to_float(float value) { return value; }

// Rounds to nearest, to even between two.
void store(float value, uint16_t* out) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    *out = value != value ? uint16_t(0x7FC0) : uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

void store(float value, float* out) { *out = value; }

template <class From, class To>
void convert(const void* x, int64_t x_stride, void* out, int64_t rows, int64_t size) {
    for (int64_t r = 0; r < rows; ++r) {
        const From* from = static_cast<const From*>(x) + r * x_stride;
        To* to = static_cast<To*>(out) + r * size;
        for (int64_t i = 0; i < size; ++i) store(to_float(from[i]), to + i);
    }
}

template <class T>
void scale_rows(const void* x, int64_t x_stride, const void* factors, void* out, int64_t rows, int64_t size) {
    for (int64_t r = 0; r < rows; ++r) {
        const T* from = static_cast<const T*>(x) + r * x_stride;
        const float factor = to_float(static_cast<const T*>(factors)[r]);
        T* to = static_cast<T*>(out) + r * size;
        for (int64_t i = 0; i < size; ++i) store(to_float(from[i]) * factor, to + i);
    }
}

template <class T>
void take_columns(const void* x, int64_t x_stride, int64_t heads, int64_t head_stride, const int64_t* order, void* out,
                  int64_t rows, int64_t count) {
    T* to = static_cast<T*>(out);
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t h = 0; h < heads; ++h, to += count) {
            const T* from = static_cast<const T*>(x) + r * x_stride + h * head_stride;
            for (int64_t i = 0; i < count; ++i) to[i] = from[order[i]];
        }
}

}  // namespace
}  // namespace mvllm

using namespace mvllm;

extern "C" {

// Rows of `size` elements in another dtype; both dtypes are float32 or bfloat16.
void mvllm_cpu_convert(const void* x, int64_t x_stride, void* out, int64_t rows, int64_t size, int from, int to) {
    if (from == to)
        from == F32 ? convert<float, float>(x, x_stride, out, rows, size)
                    : convert<uint16_t, uint16_t>(x, x_stride, out, rows, size);
    else
        from == F32 ? convert<float, uint16_t>(x, x_stride, out, rows, size)
                    : convert<uint16_t, float>(x, x_stride, out, rows, size);
}

// Rows times one factor each, float32 or bfloat16.
void mvllm_cpu_scale_rows(const void* x, int64_t x_stride, const void* factors, void* out, int64_t rows, int64_t size,
                          int dtype) {
    dtype == F32 ? scale_rows<float>(x, x_stride, factors, out, rows, size)
                 : scale_rows<uint16_t>(x, x_stride, factors, out, rows, size);
}

// out[r][h][i] = x[r][h][order[i]], elements of 2 or 4 bytes; strides in elements.
void mvllm_cpu_take_columns(const void* x, int64_t x_stride, int64_t heads, int64_t head_stride, const int64_t* order,
                            void* out, int64_t rows, int64_t count, int itemsize) {
    itemsize == 2 ? take_columns<uint16_t>(x, x_stride, heads, head_stride, order, out, rows, count)
                  : take_columns<uint32_t>(x, x_stride, heads, head_stride, order, out, rows, count);
}

}  // extern "C"
