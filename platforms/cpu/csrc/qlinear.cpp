// Products with integer weights: which instruction set runs, packing, and dividing a product over the threads.

#include "entries.h"
#include "qlinear.h"

#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace mvllm {

// Weak, as in dispatch.cpp.
#if MVLLM_X86
extern const QIsa qisa_avx2 __attribute__((weak));
extern const QIsa qisa_avx2_vnni __attribute__((weak));
extern const QIsa qisa_avx512 __attribute__((weak));
extern const QIsa qisa_avx512_vnni __attribute__((weak));
extern const QIsa qisa_avx512_bf16 __attribute__((weak));
#endif
extern const QIsa qisa_generic __attribute__((weak));

namespace {

constexpr int64_t SERIAL_WORK = 1 << 19;   // multiply-adds below which waking other threads costs more than it saves
constexpr int64_t CONVERTED_ROWS = 1024;   // rows of x that are rounded or converted at a time
constexpr int64_t REPEATED_ELEMENTS = 1 << 12;  // elements of x that every thread converts for itself: cheaper than waiting

bool runs_here(const QIsa& isa) {
#if MVLLM_X86
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
                      __builtin_cpu_supports("bmi2");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vl");
    const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    if (&isa == &qisa_avx2) return avx2;
    if (&isa == &qisa_avx2_vnni) return avx2 && __builtin_cpu_supports("avxvnni");
    if (&isa == &qisa_avx512) return avx512;
    if (&isa == &qisa_avx512_vnni) return vnni;
    if (&isa == &qisa_avx512_bf16) return vnni && __builtin_cpu_supports("avx512bf16");
#endif
    return &isa == &qisa_generic;
}

const QIsa* const best_first[] = {
#if MVLLM_X86
    &qisa_avx512_bf16, &qisa_avx512_vnni, &qisa_avx512, &qisa_avx2_vnni, &qisa_avx2,
#endif
    &qisa_generic,
};

const QIsa& choose() {
    const char* asked = std::getenv("MVLLM_CPU_ISA");
    const QIsa* best = nullptr;
    for (const QIsa* isa : best_first) {
        if (!isa || !runs_here(*isa)) continue;
        if (!best) best = isa;
        if (asked && !std::strcmp(asked, isa->name)) return *isa;
    }
    return *best;
}

const QIsa& current() {
    static const QIsa& isa = choose();
    return isa;
}

// Memory that a thread keeps from call to call: a call of a decode step should allocate nothing.
struct Buffer {
    std::unique_ptr<char[]> data;
    size_t size = 0;

    char* at_least(size_t bytes) {
        if (!bytes) return nullptr;
        if (bytes > size) {
            data.reset();
            data.reset(new char[bytes + 64]);
            size = bytes;
        }
        return data.get() + (64 - reinterpret_cast<uintptr_t>(data.get()) % 64);
    }
};

thread_local Buffer buffer;

int lane_depth(int bits) { return bits == 4 ? 8 : 4; }
int64_t tiles_of(int64_t out_features, int tile) { return (out_features + tile - 1) / tile; }

int threads_for(int64_t work) {
    return work < SERIAL_WORK ? 1 : int(std::min<int64_t>(omp_get_max_threads(), work / (SERIAL_WORK / 2)));
}

// What the kernels read in place of the caller's rows.
struct Converted {
    bool int8, wanted;
    int64_t stride, bytes;    // of a row, in elements; of all, in bytes

    Converted(const QIsa& isa, const QLinear& op, bool int8_activations, int64_t rows) : int8(int8_activations) {
        const int depth = lane_depth(op.bits);
        const bool in_place = op.dtype == F32 || (op.dtype == BF16 && isa.bf16_dot);
        wanted = int8 || !in_place || op.in_features % depth;
        // Rows a whole number of pages apart would meet in the same few places of the caches.
        stride = round_up(op.in_features, 64) + 64;
        const int64_t element = int8 ? 1 : op.dtype == BF16 && isa.bf16_dot ? 2 : 4;
        bytes = wanted ? rows * (stride * element + (int8 ? 8 : 0)) : 0;
    }

    // Lays the parts out in `memory` and points `to` at them.
    void place(char* memory, QLinear& to, int64_t rows) const {
        if (!wanted) return;
        to.x = memory;
        to.x_stride = stride;
        if (!int8) return;
        memory += rows * stride;
        to.row_scales = reinterpret_cast<float*>(memory);
        to.row_sums = reinterpret_cast<int32_t*>(memory + rows * 4);
    }

    void convert(const QIsa& isa, const QLinear& from, const QLinear& to, int64_t begin, int64_t end) const {
        void* x = const_cast<void*>(to.x);
        if (int8)
            isa.quantize(from, static_cast<int8_t*>(x), stride, const_cast<float*>(to.row_scales),
                         const_cast<int32_t*>(to.row_sums), begin, end);
        else if (wanted)
            isa.convert(from, x, stride, begin, end);
    }
};

// One thread's part: few rows, a range of columns; many, a range of blocks, those of the same rows in sequence.
void compute(const QIsa& isa, const QLinear& op, bool int8, int64_t rows, int64_t thread, int64_t threads) {
    const auto kernel = int8 ? isa.int8 : isa.weight_only;
    const int64_t strips = (op.out_features + STRIP - 1) / STRIP;
    if (rows <= QLINEAR_ROWS) return kernel(op, 0, rows, strips * thread / threads, strips * (thread + 1) / threads);
    const int64_t width = isa.tile / STRIP, tiles = (strips + width - 1) / width;
    const int64_t row_blocks = (rows + QLINEAR_ROWS - 1) / QLINEAR_ROWS, blocks = tiles * row_blocks;
    for (int64_t b = blocks * thread / threads; b < blocks * (thread + 1) / threads; ++b) {
        const int64_t tile = b % tiles, i = b / tiles;
        kernel(op, rows * i / row_blocks, rows * (i + 1) / row_blocks, tile * width, std::min(strips, (tile + 1) * width));
    }
}

void product(const QIsa& isa, const QLinear& op, bool int8, int64_t rows) {
    const Converted converted(isa, op, int8, rows);
    const int threads = threads_for(rows * op.in_features * op.out_features);
    const auto alone = [&](int64_t thread, int64_t of) {
        QLinear own = op;
        converted.place(buffer.at_least(size_t(converted.bytes)), own, rows);
        converted.convert(isa, op, own, 0, rows);
        compute(isa, own, int8, rows, thread, of);
    };
    if (threads == 1) return alone(0, 1);
    if (!converted.wanted || rows * op.in_features <= REPEATED_ELEMENTS) {
#pragma omp parallel num_threads(threads)
        alone(omp_get_thread_num(), omp_get_num_threads());
        return;
    }
    QLinear shared = op;
    converted.place(buffer.at_least(size_t(converted.bytes)), shared, rows);
#pragma omp parallel num_threads(threads)
    {
        const int64_t i = omp_get_thread_num(), n = omp_get_num_threads();
        converted.convert(isa, op, shared, rows * i / n, rows * (i + 1) / n);
#pragma omp barrier
        compute(isa, shared, int8, rows, i, n);
    }
}

// The lanes of one tile. `values` is its first column's row.
void pack_tile(const int8_t* values, int64_t stride, uint32_t* packed, int64_t columns, int64_t in_features, int tile,
               int bits) {
    static const int order[8] = {0, 16, 4, 20, 8, 24, 12, 28};  // where the nibble of each k goes
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
}  // namespace mvllm

using namespace mvllm;

extern "C" {

const char* mvllm_cpu_qlinear_isa() { return current().name; }

// Columns per tile: what the sizes of a packed weight's parts follow from.
int mvllm_cpu_qlinear_tile() { return current().tile; }

// `zeros` and `packed_zeros` may be null. The packed parts hold zeros before.
void mvllm_cpu_qlinear_pack(const int8_t* values, int64_t stride, const float* scales, const int8_t* zeros,
                            uint32_t* packed, float* packed_scales, int8_t* packed_zeros, int64_t out_features,
                            int64_t in_features, int64_t groups, int bits) {
    const int tile = current().tile;
    const int64_t lanes = (in_features + lane_depth(bits) - 1) / lane_depth(bits) * tile;
    const int64_t tiles = tiles_of(out_features, tile);
#pragma omp parallel for schedule(static) num_threads(threads_for(out_features * in_features))
    for (int64_t t = 0; t < tiles; ++t) {
        const int64_t first = t * tile, columns = std::min<int64_t>(tile, out_features - first);
        pack_tile(values + first * stride, stride, packed + t * lanes, columns, in_features, tile, bits);
        for (int64_t c = 0; c < columns; ++c)
            for (int64_t g = 0; g < groups; ++g) {
                const int64_t to = (t * groups + g) * tile + c, from = (first + c) * groups + g;
                packed_scales[to] = scales[from];
                if (zeros) packed_zeros[to] = zeros[from];
            }
    }
}

// out = x * weight^T + bias. A weight for int8 activations has 8 bits and one group.
void mvllm_cpu_qlinear(const void* x, int64_t x_stride, const uint32_t* weight, const float* scales, const int8_t* zeros,
                       const void* bias, void* out, int64_t rows, int64_t in_features, int64_t out_features,
                       int64_t group_size, int bits, int int8_activations, int dtype) {
    QLinear op{};
    op.x = x;
    op.weight = weight;
    op.scales = scales;
    op.zeros = zeros;
    op.bias = bias;
    op.out = out;
    op.x_stride = x_stride;
    op.in_features = int32_t(in_features);
    op.out_features = int32_t(out_features);
    op.group_size = int32_t(group_size);
    op.groups = int32_t((in_features + group_size - 1) / group_size);
    op.bits = bits;
    op.dtype = dtype;
    const int64_t element = dtype == F32 ? 4 : 2;
    for (int64_t first = 0; first < rows; first += CONVERTED_ROWS) {
        QLinear part = op;
        part.x = static_cast<const char*>(x) + first * x_stride * element;
        part.out = static_cast<char*>(out) + first * out_features * element;
        product(current(), part, int8_activations, std::min(rows - first, CONVERTED_ROWS));
    }
}

}  // extern "C"
