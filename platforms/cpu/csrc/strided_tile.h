// Elementwise operations on strided tensors, in float32 and rounded once, as torch computes them. Included inside a
// namespace, after state_tile.h.

// `count` elements, `stride` elements apart, as float32.
template <class E>
static void gather_floats(const void* from, int64_t stride, float* to, int64_t count) {
    typedef typename E::type T;
    const T* x = static_cast<const T*>(from);
    int64_t i = 0;
    if (stride == 1)
        for (; i + LANES <= count; i += LANES) store(to + i, E::widen(x + i));
    for (; i < count; ++i) to[i] = E::get(x[i * stride]);
}

static void gather_row(const void* from, int64_t first, int64_t stride, int32_t dtype, float* to, int64_t count) {
    switch (dtype) {
        case F32: return gather_floats<Float32>(static_cast<const float*>(from) + first, stride, to, count);
        case BF16: return gather_floats<BFloat16>(static_cast<const uint16_t*>(from) + first, stride, to, count);
        default: return gather_floats<Float16>(static_cast<const uint16_t*>(from) + first, stride, to, count);
    }
}

static void scatter_row(const float* from, void* to, int64_t first, int32_t dtype, int64_t count) {
    switch (dtype) {
        case F32: return narrow_some<Float32>(static_cast<float*>(to) + first, from, count);
        case BF16: return narrow_some<BFloat16>(static_cast<uint16_t*>(to) + first, from, count);
        default: return narrow_some<Float16>(static_cast<uint16_t*>(to) + first, from, count);
    }
}

// Rows [begin, end) of the last dimension, counted over the others.
static void elementwise(const Elementwise& op, int64_t begin, int64_t end) {
    constexpr int64_t BLOCK = 256;
    alignas(64) float xs[BLOCK], ys[BLOCK];
    const int64_t size = op.sizes[MAX_DIMS - 1];
    for (int64_t row = begin; row < end; ++row) {
        int64_t rest = row, x = 0, y = 0;
        for (int dim = MAX_DIMS - 2; dim >= 0; --dim) {
            x += rest % op.sizes[dim] * op.x_strides[dim];
            y += rest % op.sizes[dim] * op.y_strides[dim];
            rest /= op.sizes[dim];
        }
        for (int64_t d = 0; d < size; d += BLOCK) {
            const int64_t count = size - d < BLOCK ? size - d : BLOCK;
            gather_row(op.x, x + d * op.x_strides[MAX_DIMS - 1], op.x_strides[MAX_DIMS - 1], op.x_dtype, xs, count);
            if (op.operation != CONVERT)
                gather_row(op.y, y + d * op.y_strides[MAX_DIMS - 1], op.y_strides[MAX_DIMS - 1], op.y_dtype, ys, count);
            switch (op.operation) {
                case ADD:
                    for (int64_t i = 0; i < count; ++i) xs[i] += ys[i];
                    break;
                case SUBTRACT:
                    for (int64_t i = 0; i < count; ++i) xs[i] -= ys[i];
                    break;
                case MULTIPLY:
                    for (int64_t i = 0; i < count; ++i) xs[i] *= ys[i];
                    break;
                case DIVIDE:
                    for (int64_t i = 0; i < count; ++i) xs[i] /= ys[i];
                    break;
                default: break;
            }
            scatter_row(xs, op.out, row * size + d, op.dtype, count);
        }
    }
}
