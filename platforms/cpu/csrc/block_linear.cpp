// Products with block-quantized weights: division among threads as in quantized_linear.cpp, by tiles instead of columns.

#include <algorithm>

#include "entries.h"
#include "quantized_linear.h"
#include "team.h"
#include "thread_buffer.h"

namespace mvllm {
namespace {

constexpr int64_t SERIAL_WORK = 1 << 19;        // multiply-adds below which waking other threads costs more than it saves
constexpr int64_t CONVERTED_ROWS = 1152;        // rows of x that are quantized or converted at a time
constexpr int64_t REPEATED_ELEMENTS = 1 << 13;  // up to this size every thread converts all of x: faster than waiting

thread_local Buffer converted_rows, product_to_gate;

int64_t element_of(int dtype) { return dtype == F32 ? 4 : 2; }

// A product of rows. If `gated`, the result is silu(first half) * second half; both halves consist of parts with the same
// numbers of columns.
struct Product {
    BlockRows op;
    const char* weight;
    const BlockPart* parts;
    int64_t num_parts;
    const void* bias;
    void* out;
    int64_t x_stride, rows, size;  // stride of the caller's x in elements; `size`: columns of the result
    bool int8, gated;

    // Number of tiles: of all columns, or of the first half if gated.
    int64_t tiles(int tile) const {
        const int64_t all = tiles_of(parts, num_parts, tile);
        return gated ? all / 2 : all;
    }
    BlockPlace place(int64_t index, int tile) const { return place_of(weight, parts, op.in_features, index, tile); }
    int64_t work() const { return rows * op.in_features * size * (gated ? 2 : 1); }
    int64_t element() const { return element_of(op.dtype); }
};

// Memory layout of the quantized or converted rows of x.
struct Converted {
    bool wanted;
    int64_t stride, inputs, bytes;  // elements from row to row; offset of the scales and total size in bytes

    explicit Converted(const Product& p) {
        wanted = p.int8 || p.op.dtype != F32;
        stride = p.op.in_features + 64;  // a stride of whole pages would map all rows to a few cache sets
        const int64_t values = (p.rows * stride * (p.int8 ? 1 : 4) + 63) / 64 * 64;
        inputs = values;
        bytes = !wanted ? 0 : p.int8 ? values + p.rows * (p.op.in_features / BLOCK_GROUP) * int64_t(sizeof(BlockInput)) : values;
    }

    // Sets the pointers of `to` to their parts of `memory`.
    void place(char* memory, Product& to) const {
        if (!wanted) return;
        to.op.x = memory;
        to.op.x_stride = stride;
        if (to.int8) to.op.inputs = reinterpret_cast<const BlockInput*>(memory + inputs);
    }

    void convert(const BlockKernels& kernels, const Product& from, const Product& to, int64_t begin, int64_t end) const {
        if (!wanted) return;
        const void* x = static_cast<const char*>(from.op.x) + begin * from.x_stride * from.element();
        const int32_t size = from.op.in_features, dtype = from.op.dtype;
        if (from.int8)
            kernels.quantize(x, from.x_stride, size, dtype, static_cast<int8_t*>(const_cast<void*>(to.op.x)) + begin * stride,
                             stride, const_cast<BlockInput*>(to.op.inputs) + begin * (size / BLOCK_GROUP), end - begin);
        else
            kernels.convert(x, from.x_stride, size, dtype, static_cast<float*>(const_cast<void*>(to.op.x)) + begin * stride,
                            stride, end - begin);
    }
};

// Computes one tile of the product for some rows. `out`: first row and column of the tile's result.
void multiply_tile(const BlockKernels& kernels, const Product& p, const BlockPlace& place, int64_t row, int rows, char* out,
                   int64_t out_stride) {
    const void* bias = p.bias ? static_cast<const char*>(p.bias) + place.column * p.element() : nullptr;
    const BlockTile tile{place.weight, bias, out, out_stride, place.format, place.columns};
    (p.int8 ? kernels.int8 : kernels.weight_only)(p.op, tile, row, rows);
}

// Computes a block of rows by tiles of the result. A gated product is rounded like a separate product.
void block(const BlockKernels& kernels, const Product& p, int64_t row_begin, int64_t row_end, int64_t begin, int64_t end) {
    const int64_t element = p.element(), tiles = p.gated ? p.tiles(kernels.tile) : 0;
    const int rows = int(row_end - row_begin);
    for (int64_t t = begin; t < end; ++t) {
        const BlockPlace place = p.place(t, kernels.tile);
        char* out = static_cast<char*>(p.out) + (row_begin * p.size + place.column) * element;
        if (!p.gated) {
            multiply_tile(kernels, p, place, row_begin, rows, out, p.size);
            continue;
        }
        const int64_t width = place.columns;
        char* both = product_to_gate.at_least(size_t(2 * kernels.tile * BLOCK_ROWS * element));
        multiply_tile(kernels, p, place, row_begin, rows, both, 2 * width);
        multiply_tile(kernels, p, p.place(tiles + t, kernels.tile), row_begin, rows, both + width * element, 2 * width);
        current_isa().act_and_mul({both, out, 2 * width, p.size, width, width, p.op.dtype}, 0, rows);
    }
}

int64_t row_blocks_of(const Product& p) { return (p.rows + BLOCK_ROWS - 1) / BLOCK_ROWS; }

// Number of pieces of a useful size in a product.
int64_t pieces_of(const BlockKernels& kernels, const Product& p) { return p.tiles(kernels.tile) * row_blocks_of(p); }

// Computes one of `threads` parts: a range of (block of rows, tile) pairs in this order.
void compute(const BlockKernels& kernels, const Product& p, int64_t thread, int64_t threads) {
    const int64_t tiles = p.tiles(kernels.tile), row_blocks = row_blocks_of(p), blocks = tiles * row_blocks;
    auto edge = [&](int64_t i) { return p.rows * i / row_blocks; };
    const int64_t end = blocks * (thread + 1) / threads;
    for (int64_t b = blocks * thread / threads, next; b < end; b = next) {
        const int64_t i = b / tiles;
        next = std::min(end, (i + 1) * tiles);
        block(kernels, p, edge(i), edge(i + 1), b - i * tiles, next - i * tiles);
    }
}

// Whether every thread converts all rows itself. Otherwise the threads divide the rows and wait for each other.
bool converts_alone(const Converted& converted, const Product& p) {
    return !converted.wanted || p.rows * p.op.in_features <= REPEATED_ELEMENTS;
}

// A thread converts the rows for its first part and reuses them for the others.
void compute_alone(const BlockKernels& kernels, const Product& p, const Converted& converted, Part part) {
    Product own = p;
    converted.place(converted_rows.at_least(size_t(converted.bytes)), own);
    if (part.fresh) converted.convert(kernels, p, own, 0, p.rows);
    compute(kernels, own, part.index, part.count);
}

void multiply_at_once(const BlockKernels& kernels, const Product& p) {
    const Converted converted(p);
    const int threads = p.work() < SERIAL_WORK ? 1 : team_size();
    const int64_t pieces = pieces_of(kernels, p);
    if (threads == 1 || converts_alone(converted, p))
        return divide_pieces(threads, pieces, [&](Part part) { compute_alone(kernels, p, converted, part); });
    Product shared = p;
    converted.place(converted_rows.at_least(size_t(converted.bytes)), shared);
    divide_range(threads, p.rows,
                 [&](int64_t begin, int64_t end) { converted.convert(kernels, p, shared, begin, end); });
    divide_pieces(threads, pieces, [&](Part part) { compute(kernels, shared, part.index, part.count); });
}

void multiply(const Product& p) {
    for (int64_t first = 0; first < p.rows; first += CONVERTED_ROWS) {
        Product part = p;
        part.rows = std::min(p.rows - first, CONVERTED_ROWS);
        part.op.x = static_cast<const char*>(p.op.x) + first * p.x_stride * p.element();
        part.out = static_cast<char*>(p.out) + first * p.size * p.element();
        multiply_at_once(current_quantized_isa().blocks, part);
    }
}

// `size` is the number of columns of the result.
Product product_of(const void* x, int64_t x_stride, const void* weight, const BlockPart* parts, int64_t num_parts,
                   const void* bias, void* out, int64_t rows, int64_t in_features, int64_t size, int int8_activations,
                   int dtype, bool gated) {
    const BlockRows op{x, nullptr, x_stride, int32_t(in_features), dtype};
    return {op, static_cast<const char*>(weight), parts, num_parts, bias, out, x_stride, rows, size,
            int8_activations && dtype != F32, gated};
}

template <bool GATED>
Product recorded(const int64_t* s) {
    auto pointer = [&](int i) { return reinterpret_cast<void*>(s[i]); };
    return product_of(pointer(0), s[1], pointer(2), static_cast<const BlockPart*>(pointer(3)), s[4], pointer(5), pointer(6),
                      s[7], s[8], s[9], int(s[10]), int(s[11]), GATED);
}

template <bool GATED>
ThreadMode mode_of(const int64_t* s) {
    const Product p = recorded<GATED>(s);
    if (p.rows > CONVERTED_ROWS || !converts_alone(Converted(p), p)) return ThreadMode::OWN_DIVISION;
    return p.work() < SERIAL_WORK ? ThreadMode::ONE_THREAD : ThreadMode::SHARED;
}

template <bool GATED>
void part_of(const int64_t* s, Part part) {
    const Product p = recorded<GATED>(s);
    compute_alone(current_quantized_isa().blocks, p, Converted(p), part);
}

template <bool GATED>
int64_t recorded_pieces(const int64_t* s) {
    return pieces_of(current_quantized_isa().blocks, recorded<GATED>(s));
}

// The weights of the thread's first tiles, which are contiguous.
template <bool GATED>
Range ahead_of(const int64_t* s, int64_t thread, int64_t threads) {
    const Product p = recorded<GATED>(s);
    const int tile = current_quantized_isa().blocks.tile;
    const int64_t tiles = p.tiles(tile), first = tiles * thread / threads;
    if (first >= tiles) return {nullptr, 0};
    const char* begin = p.place(first, tile).weight;
    return {begin, p.place(tiles - 1, tile).weight - begin};
}

}  // namespace

const WorkSharing block_linear_sharing{mode_of<false>, part_of<false>, ahead_of<false>, recorded_pieces<false>};
const WorkSharing block_linear_silu_and_mul_sharing{mode_of<true>, part_of<true>, ahead_of<true>, recorded_pieces<true>};

}  // namespace mvllm

using namespace mvllm;

extern "C" {

// out = x * weight^T + bias.
void mvllm_cpu_block_linear(const void* x, int64_t x_stride, const void* weight, const BlockPart* parts, int64_t num_parts,
                            const void* bias, void* out, int64_t rows, int64_t in_features, int64_t out_features,
                            int int8_activations, int dtype) {
    multiply(product_of(x, x_stride, weight, parts, num_parts, bias, out, rows, in_features, out_features, int8_activations,
                        dtype, false));
}

// out [rows, size] = silu(first half of y) * second half of y, where y = x * weight^T + bias.
void mvllm_cpu_block_linear_silu_and_mul(const void* x, int64_t x_stride, const void* weight, const BlockPart* parts,
                                         int64_t num_parts, const void* bias, void* out, int64_t rows, int64_t in_features,
                                         int64_t size, int int8_activations, int dtype) {
    multiply(product_of(x, x_stride, weight, parts, num_parts, bias, out, rows, in_features, size, int8_activations, dtype,
                        true));
}

}  // extern "C"
