// Matrix products with packed weights: packing of the weights, and division of a product among threads.

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "entries.h"
#include "kernels.h"
#include "team.h"

namespace mvllm {
namespace {

constexpr int64_t SERIAL_WORK = 1 << 18;  // multiply-adds below which waking other threads costs more than it saves
constexpr int64_t COPIED_ROWS = 512;      // rows of x that are widened at a time

int64_t depth_of(int64_t in_features, int dtype) { return in_features + (dtype == BF16 ? in_features & 1 : 0); }

// Whether the kernels read x without conversion.
bool takes_x(const Isa& isa, const Linear& op) {
    return op.dtype == F32 || (op.dtype == BF16 && isa.bf16_dot && op.in_features % 2 == 0);
}

int threads_for(int64_t work) { return work < SERIAL_WORK ? 1 : team_size(); }

// Number of pieces of a useful size in a product.
int64_t pieces_of(const Isa& isa, int64_t rows, int64_t columns) {
    return columns / isa.linear_tile * ((rows + LINEAR_ROWS - 1) / LINEAR_ROWS);
}

// The first strip of part `i` of `count`; at a tile boundary if there are enough tiles.
int64_t edge(int64_t strips, int64_t width, int64_t i, int64_t count) {
    const int64_t tiles = (strips + width - 1) / width;
    return tiles >= 2 * count ? std::min(strips, tiles * i / count * width) : strips * i / count;
}

// Computes one of `threads` parts. With few rows, a part is a range of columns. With many, it is a range of blocks in
// the order of rows, so that x stays in the L2 cache while the weights are streamed with prefetching.
void compute(const Isa& isa, const Linear& op, int64_t rows, int64_t thread, int64_t threads) {
    const int64_t strips = (op.out_features + STRIP - 1) / STRIP, width = isa.linear_tile / STRIP;
    if (rows <= LINEAR_ROWS)
        return isa.linear(op, 0, rows, edge(strips, width, thread, threads), edge(strips, width, thread + 1, threads));
    const int64_t tiles = (strips + width - 1) / width;
    const int64_t row_blocks = (rows + LINEAR_ROWS - 1) / LINEAR_ROWS, blocks = tiles * row_blocks;
    for (int64_t b = blocks * thread / threads; b < blocks * (thread + 1) / threads; ++b) {
        const int64_t tile = b % tiles, i = b / tiles;
        isa.linear(op, rows * i / row_blocks, rows * (i + 1) / row_blocks, tile * width,
                   std::min(strips, (tile + 1) * width));
    }
}

template <class T>
void pack_tile(const T* weight, int64_t stride, T* packed, int64_t columns, int64_t in_features, int64_t tile, int step) {
    for (int64_t k = 0; k < in_features; k += step) {
        const int64_t n = std::min<int64_t>(step, in_features - k);
        for (int64_t c = 0; c < columns; ++c)
            for (int64_t j = 0; j < n; ++j) packed[k * tile + c * step + j] = weight[c * stride + k + j];
    }
}

// Column `c` of a tile, which is a row of the weight.
template <class T>
void unpack_row(const T* packed, int64_t c, T* row, int64_t in_features, int64_t tile, int step) {
    for (int64_t k = 0; k < in_features; k += step)
        for (int64_t j = 0; j < std::min<int64_t>(step, in_features - k); ++j) row[k + j] = packed[k * tile + c * step + j];
}

Linear linear_of(const int64_t* s) {
    auto pointer = [&](int i) { return reinterpret_cast<const void*>(s[i]); };
    return {pointer(0), pointer(2), pointer(3), reinterpret_cast<void*>(s[4]), s[1], int32_t(s[6]), int32_t(s[7]),
            int32_t(s[8])};
}

ThreadMode linear_mode(const int64_t* s) {
    if (!takes_x(current_isa(), linear_of(s))) return ThreadMode::OWN_DIVISION;
    return s[5] * s[6] * s[7] < SERIAL_WORK ? ThreadMode::ONE_THREAD : ThreadMode::SHARED;
}

void linear_part(const int64_t* s, Part part) {
    compute(current_isa(), linear_of(s), s[5], part.index, part.count);
}

int64_t linear_pieces(const int64_t* s) { return pieces_of(current_isa(), s[5], s[7]); }

// The weights of the thread's first columns, which are contiguous.
Range linear_ahead(const int64_t* s, int64_t thread, int64_t threads) {
    const Linear op = linear_of(s);
    const int64_t strips = (op.out_features + STRIP - 1) / STRIP, tile = current_isa().linear_tile;
    const int64_t bytes = depth_of(op.in_features, op.dtype) * (op.dtype == F32 ? 4 : 2) * tile;
    const int64_t first = edge(strips, tile / STRIP, thread, threads) * STRIP / tile;
    const int64_t last = (op.out_features + tile - 1) / tile;
    return {static_cast<const char*>(op.weight) + first * bytes, (last - first) * bytes};
}

// silu(first half of a product) * second half, for rows [row_begin, row_end) and strips [begin, end) of the result. The
// product is stored in `scratch`, rounded like a separate product.
void gate(const Isa& isa, const Linear& op, void* out, int64_t row_begin, int64_t row_end, int64_t begin, int64_t end,
          char* scratch) {
    const int64_t size = op.out_features / 2, element = op.dtype == F32 ? 4 : 2, width = (end - begin) * STRIP;
    Linear half = op;
    half.out_stride = 2 * width;
    auto at = [&](int64_t column) { return reinterpret_cast<void*>(intptr_t(scratch) - column * element); };
    half.out = at(row_begin * 2 * width + begin * STRIP);
    isa.linear(half, row_begin, row_end, begin, end);
    half.out = at(row_begin * 2 * width + begin * STRIP + size - width);
    isa.linear(half, row_begin, row_end, size / STRIP + begin, size / STRIP + end);
    const ActAndMul act{scratch, static_cast<char*>(out) + (row_begin * size + begin * STRIP) * element, 2 * width, size,
                        width, width, op.dtype};
    isa.act_and_mul(act, 0, row_end - row_begin);
}

// Computes one of `threads` parts, divided like in `compute`.
void gate_part(const Isa& isa, const Linear& op, void* out, int64_t rows, int64_t thread, int64_t threads) {
    thread_local std::vector<char> memory;
    const int64_t strips = op.out_features / 2 / STRIP, width = isa.linear_tile / STRIP;
    const int64_t element = op.dtype == F32 ? 4 : 2;
    auto scratch = [&](int64_t elements) {
        if (memory.size() < size_t(elements * element + 64)) memory.resize(size_t(elements * element + 64));
        return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t(63));
    };
    if (rows <= LINEAR_ROWS) {
        const int64_t begin = edge(strips, width, thread, threads), end = edge(strips, width, thread + 1, threads);
        if (begin < end) gate(isa, op, out, 0, rows, begin, end, scratch(rows * 2 * (end - begin) * STRIP));
        return;
    }
    const int64_t tiles = (strips + width - 1) / width;
    const int64_t row_blocks = (rows + LINEAR_ROWS - 1) / LINEAR_ROWS, blocks = tiles * row_blocks;
    for (int64_t b = blocks * thread / threads; b < blocks * (thread + 1) / threads; ++b) {
        const int64_t tile = b % tiles, i = b / tiles;
        gate(isa, op, out, rows * i / row_blocks, rows * (i + 1) / row_blocks, tile * width,
             std::min(strips, (tile + 1) * width), scratch(LINEAR_ROWS * 2 * isa.linear_tile));
    }
}

Linear both_of(const int64_t* s) {
    Linear op = linear_of(s);
    op.out_features *= 2;
    return op;
}

ThreadMode linear_mode_of_both(const int64_t* s) { return s[5] * s[6] * s[7] * 2 < SERIAL_WORK ? ThreadMode::ONE_THREAD : ThreadMode::SHARED; }

void linear_silu_and_mul_part(const int64_t* s, Part part) {
    const Linear op = both_of(s);
    gate_part(current_isa(), op, op.out, s[5], part.index, part.count);
}

}  // namespace

const WorkSharing linear_sharing{linear_mode, linear_part, linear_ahead, linear_pieces};
const WorkSharing linear_silu_and_mul_sharing{linear_mode_of_both, linear_silu_and_mul_part, linear_ahead, linear_pieces};

}  // namespace mvllm

using namespace mvllm;

extern "C" {

// Number of elements of the packed weight.
int64_t mvllm_cpu_linear_packed_size(int64_t out_features, int64_t in_features, int dtype) {
    const int64_t tile = current_isa().linear_tile;
    return (out_features + tile - 1) / tile * tile * depth_of(in_features, dtype);
}

// The caller fills `packed` with zeros, which remain in the padding.
void mvllm_cpu_linear_pack(const void* weight, int64_t stride, void* packed, int64_t out_features, int64_t in_features,
                           int dtype) {
    const int64_t tile = current_isa().linear_tile, tiles = (out_features + tile - 1) / tile;
    const int64_t size = tile * depth_of(in_features, dtype);
    auto pack = [&](int64_t i) {
        const int64_t columns = std::min(tile, out_features - i * tile);
        if (dtype == F32)
            pack_tile(static_cast<const float*>(weight) + i * tile * stride, stride, static_cast<float*>(packed) + i * size,
                      columns, in_features, tile, 1);
        else
            pack_tile(static_cast<const uint16_t*>(weight) + i * tile * stride, stride,
                      static_cast<uint16_t*>(packed) + i * size, columns, in_features, tile, dtype == BF16 ? 2 : 1);
    };
    divide_range(threads_for(out_features * in_features), tiles, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) pack(i);
    });
}

// out[t] = the packed weight's row ids[t] - first, zeros for ids outside of its `count` rows.
void mvllm_cpu_packed_embedding(const void* ids, int wide_ids, const void* packed, void* out, int64_t rows,
                                int64_t in_features, int64_t first, int64_t count, int dtype) {
    const int64_t tile = current_isa().linear_tile, size = tile * depth_of(in_features, dtype);
    const int64_t element = dtype == F32 ? 4 : 2;
    auto copy = [&](int64_t t) {
        const int64_t id = wide_ids ? static_cast<const int64_t*>(ids)[t] : static_cast<const int32_t*>(ids)[t];
        const int64_t row = id - first;
        char* to = static_cast<char*>(out) + t * in_features * element;
        if (row < 0 || row >= count)
            std::memset(to, 0, size_t(in_features * element));
        else if (dtype == F32)
            unpack_row(static_cast<const float*>(packed) + row / tile * size, row % tile, reinterpret_cast<float*>(to),
                       in_features, tile, 1);
        else
            unpack_row(static_cast<const uint16_t*>(packed) + row / tile * size, row % tile,
                       reinterpret_cast<uint16_t*>(to), in_features, tile, dtype == BF16 ? 2 : 1);
    };
    divide_range(threads_for(rows * in_features), rows, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) copy(t);
    });
}

// out [rows, out_features] = x * weight^T + bias; rows of `x` are `x_stride` elements apart.
void mvllm_cpu_linear(const void* x, int64_t x_stride, const void* weight, const void* bias, void* out, int64_t rows,
                      int64_t in_features, int64_t out_features, int dtype) {
    const Isa& isa = current_isa();
    Linear op{x, weight, bias, out, x_stride, int32_t(in_features), int32_t(out_features), dtype};
    const int64_t element = dtype == F32 ? 4 : 2;
    if (takes_x(isa, op)) {
        divide_pieces(threads_for(rows * in_features * out_features), pieces_of(isa, rows, out_features),
                     [&](Part part) { compute(isa, op, rows, part.index, part.count); });
        return;
    }
    const int64_t depth = depth_of(in_features, dtype);
    std::unique_ptr<float[]> copy(new float[size_t(std::min(rows, COPIED_ROWS) * depth)]);
    for (int64_t first = 0; first < rows; first += COPIED_ROWS) {
        const int64_t n = std::min(rows - first, COPIED_ROWS);
        Linear part = op;
        part.x = static_cast<const char*>(x) + first * x_stride * element;
        part.out = static_cast<char*>(out) + first * out_features * element;
        Linear copied = part;
        copied.x = copy.get();
        copied.x_stride = depth;
        const int threads = threads_for(n * in_features * out_features);
        divide_range(threads, n, [&](int64_t begin, int64_t end) { isa.linear_x(part, copy.get(), depth, begin, end); });
        divide_pieces(threads, pieces_of(isa, n, out_features),
                      [&](Part share) { compute(isa, copied, n, share.index, share.count); });
    }
}

// Whether `mvllm_cpu_linear_silu_and_mul` supports weights [2 * size, in_features].
int mvllm_cpu_linear_silu_and_mul_takes(int64_t in_features, int64_t size, int dtype) {
    const Linear op{nullptr, nullptr, nullptr, nullptr, in_features, int32_t(in_features), int32_t(2 * size), dtype};
    return takes_x(current_isa(), op) && size % STRIP == 0;
}

// out [rows, size] = silu(first half of y) * second half of y, where y = x * weight^T + bias.
void mvllm_cpu_linear_silu_and_mul(const void* x, int64_t x_stride, const void* weight, const void* bias, void* out,
                                   int64_t rows, int64_t in_features, int64_t size, int dtype) {
    const Isa& isa = current_isa();
    const Linear op{x, weight, bias, out, x_stride, int32_t(in_features), int32_t(2 * size), dtype};
    divide_pieces(threads_for(rows * in_features * size * 2), pieces_of(isa, rows, size),
                 [&](Part part) { gate_part(isa, op, out, rows, part.index, part.count); });
}

}  // extern "C"
