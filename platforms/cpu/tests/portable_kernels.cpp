// The library's kernels over ragged shapes against sums in double, without Python: what test_arm.py compiles for a processor
// that it then emulates. Prints the instruction set and how many values were right, or says what is wrong and exits with 1.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "entries.h"
#include "kernels.h"

extern "C" {
const char* mvllm_cpu_isa();
int64_t mvllm_cpu_linear_packed_size(int64_t out_features, int64_t in_features, int dtype);
void mvllm_cpu_linear_pack(const void* weight, int64_t stride, void* packed, int64_t out_features, int64_t in_features,
                           int dtype);
void* mvllm_cpu_step_new(const mvllm::Spec* spec, const mvllm::Batch* batch);
void mvllm_cpu_step_free(void* step);
}

namespace mvllm {
namespace {

std::mt19937 engine(11);
int64_t right = 0, wrong = 0;

// Numbers in memory as one of the element types.
struct Array {
    int dtype;
    std::vector<char> bytes;

    Array(int64_t count, int dtype) : dtype(dtype), bytes(size_t(count) * (dtype == F32 ? 4 : 2) + 64, 0) {}
    char* data() { return bytes.data(); }

    double get(int64_t i) const {
        if (dtype == F32) {
            float f;
            std::memcpy(&f, &bytes[size_t(i) * 4], 4);
            return f;
        }
        uint16_t h;
        std::memcpy(&h, &bytes[size_t(i) * 2], 2);
        if (dtype == BF16) {
            const uint32_t bits = uint32_t(h) << 16;
            float f;
            std::memcpy(&f, &bits, 4);
            return f;
        }
        const int exponent = h >> 10 & 31, fraction = h & 1023;
        const double size = exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
        return h & 0x8000 ? -size : size;
    }

    // Cut, not rounded: what is there is what counts.
    void put(int64_t i, float f) {
        if (dtype == F32) return void(std::memcpy(&bytes[size_t(i) * 4], &f, 4));
        uint32_t bits;
        std::memcpy(&bits, &f, 4);
        uint16_t h = uint16_t(bits >> 16);
        if (dtype == F16) {
            const int exponent = int(bits >> 23 & 255) - 112;
            h = uint16_t(bits >> 16 & 0x8000);
            if (exponent > 0 && exponent < 31) h = uint16_t(h | exponent << 10 | (bits >> 13 & 1023));
        }
        std::memcpy(&bytes[size_t(i) * 2], &h, 2);
    }
};

Array numbers(int64_t count, int dtype, float size = 1) {
    std::normal_distribution<float> normal(0, size);
    Array made(count, dtype);
    for (int64_t i = 0; i < count; ++i) made.put(i, normal(engine));
    return made;
}

double unit(int dtype) { return dtype == F32 ? 1e-6 : dtype == BF16 ? 1.0 / 255 : 1.0 / 2000; }

void expect(double found, double expected, double allowed, const char* what) {
    if (std::fabs(found - expected) <= allowed) return void(++right);
    if (++wrong < 10) std::printf("%s: %g, not %g (within %g)\n", what, found, expected, allowed);
}

void linear(int dtype, int64_t in, int64_t out, int64_t rows) {
    Array weight = numbers(out * in, dtype, 1 / std::sqrt(float(in))), bias = numbers(out, dtype), x = numbers(rows * in, dtype);
    Array packed(mvllm_cpu_linear_packed_size(out, in, dtype), dtype), y(rows * out, dtype);
    mvllm_cpu_linear_pack(weight.data(), in, packed.data(), out, in, dtype);
    mvllm_cpu_linear(x.data(), in, packed.data(), bias.data(), y.data(), rows, in, out, dtype);
    for (int64_t m = 0; m < rows; ++m)
        for (int64_t n = 0; n < out; ++n) {
            double sum = bias.get(n);
            for (int64_t k = 0; k < in; ++k) sum += x.get(m * in + k) * weight.get(n * in + k);
            expect(y.get(m * out + n), sum, std::fabs(sum) * unit(dtype) + 2e-5, "product");
        }
    const std::vector<int64_t> ids{0, out - 1, out, -1, out / 2};  // two are of other tables' rows
    Array found(int64_t(ids.size()) * in, dtype);
    mvllm_cpu_packed_embedding(ids.data(), 1, packed.data(), found.data(), int64_t(ids.size()), in, 0, out, dtype);
    for (size_t t = 0; t < ids.size(); ++t)
        for (int64_t k = 0; k < in; ++k) {
            const bool here = ids[t] >= 0 && ids[t] < out;
            expect(found.get(int64_t(t) * in + k), here ? weight.get(ids[t] * in + k) : 0, 0, "row of a packed weight");
        }
}

void gated(int dtype, int64_t size, int64_t rows) {
    Array x = numbers(rows * 2 * size, dtype, 3), y(rows * size, dtype);
    mvllm_cpu_silu_and_mul(x.data(), 2 * size, y.data(), rows, size, dtype);
    for (int64_t m = 0; m < rows; ++m)
        for (int64_t i = 0; i < size; ++i) {
            const double gate = x.get(m * 2 * size + i), expected = gate / (1 + std::exp(-gate)) * x.get(m * 2 * size + size + i);
            expect(y.get(m * size + i), expected, std::fabs(expected) * unit(dtype) * 3 + 1e-5, "gated activation");
        }
}

void argmax(int dtype, int64_t size, int64_t rows) {
    Array x = numbers(rows * size, dtype), values(rows, dtype);
    std::vector<int64_t> ids(size_t(rows), -1);
    mvllm_cpu_argmax(x.data(), size, values.data(), ids.data(), rows, size, dtype);
    for (int64_t m = 0; m < rows; ++m) {
        int64_t best = 0;
        for (int64_t i = 1; i < size; ++i)
            if (x.get(m * size + i) > x.get(m * size + best)) best = i;
        expect(double(ids[size_t(m)]), double(best), 0, "largest of a row");
        expect(values.get(m), x.get(m * size + best), 0, "largest value");
    }
}

void rotary(int dtype, int tokens, int heads, int size) {
    Array cos_sin = numbers(int64_t(tokens) * size, F32), query = numbers(int64_t(tokens) * heads * size, dtype);
    Array key = numbers(int64_t(tokens) * size, dtype), before = query;
    std::vector<int32_t> index(size_t(tokens), 0);
    for (int t = 0; t < tokens; ++t) index[size_t(t)] = tokens - 1 - t;
    mvllm_cpu_rotary_embedding(index.data(), 0, reinterpret_cast<const float*>(cos_sin.data()), size, query.data(),
                               heads * size, size, heads, key.data(), size, size, 1, tokens, dtype);
    for (int t = 0; t < tokens; ++t)
        for (int h = 0; h < heads; ++h)
            for (int i = 0; i < size / 2; ++i) {
                const int64_t at = (int64_t(t) * heads + h) * size + i, row = int64_t(index[size_t(t)]) * size + i;
                const double c = cos_sin.get(row), s = cos_sin.get(row + size / 2);
                const double a = before.get(at), b = before.get(at + size / 2);
                const double allowed = (std::fabs(a * c) + std::fabs(b * s)) * unit(dtype) * 2 + 1e-6;
                expect(query.get(at), a * c - b * s, allowed, "rotated");
            }
}

struct Request {
    int context, fresh;
};

struct Planned {
    void* step;
    ~Planned() { mvllm_cpu_step_free(step); }
};

// `requests`' keys and values are stored as new tokens of a first step, then attention of a second one is compared.
void attention(Spec spec, const std::vector<Request>& requests, int block_size) {
    const int count = int(requests.size()), pages = 400 / block_size + 1;
    std::vector<int32_t> table(size_t(count * pages)), lens, all_starts{0}, starts{0}, slots, fresh_slots;
    for (int i = 0; i < count * pages; ++i) table[size_t(i)] = count * pages - 1 - i;
    for (int r = 0; r < count; ++r) {
        const int length = requests[size_t(r)].context + requests[size_t(r)].fresh;
        for (int t = 0; t < length; ++t) {
            const int slot = table[size_t(r * pages + t / block_size)] * block_size + t % block_size;
            slots.push_back(slot);
            if (t >= requests[size_t(r)].context) fresh_slots.push_back(slot);
        }
        lens.push_back(length);
        all_starts.push_back(int32_t(slots.size()));
        starts.push_back(int32_t(fresh_slots.size()));
    }
    const int dk = round_up(spec.head_size, 4), dv = round_up(spec.value_size, 16), kv = spec.num_kv_heads;
    const int64_t tokens = int64_t(slots.size()), rows = int64_t(fresh_slots.size()), places = int64_t(count) * pages * kv;
    Array key = numbers(tokens * kv * spec.head_size, spec.dtype), value = numbers(tokens * kv * spec.value_size, spec.dtype);
    Array query = numbers(rows * spec.num_heads * spec.head_size, spec.dtype);
    Array out(rows * spec.num_heads * spec.value_size, spec.dtype);
    std::vector<float> sinks(size_t(spec.num_heads), 0.5f);
    std::vector<char> keys(size_t(places * dk * block_size * 4)), values(size_t(places * dv * block_size * 4));
    std::vector<float> key_scales(size_t(places * block_size)), value_scales(size_t(places * block_size));
    const Cache cache{keys.data(), values.data(), key_scales.data(), value_scales.data()};

    const Batch stored{count, int(tokens), block_size, pages, all_starts.data(), lens.data(), table.data(), slots.data(), nullptr};
    const Planned first{mvllm_cpu_step_new(&spec, &stored)};
    mvllm_cpu_reshape_and_cache(first.step, key.data(), kv * spec.head_size, value.data(), kv * spec.value_size, &cache);
    const Batch asked{count, int(rows), block_size, pages, starts.data(), lens.data(), table.data(), fresh_slots.data(), nullptr};
    const Planned second{mvllm_cpu_step_new(&spec, &asked)};
    const bool with_sinks = spec.window > 0;
    mvllm_cpu_paged_attention(second.step, query.data(), spec.num_heads * spec.head_size, &cache,
                              with_sinks ? sinks.data() : nullptr, F32, out.data());

    // Of itself, and of the largest of its vector, which is about 3.
    const bool bytes = is_byte(spec.kv_dtype);
    const double coarse = spec.kv_dtype == FP8 ? 0.08 : bytes ? 0.02 : spec.dtype == F32 ? 1e-5 : 0.01;
    const double least = bytes ? 0.02 : coarse / 10;
    for (int r = 0; r < count; ++r)
        for (int t = 0; t < requests[size_t(r)].fresh; ++t)
            for (int h = 0; h < spec.num_heads; ++h) {
                const int64_t row = (int64_t(starts[size_t(r)]) + t) * spec.num_heads + h, base = all_starts[size_t(r)];
                const int position = requests[size_t(r)].context + t, head = h / (spec.num_heads / kv);
                const int begin = spec.window ? std::max(0, position - spec.window + 1) : 0;
                std::vector<double> weight;
                double total = with_sinks ? std::exp(double(sinks[size_t(h)])) : 0;
                for (int s = begin; s <= position; ++s) {
                    double score = 0;
                    for (int d = 0; d < spec.head_size; ++d)
                        score += query.get(row * spec.head_size + d) * key.get(((base + s) * kv + head) * spec.head_size + d);
                    score *= spec.scale;
                    if (spec.soft_cap > 0) score = spec.soft_cap * std::tanh(score / spec.soft_cap);
                    weight.push_back(std::exp(score));
                    total += weight.back();
                }
                for (int d = 0; d < spec.value_size; ++d) {
                    double sum = 0, size = 0;
                    for (int s = begin; s <= position; ++s) {
                        const double v = value.get(((base + s) * kv + head) * spec.value_size + d);
                        sum += weight[size_t(s - begin)] / total * v;
                        size += weight[size_t(s - begin)] / total * std::fabs(v);
                    }
                    expect(out.get(row * spec.value_size + d), sum, size * coarse + least, "attention");
                }
            }
}

void all_attention() {
    const std::vector<Request> requests = {{0, 19}, {100, 1}, {15, 1}, {140, 5}, {0, 1}, {300, 1}};
    for (int dtype : {F32, BF16, F16})
        for (int kv_dtype : {dtype, int(INT8), int(FP8)})
            for (bool features : {false, true}) {
                Spec spec{};
                spec.num_heads = 4, spec.num_kv_heads = 2, spec.head_size = features ? 33 : 64, spec.value_size = 40;
                spec.dtype = dtype, spec.kv_dtype = kv_dtype;
                spec.window = features ? 20 : 0, spec.soft_cap = features ? 3.f : 0.f;
                spec.scale = 1 / std::sqrt(float(spec.head_size));
                spec.batch_invariant = features != (dtype == BF16);
                attention(spec, requests, features ? 32 : 16);
            }
}

int run() {
    const int64_t shapes[][2] = {{1, 1}, {31, 15}, {33, 17}, {64, 64}, {193, 65}, {7, 130}};
    for (int dtype : {F32, BF16, F16}) {
        for (const auto& shape : shapes)
            for (int64_t rows : {1, 2, 3, 7, 13, 97}) linear(dtype, shape[0], shape[1], rows);
        for (int64_t size : {1, 7, 16, 33, 100}) gated(dtype, size, 3), argmax(dtype, size, 5);
        for (int size : {2, 16, 34}) rotary(dtype, 5, 3, size);
    }
    all_attention();
    std::printf("%s: %ld right, %ld wrong\n", mvllm_cpu_isa(), long(right), long(wrong));
    return wrong ? 1 : 0;
}

}  // namespace
}  // namespace mvllm

int main(int argc, char**) {
    if (argc == 1) return mvllm::run();
    std::printf("%s: not run\n", mvllm_cpu_isa());  // an argument asks for the name only
    return 0;
}
