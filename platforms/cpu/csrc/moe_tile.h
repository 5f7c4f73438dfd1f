// Kernels of mixture-of-experts layers other than matrix products. Included inside a namespace, after simd.h.

template <class E>
static void moe_combine_rows(const MoeCombine& op, int64_t begin, int64_t end) {
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

static void moe_combine(const MoeCombine& op, int64_t begin, int64_t end) {
    switch (op.dtype) {
        case F32: return moe_combine_rows<Float32>(op, begin, end);
        case BF16: return moe_combine_rows<BFloat16>(op, begin, end);
        default: return moe_combine_rows<Float16>(op, begin, end);
    }
}
