// Products of bfloat16 over emulated AMX tiles, through the library's own entries: packing, threads, blocks of rows, and the
// gated product. Compiled by test_amx.py with amx_linear.cpp and linear.cpp, under the sanitizers. Exits with 1 and says
// what is wrong, or prints how many products were right.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "amx.h"
#include "entries.h"
#include "kernels.h"

extern "C" {
int64_t mvllm_cpu_linear_packed_size(int64_t out_features, int64_t in_features, int dtype);
void mvllm_cpu_linear_pack(const void* weight, int64_t stride, void* packed, int64_t out_features, int64_t in_features,
                           int dtype);
int mvllm_cpu_linear_silu_and_mul_takes(int64_t in_features, int64_t size, int dtype);
}

namespace mvllm {

static float widened(uint16_t h) {
    const uint32_t bits = uint32_t(h) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

static uint16_t rounded(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static void copy_rows(const Linear& op, void* out, int64_t stride, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        uint16_t* to = static_cast<uint16_t*>(out) + row * stride;
        std::memset(to, 0, size_t(stride) * 2);
        std::memcpy(to, static_cast<const uint16_t*>(op.x) + row * op.x_stride, size_t(op.in_features) * 2);
    }
}

static void gate_rows(const ActAndMul& op, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
        for (int64_t i = 0; i < op.size; ++i) {
            const uint16_t* x = static_cast<const uint16_t*>(op.x) + row * op.x_stride;
            const float gate = widened(x[i]), up = widened(x[op.up + i]);
            static_cast<uint16_t*>(op.out)[row * op.out_stride + i] = rounded(gate / (1 + std::exp(-gate)) * up);
        }
}

const PrefetchDistance prefetch_distance{2048, 0};

const Isa& current_isa() {
    static const Isa isa = [] {
        Isa own{};
        own.name = "amx_bf16";
        own.act_and_mul = gate_rows;
        own.linear = amx_linear;
        own.linear_x = copy_rows;
        own.linear_tile = 64;
        own.bf16_dot = true;
        return own;
    }();
    return isa;
}

namespace {

std::mt19937 engine(7);

std::vector<uint16_t> numbers(int64_t count, float size) {
    std::normal_distribution<float> normal(0, size);
    std::vector<uint16_t> made(size_t(count), 0);
    for (auto& each : made) each = rounded(normal(engine));
    return made;
}

struct Case {
    int64_t in_features, out_features;
    std::vector<uint16_t> weight, packed, bias;

    Case(int64_t in, int64_t out) : in_features(in), out_features(out) {
        weight = numbers(out * in, 1.f / std::sqrt(float(in)));
        bias = numbers(out, 1);
        packed.assign(size_t(mvllm_cpu_linear_packed_size(out, in, BF16)), 0);
        mvllm_cpu_linear_pack(weight.data(), in, packed.data(), out, in, BF16);
    }

    double exact(const uint16_t* x, int64_t column, bool with_bias) const {
        double sum = with_bias ? widened(bias[size_t(column)]) : 0;
        for (int64_t k = 0; k < in_features; ++k)
            sum += double(widened(x[k])) * widened(weight[size_t(column * in_features + k)]);
        return sum;
    }
};

int64_t right = 0;

bool close(float found, double expected, const char* what, const Case& c, int64_t rows, int64_t row, int64_t column) {
    if (std::fabs(found - expected) <= std::fabs(expected) / 250 + 1e-4) return ++right, true;
    std::printf("%s %ldx%ld, %ld rows: [%ld][%ld] is %g, not %g\n", what, long(c.out_features), long(c.in_features),
                long(rows), long(row), long(column), found, expected);
    return false;
}

bool check(const Case& c, int64_t rows, bool with_bias) {
    const int64_t stride = c.in_features + rows % 3;  // rows with gaps
    const auto x = numbers(rows * stride, 1);
    std::vector<uint16_t> out(size_t(rows * c.out_features), 0x7fc0);
    mvllm_cpu_linear(x.data(), stride, c.packed.data(), with_bias ? c.bias.data() : nullptr, out.data(), rows,
                     c.in_features, c.out_features, BF16);
    for (int64_t m = 0; m < rows; ++m)
        for (int64_t n = 0; n < c.out_features; ++n)
            if (!close(widened(out[size_t(m * c.out_features + n)]), c.exact(&x[size_t(m * stride)], n, with_bias), "product",
                       c, rows, m, n))
                return false;
    // A row by itself gives the same bits.
    std::vector<uint16_t> alone(size_t(c.out_features));
    for (int64_t m : {int64_t(0), rows / 2, rows - 1}) {
        mvllm_cpu_linear(&x[size_t(m * stride)], stride, c.packed.data(), with_bias ? c.bias.data() : nullptr, alone.data(),
                         1, c.in_features, c.out_features, BF16);
        if (std::memcmp(alone.data(), &out[size_t(m * c.out_features)], alone.size() * 2)) {
            std::printf("row %ld of %ld depends on the others\n", long(m), long(rows));
            return false;
        }
    }
    return true;
}

bool check_gated(const Case& c, int64_t rows) {
    const int64_t size = c.out_features / 2;
    if (!mvllm_cpu_linear_silu_and_mul_takes(c.in_features, size, BF16))
        return std::printf("gated products are not taken\n"), false;
    const auto x = numbers(rows * c.in_features, 1);
    std::vector<uint16_t> out(size_t(rows * size));
    mvllm_cpu_linear_silu_and_mul(x.data(), c.in_features, c.packed.data(), nullptr, out.data(), rows, c.in_features, size,
                                  BF16);
    for (int64_t m = 0; m < rows; ++m)
        for (int64_t n = 0; n < size; ++n) {
            const uint16_t* row = &x[size_t(m * c.in_features)];
            const float gate = widened(rounded(float(c.exact(row, n, false))));
            const double expected = gate / (1 + std::exp(-double(gate))) * c.exact(row, size + n, false);
            if (std::fabs(widened(out[size_t(m * size + n)]) - expected) > std::fabs(expected) / 60 + 1e-3)
                return close(widened(out[size_t(m * size + n)]), expected, "gated", c, rows, m, n);
            ++right;
        }
    return true;
}

int run() {
    const int64_t shapes[][2] = {{1, 1}, {2, 64}, {31, 15}, {32, 16}, {33, 17}, {64, 65}, {66, 130}, {96, 33}, {193, 200}};
    for (const auto& shape : shapes) {
        const Case c(shape[0], shape[1]);
        for (int64_t rows : {1, 2, 15, 16, 17, 31, 32, 33, 40, 97, 130})
            if (!check(c, rows, rows % 2 == 0)) return 1;
    }
    for (int64_t rows : {1, 7, 33, 100})
        if (!check_gated(Case(70, 96), rows) || !check_gated(Case(32, 320), rows)) return 1;
    std::printf("%ld right\n", long(right));
    return 0;
}

}  // namespace
}  // namespace mvllm

int main() { return mvllm::run(); }
