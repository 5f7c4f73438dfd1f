// Activations, layer norms, and the decay of delta rules. They round where the references in core round. Included inside a
// namespace, after state_tile.h.

// e^x of x <= 0; 0 below -87.
INLINE vf vexp_of_negative(vf x) { return vexp2<true>(x * LOG2E); }

INLINE vf vtanh_exact(vf x) {
    const vf size = vmax(x, -x), e = vexp_of_negative(size * -2.f), square = x * x;
    const vf small = x + x * square * (-0.333333333f + square * (0.133333333f - square * 0.0539682540f));
    const vf large = (1.f - e) / (1.f + e);
    return size < 0.25f ? small : x < 0.f ? -large : x != x ? x : large;
}

// x times the normal distribution. The complement of erf is formula 7.1.26 of Abramowitz and Stegun, which torch uses, too.
INLINE vf vgelu(vf x) {
    const vf z = vmax(x, -x) * 0.707106781f, t = 1.f / (1.f + 0.3275911f * z);
    vf p = t * 1.061405429f - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const vf tail = 0.5f * p * t * vexp_of_negative(-z * z);
    return x * (x < 0.f ? tail : 1.f - tail);
}

INLINE vf vgelu_tanh(vf x) {
    constexpr float LINEAR = 1.5957691216057308f;
    return x * vsigmoid(x * (x * x * (LINEAR * 0.044715f) + LINEAR));
}

// log(1 + e^x) = max(x, 0) + log(1 + u), u = e^-|x|; log(1 + u) is 2 artanh(u / (2 + u)), a series in a number below 1/3.
INLINE vf vsoftplus(vf x) {
    const vf u = vexp_of_negative(-vmax(x, -x)), s = u / (2.f + u), square = s * s;
    vf p = square * 0.0769230769f + 0.0909090909f;
    p = p * square + 0.111111111f;
    p = p * square + 0.142857143f;
    p = p * square + 0.2f;
    p = p * square + 0.333333333f;
    p = p * square + 1.f;
    return x != x ? x : vmax(x, vf{}) + 2.f * s * p;
}

template <class E, int FUNCTION>
INLINE vf activated(vf x) {
    switch (FUNCTION) {
        case RELU: return x < 0.f ? vf{} : x;
        case RELU_SQUARED: return x < 0.f ? vf{} : x * x;
        case GELU: return vgelu(x);
        case GELU_TANH: return vgelu_tanh(x);
        case QUICK_GELU: return x * E::round(vsigmoid(E::round(x * 1.702f)));
        case SILU: return x * vsigmoid(x);
        case TANH: return vtanh_exact(x);
        default: return vsigmoid(x);
    }
}

template <class E, int FUNCTION>
static void activate_rows(const Activate& op, int64_t begin, int64_t end) {
    typedef typename E::type T;
    for (int64_t row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(op.x) + row * op.x_stride;
        const T* other = op.other ? static_cast<const T*>(op.other) + row * op.other_stride : nullptr;
        T* out = static_cast<T*>(op.out) + row * op.size;
        int64_t d = 0;
        for (; d + LANES <= op.size; d += LANES) {
            const vf y = activated<E, FUNCTION>(E::widen(x + d));
            E::narrow(out + d, other ? E::round(y) * E::widen(other + d) : y);
        }
        if (d == op.size) continue;
        T rest[2][LANES] = {};
        const size_t bytes = size_t(op.size - d) * sizeof(T);
        __builtin_memcpy(rest[0], x + d, bytes);
        if (other) __builtin_memcpy(rest[1], other + d, bytes);
        const vf y = activated<E, FUNCTION>(E::widen(rest[0]));
        E::narrow(rest[0], other ? E::round(y) * E::widen(rest[1]) : y);
        __builtin_memcpy(out + d, rest[0], bytes);
    }
}

template <class E>
static void activate_by_function(const Activate& op, int64_t begin, int64_t end) {
    switch (op.function) {
        case RELU: return activate_rows<E, RELU>(op, begin, end);
        case RELU_SQUARED: return activate_rows<E, RELU_SQUARED>(op, begin, end);
        case GELU: return activate_rows<E, GELU>(op, begin, end);
        case GELU_TANH: return activate_rows<E, GELU_TANH>(op, begin, end);
        case QUICK_GELU: return activate_rows<E, QUICK_GELU>(op, begin, end);
        case SILU: return activate_rows<E, SILU>(op, begin, end);
        case TANH: return activate_rows<E, TANH>(op, begin, end);
        default: return activate_rows<E, SIGMOID>(op, begin, end);
    }
}

template <class E>
static void layer_norm_rows(const LayerNorm& op, int64_t begin, int64_t end) {
    typedef typename E::type T;
    const int64_t size = op.size, whole = size / LANES * LANES;
    const T* weight = static_cast<const T*>(op.weight);
    const T* bias = static_cast<const T*>(op.bias);
    for (int64_t row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(op.x) + row * op.x_stride;
        T* out = static_cast<T*>(op.out) + row * size;
        vf sums[4] = {};
        float rest = 0;
        int64_t d = 0;
        for (; d < whole; d += LANES) sums[d / LANES % 4] += E::widen(x + d);
        for (; d < size; ++d) rest += E::get(x[d]);
        const float mean = (sum_of_lanes((sums[0] + sums[1]) + (sums[2] + sums[3])) + rest) / float(size);
        vf squares[4] = {};
        rest = 0;
        for (d = 0; d < whole; d += LANES) {
            const vf v = E::widen(x + d) - mean;
            squares[d / LANES % 4] += v * v;
        }
        for (; d < size; ++d) rest += (E::get(x[d]) - mean) * (E::get(x[d]) - mean);
        const float square = sum_of_lanes((squares[0] + squares[1]) + (squares[2] + squares[3])) + rest;
        const float factor = 1.f / __builtin_sqrtf(square / float(size) + op.eps);
        for (d = 0; d < whole; d += LANES) {
            const vf y = (E::widen(x + d) - mean) * factor;
            E::narrow(out + d, weight ? y * E::widen(weight + d) + E::widen(bias + d) : y);
        }
        for (; d < size; ++d) {
            const float y = (E::get(x[d]) - mean) * factor;
            out[d] = E::put(weight ? y * E::get(weight[d]) + E::get(bias[d]) : y);
        }
    }
}

template <class E>
static void log_decay_rows(const LogDecay& op, int64_t begin, int64_t end) {
    typedef typename E::type T;
    for (int64_t row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(op.x) + row * op.x_stride;
        float* out = op.out + row * op.size;
        for (int64_t d = 0; d < op.size; d += LANES) {
            const int lanes = int(op.size - d < LANES ? op.size - d : LANES);
            alignas(64) float values[LANES] = {}, factors[LANES] = {};
            for (int i = 0; i < lanes; ++i) {
                values[i] = E::get(x[d + i]) + op.bias[d + i];
                factors[i] = op.factors[(d + i) / op.group];
            }
            const vf y = vsoftplus(load(values)) * load(factors);
            store(values, y);
            __builtin_memcpy(out + d, values, size_t(lanes) * sizeof(float));
        }
    }
}

#define BY_DTYPE(function, op, begin, end)                          \
    switch (op.dtype) {                                             \
        case F32: return function<Float32>(op, begin, end);         \
        case BF16: return function<BFloat16>(op, begin, end);       \
        default: return function<Float16>(op, begin, end);          \
    }

static void activate(const Activate& op, int64_t begin, int64_t end) { BY_DTYPE(activate_by_function, op, begin, end) }
static void layer_norm(const LayerNorm& op, int64_t begin, int64_t end) { BY_DTYPE(layer_norm_rows, op, begin, end) }
static void log_decay(const LogDecay& op, int64_t begin, int64_t end) { BY_DTYPE(log_decay_rows, op, begin, end) }

#undef BY_DTYPE
