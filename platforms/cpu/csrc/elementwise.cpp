// Row-wise operations over the threads. Small ones run on the calling thread, because waking
// threads costs microseconds.

#include <cstring>

#include "entries.h"
#include "kernels.h"
#include "team.h"

namespace mvllm {
namespace {

constexpr int64_t SERIAL_ELEMENTS = 1 << 15;

bool is_small(int64_t rows, int64_t elements_per_row) {
    return rows == 1 || rows * elements_per_row < 2 * SERIAL_ELEMENTS;
}

template <class Op>
void over_rows(void (*kernel)(const Op&, int64_t, int64_t), const Op& op, int64_t rows, int64_t elements_per_row) {
    const int threads = is_small(rows, elements_per_row) ? 1 : team_size();
    divide_pieces(threads, threads, [&](Part part) {
        kernel(op, rows * part.index / part.count, rows * (part.index + 1) / part.count);
    });
}

// Copies rows of a table; strides and sizes in bytes.
struct Embedding {
    const void* ids;
    const void* table;
    void* out;
    int64_t table_stride, row_bytes;
    int64_t first, count;  // ids of the table's rows
    int32_t wide_ids;  // whether ids are 64-bit integers, else 32-bit
};

void embedding_rows(const Embedding& op, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
        const int64_t id = op.wide_ids ? static_cast<const int64_t*>(op.ids)[t] : static_cast<const int32_t*>(op.ids)[t];
        const int64_t row = id - op.first;
        char* out = static_cast<char*>(op.out) + t * op.row_bytes;
        if (row >= 0 && row < op.count)
            std::memcpy(out, static_cast<const char*>(op.table) + row * op.table_stride, size_t(op.row_bytes));
        else
            std::memset(out, 0, size_t(op.row_bytes));
    }
}

RmsNorm rms_norm_of(const void* x, int64_t x_stride, int64_t heads, int64_t head_stride, void* residual, const void* weight,
                    void* out, int64_t size, int dtype, float eps) {
    return {x, residual, weight, out, x_stride, heads, head_stride, int32_t(size), dtype, eps};
}

ActAndMul silu_and_mul_of(const void* x, int64_t x_stride, void* out, int64_t size, int dtype) {
    return {x, out, x_stride, size, size, size, dtype};
}

ActAndMul gelu_tanh_and_mul_of(const void* x, int64_t x_stride, void* out, int64_t size, int dtype) {
    return {x, out, x_stride, size, size, size, dtype, true};
}

// Cost of one element of silu_and_mul, in elements of a simple operation.
constexpr int64_t SILU_COST = 4;

const void* pointer(int64_t word) { return reinterpret_cast<const void*>(word); }
void* target(int64_t word) { return reinterpret_cast<void*>(word); }

ThreadMode mode_of(int64_t rows, int64_t elements_per_row) {
    return is_small(rows, elements_per_row) ? ThreadMode::ONE_THREAD : ThreadMode::SHARED;
}

ThreadMode rms_norm_mode(const int64_t* s) { return mode_of(s[7], s[8]); }
ThreadMode silu_and_mul_mode(const int64_t* s) { return mode_of(s[3], SILU_COST * s[4]); }
ThreadMode rotary_mode(const int64_t* s) { return mode_of(s[12], (s[7] + s[11]) * s[3]); }

void rms_norm_part(const int64_t* s, Part part) {
    const int32_t bits = int32_t(s[10]);
    float eps;
    std::memcpy(&eps, &bits, sizeof(eps));
    const RmsNorm op = rms_norm_of(pointer(s[0]), s[1], s[2], s[3], target(s[4]), pointer(s[5]), target(s[6]), s[8],
                                   int(s[9]), eps);
    current_isa().rms_norm(op, s[7] * part.index / part.count, s[7] * (part.index + 1) / part.count);
}

void silu_and_mul_part(const int64_t* s, Part part) {
    const ActAndMul op = silu_and_mul_of(pointer(s[0]), s[1], target(s[2]), s[4], int(s[5]));
    current_isa().act_and_mul(op, s[3] * part.index / part.count, s[3] * (part.index + 1) / part.count);
}

void gelu_tanh_and_mul_part(const int64_t* s, Part part) {
    const ActAndMul op = gelu_tanh_and_mul_of(pointer(s[0]), s[1], target(s[2]), s[4], int(s[5]));
    current_isa().act_and_mul(op, s[3] * part.index / part.count, s[3] * (part.index + 1) / part.count);
}

void rotary_embedding_part(const int64_t* s, Part part) {
    const Rotary op{pointer(s[0]), reinterpret_cast<const float*>(s[2]), target(s[4]), target(s[8]), s[5], s[6], s[9], s[10],
                    int32_t(s[1]), int32_t(s[7]), int32_t(s[11]), int32_t(s[3]), int32_t(s[13])};
    current_isa().rotary_embedding(op, s[12] * part.index / part.count, s[12] * (part.index + 1) / part.count);
}

ThreadMode always_one_thread(const int64_t*) { return ThreadMode::ONE_THREAD; }
ThreadMode always_own_division(const int64_t*) { return ThreadMode::OWN_DIVISION; }

}  // namespace

const WorkSharing one_thread{always_one_thread, nullptr, nullptr, nullptr}, own_division{always_own_division, nullptr, nullptr, nullptr};
const WorkSharing rms_norm_sharing{rms_norm_mode, rms_norm_part, nullptr, nullptr};
const WorkSharing silu_and_mul_sharing{silu_and_mul_mode, silu_and_mul_part, nullptr, nullptr};
const WorkSharing gelu_tanh_and_mul_sharing{silu_and_mul_mode, gelu_tanh_and_mul_part, nullptr, nullptr};
const WorkSharing rotary_embedding_sharing{rotary_mode, rotary_embedding_part, nullptr, nullptr};

}  // namespace mvllm

using namespace mvllm;

extern "C" {

int mvllm_cpu_abi_version() { return 20; }

const char* mvllm_cpu_isa() { return current_isa().name; }

// Rows of `x` in groups of `heads` rows: groups are `x_stride` elements apart, the rows of a group `head_stride`.
void mvllm_cpu_rms_norm(const void* x, int64_t x_stride, int64_t heads, int64_t head_stride, void* residual,
                        const void* weight, void* out, int64_t rows, int64_t size, int dtype, float eps) {
    const RmsNorm op = rms_norm_of(x, x_stride, heads, head_stride, residual, weight, out, size, dtype, eps);
    over_rows(current_isa().rms_norm, op, rows, size);
}

// out[t] = table[ids[t] - first], zeros for ids outside of the table's `count` rows; strides and sizes in bytes.
void mvllm_cpu_embedding(const void* ids, int wide_ids, const void* table, int64_t table_stride, void* out, int64_t rows,
                         int64_t row_bytes, int64_t first, int64_t count) {
    over_rows(embedding_rows, Embedding{ids, table, out, table_stride, row_bytes, first, count, wide_ids}, rows, row_bytes / 4);
}

void mvllm_cpu_argmax(const void* x, int64_t x_stride, void* values, int64_t* ids, int64_t rows, int64_t size, int dtype) {
    over_rows(current_isa().argmax, Argmax{x, values, ids, x_stride, size, dtype}, rows, size);
}

void mvllm_cpu_silu_and_mul(const void* x, int64_t x_stride, void* out, int64_t rows, int64_t size, int dtype) {
    over_rows(current_isa().act_and_mul, silu_and_mul_of(x, x_stride, out, size, dtype), rows, SILU_COST * size);
}

void mvllm_cpu_gelu_tanh_and_mul(const void* x, int64_t x_stride, void* out, int64_t rows, int64_t size, int dtype) {
    over_rows(current_isa().act_and_mul, gelu_tanh_and_mul_of(x, x_stride, out, size, dtype), rows, SILU_COST * size);
}

// The sum of `x` and `y`, `count` contiguous elements each.
void mvllm_cpu_add(const void* x, const void* y, void* out, int64_t count, int dtype) {
    over_rows(current_isa().add_or_scale, AddOrScale{x, y, out, 1.f, dtype}, count, 1);
}

void mvllm_cpu_scale(const void* x, float factor, void* out, int64_t count, int dtype) {
    over_rows(current_isa().add_or_scale, AddOrScale{x, nullptr, out, factor, dtype}, count, 1);
}

void mvllm_cpu_rotary_embedding(const void* index, int wide_index, const float* cos_sin, int rotary_dim, void* query,
                                int64_t query_stride, int64_t query_head_stride, int num_heads, void* key, int64_t key_stride,
                                int64_t key_head_stride, int num_kv_heads, int64_t tokens, int dtype) {
    const Rotary op{index,      cos_sin,         query,      key,       query_stride, query_head_stride,
                    key_stride, key_head_stride, wide_index, num_heads, num_kv_heads, rotary_dim,
                    dtype};
    over_rows(current_isa().rotary_embedding, op, tokens, int64_t(num_heads + num_kv_heads) * rotary_dim);
}

}  // extern "C"
