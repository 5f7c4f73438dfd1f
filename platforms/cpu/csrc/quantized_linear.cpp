// Products with integer weights: choice of the instruction set, packing, and division of a product among threads.

#include "amx.h"
#include "entries.h"
#include "processor.h"
#include "quantized_linear.h"
#include "team.h"
#include "thread_buffer.h"

#include <algorithm>

namespace mvllm {

// Weak, as in dispatch.cpp.
#if MVLLM_X86
extern const QuantizedIsa quantized_isa_avx2 __attribute__((weak));
extern const QuantizedIsa quantized_isa_avx2_vnni __attribute__((weak));
extern const QuantizedIsa quantized_isa_avx512 __attribute__((weak));
extern const QuantizedIsa quantized_isa_avx512_vnni __attribute__((weak));
extern const QuantizedIsa quantized_isa_avx512_bf16 __attribute__((weak));
#endif
extern const QuantizedIsa quantized_isa_generic __attribute__((weak));

namespace {

constexpr int64_t SERIAL_WORK = 1 << 19;        // multiply-adds below which waking other threads costs more than it saves
constexpr int64_t CONVERTED_ROWS = 1152;        // rows of x that are quantized or converted at a time
constexpr int64_t ROW_STEP = 12;                // a multiple of the rows of a register tile in every instruction set
constexpr int64_t REPEATED_ELEMENTS = 1 << 13;  // up to this size every thread converts all of x: faster than waiting
constexpr int64_t GATED_ELEMENTS = 1 << 14;     // elements computed before silu_and_mul: they stay in the L1 cache

const QuantizedIsa& choose() {
    [[maybe_unused]] const Features has;
    const Candidate<QuantizedIsa> best_first[] = {
#if MVLLM_AMX && MVLLM_AMX_EMULATED != 1
        {amx_quantized_isa(), true, "amx_bf16"},
#endif
#if MVLLM_X86
        {&quantized_isa_avx512_bf16, has.avx512_bf16 && has.avx512_vnni},
        {&quantized_isa_avx512_vnni, has.avx512_vnni},
        {&quantized_isa_avx512, has.avx512},
        {&quantized_isa_avx2_vnni, has.avx2_vnni},
        {&quantized_isa_avx2, has.avx2},
#endif
        {&quantized_isa_generic, true},
    };
    return chosen(best_first);
}

const QuantizedIsa& current() { return current_quantized_isa(); }

thread_local Buffer converted_rows, product_to_gate;

int lane_depth(int bits) { return bits == 4 ? 8 : 4; }
int64_t tiles_of(int64_t out_features, int tile) { return (out_features + tile - 1) / tile; }
int64_t element_of(int dtype) { return dtype == F32 ? 4 : 2; }

int threads_for(int64_t work) { return work < SERIAL_WORK ? 1 : team_size(); }

// A product of rows. If `gated`, the result is silu(first half) * second half.
struct Product {
    QuantizedLinear op;
    int64_t rows;
    bool gated;

    int64_t work() const { return rows * op.in_features * op.out_features; }
    int64_t strips() const {
        return gated ? op.out_features / 2 / STRIP : (int64_t(op.out_features) + STRIP - 1) / STRIP;
    }
};

// Memory layout of the quantized or converted rows of x.
struct Converted {
    bool int8, wanted;
    int64_t stride, sums, bytes;  // elements from row to row; offset of the row sums and total size in bytes

    Converted(const QuantizedIsa& isa, const Product& p) : int8(p.op.int8_activations) {
        const QuantizedLinear& op = p.op;
        const bool bf16 = op.dtype == BF16 && isa.bf16_dot, in_place = op.dtype == F32 || bf16;
        wanted = int8 || !in_place || op.in_features % lane_depth(op.bits);
        // A stride of whole pages would map all rows to a few cache sets.
        stride = round_up(op.in_features, 64) + 64;
        const int64_t values = p.rows * stride * (int8 ? 1 : bf16 ? 2 : 4);
        sums = values + p.rows * 4;
        bytes = !wanted ? 0 : int8 ? sums + p.rows * op.blocks * 4 : values;
    }

    // Sets the pointers of `to` to their parts of `memory`.
    void place(char* memory, Product& to) const {
        if (!wanted) return;
        to.op.x = memory;
        to.op.x_stride = stride;
        if (!int8) return;
        to.op.row_scales = reinterpret_cast<float*>(memory + to.rows * stride);
        to.op.row_sums = reinterpret_cast<int32_t*>(memory + sums);
    }

    void convert(const QuantizedIsa& isa, const Product& from, const Product& to, int64_t begin, int64_t end) const {
        void* x = const_cast<void*>(to.op.x);
        if (int8)
            isa.quantize(from.op, static_cast<int8_t*>(x), stride, const_cast<float*>(to.op.row_scales),
                         const_cast<int32_t*>(to.op.row_sums), begin, end);
        else if (wanted)
            isa.convert(from.op, x, stride, begin, end);
    }
};

// Computes a block of rows by strips of the result. A gated product is rounded like a separate product.
void block(const QuantizedIsa& isa, const Product& p, int64_t row_begin, int64_t row_end, int64_t begin, int64_t end) {
    const auto kernel = p.op.int8_activations ? isa.int8 : isa.weight_only;
    if (!p.gated) return kernel(p.op, row_begin, row_end, begin, end);
    const int64_t size = p.op.out_features / 2, element = element_of(p.op.dtype), rows = row_end - row_begin;
    const int64_t tile = isa.tile / STRIP, fitting = GATED_ELEMENTS / (2 * STRIP * rows) / tile * tile;
    const int64_t most = std::max(fitting, tile);
    char* scratch = product_to_gate.at_least(size_t(2 * most * STRIP * rows * element));
    for (int64_t next; begin < end; begin = next) {
        next = std::min(end, (begin / tile) * tile + most);
        const int64_t width = (next - begin) * STRIP;
        QuantizedLinear half = p.op;
        half.out_stride = 2 * width;
        // Kernels index `out` from the first row and column of the whole result.
        auto from = [&](int64_t column) {
            return reinterpret_cast<void*>(intptr_t(scratch) - (row_begin * 2 * width + column) * element);
        };
        half.out = from(begin * STRIP);
        kernel(half, row_begin, row_end, begin, next);
        half.out = from(size + begin * STRIP - width);
        kernel(half, row_begin, row_end, size / STRIP + begin, size / STRIP + next);
        char* out = static_cast<char*>(p.op.out) + (row_begin * p.op.out_stride + begin * STRIP) * element;
        current_isa().act_and_mul({scratch, out, 2 * width, p.op.out_stride, width, width, p.op.dtype}, 0, rows);
    }
}

// Number of pieces of a useful size in a product.
int64_t pieces_of(const QuantizedIsa& isa, const Product& p) {
    return p.strips() * STRIP / isa.tile * ((p.rows + QUANTIZED_LINEAR_ROWS - 1) / QUANTIZED_LINEAR_ROWS);
}

// The first strip of part `i` of `count`; at a tile boundary if there are enough tiles.
int64_t edge_of(int64_t strips, int64_t width, int64_t i, int64_t count) {
    const int64_t tiles = (strips + width - 1) / width;
    return tiles >= 2 * count ? std::min(strips, tiles * i / count * width) : strips * i / count;
}

// Computes one of `threads` parts. With few rows, a part is a range of columns. With many, it is a range of blocks in
// the order of rows.
void compute(const QuantizedIsa& isa, const Product& p, int64_t thread, int64_t threads) {
    const int64_t strips = p.strips(), rows = p.rows, width = isa.tile / STRIP;
    if (rows <= QUANTIZED_LINEAR_ROWS)
        return block(isa, p, 0, rows, edge_of(strips, width, thread, threads), edge_of(strips, width, thread + 1, threads));
    const int64_t tiles = (strips + width - 1) / width;
    const int64_t row_blocks = (rows + QUANTIZED_LINEAR_ROWS - 1) / QUANTIZED_LINEAR_ROWS, blocks = tiles * row_blocks;
    const int64_t steps = (rows + ROW_STEP - 1) / ROW_STEP;
    auto edge = [&](int64_t i) { return std::min(rows, (steps * i + row_blocks - 1) / row_blocks * ROW_STEP); };
    for (int64_t b = blocks * thread / threads; b < blocks * (thread + 1) / threads; ++b) {
        const int64_t tile = b % tiles, i = b / tiles;
        block(isa, p, edge(i), edge(i + 1), tile * width, std::min(strips, (tile + 1) * width));
    }
}

// Whether every thread converts all rows itself. Otherwise the threads divide the rows and wait for each other.
bool converts_alone(const Converted& converted, const Product& p) {
    return !converted.wanted || p.rows * p.op.in_features <= REPEATED_ELEMENTS;
}

// A thread converts the rows for its first part and reuses them for the others.
void compute_alone(const QuantizedIsa& isa, const Product& p, const Converted& converted, Part part) {
    Product own = p;
    converted.place(converted_rows.at_least(size_t(converted.bytes)), own);
    if (part.fresh) converted.convert(isa, p, own, 0, p.rows);
    compute(isa, own, part.index, part.count);
}

void multiply_at_once(const QuantizedIsa& isa, const Product& p) {
    const Converted converted(isa, p);
    const int threads = threads_for(p.work());
    const int64_t pieces = pieces_of(isa, p);
    if (threads == 1 || converts_alone(converted, p))
        return divide_pieces(threads, pieces, [&](Part part) { compute_alone(isa, p, converted, part); });
    Product shared = p;
    converted.place(converted_rows.at_least(size_t(converted.bytes)), shared);
    divide_range(threads, p.rows, [&](int64_t begin, int64_t end) { converted.convert(isa, p, shared, begin, end); });
    divide_pieces(threads, pieces, [&](Part part) { compute(isa, shared, part.index, part.count); });
}

void multiply(const Product& p) {
    const int64_t element = element_of(p.op.dtype);
    for (int64_t first = 0; first < p.rows; first += CONVERTED_ROWS) {
        Product part = p;
        part.rows = std::min(p.rows - first, CONVERTED_ROWS);
        part.op.x = static_cast<const char*>(p.op.x) + first * p.op.x_stride * element;
        part.op.out = static_cast<char*>(p.op.out) + first * p.op.out_stride * element;
        multiply_at_once(current(), part);
    }
}

// `size` is the number of columns of the result.
Product product_of(const void* x, int64_t x_stride, const uint32_t* weight, const void* scales, const int8_t* zeros,
                   const void* bias, void* out, int64_t rows, int64_t in_features, int64_t size, int64_t group_size,
                   int64_t block_size, int bits, int int8_activations, int bf16_scales, int dtype, bool gated) {
    QuantizedLinear op{};
    op.x = x;
    op.weight = weight;
    op.scales = scales;
    op.zeros = zeros;
    op.bias = bias;
    op.out = out;
    op.x_stride = x_stride;
    op.out_stride = size;
    op.in_features = int32_t(in_features);
    op.out_features = int32_t(gated ? 2 * size : size);
    op.group_size = int32_t(group_size);
    op.groups = int32_t((in_features + group_size - 1) / group_size);
    op.block_size = int32_t(block_size);
    op.blocks = int32_t((in_features + block_size - 1) / block_size);
    op.bits = bits;
    op.dtype = dtype;
    op.int8_activations = int8_activations;
    op.bf16_scales = bf16_scales;
    return {op, rows, gated};
}

template <bool GATED>
Product recorded(const int64_t* s) {
    auto pointer = [&](int i) { return reinterpret_cast<void*>(s[i]); };
    return product_of(pointer(0), s[1], static_cast<const uint32_t*>(pointer(2)), pointer(3),
                      static_cast<const int8_t*>(pointer(4)), pointer(5), pointer(6), s[7], s[8], s[9], s[10], s[11],
                      int(s[12]), int(s[13]), int(s[14]), int(s[15]), GATED);
}

template <bool GATED>
ThreadMode mode_of(const int64_t* s) {
    const Product p = recorded<GATED>(s);
    if (p.rows > CONVERTED_ROWS || !converts_alone(Converted(current(), p), p)) return ThreadMode::OWN_DIVISION;
    return p.work() < SERIAL_WORK ? ThreadMode::ONE_THREAD : ThreadMode::SHARED;
}

template <bool GATED>
void part_of(const int64_t* s, Part part) {
    const Product p = recorded<GATED>(s);
    compute_alone(current(), p, Converted(current(), p), part);
}

template <bool GATED>
int64_t recorded_pieces(const int64_t* s) {
    return pieces_of(current(), recorded<GATED>(s));
}

// The weights of the thread's first columns, which are contiguous.
template <bool GATED>
Range ahead_of(const int64_t* s, int64_t thread, int64_t threads) {
    const Product p = recorded<GATED>(s);
    const int64_t tile = current().tile, depth = lane_depth(p.op.bits);
    const int64_t bytes = (p.op.in_features + depth - 1) / depth * tile * 4;
    const int64_t first = edge_of(p.strips(), tile / STRIP, thread, threads) * STRIP / tile, last = tiles_of(p.op.out_features, int(tile));
    return {reinterpret_cast<const char*>(p.op.weight) + first * bytes, (last - first) * bytes};
}

// Packs one tile. `values` is the weight row of its first column.
void pack_tile(const int8_t* values, int64_t stride, uint32_t* packed, int64_t columns, int64_t in_features, int tile,
               int bits, bool int8_activations) {
    static const int pairs[8] = {0, 16, 4, 20, 8, 24, 12, 28}, bytes[8] = {0, 8, 16, 24, 4, 12, 20, 28};
    const int* order = int8_activations ? bytes : pairs;  // bit offset of the nibble of each k
    const int depth = lane_depth(bits);
    for (int64_t k = 0; k < in_features; k += depth, packed += tile) {
        const int n = int(std::min<int64_t>(depth, in_features - k));
        for (int64_t c = 0; c < columns; ++c) {
            const int8_t* from = values + c * stride + k;
            uint32_t lane = 0;
            if (bits == 4)
                for (int j = 0; j < n; ++j) lane |= uint32_t((from[j] + 8) & 15) << order[j];
            else
                for (int j = 0; j < n; ++j) lane |= uint32_t(uint8_t(from[j] + 128)) << 8 * j;
            packed[c] = lane;
        }
    }
}

}  // namespace

const QuantizedIsa& current_quantized_isa() {
    static const QuantizedIsa& isa = choose();
    return isa;
}

const WorkSharing quantized_linear_sharing{mode_of<false>, part_of<false>, ahead_of<false>, recorded_pieces<false>};
const WorkSharing quantized_linear_silu_and_mul_sharing{mode_of<true>, part_of<true>, ahead_of<true>, recorded_pieces<true>};

}  // namespace mvllm

using namespace mvllm;

extern "C" {

const char* mvllm_cpu_quantized_linear_isa() { return current().name; }

// Columns per tile, which determines the sizes of the packed arrays.
int mvllm_cpu_quantized_linear_tile() { return current().tile; }

// `zeros` [out_features, groups] and `packed_zeros` may be null; `factors` has the same shape, or is null if all are
// one. Scales are [out_features, blocks]; bfloat16 truncates them. The caller fills the packed arrays with zeros.
void mvllm_cpu_quantized_linear_pack(const int8_t* values, int64_t stride, const float* scales, const int8_t* zeros,
                                     const int8_t* factors, uint32_t* packed, void* packed_scales, int8_t* packed_zeros,
                                     int64_t out_features, int64_t in_features, int64_t groups, int64_t blocks, int bits,
                                     int int8_activations, int bf16_scales) {
    const int tile = current().tile;
    const int64_t lanes = (in_features + lane_depth(bits) - 1) / lane_depth(bits) * tile;
    const int64_t tiles = tiles_of(out_features, tile);
    const bool with_factors = bits == 4 && int8_activations;
    auto pack = [&](int64_t t) {
        const int64_t first = t * tile, columns = std::min<int64_t>(tile, out_features - first);
        pack_tile(values + first * stride, stride, packed + t * lanes, columns, in_features, tile, bits, int8_activations);
        for (int64_t c = 0; c < columns; ++c) {
            for (int64_t b = 0; b < blocks; ++b) {
                const int64_t to = (t * blocks + b) * tile + c;
                const float scale = scales[(first + c) * blocks + b];
                uint32_t bits_of_scale;
                std::memcpy(&bits_of_scale, &scale, 4);
                if (bf16_scales)
                    static_cast<uint16_t*>(packed_scales)[to] = uint16_t(bits_of_scale >> 16);
                else
                    static_cast<float*>(packed_scales)[to] = scale;
            }
            for (int64_t g = 0; g < groups && packed_zeros; ++g) {
                const int64_t from = (first + c) * groups + g;
                const int zero = zeros ? zeros[from] : 0;
                packed_zeros[(t * groups + g) * tile + c] =
                    int8_t(with_factors ? (zero + 8) | ((factors ? factors[from] : 1) - 1) << 4 : zero);
            }
        }
    };
    divide_range(threads_for(out_features * in_features), tiles, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) pack(t);
    });
}

// out = x * weight^T + bias. A weight for int8 activations has one block and 8 bits, or blocks of at most 256 columns.
void mvllm_cpu_quantized_linear(const void* x, int64_t x_stride, const uint32_t* weight, const void* scales,
                                const int8_t* zeros, const void* bias, void* out, int64_t rows, int64_t in_features,
                                int64_t out_features, int64_t group_size, int64_t block_size, int bits, int int8_activations,
                                int bf16_scales, int dtype) {
    multiply(product_of(x, x_stride, weight, scales, zeros, bias, out, rows, in_features, out_features, group_size,
                        block_size, bits, int8_activations, bf16_scales, dtype, false));
}

// out [rows, size] = silu(first half of y) * second half of y, where y = x * weight^T + bias; `size` is a multiple of
// 16.
void mvllm_cpu_quantized_linear_silu_and_mul(const void* x, int64_t x_stride, const uint32_t* weight, const void* scales,
                                             const int8_t* zeros, const void* bias, void* out, int64_t rows,
                                             int64_t in_features, int64_t size, int64_t group_size, int64_t block_size,
                                             int bits, int int8_activations, int bf16_scales, int dtype) {
    multiply(product_of(x, x_stride, weight, scales, zeros, bias, out, rows, in_features, size, group_size, block_size, bits,
                        int8_activations, bf16_scales, dtype, true));
}

}  // extern "C"
