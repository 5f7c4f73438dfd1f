// Copies and elementwise operations that models make between operations of core. Arguments may be strided. Results are those
// of torch, bit for bit, except for the bits of NaN.

#include <algorithm>
#include <cstring>

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

// Copies `count` elements that are `stride` elements apart in both tensors.
template <class T>
void copy_elements(const char* from, int64_t from_stride, char* to, int64_t to_stride, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
        std::memcpy(to + i * to_stride * int64_t(sizeof(T)), from + i * from_stride * int64_t(sizeof(T)), sizeof(T));
}

// An integer of 1 (truth value), 4 or 8 bytes.
int64_t integer_at(const void* p, int64_t i, int itemsize) {
    if (itemsize == 8) return static_cast<const int64_t*>(p)[i];
    return itemsize == 4 ? static_cast<const int32_t*>(p)[i] : static_cast<const uint8_t*>(p)[i];
}

int64_t of_integers(int operation, int64_t a, int64_t b) {
    switch (operation) {
        case SUM: return int64_t(uint64_t(a) + uint64_t(b));
        case DIFFERENCE: return int64_t(uint64_t(a) - uint64_t(b));
        case PRODUCT: return int64_t(uint64_t(a) * uint64_t(b));
        case GREATER: return a > b;
        case GREATER_EQUAL: return a >= b;
        case LESS: return a < b;
        case LESS_EQUAL: return a <= b;
        case EQUAL: return a == b;
        case LARGER: return std::max(a, b);
        default: return std::min(a, b);
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

// out = x op y over four dimensions; `out` is contiguous.
void mvllm_cpu_elementwise(const void* x, const void* y, void* out, int64_t n0, int64_t n1, int64_t n2, int64_t n3, int64_t x0,
                           int64_t x1, int64_t x2, int64_t x3, int64_t y0, int64_t y1, int64_t y2, int64_t y3, int operation,
                           int x_dtype, int y_dtype, int dtype) {
    const Elementwise op{x, y, out, {n0, n1, n2, n3}, {x0, x1, x2, x3}, {y0, y1, y2, y3}, operation, x_dtype, y_dtype, dtype};
    over_rows(n0 * n1 * n2, n3, [&](int64_t begin, int64_t end) { current_isa().elementwise(op, begin, end); });
}

// Copies elements of 1, 2, 4 or 8 bytes over four dimensions; strides in elements.
void mvllm_cpu_copy(const void* x, void* out, int64_t n0, int64_t n1, int64_t n2, int64_t n3, int64_t x0, int64_t x1,
                    int64_t x2, int64_t x3, int64_t out0, int64_t out1, int64_t out2, int64_t out3, int itemsize) {
    over_rows(n0 * n1 * n2, n3, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const int64_t i = row / (n1 * n2), j = row / n2 % n1, k = row % n2;
            const char* from = static_cast<const char*>(x) + (i * x0 + j * x1 + k * x2) * itemsize;
            char* to = static_cast<char*>(out) + (i * out0 + j * out1 + k * out2) * itemsize;
            if (x3 == 1 && out3 == 1)
                std::memcpy(to, from, size_t(n3 * itemsize));
            else
                switch (itemsize) {
                    case 1: copy_elements<uint8_t>(from, x3, to, out3, n3); break;
                    case 2: copy_elements<uint16_t>(from, x3, to, out3, n3); break;
                    case 4: copy_elements<uint32_t>(from, x3, to, out3, n3); break;
                    default: copy_elements<uint64_t>(from, x3, to, out3, n3); break;
                }
        }
    });
}

// out = x op y, or x op number if `y` is null: contiguous integers and truth values.
void mvllm_cpu_integers(const void* x, const void* y, int64_t number, void* out, int64_t count, int operation, int x_itemsize,
                        int y_itemsize, int itemsize) {
    for (int64_t i = 0; i < count; ++i) {
        const int64_t found = of_integers(operation, integer_at(x, i, x_itemsize), y ? integer_at(y, i, y_itemsize) : number);
        if (itemsize == 8)
            static_cast<int64_t*>(out)[i] = found;
        else if (itemsize == 4)
            static_cast<int32_t*>(out)[i] = int32_t(found);
        else
            static_cast<uint8_t*>(out)[i] = uint8_t(found);
    }
}

// Rows of x where the condition is true, else of y. Rows are `*_stride` bytes apart in x and y, and adjacent in `out`.
void mvllm_cpu_choose_rows(const uint8_t* condition, const void* x, int64_t x_stride, const void* y, int64_t y_stride,
                           void* out, int64_t rows, int64_t row_bytes) {
    for (int64_t r = 0; r < rows; ++r)
        std::memcpy(static_cast<char*>(out) + r * row_bytes,
                    condition[r] ? static_cast<const char*>(x) + r * x_stride : static_cast<const char*>(y) + r * y_stride,
                    size_t(row_bytes));
}

// out[r][h][i] = x[r][h][order[i]], elements of 2 or 4 bytes; strides in elements.
void mvllm_cpu_take_columns(const void* x, int64_t x_stride, int64_t heads, int64_t head_stride, const int64_t* order,
                            void* out, int64_t rows, int64_t count, int itemsize) {
    itemsize == 2 ? take_columns<uint16_t>(x, x_stride, heads, head_stride, order, out, rows, count)
                  : take_columns<uint32_t>(x, x_stride, heads, head_stride, order, out, rows, count);
}

}  // extern "C"
