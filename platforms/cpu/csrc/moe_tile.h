// Kernels of mixture-of-experts layers other than matrix products. Included inside a namespace, after simd.h.

template <class E>
static void moe_sum_rows(const MoeSum& op, int64_t begin, int64_t end) {
    typedef typename E::type T;
    constexpr int WIDE = 4 * LANES;
    const T* rows = static_cast<const T*>(op.rows);
    for (int64_t t = begin; t < end; ++t) {
        const int32_t* at = op.positions + t * op.top_k;
        const float* weight = op.weights + t * op.top_k;
        T* out = static_cast<T*>(op.out) + t * op.size;
        int64_t d = 0;
        for (; d + WIDE <= op.size; d += WIDE) {
            vf sum[4] = {};
            for (int k = 0; k < op.top_k; ++k)
                for (int v = 0; v < 4; ++v) sum[v] += E::widen(rows + at[k] * op.row_stride + d + v * LANES) * weight[k];
            for (int v = 0; v < 4; ++v) E::narrow(out + d + v * LANES, sum[v]);
        }
        for (; d < op.size; ++d) {
            float sum = 0;
            for (int k = 0; k < op.top_k; ++k) sum += E::get(rows[at[k] * op.row_stride + d]) * weight[k];
            out[d] = E::put(sum);
        }
    }
}

static void moe_sum(const MoeSum& op, int64_t begin, int64_t end) {
    switch (op.dtype) {
        case F32: return moe_sum_rows<Float32>(op, begin, end);
        case BF16: return moe_sum_rows<BFloat16>(op, begin, end);
        default: return moe_sum_rows<Float16>(op, begin, end);
    }
}

// The inner elements of a gated MLP with clamped gates, rounded where the reference rounds.
template <class E>
INLINE vf clamped_gates(vf gate, vf up, float alpha, float bound) {
    const vf limit = splat(bound);
    gate = vmin(limit, gate);
    up = vmax(splat(-bound), vmin(limit, up));
    const vf y = E::round(gate * alpha) * -LOG2E;
    const vf sigmoid = E::round(1.f / (1.f + vexp2<true>(vmin(splat(126.f), y))));
    return E::round(up + 1.f) * E::round(gate * sigmoid);
}

template <class E>
static void clamped_gate_rows(const ClampedGate& op, int64_t begin, int64_t end) {
    typedef typename E::type T;
    const float limit = E::get(E::put(op.limit));
    for (int64_t row = begin; row < end; ++row) {
        const T* gate = static_cast<const T*>(op.rows.x) + row * op.rows.x_stride;
        const T* up = gate + op.rows.up;
        T* out = static_cast<T*>(op.rows.out) + row * op.rows.out_stride;
        int64_t d = 0;
        for (; d + LANES <= op.rows.size; d += LANES)
            E::narrow(out + d, clamped_gates<E>(E::widen(gate + d), E::widen(up + d), op.alpha, limit));
        if (d == op.rows.size) continue;
        T rest[3][LANES] = {};
        const size_t bytes = size_t(op.rows.size - d) * sizeof(T);
        __builtin_memcpy(rest[0], gate + d, bytes);
        __builtin_memcpy(rest[1], up + d, bytes);
        E::narrow(rest[2], clamped_gates<E>(E::widen(rest[0]), E::widen(rest[1]), op.alpha, limit));
        __builtin_memcpy(out + d, rest[2], bytes);
    }
}

static void clamped_gate(const ClampedGate& op, int64_t begin, int64_t end) {
    switch (op.rows.dtype) {
        case F32: return clamped_gate_rows<Float32>(op, begin, end);
        case BF16: return clamped_gate_rows<BFloat16>(op, begin, end);
        default: return clamped_gate_rows<Float16>(op, begin, end);
    }
}
