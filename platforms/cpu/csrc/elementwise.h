// Row-wise operations. They round where the references in core round, so results are equal or differ in the last bits.
// Included inside a namespace, after simd.h.

// The value rounded to E.
template <class E>
INLINE float rounded(float v) {
    return E::get(E::put(v));
}

template <class E>
static void rms_norm_rows(const RmsNorm& op, int64_t begin, int64_t end) {
    typedef typename E::type T;
    const int size = op.size, whole = size / LANES * LANES;
    const T* weight = static_cast<const T*>(op.weight);
    for (int64_t row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(op.x) + row / op.heads * op.x_stride + row % op.heads * op.head_stride;
        T* out = static_cast<T*>(op.out) + row * size;
        vf squares[4] = {};
        float rest = 0;
        int d = 0;
        if (op.residual) {
            T* residual = static_cast<T*>(op.residual) + row * size;
            for (; d < whole; d += LANES) {
                vf sum = E::round(E::widen(residual + d) + E::widen(x + d));
                E::narrow(residual + d, sum);
                squares[d / LANES % 4] += sum * sum;
            }
            for (; d < size; ++d) {
                residual[d] = E::put(E::get(residual[d]) + E::get(x[d]));
                rest += E::get(residual[d]) * E::get(residual[d]);
            }
            x = residual;
        } else {
            for (; d < whole; d += LANES) {
                vf v = E::widen(x + d);
                squares[d / LANES % 4] += v * v;
            }
            for (; d < size; ++d) rest += E::get(x[d]) * E::get(x[d]);
        }
        rest += sum_lanes((squares[0] + squares[1]) + (squares[2] + squares[3]));
        const float factor = 1.f / __builtin_sqrtf(rest / float(size) + op.eps);
        for (d = 0; d < whole; d += LANES)
            E::narrow(out + d, E::round(E::widen(x + d) * factor) * E::widen(weight + d));
        for (; d < size; ++d) out[d] = E::put(rounded<E>(E::get(x[d]) * factor) * E::get(weight[d]));
    }
}

// silu(x) = x * sigmoid(x), and the tanh form of gelu is x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x^3)).
template <class E, bool GELU_TANH>
static void act_and_mul_rows(const ActAndMul& op, int64_t begin, int64_t end) {
    typedef typename E::type T;
    constexpr float LINEAR = GELU_TANH ? -1.5957691216057308f * LOG2E : -LOG2E, CUBIC = GELU_TANH ? LINEAR * 0.044715f : 0.f;
    const vf limit = splat(126.f);
    for (int64_t row = begin; row < end; ++row) {
        const T* gate = static_cast<const T*>(op.x) + row * op.x_stride;
        const T* up = gate + op.up;
        T* out = static_cast<T*>(op.out) + row * op.out_stride;
        int64_t d = 0;
        for (; d + LANES <= op.size; d += LANES) {
            const vf x = E::widen(gate + d), y = GELU_TANH ? x * (x * x * CUBIC + LINEAR) : x * LINEAR;
            const vf gated = x / (1.f + vexp2<true>(y > limit ? limit : y));
            E::narrow(out + d, E::round(gated) * E::widen(up + d));
        }
        for (; d < op.size; ++d) {
            const float x = E::get(gate[d]), y = GELU_TANH ? x * (x * x * CUBIC + LINEAR) : x * LINEAR;
            const float gated = x / (1.f + exp2_one(y > 126.f ? 126.f : y));
            out[d] = E::put(rounded<E>(gated) * E::get(up[d]));
        }
    }
}

template <class E>
static void silu_or_gelu_and_mul_rows(const ActAndMul& op, int64_t begin, int64_t end) {
    (op.is_gelu_tanh ? act_and_mul_rows<E, true> : act_and_mul_rows<E, false>)(op, begin, end);
}

template <class E>
static void add_or_scale_elements(const AddOrScale& op, int64_t begin, int64_t end) {
    typedef typename E::type T;
    const T* x = static_cast<const T*>(op.x);
    const T* y = static_cast<const T*>(op.y);
    T* out = static_cast<T*>(op.out);
    int64_t i = begin;
    for (; i + LANES <= end; i += LANES) E::narrow(out + i, y ? E::widen(x + i) + E::widen(y + i) : E::widen(x + i) * op.factor);
    for (; i < end; ++i) out[i] = E::put(y ? E::get(x[i]) + E::get(y[i]) : E::get(x[i]) * op.factor);
}

template <class E>
INLINE void rotate_heads(typename E::type* head, int64_t stride, int heads, const float* cos, int half) {
    const float* sin = cos + half;
    for (int h = 0; h < heads; ++h, head += stride) {
        int d = 0;
        for (; d + LANES <= half; d += LANES) {
            vf a = E::widen(head + d), b = E::widen(head + half + d), c = load(cos + d), s = load(sin + d);
            E::narrow(head + d, a * c - b * s);
            E::narrow(head + half + d, b * c + a * s);
        }
        for (; d < half; ++d) {
            float a = E::get(head[d]), b = E::get(head[half + d]);
            head[d] = E::put(a * cos[d] - b * sin[d]);
            head[half + d] = E::put(b * cos[d] + a * sin[d]);
        }
    }
}

template <class E>
static void rotary_tokens(const Rotary& op, int64_t begin, int64_t end) {
    typedef typename E::type T;
    for (int64_t t = begin; t < end; ++t) {
        int64_t at = op.wide_index ? static_cast<const int64_t*>(op.index)[t] : static_cast<const int32_t*>(op.index)[t];
        const float* cos = op.cos_sin + at * op.rotary_dim;
        rotate_heads<E>(static_cast<T*>(op.query) + t * op.query_stride, op.query_head_stride, op.num_heads, cos,
                        op.rotary_dim / 2);
        rotate_heads<E>(static_cast<T*>(op.key) + t * op.key_stride, op.key_head_stride, op.num_kv_heads, cos,
                        op.rotary_dim / 2);
    }
}

template <class E>
static void argmax_rows(const Argmax& op, int64_t begin, int64_t end) {
    typedef typename E::type T;
    const int64_t size = op.size, whole = size / LANES * LANES;
    for (int64_t row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(op.x) + row * op.x_stride;
        float best = -__builtin_inff();
        int64_t id = 0, d = 0;
        bool is_nan = false;
        if (whole) {
            vf top[2] = {splat(best), splat(best)};
            vi at[2] = {}, nan = {}, here;
            for (int i = 0; i < LANES; ++i) here[i] = i;
            for (int half = 0; d < whole; d += LANES, here += LANES, half ^= 1) {
                const vf v = E::widen(x + d);
                const vi more = v > top[half];
                top[half] = more ? v : top[half];
                at[half] = more ? here : at[half];
                nan |= v != v;
            }
            for (int half = 0; half < 2; ++half)
                for (int i = 0; i < LANES; ++i) {
                    is_nan |= nan[i] != 0;
                    if (top[half][i] > best || (top[half][i] == best && at[half][i] < id)) best = top[half][i], id = at[half][i];
                }
        }
        for (; d < size; ++d) {
            const float v = E::get(x[d]);
            if (v > best) best = v, id = d;
            is_nan |= v != v;
        }
        for (d = 0; is_nan && d < size; ++d)
            if (E::get(x[d]) != E::get(x[d])) {
                id = d;
                break;
            }
        static_cast<T*>(op.values)[row] = x[id];
        op.ids[row] = id;
    }
}

#define BY_DTYPE(function, op, begin, end)                          \
    switch (op.dtype) {                                             \
        case F32: return function<Float32>(op, begin, end);         \
        case BF16: return function<BFloat16>(op, begin, end);       \
        default: return function<Float16>(op, begin, end);          \
    }

static void rms_norm(const RmsNorm& op, int64_t begin, int64_t end) { BY_DTYPE(rms_norm_rows, op, begin, end) }
static void act_and_mul(const ActAndMul& op, int64_t begin, int64_t end) { BY_DTYPE(silu_or_gelu_and_mul_rows, op, begin, end) }
static void add_or_scale(const AddOrScale& op, int64_t begin, int64_t end) { BY_DTYPE(add_or_scale_elements, op, begin, end) }
static void rotary_embedding(const Rotary& op, int64_t begin, int64_t end) { BY_DTYPE(rotary_tokens, op, begin, end) }
static void argmax(const Argmax& op, int64_t begin, int64_t end) { BY_DTYPE(argmax_rows, op, begin, end) }

#undef BY_DTYPE
