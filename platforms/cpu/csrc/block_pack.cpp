// Packs blocks of GGUF files as block_linear.h describes.

#include <algorithm>
#include <cstring>

#include "quantized_linear.h"
#include "thread_team.h"

namespace mvllm {
namespace {

// The fields of one block of a GGUF file.
struct FileBlock {
    uint8_t head[4];
    uint8_t sub[8][2];
    uint8_t codes[256];  // one unsigned byte for each of the block's values
};

void read_nibbles(const uint8_t* from, int bytes, uint8_t* to) {
    for (int i = 0; i < bytes; ++i) {
        to[i] = from[i] & 15;
        to[bytes + i] = from[i] >> 4;
    }
}

// q4_k and q5_k: six bits each for eight scales and eight minima.
void read_sub_scales(const uint8_t* from, uint8_t (*to)[2]) {
    for (int g = 0; g < 4; ++g) {
        to[g][0] = from[g] & 63;
        to[g][1] = from[4 + g] & 63;
        to[4 + g][0] = uint8_t((from[8 + g] & 15) | (from[g] >> 2 & 48));
        to[4 + g][1] = uint8_t(from[8 + g] >> 4 | (from[4 + g] >> 2 & 48));
    }
}

void read_block(BlockFormat format, const uint8_t* from, FileBlock& to) {
    switch (format) {
        case Q4_0:
        case Q4_1:
        case IQ4_NL:
        case MXFP4: {
            const int head = BLOCK_LAYOUTS[format].head;
            std::memcpy(to.head, from, size_t(head));
            return read_nibbles(from + head, 16, to.codes);
        }
        case Q5_0:
        case Q5_1: {
            const int head = BLOCK_LAYOUTS[format].head;
            std::memcpy(to.head, from, size_t(head));
            read_nibbles(from + head + 4, 16, to.codes);
            for (int byte = 0; byte < 4; ++byte)
                for (int bit = 0; bit < 8; ++bit)
                    to.codes[8 * byte + bit] |= uint8_t((from[head + byte] >> bit & 1) << 4);
            return;
        }
        case Q8_0:
            std::memcpy(to.head, from, 2);
            for (int i = 0; i < 32; ++i) to.codes[i] = from[2 + i] ^ 128;
            return;
        case Q4_K:
        case Q5_K: {
            std::memcpy(to.head, from, 4);
            read_sub_scales(from + 4, to.sub);
            const uint8_t* low = from + (format == Q5_K ? 48 : 16);
            for (int i = 0; i < 4; ++i) read_nibbles(low + 32 * i, 32, to.codes + 64 * i);
            if (format == Q5_K)
                for (int g = 0; g < 8; ++g)
                    for (int i = 0; i < 32; ++i) to.codes[32 * g + i] |= uint8_t((from[16 + i] >> g & 1) << 4);
            return;
        }
        case Q3_K:
            for (int g = 0; g < 8; ++g)
                for (int i = 0; i < 32; ++i) {
                    const int low = from[32 + 32 * (g / 4) + i] >> 2 * (g % 4) & 3, high = from[i] >> g & 1;
                    to.codes[32 * g + i] = uint8_t(low | high << 2);
                }
            for (int j = 0; j < 16; ++j) {
                const int low = from[96 + j % 8] >> 4 * (j / 8) & 15, high = from[104 + j % 4] >> 2 * (j / 4) & 3;
                to.sub[j / 2][j % 2] = uint8_t((low | high << 4) - 32);
            }
            std::memcpy(to.head, from + 108, 2);
            return;
        case IQ4_XS:
            std::memcpy(to.head, from, 2);
            for (int g = 0; g < 8; ++g) {
                const int low = from[4 + g / 2] >> 4 * (g % 2) & 15, high = from[2 + g / 4] >> 2 * (g % 4) & 3;
                to.sub[g][0] = uint8_t((low | high << 4) - 32);
                read_nibbles(from + 8 + 16 * g, 16, to.codes + 32 * g);
            }
            return;
        default:
            for (int half = 0; half < 2; ++half) {
                uint8_t* codes = to.codes + 128 * half;
                read_nibbles(from + 64 * half, 64, codes);
                for (int g = 0; g < 4; ++g)
                    for (int i = 0; i < 32; ++i)
                        codes[32 * g + i] |= uint8_t((from[128 + 32 * half + i] >> 2 * g & 3) << 4);
            }
            std::memcpy(to.sub, from + 192, 16);
            std::memcpy(to.head, from + 208, 2);
    }
}

// The 32-bit lanes of one group of a column, in the layout with `ROWS` rows of lanes. `words`: eight words of four codes.
template <int ROWS>
void lanes_of(const uint32_t* words, uint32_t* lanes) {
    constexpr uint32_t BIT = 0x01010101, PAIR = 0x03030303, NIBBLE = 0x0f0f0f0f;
    if constexpr (ROWS == 8) {
        std::memcpy(lanes, words, 32);
        return;
    }
    if constexpr (ROWS == 3) {
        for (int row = 0; row < 2; ++row) {
            lanes[row] = 0;
            for (int j = 0; j < 4; ++j) lanes[row] |= (words[4 * row + j] & PAIR) << 2 * j;
        }
    } else {
        for (int row = 0; row < 4; ++row) lanes[row] = (words[2 * row] & NIBBLE) | (words[2 * row + 1] & NIBBLE) << 4;
    }
    if constexpr (ROWS == 3 || ROWS == 5) {
        constexpr int LAST = ROWS - 1, POSITION = ROWS == 3 ? 2 : 4;
        lanes[LAST] = 0;
        for (int j = 0; j < 8; ++j) lanes[LAST] |= (words[j] >> POSITION & BIT) << j;
    }
    if constexpr (ROWS == 6) {
        for (int row = 4; row < 6; ++row) {
            lanes[row] = 0;
            for (int j = 0; j < 4; ++j) lanes[row] |= (words[4 * (row - 4) + j] >> 4 & PAIR) << 2 * j;
        }
    }
}

// Writes one block of one column; `to` is the start of the tile's block.
template <int ROWS>
void write_block(const BlockLayout& layout, const FileBlock& block, char* to, int tile, int column) {
    if (layout.head == 1)
        to[column] = char(block.head[0]);
    else
        for (int i = 0; i < layout.head; i += 2) std::memcpy(to + i * tile + 2 * column, block.head + i, 2);
    to += layout.head * tile;
    for (int g = 0; g < layout.groups; ++g) {
        for (int s = 0; s < layout.sub; ++s, to += tile) to[column] = char(block.sub[g][s]);
        uint32_t words[8], lanes[ROWS];
        std::memcpy(words, block.codes + BLOCK_GROUP * g, 32);
        lanes_of<ROWS>(words, lanes);
        for (int row = 0; row < ROWS; ++row, to += 4 * tile) std::memcpy(to + 4 * column, lanes + row, 4);
    }
}

using WriteBlock = void (*)(const BlockLayout&, const FileBlock&, char*, int, int);

WriteBlock write_block_of(const BlockLayout& layout) {
    switch (layout.rows) {
        case 3: return write_block<3>;
        case 4: return write_block<4>;
        case 5: return write_block<5>;
        case 6: return write_block<6>;
        default: return write_block<8>;
    }
}

}  // namespace
}  // namespace mvllm

using namespace mvllm;

extern "C" {

// Columns of a tile.
int mvllm_cpu_block_tile() { return current_quantized_isa().blocks.tile; }

// Bytes of `columns` packed columns.
int64_t mvllm_cpu_block_packed_size(int64_t columns, int64_t in_features, int format) {
    const BlockLayout& layout = BLOCK_LAYOUTS[format];
    const int tile = current_quantized_isa().blocks.tile;
    return (columns + tile - 1) / tile * tile * (in_features / (layout.groups * BLOCK_GROUP)) * layout.block();
}

// `data` has one row of a file per column, `stride` bytes apart. The caller fills `packed` with zeros.
void mvllm_cpu_block_pack(const uint8_t* data, int64_t stride, char* packed, int64_t columns, int64_t in_features, int format) {
    const BlockLayout& layout = BLOCK_LAYOUTS[format];
    const int tile = current_quantized_isa().blocks.tile;
    const int64_t blocks = in_features / (layout.groups * BLOCK_GROUP), tiles = (columns + tile - 1) / tile;
    const WriteBlock write_block = write_block_of(layout);
    auto pack = [&](int64_t t) {
        FileBlock block;
        for (int64_t c = 0; c < std::min<int64_t>(tile, columns - t * tile); ++c)
            for (int64_t b = 0; b < blocks; ++b) {
                read_block(BlockFormat(format), data + (t * tile + c) * stride + b * layout.file_block, block);
                write_block(layout, block, packed + (t * blocks + b) * layout.block() * tile, tile, int(c));
            }
    };
    divide_range(tiles < 8 ? 1 : team_size(), tiles, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) pack(t);
    });
}

// `codes` has one row of 8-bit floats per column, `stride` bytes apart: rows [first_row, ...) of a matrix with one scale per
// block of `block_rows` by `block_columns` elements. Rows of `scales` are `scales_stride` elements apart. `block_columns` is a
// multiple of 128, or equals `in_features`. The caller fills `packed` with zeros.
void mvllm_cpu_float8_pack(const uint8_t* codes, int64_t stride, const float* scales, int64_t scales_stride,
                           int64_t block_rows, int64_t block_columns, int64_t first_row, char* packed, int64_t columns,
                           int64_t in_features) {
    const BlockLayout& layout = BLOCK_LAYOUTS[E4M3];
    const int tile = current_quantized_isa().blocks.tile;
    const int64_t values = layout.groups * BLOCK_GROUP, blocks = (in_features + values - 1) / values;
    const int64_t tiles = (columns + tile - 1) / tile;
    auto pack = [&](int64_t t) {
        for (int64_t c = 0; c < std::min<int64_t>(tile, columns - t * tile); ++c) {
            const int64_t row = t * tile + c;
            const float* of_row = scales + (first_row + row) / block_rows * scales_stride;
            for (int64_t b = 0; b < blocks; ++b) {
                uint8_t block[128] = {};
                const int64_t k = b * values;
                std::memcpy(block, codes + row * stride + k, size_t(std::min(values, in_features - k)));
                char* to = packed + (t * blocks + b) * layout.block() * tile;
                // A NaN weight makes every product NaN, so NaN is stored as the scale, where the kernels read it.
                const bool has_nan = std::any_of(block, block + values, [](uint8_t code) { return (code & 127) == 127; });
                const float scale = has_nan ? __builtin_nanf("") : of_row[k / block_columns];
                std::memcpy(to + 4 * c, &scale, 4);
                to += layout.head * tile;
                for (int g = 0; g < layout.groups; ++g)
                    for (int lane = 0; lane < layout.rows; ++lane, to += 4 * tile)
                        std::memcpy(to + 4 * c, block + g * BLOCK_GROUP + 4 * lane, 4);
            }
        }
    };
    divide_range(tiles < 8 ? 1 : team_size(), tiles, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) pack(t);
    });
}

}  // extern "C"
