"""The schemas of all operations, by name."""

from __future__ import annotations

from mvllm.ops.activation import ACTIVATIONS
from mvllm.ops.argmax import ARGMAX
from mvllm.ops.block_quantized_linear import BLOCK_QUANTIZED_LINEAR, BLOCK_QUANTIZED_LINEAR_SILU_AND_MUL
from mvllm.ops.causal_conv1d import CAUSAL_CONV1D
from mvllm.ops.delta_rule import GATED_DELTA_RULE, KDA, LOG_DECAY
from mvllm.ops.draw import FILTERED_DRAW
from mvllm.ops.encoder_attention import ENCODER_ATTENTION
from mvllm.ops.float8_linear import FLOAT8_LINEAR
from mvllm.ops.gated_rms_norm import GATED_RMS_NORM
from mvllm.ops.linear import EMBEDDING, HEAD_PRODUCT, LINEAR, LINEAR_SILU_AND_MUL
from mvllm.ops.logsumexp import LOGSUMEXP
from mvllm.ops.lora import ADD_LORA, ADD_LORA_BY_SLOT
from mvllm.ops.moe import CLAMPED_MOE, GELU_TANH_MOE, MOE, UNGATED_MOE
from mvllm.ops.norm import FUSED_ADD_LAYER_NORM, FUSED_ADD_RMS_NORM, LAYER_NORM, RMS_NORM
from mvllm.ops.quantized_linear import QUANTIZED_LINEAR, QUANTIZED_LINEAR_SILU_AND_MUL
from mvllm.ops.quantized_moe import QUANTIZED_MOE, QUANTIZED_UNGATED_MOE
from mvllm.ops.rotary import ROTARY_EMBEDDING
from mvllm.ops.schema import OpSchema
from mvllm.ops.select_experts import SELECT_EXPERTS
from mvllm.ops.ssd import SSD

SCHEMAS: dict[str, OpSchema] = {
    schema.name: schema
    for schema in (
        LINEAR,
        QUANTIZED_LINEAR,
        LINEAR_SILU_AND_MUL,
        QUANTIZED_LINEAR_SILU_AND_MUL,
        FLOAT8_LINEAR,
        BLOCK_QUANTIZED_LINEAR,
        BLOCK_QUANTIZED_LINEAR_SILU_AND_MUL,
        ADD_LORA,
        ADD_LORA_BY_SLOT,
        EMBEDDING,
        RMS_NORM,
        FUSED_ADD_RMS_NORM,
        LAYER_NORM,
        FUSED_ADD_LAYER_NORM,
        GATED_RMS_NORM,
        ROTARY_EMBEDDING,
        MOE,
        GELU_TANH_MOE,
        CLAMPED_MOE,
        UNGATED_MOE,
        QUANTIZED_MOE,
        QUANTIZED_UNGATED_MOE,
        SELECT_EXPERTS,
        CAUSAL_CONV1D,
        SSD,
        GATED_DELTA_RULE,
        KDA,
        LOG_DECAY,
        HEAD_PRODUCT,
        ENCODER_ATTENTION,
        ARGMAX,
        LOGSUMEXP,
        FILTERED_DRAW,
        *ACTIVATIONS,
    )
}
