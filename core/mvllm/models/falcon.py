"""Falcon: decoder layers with LayerNorm, fused QKV, and attention and MLP in parallel on one residual stream.

old architecture    one norm for both blocks; without `parallel_attn`, sequential blocks
new architecture    two norms, one for each block, or one for both (`num_ln_in_parallel_attn`)
"""

from __future__ import annotations

import re

import torch
from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.config.rope_parameters import RopeParameters
from mvllm.errors import ModelError
from mvllm.layers.attention import Attention
from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.layers.linear import QKVLinear, RowParallelLinear
from mvllm.layers.mlp import MLP
from mvllm.layers.norm import LayerNorm
from mvllm.layers.rotary import CosSinRows, RotaryEmbedding
from mvllm.layers.rotary_attention import RotaryAttention
from mvllm.models.causal_lm import CausalLM, layer_norm_epsilon


class FalconAttention(nn.Module):
    """Self-attention with rotary position embedding."""

    def __init__(self, config: ModelConfig, ctx: BuildContext, name: str, rotary: RotaryEmbedding) -> None:
        super().__init__()
        bias, size, head_size = _has_bias(config), config.hidden_size, config.head_size
        heads = config.num_heads, config.num_kv_heads
        self.qkv = QKVLinear(ctx, (f"{name}.query_key_value",), size, *heads, head_size, bias=bias, by_group=True)
        self.output = RowParallelLinear(ctx, f"{name}.dense", size, size, bias=bias)
        self.attention = Attention(ctx, self.qkv.heads, head_size, head_size**-0.5)
        self._rotary_attention = RotaryAttention(self.attention, rotary)

    def forward(self, x: torch.Tensor, cos_sin: CosSinRows, step: ForwardStep) -> torch.Tensor:
        """[T, hidden_size] to [T, hidden_size]."""
        query, key, value = self.qkv.split(x)
        return self.output(self._rotary_attention(cos_sin, query, key, value, step))


class FalconLayer(nn.Module):
    """A decoder layer: attention and MLP, in parallel or in sequence."""

    def __init__(self, config: ModelConfig, ctx: BuildContext, rotary: RotaryEmbedding, layer: int) -> None:
        super().__init__()
        name, hf, size = f"transformer.h.{layer}", config.hf_config, config.hidden_size
        is_new, eps = bool(hf.get("new_decoder_architecture", False)), layer_norm_epsilon(config)
        self.parallel = is_new or bool(hf.get("parallel_attn", True))
        own_mlp_norm = hf.positive_int("num_ln_in_parallel_attn", 2) == 2 if is_new else not self.parallel
        first, second = ("ln_attn", "ln_mlp") if is_new else ("input_layernorm", "post_attention_layernorm")
        self.attention_norm = LayerNorm(ctx, f"{name}.{first if own_mlp_norm else 'input_layernorm'}", size, eps)
        self.mlp_norm = LayerNorm(ctx, f"{name}.{second}", size, eps) if own_mlp_norm else None
        self.attention = FalconAttention(config, ctx, f"{name}.self_attention", rotary)
        names = f"{name}.mlp.dense_h_to_4h", f"{name}.mlp.dense_4h_to_h"
        intermediate_size, act = hf.positive_int("ffn_hidden_size", 4 * size), hf.get("activation", "gelu")
        self.mlp = MLP(ctx, *names, size, intermediate_size, act, bias=_has_bias(config))

    def forward(self, x: torch.Tensor, cos_sin: CosSinRows, step: ForwardStep) -> torch.Tensor:
        """[T, hidden_size] to [T, hidden_size]."""
        normed = self.attention_norm(x)
        attn_output = self.attention(normed, cos_sin, step)
        if not self.parallel:
            x = x + attn_output
            return x + self.mlp(x if self.mlp_norm is None else self.mlp_norm(x))
        return x + attn_output + self.mlp(normed if self.mlp_norm is None else self.mlp_norm(x))


class FalconForCausalLM(CausalLM):
    """`FalconForCausalLM` of Hugging Face checkpoints.

    Raises:
        ModelError: The checkpoint uses ALiBi.
    """

    keeps_layers = True
    ties_embeddings_by_default = True
    layer_names = re.compile(r"transformer\.h\.(\d+)\.")
    first_stage_names = ("transformer.word_embeddings.",)
    last_stage_names = ("transformer.ln_f.",)

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        hf, size = config.hf_config, config.hidden_size
        if hf.get("alibi", False):
            raise ModelError(
                f"{hf.source}: 'alibi' is true: position biases on attention scores (ALiBi) are not supported. Use "
                "a checkpoint with rotary position embedding (alibi: false)."
            )
        self.rotary = RotaryEmbedding(ctx, RopeParameters.from_config(hf, config.head_size), config.max_model_len)
        self.uses_prompt_lens = self.rotary.uses_prompt_lens
        self.original_context = self.rotary.rope.native_len
        self.word_embeddings = self._build_embedding(ctx, "transformer.word_embeddings", size)
        self.layers = nn.ModuleList(FalconLayer(config, ctx, self.rotary, layer) for layer in self._layer_numbers())
        self.norm = LayerNorm(ctx, "transformer.ln_f", size, layer_norm_epsilon(config)) if self.stage.is_last else None
        self.lm_head = self._build_head(ctx, "transformer.word_embeddings", size, self.word_embeddings)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        step: ForwardStep,
        intermediate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = intermediate if self.word_embeddings is None else self.merge_items(self.word_embeddings(input_ids), step)
        assert x is not None, "every pipeline stage but the first needs `intermediate`"
        cos_sin = self.rotary.angles(positions, step.prompt_lens)
        for number, layer in zip(self._layer_numbers(), self.layers, strict=True):
            if number in step.kept_layers:
                step.kept_states.append(x)
            x = layer(x, cos_sin, step)
        return x if self.norm is None else self.norm(x)


def _has_bias(config: ModelConfig) -> bool:
    return bool(config.hf_config.get("bias", False))
