// Products of each head's rows with a matrix of its own, as it is stored. Sums in float32, rounded once. A row's result does
// not depend on the other rows: every row has the same order of sums. Included inside a namespace, after state_tile.h.

// ROWS rows times columns [begin, end), whose elements of one row of the matrix are adjacent. `x` holds float32 rows.
template <class E, int ROWS>
static void head_rows_by_columns(const HeadProduct& op, const typename E::type* weight, const float* x, int64_t x_stride,
                                 typename E::type* out, int64_t begin, int64_t end) {
    typedef typename E::type T;
    constexpr int WIDE = 4;
    const int64_t out_stride = op.heads * op.out_size;
    int64_t c = begin;
    for (; c + WIDE * LANES <= end; c += WIDE * LANES) {
        vf sums[ROWS][WIDE] = {};
        for (int64_t k = 0; k < op.in_size; ++k) {
            vf w[WIDE];
            for (int i = 0; i < WIDE; ++i) w[i] = E::widen(weight + k * op.row_stride + c + i * LANES);
            for (int r = 0; r < ROWS; ++r)
                for (int i = 0; i < WIDE; ++i) sums[r][i] += w[i] * x[r * x_stride + k];
        }
        for (int r = 0; r < ROWS; ++r)
            for (int i = 0; i < WIDE; ++i) E::narrow(out + r * out_stride + c + i * LANES, sums[r][i]);
    }
    for (; c < end; c += LANES) {
        const int64_t count = end - c < LANES ? end - c : LANES;
        vf sums[ROWS] = {};
        for (int64_t k = 0; k < op.in_size; ++k) {
            T some[LANES] = {};
            __builtin_memcpy(some, weight + k * op.row_stride + c, size_t(count) * sizeof(T));
            const vf w = E::widen(some);
            for (int r = 0; r < ROWS; ++r) sums[r] += w * x[r * x_stride + k];
        }
        for (int r = 0; r < ROWS; ++r) {
            T some[LANES];
            E::narrow(some, sums[r]);
            __builtin_memcpy(out + r * out_stride + c, some, size_t(count) * sizeof(T));
        }
    }
}

// The same for a matrix whose elements of one column are adjacent. Rows of `x` are padded with zeros to a multiple of LANES.
template <class E, int ROWS>
static void head_rows_by_rows(const HeadProduct& op, const typename E::type* weight, const float* x, int64_t x_stride,
                              typename E::type* out, int64_t begin, int64_t end) {
    typedef typename E::type T;
    constexpr int WIDE = 4;
    const int64_t out_stride = op.heads * op.out_size, whole = op.in_size / LANES * LANES;
    for (int64_t c = begin; c < end; c += WIDE) {
        const int columns = int(end - c < WIDE ? end - c : WIDE);
        vf sums[ROWS][WIDE] = {};
        int64_t k = 0;
        for (; k < whole; k += LANES)
            for (int i = 0; i < WIDE; ++i) {
                const vf w = E::widen(weight + (c + (i < columns ? i : 0)) * op.column_stride + k);
                for (int r = 0; r < ROWS; ++r) sums[r][i] += w * load(x + r * x_stride + k);
            }
        if (k < op.in_size)
            for (int i = 0; i < columns; ++i) {
                T some[LANES] = {};
                __builtin_memcpy(some, weight + (c + i) * op.column_stride + k, size_t(op.in_size - k) * sizeof(T));
                for (int r = 0; r < ROWS; ++r) sums[r][i] += E::widen(some) * load(x + r * x_stride + k);
            }
        for (int r = 0; r < ROWS; ++r)
            for (int i = 0; i < columns; ++i) out[r * out_stride + c + i] = E::put(sum_of_lanes(sums[r][i]));
    }
}

// Columns [begin, end) of one head, for all tokens. `scratch`: in_size numbers, rounded up to LANES, for each token.
template <class E>
static void head_product_columns(const HeadProduct& op, int64_t head, int64_t begin, int64_t end, float* scratch) {
    typedef typename E::type T;
    constexpr int ROWS = 4;
    const int64_t padded = (op.in_size + LANES - 1) / LANES * LANES;
    const T* const weight = static_cast<const T*>(op.weight) + head * op.head_stride;
    const T* const rows = static_cast<const T*>(op.x) + head * op.x_head_stride;
    for (int64_t t = 0; t < op.tokens; ++t) widen_padded<E>(rows + t * op.x_stride, scratch + t * padded, op.in_size);
    for (int64_t t = 0; t < op.tokens; t += t + ROWS <= op.tokens ? ROWS : 1) {
        const float* const x = scratch + t * padded;
        T* const out = static_cast<T*>(op.out) + (t * op.heads + head) * op.out_size;
        const bool all = t + ROWS <= op.tokens;
        if (op.column_stride == 1)
            (all ? head_rows_by_columns<E, ROWS> : head_rows_by_columns<E, 1>)(op, weight, x, padded, out, begin, end);
        else
            (all ? head_rows_by_rows<E, ROWS> : head_rows_by_rows<E, 1>)(op, weight, x, padded, out, begin, end);
    }
}

static void head_product(const HeadProduct& op, int64_t head, int64_t begin, int64_t end, float* scratch) {
    switch (op.dtype) {
        case F32: return head_product_columns<Float32>(op, head, begin, end, scratch);
        case BF16: return head_product_columns<BFloat16>(op, head, begin, end, scratch);
        default: return head_product_columns<Float16>(op, head, begin, end, scratch);
    }
}
