// The matrix tiles of AMX: eight registers of up to 16 rows of 64 bytes. The product of two tiles is added to a third.
//
// The macros are assembler instructions, because the compiler's intrinsics exist only if the command line enables the
// extension, and this library is compiled for any processor. With MVLLM_AMX_EMULATED (amx.h), for tests, the same macros are
// plain C++ after Intel's manual (vol. 2, TDPBF16PS, TDPBSSD, TDPBSUD; except that the first treats numbers below 2^-126 as
// zero), which aborts where the processor would raise an exception. The sanitizers see only what emulated tiles access.

#pragma once

#include <cstdint>

namespace mvllm {

// Operand of LDTILECFG: bytes per row and number of rows of each tile.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64, "as the processor reads it");

}  // namespace mvllm

#if MVLLM_AMX_EMULATED

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace mvllm {
namespace emulated {

struct Tile {
    uint8_t bytes[16][64];
};
inline thread_local Tile tiles[8];
inline thread_local TileConfig config;
inline thread_local bool configured = false;

inline void need(bool met, const char* what) {
    if (met) return;
    std::fprintf(stderr, "AMX exception: %s\n", what);
    std::abort();
}

inline void load_config(const TileConfig& wanted) {
    need(wanted.palette == 1 && wanted.start_row == 0, "palette");
    for (int t = 0; t < 16; ++t) {
        need(wanted.rows[t] <= 16 && wanted.row_bytes[t] <= 64, "a tile larger than there are");
        need((wanted.rows[t] == 0) == (wanted.row_bytes[t] == 0), "a tile with rows or bytes alone");
        need(t < 8 || wanted.rows[t] == 0, "a ninth tile");
    }
    config = wanted;
    configured = true;
    std::memset(tiles, 0, sizeof(tiles));
}

inline void release() { configured = false; }

inline void used(int t) { need(configured && config.rows[t], "a tile that is not configured"); }

inline void zero(int t) {
    used(t);
    std::memset(&tiles[t], 0, sizeof(Tile));
}

inline void load(int t, const void* from, int64_t stride) {
    zero(t);
    for (int r = 0; r < config.rows[t]; ++r)
        std::memcpy(tiles[t].bytes[r], static_cast<const char*>(from) + r * stride, config.row_bytes[t]);
}

inline void store(int t, void* to, int64_t stride) {
    used(t);
    for (int r = 0; r < config.rows[t]; ++r)
        std::memcpy(static_cast<char*>(to) + r * stride, tiles[t].bytes[r], config.row_bytes[t]);
}

inline float bf16_at(const Tile& tile, int row, int i) {
    uint16_t half;
    std::memcpy(&half, tile.bytes[row] + 2 * i, 2);
    const uint32_t bits = uint32_t(half) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

inline void need_shapes(int c, int a, int b) {
    used(a), used(b), used(c);
    need(config.rows[c] == config.rows[a], "rows of the sum and of the first factor");
    need(config.row_bytes[a] == 4 * config.rows[b], "columns of the first factor and rows of the second");
    need(config.row_bytes[c] == config.row_bytes[b], "columns of the sum and of the second factor");
    need(a != b && b != c && a != c, "tiles that are not different");
}

// Sums of products of four bytes, signed by `Second`.
template <class Second>
inline void dot_bytes(int c, int a, int b) {
    need_shapes(c, a, b);
    for (int m = 0; m < config.rows[c]; ++m)
        for (int n = 0; n < config.row_bytes[c] / 4; ++n) {
            int32_t sum;
            std::memcpy(&sum, tiles[c].bytes[m] + 4 * n, 4);
            for (int k = 0; k < config.row_bytes[a] / 4; ++k)
                for (int i = 0; i < 4; ++i)
                    sum += int32_t(int8_t(tiles[a].bytes[m][4 * k + i])) * int32_t(Second(tiles[b].bytes[k][4 * n + i]));
            std::memcpy(tiles[c].bytes[m] + 4 * n, &sum, 4);
        }
}

inline void dot_bf16(int c, int a, int b) {
    need_shapes(c, a, b);
    for (int m = 0; m < config.rows[c]; ++m)
        for (int n = 0; n < config.row_bytes[c] / 4; ++n) {
            float even = 0, odd = 0, sum;
            for (int k = 0; k < config.row_bytes[a] / 4; ++k) {
                even = std::fma(bf16_at(tiles[a], m, 2 * k), bf16_at(tiles[b], k, 2 * n), even);
                odd = std::fma(bf16_at(tiles[a], m, 2 * k + 1), bf16_at(tiles[b], k, 2 * n + 1), odd);
            }
            std::memcpy(&sum, tiles[c].bytes[m] + 4 * n, 4);
            sum += even + odd;
            std::memcpy(tiles[c].bytes[m] + 4 * n, &sum, 4);
        }
}

}  // namespace emulated
}  // namespace mvllm

#define TILE_CONFIG(config) ::mvllm::emulated::load_config(config)
#define TILE_RELEASE() ::mvllm::emulated::release()
#define TILE_ZERO(t) ::mvllm::emulated::zero(t)
#define TILE_LOAD(t, from, stride) ::mvllm::emulated::load(t, from, stride)
#define TILE_STORE(t, to, stride) ::mvllm::emulated::store(t, to, stride)
#define TILE_DOT_BF16(c, a, b) ::mvllm::emulated::dot_bf16(c, a, b)
#define TILE_DOT_S8S8(c, a, b) ::mvllm::emulated::dot_bytes<int8_t>(c, a, b)
#define TILE_DOT_S8U8(c, a, b) ::mvllm::emulated::dot_bytes<uint8_t>(c, a, b)

#else

#define TILE_CONFIG(config) asm volatile("ldtilecfg %0" ::"m"(config))
#define TILE_RELEASE() asm volatile("tilerelease")
#define TILE_ZERO(t) asm volatile("tilezero %%tmm" #t ::)
#define TILE_LOAD(t, from, stride) \
    asm volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"((const void*)(from)), "r"((int64_t)(stride)) : "memory")
#define TILE_STORE(t, to, stride) \
    asm volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"((void*)(to)), "r"((int64_t)(stride)) : "memory")
#define TILE_DOT_BF16(c, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)
// Signed bytes of a by signed or unsigned bytes of b.
#define TILE_DOT_S8S8(c, a, b) asm volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)
#define TILE_DOT_S8U8(c, a, b) asm volatile("tdpbsud %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)

#endif
