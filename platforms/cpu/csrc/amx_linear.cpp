// Products of bfloat16 rows with packed weights on AMX tiles. All other kernels and the packing are those of avx512_bf16:
// 16 pairs of k by 16 columns of a packed weight have the layout of the second operand of a tile product,
//
//     weight [pairs of k][64 columns][2]:  tile = 16 rows, 256 bytes apart, of 64 bytes
//     x      [rows][k]:                    tile = 16 rows of 32 k
//
// Up to 16 rows: one tile of x by four tiles of weights, so that weights are read as one stream. More rows: two by two
// tiles, which loads half as many tiles per product. A row is summed in the same order in both cases.
//
// The tests run it with emulated tiles (amx.h), and with the processor's where it has them.

#include "amx.h"

#if MVLLM_AMX
#include "amx_tiles.h"

#include <algorithm>
#include <cstring>

#if MVLLM_AMX_EMULATED == 1
#define LANES 4
#define HAS_F16C 0
#define HAS_BF16_DOT 0
#else
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,bmi2,prefer-vector-width=512")
#define LANES 16
#define HAS_F16C 1
#define HAS_BF16_DOT 1
#endif

namespace mvllm {
namespace amx {
#include "simd.h"

constexpr int SIDE = 16;                      // rows and columns of a tile of sums
constexpr int PAIRS = 16;                     // pairs of k in one product of tiles
constexpr int WIDE = 64;                      // columns per tile of the packed weight
constexpr int64_t PAIR_BYTES = WIDE * 2 * 2;  // from one pair of k to the next

// Tiles 0 to 3 hold sums, 4 and 5 rows of x, 6 and 7 weights.
static void configure(int first_rows, int second_rows) {
    TileConfig config;
    const int rows[8] = {first_rows,
                         first_rows,
                         second_rows ? second_rows : first_rows,
                         second_rows ? second_rows : first_rows,
                         first_rows,
                         second_rows ? second_rows : first_rows,
                         PAIRS,
                         PAIRS};
    for (int t = 0; t < 8; ++t) {
        config.rows[t] = uint8_t(rows[t]);
        config.row_bytes[t] = 64;
    }
    TILE_CONFIG(config);
}

// The remainder of k that does not fill a tile, padded with zeros.
struct Tail {
    alignas(64) uint16_t x[2 * SIDE][2 * PAIRS];
    alignas(64) uint16_t weight[PAIRS][WIDE * 2];
};

struct Operands {
    const char* x;
    int64_t x_bytes;  // from row to row
    const char* weight;
    int64_t pairs;
    int rows, strips;
};

// One step of k: `strips` tiles of weights by one tile of x. Few rows are bound by reading the weights.
INLINE void step_wide(const char* x, int64_t x_bytes, const char* w, int strips) {
    if (strips == WIDE / STRIP)
        for (int64_t i = 0; i < PAIRS * PAIR_BYTES; i += 64) prefetch(w + prefetch_distance.near + i);
    TILE_LOAD(4, x, x_bytes);
    TILE_LOAD(6, w, PAIR_BYTES);
    TILE_DOT_BF16(0, 4, 6);
    if (strips > 1) {
        TILE_LOAD(7, w + 64, PAIR_BYTES);
        TILE_DOT_BF16(1, 4, 7);
    }
    if (strips > 2) {
        TILE_LOAD(6, w + 128, PAIR_BYTES);
        TILE_DOT_BF16(2, 4, 6);
    }
    if (strips > 3) {
        TILE_LOAD(7, w + 192, PAIR_BYTES);
        TILE_DOT_BF16(3, 4, 7);
    }
}

// One step of k: two tiles of x by one or two of weights.
INLINE void step_square(const char* x, int64_t x_bytes, const char* w, int strips) {
    TILE_LOAD(4, x, x_bytes);
    TILE_LOAD(5, x + SIDE * x_bytes, x_bytes);
    TILE_LOAD(6, w, PAIR_BYTES);
    TILE_DOT_BF16(0, 4, 6);
    TILE_DOT_BF16(2, 5, 6);
    if (strips > 1) {
        TILE_LOAD(7, w + 64, PAIR_BYTES);
        TILE_DOT_BF16(1, 4, 7);
        TILE_DOT_BF16(3, 5, 7);
    }
}

static void fill_tail(Tail& tail, const Operands& a) {
    const int64_t whole = a.pairs / PAIRS * PAIRS, left = a.pairs - whole;
    std::memset(&tail, 0, sizeof(tail));
    for (int m = 0; m < a.rows; ++m) std::memcpy(tail.x[m], a.x + m * a.x_bytes + whole * 4, size_t(left) * 4);
    for (int64_t p = 0; p < left; ++p)
        std::memcpy(tail.weight[p], a.weight + (whole + p) * PAIR_BYTES, size_t(a.strips) * STRIP * 4);
}

// sums[rows][WIDE] = x * weight, for up to 16 rows by four strips of columns, or 32 rows by two.
static void multiply(const Operands& a, float* sums) {
    const bool square = a.rows > SIDE;
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    const char* x = a.x;
    const char* w = a.weight;
    for (int64_t p = 0; p + PAIRS <= a.pairs; p += PAIRS, x += PAIRS * 4, w += PAIRS * PAIR_BYTES)
        square ? step_square(x, a.x_bytes, w, a.strips) : step_wide(x, a.x_bytes, w, a.strips);
    if (a.pairs % PAIRS) {
        Tail tail;
        fill_tail(tail, a);
        const char* tail_x = reinterpret_cast<const char*>(tail.x);
        const char* tail_w = reinterpret_cast<const char*>(tail.weight);
        const int64_t bytes = sizeof(tail.x[0]);
        square ? step_square(tail_x, bytes, tail_w, a.strips) : step_wide(tail_x, bytes, tail_w, a.strips);
    }
    const int64_t row = WIDE * sizeof(float);
    TILE_STORE(0, sums, row);
    TILE_STORE(1, sums + SIDE, row);
    if (square) sums += SIDE * WIDE - 2 * SIDE;
    TILE_STORE(2, sums + 2 * SIDE, row);
    TILE_STORE(3, sums + 3 * SIDE, row);
}

// Adds the bias, rounds, and stores `columns` sums of each row.
static void round_rows(const float* sums, int rows, int columns, const uint16_t* bias, uint16_t* out, int64_t stride) {
    for (int m = 0; m < rows; ++m, sums += WIDE, out += stride) {
        int c = 0;
        for (; c + LANES <= columns; c += LANES) {
            const vf sum = load(sums + c);
            BFloat16::narrow(out + c, bias ? sum + BFloat16::widen(bias + c) : sum);
        }
        for (; c < columns; ++c) out[c] = to_bf16(bias ? sums[c] + from_bf16(bias[c]) : sums[c]);
    }
}

static void linear(const Linear& op, int64_t row_begin, int64_t row_end, int64_t strip_begin, int64_t strip_end) {
    alignas(64) float sums[2 * SIDE * WIDE];
    const int64_t pairs = (int64_t(op.in_features) + 1) / 2, stride = op.out_stride ? op.out_stride : op.out_features;
    const uint16_t* x = static_cast<const uint16_t*>(op.x);
    const uint16_t* weight = static_cast<const uint16_t*>(op.weight);
    int configured = 0;
    for (int64_t strip = strip_begin, next; strip < strip_end; strip = next) {
        const int64_t tile = strip / (WIDE / STRIP), within = strip % (WIDE / STRIP);
        const int64_t wide = std::min(strip_end - strip, WIDE / STRIP - within);
        next = strip + (row_end - row_begin > SIDE ? std::min<int64_t>(wide, 2) : wide);
        const int64_t column = strip * STRIP, columns = std::min<int64_t>(next * STRIP, op.out_features) - column;
        for (int64_t row = row_begin; row < row_end; row += 2 * SIDE) {
            const int rows = int(std::min<int64_t>(row_end - row, 2 * SIDE));
            if (rows != configured) configure(std::min(rows, SIDE), std::max(rows - SIDE, 0));
            configured = rows;
            const Operands operands{reinterpret_cast<const char*>(x + row * op.x_stride), op.x_stride * 2,
                                    reinterpret_cast<const char*>(weight + (tile * pairs * WIDE + within * STRIP) * 2),
                                    pairs, rows, int(next - strip)};
            multiply(operands, sums);
            const uint16_t* bias = op.bias ? static_cast<const uint16_t*>(op.bias) + column : nullptr;
            round_rows(sums, rows, int(columns), bias, static_cast<uint16_t*>(op.out) + row * stride + column, stride);
        }
    }
    if (configured) TILE_RELEASE();
}

}  // namespace amx

#if MVLLM_AMX_EMULATED != 1
#pragma GCC pop_options

// Weak, as in dispatch.cpp.
extern const Isa isa_avx512_bf16 __attribute__((weak));

#if MVLLM_AMX_EMULATED
bool amx_runs_here(unsigned) { return true; }
#else
bool amx_runs_here(unsigned products) {
    constexpr unsigned TILE_BIT = 1u << 24, OSXSAVE_BIT = 1u << 27, STATE = 3u << 17;
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM of asm/prctl.h
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE_BIT)) return false;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (products | TILE_BIT)) != (products | TILE_BIT)) return false;
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    // Linux enables the tiles' state on request, for all current and later threads of the process.
    return (low & STATE) == STATE && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#endif

const Isa* amx_isa() {
    if (!&isa_avx512_bf16 || !__builtin_cpu_supports("avx512bf16") || !amx_runs_here(AMX_BF16)) return nullptr;
    static const Isa isa = [] {
        Isa own = isa_avx512_bf16;
        own.name = "amx_bf16";
        own.linear = amx_linear;
        own.paged_attention = amx_paged_attention;
        return own;
    }();
    return &isa;
}
#endif

void amx_linear(const Linear& op, int64_t row_begin, int64_t row_end, int64_t strip_begin, int64_t strip_end) {
#if MVLLM_AMX_EMULATED != 1
    if (op.dtype != BF16) return isa_avx512_bf16.linear(op, row_begin, row_end, strip_begin, strip_end);
#endif
    amx::linear(op, row_begin, row_end, strip_begin, strip_end);
}

}  // namespace mvllm
#endif
