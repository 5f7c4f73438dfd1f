// Row-wise operations on logits: the logarithm of the sum of exponentials, and random draws. A row is computed by one thread
// in an order of sums that depends on its size alone, so its result does not depend on the other rows. Included inside a
// namespace, after simd.h.

constexpr int64_t SUMMED_ELEMENTS = 4096;  // elements added in float32; their sums are added in float64
constexpr int64_t MAXIMA_OF = 64;          // elements per maximum, to bound the k-th largest element

INLINE float natural_exponent_base(float best) { return best == -__builtin_inff() ? 0.f : best; }

template <class E>
static void logsumexp_of_rows(const LogSumExp& op, int64_t begin, int64_t end) {
    typedef typename E::type T;
    const int64_t size = op.size, whole = size / LANES * LANES;
    for (int64_t row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(op.x) + row * op.x_stride;
        T rest[LANES];
        for (int i = 0; i < LANES; ++i) rest[i] = E::put(i < size - whole ? E::get(x[whole + i]) : -__builtin_inff());
        vf top = E::widen(rest);
        vi is_nan = top != top;
        for (int64_t d = 0; d < whole; d += LANES) {
            const vf v = E::widen(x + d);
            is_nan |= v != v;
            top = v > top ? v : top;
        }
        float best = max_lanes(top);
        bool nan = false;
        for (int i = 0; i < LANES; ++i) nan |= is_nan[i] != 0;
        if (nan || best == __builtin_inff()) {
            op.out[row] = nan ? __builtin_nanf("") : best;
            continue;
        }
        const float base = natural_exponent_base(best);
        double sum = double(sum_lanes(vexp2<true>((E::widen(rest) - base) * LOG2E)));
        for (int64_t first = 0; first < whole; first += SUMMED_ELEMENTS) {
            const int64_t last = first + SUMMED_ELEMENTS < whole ? first + SUMMED_ELEMENTS : whole;
            vf sums[4] = {};
            int64_t d = first;
            for (; d + 4 * LANES <= last; d += 4 * LANES)
                for (int i = 0; i < 4; ++i) sums[i] += vexp2<true>((E::widen(x + d + i * LANES) - base) * LOG2E);
            for (; d < last; d += LANES) sums[0] += vexp2<true>((E::widen(x + d) - base) * LOG2E);
            sum += double(sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3])));
        }
        op.out[row] = float(double(base) + __builtin_log(sum));
    }
}

static void logsumexp(const LogSumExp& op, int64_t begin, int64_t end) {
    switch (op.dtype) {
        case F32: return logsumexp_of_rows<Float32>(op, begin, end);
        case BF16: return logsumexp_of_rows<BFloat16>(op, begin, end);
        default: return logsumexp_of_rows<Float16>(op, begin, end);
    }
}

// ---- draws -------------------------------------------------------------------------------------------------------------

// Integers in the order of the floats.
INLINE int32_t order_of(float x) {
    const int32_t bits = int32_t(as_bits(x));
    return bits < 0 ? bits ^ 0x7fffffff : bits;
}
INLINE float float_of(int32_t order) { return as_float(uint32_t(order < 0 ? order ^ 0x7fffffff : order)); }

// Sum of weights of the elements that are at least `limit`; with COUNT their number. `count` is a multiple of LANES.
template <bool COUNT>
INLINE double at_least(const float* x, const float* weights, int64_t count, float limit) {
    double sum = 0;
    for (int64_t first = 0; first < count; first += SUMMED_ELEMENTS) {
        const int64_t last = first + SUMMED_ELEMENTS < count ? first + SUMMED_ELEMENTS : count;
        vf sums = {};
        for (int64_t i = first; i < last; i += LANES)
            sums += load(x + i) >= splat(limit) ? (COUNT ? splat(1.f) : load(weights + i)) : vf{};
        sum += double(sum_lanes(sums));
    }
    return sum;
}

// The largest number, from `low` to `high`, at which `at_least` reaches `target`; `low` if none does. The sums never increase
// with the number, because rounding is monotone.
template <bool COUNT>
static float largest_reaching(const float* x, const float* weights, int64_t count, float low, float high, double target) {
    int64_t from = order_of(low), to = order_of(high);
    while (from < to) {
        const int64_t middle = from + (to - from + 1) / 2;
        if (at_least<COUNT>(x, weights, count, float_of(int32_t(middle))) >= target)
            from = middle;
        else
            to = middle - 1;
    }
    return float_of(int32_t(from));
}

// Copies the elements that are at least `limit`, and their weights if there are any, and pads them to a multiple of LANES.
// Returns the padded number.
static int64_t collect(const float* x, const float* weights, int64_t size, float limit, float* found, float* found_weights) {
    int64_t n = 0;
    for (int64_t i = 0; i < size; ++i)
        if (x[i] >= limit) {
            found[n] = x[i];
            if (weights) found_weights[n] = weights[i];
            ++n;
        }
    for (; n % LANES; ++n) {
        found[n] = -__builtin_inff();
        if (weights) found_weights[n] = 0;
    }
    return n;
}

// The k-th largest element. If there are at least k maxima of MAXIMA_OF elements, it is at least the k-th largest of them.
static float kth_largest(const float* x, int64_t size, int64_t k, float peak, float* maxima, float* found) {
    const float least = -__builtin_inff();
    const int64_t blocks = (size + MAXIMA_OF - 1) / MAXIMA_OF;
    float bound = least;
    if (k <= blocks) {
        for (int64_t b = 0; b < blocks; ++b) {
            const int64_t last = (b + 1) * MAXIMA_OF < size ? (b + 1) * MAXIMA_OF : size;
            float most = least;
            for (int64_t i = b * MAXIMA_OF; i < last; ++i) most = x[i] > most ? x[i] : most;
            maxima[b] = most;
        }
        int64_t padded = blocks;
        for (; padded % LANES; ++padded) maxima[padded] = least;
        bound = largest_reaching<true>(maxima, nullptr, padded, least, peak, double(k));
    }
    const int64_t count = collect(x, nullptr, size, bound, found, nullptr);
    return largest_reaching<true>(found, nullptr, count, bound, peak, double(k));
}

// The first index of positive weight at which the running sum exceeds `uniform` of the total.
INLINE int64_t drawn_index(const float* weights, int64_t count, float uniform) {
    double total = 0, sum = 0;
    for (int64_t i = 0; i < count; ++i) total += double(weights[i]);
    const double target = total * double(uniform);
    int64_t last = 0;
    for (int64_t i = 0; i < count; ++i) {
        if (!(weights[i] > 0)) continue;
        last = i;
        sum += double(weights[i]);
        if (sum > target) break;
    }
    return last;
}

static int64_t draw_row(const FilteredDraw& op, int64_t row, float* scratch) {
    const int64_t size = op.size, padded = (size + LANES - 1) / LANES * LANES;
    const float* x = op.logits + row * op.stride;
    const float peak = op.peaks[row], scale = op.inv_temperature[row];
    if (!(__builtin_fabsf(peak) < __builtin_inff())) return 0;
    float* weights = scratch;
    float* found = scratch + padded;
    float* found_weights = scratch + 2 * padded;
    for (int64_t i = 0; i < padded; i += LANES) {
        vf v;
        if (i + LANES <= size)
            v = load(x + i);
        else
            for (int j = 0; j < LANES; ++j) v[j] = i + j < size ? x[i + j] : -__builtin_inff();
        store(weights + i, vexp2<true>((v - peak) * scale * LOG2E));
    }
    float lowest = peak + op.min_p_gap[row];
    if (op.top_k[row] < size) {
        const float kth = kth_largest(x, size, op.top_k[row], peak, found_weights, found);
        lowest = kth > lowest ? kth : lowest;
    }
    const float top_p = op.top_p[row];
    if (top_p < 1.f) {
        double total = 0;
        for (int64_t i = 0; i < size; ++i) total += x[i] >= lowest ? double(weights[i]) : 0;
        // Elements below `bound` have less than (1 - top_p) of the largest element's weight together.
        const float bound = peak + float(__builtin_log((1. - double(top_p)) / double(size))) / scale;
        const float low = bound > lowest ? bound : lowest;
        const int64_t count = collect(x, weights, size, low, found, found_weights);
        const float nucleus = largest_reaching<false>(found, found_weights, count, low, peak, total * double(top_p));
        lowest = nucleus > lowest ? nucleus : lowest;
    }
    const int64_t blocks = (size + op.block_size - 1) / op.block_size;
    for (int64_t i = 0; i < size; ++i) weights[i] = x[i] >= lowest ? weights[i] : 0;
    for (int64_t b = 0; b < blocks; ++b) {
        const int64_t last = (b + 1) * op.block_size < size ? (b + 1) * op.block_size : size;
        double sum = 0;
        for (int64_t i = b * op.block_size; i < last; ++i) sum += double(weights[i]);
        found[b] = float(sum);
    }
    const int64_t block = drawn_index(found, blocks, op.coarse[row]), first = block * op.block_size;
    const int64_t within = first + op.block_size < size ? op.block_size : size - first;
    return first + drawn_index(weights + first, within, op.fine[row]);
}

// `scratch`: 3 * (op.size + LANES) floats.
static void filtered_draw(const FilteredDraw& op, int64_t begin, int64_t end, float* scratch) {
    for (int64_t row = begin; row < end; ++row) op.out[row] = draw_row(op, row, scratch);
}
