// Kernels of layers with a state: a short convolution, the recurrence of Mamba-2, delta rules, and the gated norm after
// them. Core's mvllm/ops/{causal_conv1d,ssd,delta_rule,gated_rms_norm}.py specify them. Included inside a namespace,
// after simd.h.
//
// A recurrence is computed token by token, in float32, for one head of one request at a time. Its state is read from
// memory once per call: tokens are taken in groups, and each part of the state that fits the registers or the first
// cache is advanced by all tokens of a group. So the order of operations on an element depends neither on how a prompt is
// cut into steps nor on the other requests.

INLINE float sum_of_lanes(vf v) {
#if LANES == 4
    return (v[0] + v[2]) + (v[1] + v[3]);
#else
#if LANES == 16
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
#else
    const __m256 half = (__m256)v;
#endif
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
#endif
}

#if LANES == 16
// Sums of parts of two vectors, in the order of `sum_of_lanes`: of their halves, and so on; results are in one vector.
INLINE vf sum_halves(vf a, vf b) {
    return (vf)_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0x44) + (vf)_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0xEE);
}
INLINE vf sum_quarters(vf a, vf b) {
    return (vf)_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0x88) + (vf)_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0xDD);
}
INLINE vf sum_pairs(vf a, vf b) {
    return (vf)_mm512_shuffle_ps((__m512)a, (__m512)b, 0x44) + (vf)_mm512_shuffle_ps((__m512)a, (__m512)b, 0xEE);
}
INLINE vf sum_lanes_of_pairs(vf a, vf b) {
    return (vf)_mm512_shuffle_ps((__m512)a, (__m512)b, 0x88) + (vf)_mm512_shuffle_ps((__m512)a, (__m512)b, 0xDD);
}
#endif

// The sums of the lanes of STATE_TOKENS vectors, in the order of `sum_of_lanes`.
INLINE void sums_of_lanes(const vf* v, float* sums) {
#if LANES == 16
    static_assert(STATE_TOKENS == LANES, "one vector of sums");
    vf eights[8], fours[4];
    for (int i = 0; i < 8; ++i) eights[i] = sum_halves(v[i], v[i + 8]);
    for (int i = 0; i < 4; ++i) fours[i] = sum_quarters(eights[i], eights[i + 4]);
    const vf ones = sum_lanes_of_pairs(sum_pairs(fours[0], fours[2]), sum_pairs(fours[1], fours[3]));
    const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
    store(sums, (vf)_mm512_permutexvar_ps(order, (__m512)ones));
#else
    for (int i = 0; i < STATE_TOKENS; ++i) sums[i] = sum_of_lanes(v[i]);
#endif
}

// Widens `count` elements and sets those up to the next multiple of LANES to zero.
template <class E>
INLINE void widen_padded(const typename E::type* from, float* to, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(to + i, E::widen(from + i));
    if (i == count) return;
    store(to + i, vf{});
    for (; i < count; ++i) to[i] = E::get(from[i]);
}

// Rounds `count` elements; reads up to the next multiple of LANES.
template <class E>
INLINE void narrow_some(typename E::type* to, const float* from, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) E::narrow(to + i, load(from + i));
    for (; i < count; ++i) to[i] = E::put(from[i]);
}

INLINE vf vsigmoid(vf x) {
    const vf y = x * -LOG2E, limit = splat(126.f);
    return 1.f / (1.f + vexp2<true>(y > limit ? limit : y));
}

INLINE float get_element(const void* p, int64_t i, int32_t dtype) {
    if (dtype == F32) return static_cast<const float*>(p)[i];
    const uint16_t bits = static_cast<const uint16_t*>(p)[i];
    return dtype == BF16 ? from_bf16(bits) : from_f16(bits);
}

// ---- convolution -------------------------------------------------------------------------------------------------------

// K: the kernel size if it is known to the compiler, else 0.
template <class E, int K>
static void conv_channels(const CausalConv1d& op, int64_t request, int64_t begin, int64_t end) {
    typedef typename E::type T;
    constexpr int BLOCK = 64;
    const Tokens tokens = tokens_of(op.step, request);
    if (tokens.begin == tokens.end) return;
    const int kernel = K ? K : int(op.kernel_size), older = kernel - 1;
    const int64_t row = op.channels * older;
    const T* from = tokens.read < 0 ? nullptr : static_cast<const T*>(op.state) + tokens.read * row;
    T* to = tokens.write < 0 ? nullptr : static_cast<T*>(op.state) + tokens.write * row;
    const T* weight = static_cast<const T*>(op.weight);
    const T* bias = static_cast<const T*>(op.bias);
    // Weights and the last inputs, by input and channel. The inputs are a ring: the oldest is in row `oldest`.
    alignas(64) float weights[MAX_CONV_KERNEL][BLOCK], inputs[MAX_CONV_KERNEL][BLOCK], biases[BLOCK], sums[BLOCK];
    for (int64_t first = begin; first < end; first += BLOCK) {
        const int64_t count = end - first < BLOCK ? end - first : BLOCK;
        const int width = int((count + LANES - 1) / LANES * LANES);
        for (int c = 0; c < width; ++c) biases[c] = bias && c < count ? E::get(bias[first + c]) : 0.f;
        for (int c = 0; c < count; ++c)
            for (int k = 0; k < kernel; ++k) weights[k][c] = E::get(weight[(first + c) * kernel + k]);
        if (from)
            for (int c = 0; c < count; ++c)
                for (int k = 0; k < older; ++k) inputs[k][c] = E::get(from[(first + c) * older + k]);
        for (int k = 0; k < kernel; ++k)
            for (int c = from ? int(count) : 0; c < width; ++c) inputs[k][c] = 0.f;
        for (int k = 0; k < kernel; ++k)
            for (int c = int(count); c < width; ++c) weights[k][c] = 0.f;
        int oldest = 0;
        for (int64_t t = tokens.begin; t < tokens.end; ++t) {
            const int newest = oldest ? oldest - 1 : older;
            widen_padded<E>(static_cast<const T*>(op.x) + t * op.x_stride + first, inputs[newest], count);
            for (int c = 0; c < width; c += LANES) {
                vf sum = load(biases + c);
                for (int k = 0; k < kernel; ++k) {
                    const int at = oldest + k < kernel ? oldest + k : oldest + k - kernel;
                    sum += load(weights[k] + c) * load(inputs[at] + c);
                }
                store(sums + c, op.silu ? sum * vsigmoid(sum) : sum);
            }
            narrow_some<E>(static_cast<T*>(op.out) + t * op.channels + first, sums, count);
            oldest = oldest + 1 < kernel ? oldest + 1 : 0;
        }
        if (!to) continue;
        const float* last[MAX_CONV_KERNEL];
        for (int k = 0; k < older; ++k) last[k] = inputs[oldest + k < kernel ? oldest + k : oldest + k - kernel];
        for (int c = 0; c < count; ++c)
            for (int k = 0; k < older; ++k) to[(first + c) * older + k] = E::put(last[k][c]);
    }
}

template <class E>
static void causal_conv1d_channels(const CausalConv1d& op, int64_t request, int64_t begin, int64_t end) {
    switch (op.kernel_size) {
        case 3: return conv_channels<E, 3>(op, request, begin, end);
        case 4: return conv_channels<E, 4>(op, request, begin, end);
        default: return conv_channels<E, 0>(op, request, begin, end);
    }
}

// ---- Mamba-2 -----------------------------------------------------------------------------------------------------------

// log(1 + e^x)
INLINE float softplus(float x) { return x > 20.f ? x : __builtin_log1pf(__builtin_expf(x)); }

// Rows [begin, end) of a head's state. `scratch`: a state, for requests that write none, then inputs and results of a group:
// tokens are a power of two apart in many models, so a column of theirs would share a few lines of the first cache.
template <class E>
static void ssd_rows(const Ssd& op, int64_t request, int64_t head, int64_t begin, int64_t end, float* scratch) {
    typedef typename E::type T;
    constexpr int WIDE = LANES == 16 ? 8 : 4;
    const Tokens tokens = tokens_of(op.step, request);
    if (tokens.begin == tokens.end) return;
    const int64_t size = op.state_size, padded = (size + LANES - 1) / LANES * LANES, whole = size / LANES * LANES;
    const int64_t group = head * op.groups / op.heads, head_size = op.head_dim * size;
    const float* from = tokens.read < 0 ? nullptr : op.state + (tokens.read * op.heads + head) * head_size;
    float* const to = tokens.write < 0 ? scratch : op.state + (tokens.write * op.heads + head) * head_size;
    const float skip = op.d ? op.d[head] : 0.f, bias = op.dt_bias ? op.dt_bias[head] : 0.f;
    alignas(64) float bs[STATE_TOKENS * MAX_STATE_SIZE], cs[STATE_TOKENS * MAX_STATE_SIZE];
    float dts[STATE_TOKENS], decays[STATE_TOKENS];
    const int64_t rows = end - begin, padded_rows = (rows + LANES - 1) / LANES * LANES;
    float* const xs = scratch + head_size;
    float* const ys = xs + STATE_TOKENS * padded_rows;  // [rows][STATE_TOKENS]
    vf sums[STATE_TOKENS] = {};
    for (int64_t first = tokens.begin; first < tokens.end; first += STATE_TOKENS) {
        const int count = int(tokens.end - first < STATE_TOKENS ? tokens.end - first : STATE_TOKENS);
        for (int i = 0; i < count; ++i) {
            const int64_t t = first + i;
            float dt = softplus(E::get(static_cast<const T*>(op.dt)[t * op.dt_stride + head]) + bias);
            dt = dt < op.dt_min ? op.dt_min : dt > op.dt_max ? op.dt_max : dt;
            dts[i] = dt;
            decays[i] = __builtin_expf(dt * op.a[head]);
            widen_padded<E>(static_cast<const T*>(op.b) + t * op.b_stride + group * size, bs + i * padded, size);
            widen_padded<E>(static_cast<const T*>(op.c) + t * op.c_stride + group * size, cs + i * padded, size);
        }
        const T* const x = static_cast<const T*>(op.x) + first * op.x_stride + head * op.head_dim + begin;
        T* const out = static_cast<T*>(op.out) + (first * op.heads + head) * op.head_dim + begin;
        for (int i = 0; i < count; ++i) widen_padded<E>(x + i * op.x_stride, xs + i * padded_rows, rows);
        for (int64_t p = begin; p < end; ++p) {
            const float* source = from ? from + p * size : nullptr;
            float* const target = to + p * size;
            const float* const values = xs + p - begin;
            if (size < WIDE * LANES)
                for (int i = 0; i < count; ++i) sums[i] = vf{};
            int64_t n = 0;
            for (; n + WIDE * LANES <= size; n += WIDE * LANES) {
                if (source)  // the next row, which is needed only after all tokens of this one
                    for (int w = 0; w < WIDE; ++w) __builtin_prefetch(source + size + n + w * LANES);
                vf h[WIDE];
                for (int w = 0; w < WIDE; ++w) h[w] = source ? load(source + n + w * LANES) : vf{};
                for (int i = 0; i < count; ++i) {
                    const float added = values[i * padded_rows] * dts[i];
                    const float *b = bs + i * padded + n, *c = cs + i * padded + n;
                    vf even = n ? sums[i] : vf{}, odd = {};
                    for (int w = 0; w < WIDE; ++w) {
                        h[w] = h[w] * decays[i] + load(b + w * LANES) * added;
                        (w % 2 ? odd : even) += h[w] * load(c + w * LANES);
                    }
                    sums[i] = even + odd;
                }
                for (int w = 0; w < WIDE; ++w) store(target + n + w * LANES, h[w]);
            }
            for (; n < size; n += LANES) {
                alignas(64) float rest[LANES] = {};
                const int64_t lanes = n < whole ? LANES : size - n;
                if (source)
                    for (int64_t l = 0; l < lanes; ++l) rest[l] = source[n + l];
                vf h = load(rest);
                for (int i = 0; i < count; ++i) {
                    const float added = values[i * padded_rows] * dts[i];
                    h = h * decays[i] + load(bs + i * padded + n) * added;
                    sums[i] += h * load(cs + i * padded + n);
                }
                store(rest, h);
                for (int64_t l = 0; l < lanes; ++l) target[n + l] = rest[l];
            }
            if (count == 1)
                ys[(p - begin) * STATE_TOKENS] = sum_of_lanes(sums[0]);
            else
                sums_of_lanes(sums, ys + (p - begin) * STATE_TOKENS);
        }
        for (int i = 0; i < count; ++i) {
            float* const x_of_token = xs + i * padded_rows;
            for (int64_t p = 0; p < rows; ++p) x_of_token[p] = ys[p * STATE_TOKENS + i] + x_of_token[p] * skip;
            narrow_some<E>(out + i * op.heads * op.head_dim, x_of_token, rows);
        }
        from = to;
    }
}

// ---- delta rules -------------------------------------------------------------------------------------------------------

// What the tokens of a group need, for one head: `size` numbers per token each.
struct DeltaTokens {
    float *decays, *keys, *decayed_keys, *decayed_queries;
    float betas[STATE_TOKENS], products[STATE_TOKENS];  // products: of query and key
};

template <class E>
INLINE float length_factor(const typename E::type* x, int64_t size, bool l2_norm) {
    if (!l2_norm) return 1.f;
    vf sums = {};
    float rest = 0;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        const vf v = E::widen(x + i);
        sums += v * v;
    }
    for (; i < size; ++i) rest += E::get(x[i]) * E::get(x[i]);
    return 1.f / __builtin_sqrtf(sum_of_lanes(sums) + rest + 1e-6f);
}

template <class E>
static void prepare_delta_tokens(const GatedDeltaRule& op, int64_t head, int64_t first, int count, int64_t padded,
                                 DeltaTokens& tokens) {
    typedef typename E::type T;
    const int64_t size = op.k_dim, key_head = head * op.k_heads / op.v_heads;
    for (int i = 0; i < count; ++i) {
        const int64_t t = first + i;
        const T* q = static_cast<const T*>(op.q) + t * op.q_stride + key_head * size;
        const T* k = static_cast<const T*>(op.k) + t * op.k_stride + key_head * size;
        const float q_factor = length_factor<E>(q, size, op.l2_norm) * op.scale, k_factor = length_factor<E>(k, size, op.l2_norm);
        float* const keys = tokens.keys + i * padded;
        float* const decays = tokens.decays + i * padded;
        float* const decayed_keys = tokens.decayed_keys + i * padded;
        float* const decayed_queries = tokens.decayed_queries + i * padded;
        widen_padded<E>(k, keys, size);
        widen_padded<E>(q, decayed_queries, size);
        if (op.channel_decay)
            widen_padded<Float32>(op.g + t * op.g_stride + head * size, decays, size);
        const float g = op.channel_decay ? 0.f : op.g[t * op.g_stride + head];
        vf products = {};
        for (int64_t j = 0; j < padded; j += LANES) {
            const vf key = load(keys + j) * k_factor, query = load(decayed_queries + j) * q_factor;
            const vf decay = vexp(op.channel_decay ? load(decays + j) : splat(g));
            products += key * query;
            store(keys + j, key);
            store(decays + j, decay);
            store(decayed_keys + j, key * decay);
            store(decayed_queries + j, query * decay);
        }
        tokens.products[i] = sum_of_lanes(products);
        tokens.betas[i] = get_element(op.beta, t * op.beta_stride + head, op.beta_dtype);
    }
}

// a * b + c with one rounding where the instruction set has it. The compiler may fuse either product of a sum of two, and not
// the same one everywhere.
INLINE vf fused_add(vf a, float b, vf c) {
#if LANES == 16
    return (vf)_mm512_fmadd_ps((__m512)a, _mm512_set1_ps(b), (__m512)c);
#elif LANES == 8
    return (vf)_mm256_fmadd_ps((__m256)a, _mm256_set1_ps(b), (__m256)c);
#elif defined(__aarch64__)
    for (int i = 0; i < LANES; ++i) c[i] = __builtin_fmaf(a[i], b, c[i]);
    return c;
#else
    return a * b + c;
#endif
}

// Advances W * LANES columns of a head's state by the tokens of a group. `from` may be null: zeros. The pass that adds a
// token's correction also computes both products of the next token with the new state.
template <class E, int W>
static void delta_columns(const GatedDeltaRule& op, const DeltaTokens& tokens, int count, int64_t padded, const float* from,
                          float* to, const typename E::type* v, typename E::type* out) {
    const int64_t size = op.k_dim, stride = op.v_dim, out_stride = op.v_heads * op.v_dim;
    vf found[W] = {}, read[W] = {}, correction[W];
    if (from)
        for (int64_t k = 0; k < size; ++k)
            for (int w = 0; w < W; ++w) {
                const vf s = load(from + k * stride + w * LANES);
                found[w] += s * tokens.decayed_keys[k];
                read[w] += s * tokens.decayed_queries[k];
            }
    for (int i = 0; i < count; ++i, from = to) {
        const float* const decays = tokens.decays + i * padded;
        const float* const keys = tokens.keys + i * padded;
        for (int w = 0; w < W; ++w) {
            correction[w] = (E::widen(v + i * op.v_stride + w * LANES) - found[w]) * tokens.betas[i];
            E::narrow(out + i * out_stride + w * LANES, read[w] + correction[w] * tokens.products[i]);
        }
        if (i + 1 == count) {
            for (int64_t k = 0; k < size; ++k)
                for (int w = 0; w < W; ++w) {
                    const vf s = from ? load(from + k * stride + w * LANES) * decays[k] : vf{};
                    store(to + k * stride + w * LANES, fused_add(correction[w], keys[k], s));
                }
            break;
        }
        const float* const decayed_keys = tokens.decayed_keys + (i + 1) * padded;
        const float* const decayed_queries = tokens.decayed_queries + (i + 1) * padded;
        for (int w = 0; w < W; ++w) found[w] = read[w] = vf{};
        for (int64_t k = 0; k < size; ++k)
            for (int w = 0; w < W; ++w) {
                const vf s = from ? load(from + k * stride + w * LANES) * decays[k] : vf{};
                const vf next = fused_add(correction[w], keys[k], s);
                store(to + k * stride + w * LANES, next);
                found[w] += next * decayed_keys[k];
                read[w] += next * decayed_queries[k];
            }
    }
}

// One column.
template <class E>
INLINE void delta_column(const GatedDeltaRule& op, const DeltaTokens& tokens, int i, int64_t padded, const float* from,
                         float* to, const typename E::type* v, typename E::type* out) {
    const int64_t size = op.k_dim, stride = op.v_dim;
    float found = 0, read = 0;
    if (from)
        for (int64_t k = 0; k < size; ++k) {
            found += from[k * stride] * tokens.decayed_keys[i * padded + k];
            read += from[k * stride] * tokens.decayed_queries[i * padded + k];
        }
    const float correction = (E::get(*v) - found) * tokens.betas[i];
    *out = E::put(read + correction * tokens.products[i]);
    for (int64_t k = 0; k < size; ++k) {
        const float s = from ? from[k * stride] * tokens.decays[i * padded + k] : 0.f;
        to[k * stride] = s + correction * tokens.keys[i * padded + k];
    }
}

// Where token i of a group finds the state, from `column` on; null: zeros.
INLINE const float* state_before(const float* from, const float* to, int i, int64_t column) {
    if (i) return to + column;
    return from ? from + column : nullptr;
}

// Columns [begin, end) of a head's state. `scratch`: a state, for requests that write none, then the group's numbers.
template <class E>
static void delta_rule_columns(const GatedDeltaRule& op, int64_t request, int64_t head, int64_t begin, int64_t end,
                               float* scratch) {
    typedef typename E::type T;
    constexpr int WIDE = LANES == 16 ? 2 : 4;  // so that 128 rows of the columns fit half of the first cache
    const Tokens tokens = tokens_of(op.step, request);
    if (tokens.begin == tokens.end) return;
    const int64_t padded = (op.k_dim + LANES - 1) / LANES * LANES, head_size = op.k_dim * op.v_dim;
    const float* from = tokens.read < 0 ? nullptr : op.state + (tokens.read * op.v_heads + head) * head_size;
    float* const to = tokens.write < 0 ? scratch : op.state + (tokens.write * op.v_heads + head) * head_size;
    float* const memory = scratch + head_size;
    DeltaTokens group;
    group.decays = memory;
    group.keys = memory + STATE_TOKENS * padded;
    group.decayed_keys = memory + 2 * STATE_TOKENS * padded;
    group.decayed_queries = memory + 3 * STATE_TOKENS * padded;
    for (int64_t first = tokens.begin; first < tokens.end; first += STATE_TOKENS) {
        const int count = int(tokens.end - first < STATE_TOKENS ? tokens.end - first : STATE_TOKENS);
        prepare_delta_tokens<E>(op, head, first, count, padded, group);
        const T* const v = static_cast<const T*>(op.v) + first * op.v_stride + head * op.v_dim;
        T* const out = static_cast<T*>(op.out) + (first * op.v_heads + head) * op.v_dim;
        const int64_t out_stride = op.v_heads * op.v_dim;
        int64_t c = begin;
        for (; c + WIDE * LANES <= end; c += WIDE * LANES)
            delta_columns<E, WIDE>(op, group, count, padded, state_before(from, to, 0, c), to + c, v + c, out + c);
        for (; c + LANES <= end; c += LANES)
            delta_columns<E, 1>(op, group, count, padded, state_before(from, to, 0, c), to + c, v + c, out + c);
        for (; c < end; ++c)
            for (int i = 0; i < count; ++i)
                delta_column<E>(op, group, i, padded, state_before(from, to, i, c), to + c, v + i * op.v_stride + c, out + i * out_stride + c);
        from = to;
    }
}

// ---- gated norm --------------------------------------------------------------------------------------------------------

// `scratch`: group_size numbers, rounded up to LANES, twice.
template <class E>
static void gated_rms_norm_rows(const GatedRmsNorm& op, int64_t begin, int64_t end, float* scratch) {
    typedef typename E::type T;
    const int64_t size = op.group_size, padded = (size + LANES - 1) / LANES * LANES;
    float* const values = scratch;
    float* const factors = scratch + padded;
    for (int64_t row = begin; row < end; ++row)
        for (int64_t first = 0; first < op.width; first += size) {
            const int64_t group = row / op.heads, head = row % op.heads;
            const T* const x = static_cast<const T*>(op.x) + group * op.x_stride + head * op.x_head_stride;
            widen_padded<E>(x + first, values, size);
            if (op.gate) {
                const T* const gates = static_cast<const T*>(op.gate) + group * op.gate_stride + head * op.gate_head_stride;
                widen_padded<E>(gates + first, factors, size);
                for (int64_t i = 0; i < padded; i += LANES) {
                    const vf gate = load(factors + i), factor = op.sigmoid ? vsigmoid(gate) : gate * vsigmoid(gate);
                    if (op.norm_before_gate)
                        store(factors + i, factor);
                    else
                        store(values + i, load(values + i) * factor);
                }
            }
            vf squares[4] = {};
            for (int64_t i = 0; i < padded; i += LANES) squares[i / LANES % 4] += load(values + i) * load(values + i);
            const float sum = sum_of_lanes((squares[0] + squares[1]) + (squares[2] + squares[3]));
            const float factor = 1.f / __builtin_sqrtf(sum / float(size) + op.eps);
            const bool gated = op.gate && op.norm_before_gate;
            T* const out = static_cast<T*>(op.out) + row * op.width + first;
            int64_t i = 0;
            if (op.weight_dtype == F32) {
                const float* weight = static_cast<const float*>(op.weight) + first;
                for (; i + LANES <= size; i += LANES) {
                    const vf y = load(values + i) * factor * load(weight + i);
                    E::narrow(out + i, gated ? y * load(factors + i) : y);
                }
            } else {
                const T* weight = static_cast<const T*>(op.weight) + first;
                for (; i + LANES <= size; i += LANES) {
                    const vf y = load(values + i) * factor * E::widen(weight + i);
                    E::narrow(out + i, gated ? y * load(factors + i) : y);
                }
            }
            for (; i < size; ++i) {
                const float y = values[i] * factor * get_element(op.weight, first + i, op.weight_dtype);
                out[i] = E::put(gated ? y * factors[i] : y);
            }
        }
}

#define BY_DTYPE(function, op, ...)                                 \
    switch (op.dtype) {                                             \
        case F32: return function<Float32>(op, __VA_ARGS__);        \
        case BF16: return function<BFloat16>(op, __VA_ARGS__);      \
        default: return function<Float16>(op, __VA_ARGS__);         \
    }

static void causal_conv1d(const CausalConv1d& op, int64_t request, int64_t begin, int64_t end) {
    BY_DTYPE(causal_conv1d_channels, op, request, begin, end)
}
static void ssd(const Ssd& op, int64_t request, int64_t head, int64_t begin, int64_t end, float* scratch) {
    BY_DTYPE(ssd_rows, op, request, head, begin, end, scratch)
}
static void gated_delta_rule(const GatedDeltaRule& op, int64_t request, int64_t head, int64_t begin, int64_t end,
                             float* scratch) {
    BY_DTYPE(delta_rule_columns, op, request, head, begin, end, scratch)
}
static void gated_rms_norm(const GatedRmsNorm& op, int64_t begin, int64_t end, float* scratch) {
    BY_DTYPE(gated_rms_norm_rows, op, begin, end, scratch)
}

#undef BY_DTYPE
