// Declarations of the library's functions that recorded programs call.

#pragma once

#include <cstdint>

#include "block_linear.h"
#include "kernels.h"

namespace mvllm {
struct SharedGroup;
struct ExpertMatrices;
}

extern "C" {

void mvllm_cpu_rms_norm(const void* x, int64_t x_stride, int64_t heads, int64_t head_stride, void* residual,
                        const void* weight, void* out, int64_t rows, int64_t size, int dtype, float eps);
void mvllm_cpu_embedding(const void* ids, int wide_ids, const void* table, int64_t table_stride, void* out, int64_t rows,
                         int64_t row_bytes, int64_t first, int64_t count);
void mvllm_cpu_packed_embedding(const void* ids, int wide_ids, const void* packed, void* out, int64_t rows,
                                int64_t in_features, int64_t first, int64_t count, int dtype);
void mvllm_cpu_argmax(const void* x, int64_t x_stride, void* values, int64_t* ids, int64_t rows, int64_t size, int dtype);
void mvllm_cpu_silu_and_mul(const void* x, int64_t x_stride, void* out, int64_t rows, int64_t size, int dtype);
void mvllm_cpu_gelu_tanh_and_mul(const void* x, int64_t x_stride, void* out, int64_t rows, int64_t size, int dtype);
void mvllm_cpu_add(const void* x, const void* y, void* out, int64_t count, int dtype);
void mvllm_cpu_scale(const void* x, float factor, void* out, int64_t count, int dtype);
void mvllm_cpu_rotary_embedding(const void* index, int wide_index, const float* cos_sin, int rotary_dim, void* query,
                                int64_t query_stride, int64_t query_head_stride, int num_heads, void* key, int64_t key_stride,
                                int64_t key_head_stride, int num_kv_heads, int64_t tokens, int dtype);
void mvllm_cpu_activate(const void* x, int64_t x_stride, const void* other, int64_t other_stride, void* out, int64_t rows,
                        int64_t size, int function, int dtype);
void mvllm_cpu_layer_norm(const void* x, int64_t x_stride, const void* weight, const void* bias, void* out, int64_t rows,
                          int64_t size, float eps, int dtype);
void mvllm_cpu_log_decay(const void* x, int64_t x_stride, const float* factors, const float* bias, float* out, int64_t rows,
                         int64_t size, int64_t group, int dtype);
void mvllm_cpu_elementwise(const void* x, const void* y, void* out, int64_t n0, int64_t n1, int64_t n2, int64_t n3, int64_t x0,
                           int64_t x1, int64_t x2, int64_t x3, int64_t y0, int64_t y1, int64_t y2, int64_t y3, int operation,
                           int x_dtype, int y_dtype, int dtype);
void mvllm_cpu_copy(const void* x, void* out, int64_t n0, int64_t n1, int64_t n2, int64_t n3, int64_t x0, int64_t x1,
                    int64_t x2, int64_t x3, int64_t out0, int64_t out1, int64_t out2, int64_t out3, int itemsize);
void mvllm_cpu_integers(const void* x, const void* y, int64_t number, void* out, int64_t count, int operation, int x_itemsize,
                        int y_itemsize, int itemsize);
void mvllm_cpu_choose_rows(const uint8_t* condition, const void* x, int64_t x_stride, const void* y, int64_t y_stride,
                           void* out, int64_t rows, int64_t row_bytes);
void mvllm_cpu_head_product(const void* x, int64_t x_stride, int64_t x_head_stride, const void* weight, int64_t head_stride,
                            int64_t row_stride, int64_t column_stride, void* out, int64_t tokens, int64_t heads,
                            int64_t in_size, int64_t out_size, int dtype);
void mvllm_cpu_take_columns(const void* x, int64_t x_stride, int64_t heads, int64_t head_stride, const int64_t* order,
                            void* out, int64_t rows, int64_t count, int itemsize);
void mvllm_cpu_select_experts(const void* logits, int64_t stride, const float* correction, float* weights, int64_t* ids,
                              int64_t rows, int64_t experts, int64_t top_k, int scores, int normalize, float scale,
                              int64_t groups, int64_t top_groups, int by_best_two, int dtype);
void mvllm_cpu_moe(const void* x, int64_t x_stride, const void* gate_up, const void* down, const int64_t* ids,
                   const float* weights, void* out, int64_t tokens, int64_t experts, int64_t top_k, int64_t hidden,
                   int64_t inner, int dtype);
void mvllm_cpu_gelu_tanh_moe(const void* x, int64_t x_stride, const void* gate_up, const void* down, const int64_t* ids,
                             const float* weights, void* out, int64_t tokens, int64_t experts, int64_t top_k, int64_t hidden,
                             int64_t inner, int dtype);
void mvllm_cpu_ungated_moe(const void* x, int64_t x_stride, const void* up, const void* down, const int64_t* ids,
                           const float* weights, void* out, int64_t tokens, int64_t experts, int64_t top_k, int64_t hidden,
                           int64_t inner, int function, int dtype);
void mvllm_cpu_clamped_moe(const void* x, int64_t x_stride, const void* gate_up, const void* gate_up_bias, const void* down,
                           const void* down_bias, const int64_t* ids, const float* weights, void* out, int64_t tokens,
                           int64_t experts, int64_t top_k, int64_t hidden, int64_t inner, float alpha, float limit, int dtype);
void mvllm_cpu_quantized_moe(const void* x, int64_t x_stride, const mvllm::ExpertMatrices* gate_up,
                             const mvllm::ExpertMatrices* down, const void* gate_up_bias, const void* down_bias,
                             const int64_t* ids, const float* weights, void* out, int64_t tokens, int64_t experts,
                             int64_t top_k, int gate, int function, float alpha, float limit, int dtype);
void mvllm_cpu_linear(const void* x, int64_t x_stride, const void* weight, const void* bias, void* out, int64_t rows,
                      int64_t in_features, int64_t out_features, int dtype);
void mvllm_cpu_linear_silu_and_mul(const void* x, int64_t x_stride, const void* weight, const void* bias, void* out,
                                   int64_t rows, int64_t in_features, int64_t size, int dtype);
void mvllm_cpu_quantized_linear(const void* x, int64_t x_stride, const uint32_t* weight, const void* scales,
                                const int8_t* zeros, const void* bias, void* out, int64_t rows, int64_t in_features,
                                int64_t out_features, int64_t group_size, int64_t block_size, int bits, int int8_activations,
                                int bf16_scales, int dtype);
void mvllm_cpu_quantized_linear_silu_and_mul(const void* x, int64_t x_stride, const uint32_t* weight, const void* scales,
                                             const int8_t* zeros, const void* bias, void* out, int64_t rows,
                                             int64_t in_features, int64_t size, int64_t group_size, int64_t block_size,
                                             int bits, int int8_activations, int bf16_scales, int dtype);
void mvllm_cpu_block_linear(const void* x, int64_t x_stride, const void* weight, const mvllm::BlockPart* parts,
                            int64_t num_parts, const void* bias, void* out, int64_t rows, int64_t in_features,
                            int64_t out_features, int int8_activations, int dtype);
void mvllm_cpu_block_linear_silu_and_mul(const void* x, int64_t x_stride, const void* weight, const mvllm::BlockPart* parts,
                                         int64_t num_parts, const void* bias, void* out, int64_t rows, int64_t in_features,
                                         int64_t size, int int8_activations, int dtype);
void mvllm_cpu_block_embedding(const void* ids, int wide_ids, const void* weight, const mvllm::BlockPart* parts,
                               int64_t num_parts, void* out, int64_t rows, int64_t in_features, int64_t first, int dtype);
void mvllm_cpu_causal_conv1d(const void* x, int64_t x_stride, const void* weight, const void* bias, void* state, void* out,
                             const int32_t* query_start_loc, const int32_t* read_slots, const int32_t* write_slots,
                             int64_t requests, int64_t tokens, int64_t channels, int64_t kernel_size, int silu, int dtype);
void mvllm_cpu_ssd(const void* x, int64_t x_stride, const void* dt, int64_t dt_stride, const float* a, const void* b,
                   int64_t b_stride, const void* c, int64_t c_stride, const float* d, const float* dt_bias, float* state,
                   void* out, const int32_t* query_start_loc, const int32_t* read_slots, const int32_t* write_slots,
                   int64_t requests, int64_t tokens, int64_t heads, int64_t head_dim, int64_t groups, int64_t state_size,
                   float dt_min, float dt_max, int dtype);
void mvllm_cpu_gated_delta_rule(const void* q, int64_t q_stride, const void* k, int64_t k_stride, const void* v,
                                int64_t v_stride, const float* g, int64_t g_stride, const void* beta, int64_t beta_stride,
                                float* state, void* out, const int32_t* query_start_loc, const int32_t* read_slots,
                                const int32_t* write_slots, int64_t requests, int64_t tokens, int64_t k_heads, int64_t v_heads,
                                int64_t k_dim, int64_t v_dim, float scale, int l2_norm, int channel_decay, int beta_dtype,
                                int dtype);
void mvllm_cpu_gated_rms_norm(const void* x, int64_t x_stride, int64_t x_head_stride, const void* gate, int64_t gate_stride,
                              int64_t gate_head_stride, const void* weight, void* out, int64_t rows, int64_t heads,
                              int64_t width, int64_t group_size, float eps, int norm_before_gate, int sigmoid,
                              int weight_dtype, int dtype);
void mvllm_cpu_reshape_and_cache(const void* handle, const void* key, int64_t key_stride, const void* value,
                                 int64_t value_stride, const mvllm::Cache* cache);
void mvllm_cpu_paged_attention(const void* handle, const void* query, int64_t query_stride, const mvllm::Cache* cache,
                               const void* sinks, int sinks_dtype, void* out);
void mvllm_cpu_sparse_attention(const void* handle, const void* query, int64_t query_stride, const int32_t* positions,
                                const mvllm::Cache* cache, void* out);
void mvllm_cpu_select_positions(const void* handle, const void* query, int64_t query_stride, const float* weights,
                                int64_t weights_stride, const mvllm::Cache* cache, int32_t* positions);
#if defined(__linux__)
int mvllm_cpu_shared_all_reduce(mvllm::SharedGroup* group, void* data, int64_t count, int dtype, const char* ahead);
#endif

}  // extern "C"
