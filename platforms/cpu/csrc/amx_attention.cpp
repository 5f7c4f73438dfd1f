// Attention on AMX tiles: attention_tile.h compiled with tiles. Decodes with few heads in a group, and all but bfloat16
// queries, are left to avx512_bf16.

#include "amx.h"

#if MVLLM_AMX && MVLLM_AMX_EMULATED != 1
#include "amx_tiles.h"

#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,bmi2,prefer-vector-width=512")

#define LANES 16
#define HAS_F16C 1
#define HAS_BF16_DOT 1
#define HAS_TILES 1
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
namespace mvllm {
// Weak, as in dispatch.cpp.
extern const Isa isa_avx512_bf16 __attribute__((weak));

namespace amx_attention {
#include "simd.h"
#include "attention_tile.h"

constexpr int FEWEST_HEADS = 5;  // of a group: for fewer, vectors read the cache as fast

static void paged_attention_on_tiles(const Geometry& g, const Layer& layer, const WorkItem& item, const WorkItem* next,
                                     const Scratch& scratch, float* partials) {
    const bool bytes = g.spec.kv_dtype == INT8 || g.spec.kv_dtype == FP8, pairs = bytes || g.spec.kv_dtype == BF16;
    const bool rounds = rounds_probabilities(g, item, bytes);
    if (g.spec.dtype != BF16 || !pairs || !suits_tiles(g) || (!rounds && g.group < FEWEST_HEADS))
        return isa_avx512_bf16.paged_attention(g, layer, item, next, scratch, partials);
    if (!rounds)
        return paged_attention_tile<Paired, NoBytes, true, false>(g, layer, item, next, scratch, partials);
    if (g.spec.kv_dtype == INT8) return paged_attention_tile<Paired, Int8, true, true>(g, layer, item, next, scratch, partials);
    if (bytes) return paged_attention_tile<Paired, Fp8, true, true>(g, layer, item, next, scratch, partials);
    paged_attention_tile<Paired, NoBytes, true, true>(g, layer, item, next, scratch, partials);
}
}  // namespace amx_attention
#pragma GCC diagnostic pop
#pragma GCC pop_options

void amx_paged_attention(const Geometry& g, const Layer& layer, const WorkItem& item, const WorkItem* next,
                         const Scratch& scratch, float* partials) {
    amx_attention::paged_attention_on_tiles(g, layer, item, next, scratch, partials);
}
}  // namespace mvllm
#endif
