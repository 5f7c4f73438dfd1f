// Reads rows of a weight packed as block_linear.h describes: token embeddings tied to the language-model head.
//
// Results are bit-identical to core's mvllm/ops/block_formats.py: each operation rounds to float32.

#include <cstring>

#include "entries.h"
#include "quantized_linear.h"
#include "thread_team.h"

#pragma GCC push_options
#pragma GCC optimize("fp-contract=off")

#define LANES 4
#define HAS_F16C 0
#define HAS_BF16_DOT 0
namespace mvllm {
namespace {
#include "simd.h"

constexpr int64_t SERIAL_ELEMENTS = 1 << 15;  // elements below which waking other threads costs more than it saves

// Unpacks one group of a column to unsigned bytes. `lanes` is the column's lane in the first row.
void read_codes(const char* lanes, int rows, int tile, uint8_t* codes) {
    auto lane_at = [&](int row) {
        uint32_t lane;
        std::memcpy(&lane, lanes + int64_t(row) * tile * 4, 4);
        return lane;
    };
    std::memset(codes, 0, BLOCK_GROUP);
    for (int row = 0; row < rows; ++row) {
        const uint32_t lane = lane_at(row);
        for (int i = 0; i < 4; ++i) {
            const uint32_t byte = lane >> 8 * i & 255;
            if (rows == 8) {
                codes[4 * row + i] = uint8_t(byte);
            } else if (rows == 3 && row < 2) {
                for (int j = 0; j < 4; ++j) codes[4 * (4 * row + j) + i] = byte >> 2 * j & 3;
            } else if (rows == 3) {
                for (int j = 0; j < 8; ++j) codes[4 * j + i] |= uint8_t((byte >> j & 1) << 2);
            } else if (row < 4) {
                codes[8 * row + i] = byte & 15;
                codes[8 * row + 4 + i] = uint8_t(byte >> 4);
            } else if (rows == 5) {
                for (int j = 0; j < 8; ++j) codes[4 * j + i] |= uint8_t((byte >> j & 1) << 4);
            } else {
                for (int j = 0; j < 4; ++j) codes[4 * (4 * (row - 4) + j) + i] |= uint8_t((byte >> 2 * j & 3) << 4);
            }
        }
    }
}

// Dequantizes group `g` of the block that starts at `block`, for one column.
void read_group(BlockFormat format, const char* block, int g, int tile, int column, float* to) {
    static const float fours[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    static const float steps[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    const BlockLayout& layout = BLOCK_LAYOUTS[format];
    const char* group = block + (layout.head + g * layout.group()) * tile;
    auto half = [&](int field) {
        uint16_t bits;
        std::memcpy(&bits, block + 2 * (field * tile + column), 2);
        return from_f16(bits);
    };
    auto sub = [&](int field) { return float(int8_t(group[field * tile + column])); };
    uint8_t codes[BLOCK_GROUP];
    read_codes(group + layout.sub * tile + 4 * column, layout.rows, tile, codes);
    switch (format) {
        case Q4_0:
        case Q5_0:
        case Q8_0: {
            const float d = half(0), zero = format == Q4_0 ? 8 : format == Q5_0 ? 16 : 128;
            for (int k = 0; k < BLOCK_GROUP; ++k) to[k] = d * (float(codes[k]) - zero);
            return;
        }
        case Q4_1:
        case Q5_1: {
            const float d = half(0), m = half(1);
            for (int k = 0; k < BLOCK_GROUP; ++k) to[k] = d * float(codes[k]) + m;
            return;
        }
        case Q4_K:
        case Q5_K: {
            const float d = half(0) * sub(0), m = half(1) * sub(1);
            for (int k = 0; k < BLOCK_GROUP; ++k) to[k] = d * float(codes[k]) - m;
            return;
        }
        case Q3_K:
        case Q6_K: {
            const float zero = format == Q3_K ? 4 : 32;
            for (int k = 0; k < BLOCK_GROUP; ++k) to[k] = half(0) * sub(k / 16) * (float(codes[k]) - zero);
            return;
        }
        case IQ4_NL:
        case IQ4_XS: {
            const float d = format == IQ4_NL ? half(0) : half(0) * sub(0);
            for (int k = 0; k < BLOCK_GROUP; ++k) to[k] = d * steps[codes[k]];
            return;
        }
        default: {
            const uint32_t e = uint8_t(block[column]);
            const float d = as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
            for (int k = 0; k < BLOCK_GROUP; ++k) to[k] = d * fours[codes[k]];
        }
    }
}

// Writes row `row` of the weight, which is a column of the packed product, to `out`.
void read_row(const char* weight, const BlockPart* part, int64_t row, int64_t in_features, void* out, int dtype) {
    const BlockFormat format = BlockFormat(part->format);
    const BlockLayout& layout = BLOCK_LAYOUTS[format];
    const int tile = current_quantized_isa().blocks.tile, column = int((row - part->column) % tile);
    const int64_t block_bytes = int64_t(layout.block()) * tile;
    const char* block = weight + part->offset + (row - part->column) / tile * (in_features / (layout.groups * BLOCK_GROUP)) * block_bytes;
    for (int64_t k = 0; k < in_features; block += block_bytes)
        for (int g = 0; g < layout.groups; ++g, k += BLOCK_GROUP) {
            float values[BLOCK_GROUP];
            read_group(format, block, g, tile, column, values);
            if (dtype == F32)
                std::memcpy(static_cast<float*>(out) + k, values, sizeof(values));
            else
                for (int i = 0; i < BLOCK_GROUP; ++i)
                    static_cast<uint16_t*>(out)[k + i] = dtype == BF16 ? to_bf16(values[i]) : to_f16(values[i]);
        }
}

}  // namespace
}  // namespace mvllm

using namespace mvllm;

extern "C" {

// out[t] = the packed weight's row ids[t] - first, zeros for ids outside of its rows.
void mvllm_cpu_block_embedding(const void* ids, int wide_ids, const void* weight, const BlockPart* parts, int64_t num_parts,
                               void* out, int64_t rows, int64_t in_features, int64_t first, int dtype) {
    const int64_t element = dtype == F32 ? 4 : 2, count = parts[num_parts - 1].column + parts[num_parts - 1].columns;
    auto copy = [&](int64_t t) {
        const int64_t id = wide_ids ? static_cast<const int64_t*>(ids)[t] : static_cast<const int32_t*>(ids)[t];
        const int64_t row = id - first;
        char* to = static_cast<char*>(out) + t * in_features * element;
        if (row < 0 || row >= count) {
            std::memset(to, 0, size_t(in_features * element));
            return;
        }
        const BlockPart* part = parts;
        while (row >= part->column + part->columns) ++part;
        read_row(static_cast<const char*>(weight), part, row, in_features, to, dtype);
    };
    divide_range(rows * in_features < SERIAL_ELEMENTS ? 1 : team_size(), rows, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) copy(t);
    });
}

}  // extern "C"
#pragma GCC pop_options
