"""Gemma 4 language model: Gemma 3 with larger heads on layers without a window, and norms on values.

The smaller models add an input to every layer that depends on the token (per-layer embeddings), and their last layers
attend to the keys and values of an earlier layer of the same type instead of their own:

    layer        0 window  1 full  2 window  3 full | 4 window  5 full       num_kv_shared_layers = 2
    KV cache     0         1       2         3      | 2         3

Norms' weights are stored as they are, unlike those of Gemma 2 and 3. Attention scores are not scaled.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from mvllm.config.hf_config import HFConfig
from mvllm.config.model import ModelConfig
from mvllm.config.rope_parameters import RopeParameters, is_per_layer_type, rope_settings
from mvllm.errors import ConfigError, ModelError
from mvllm.families.gemma4.experts import Gemma4MoeLayer
from mvllm.families.gemma4.layers import Gemma4Attention, LayerScalar, PerLayerBlock, PerLayerEmbedding
from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.layers.item_rows import replace_ids
from mvllm.layers.mlp import GatedMLP
from mvllm.layers.rotary import CosSinRows, RotaryEmbedding
from mvllm.models.gemma2 import GEMMA_NORMS, number_or_default
from mvllm.models.layer_windows import layer_windows
from mvllm.models.llama import LlamaLayer, LlamaOptions, norm_eps
from mvllm.models.text_part import TextPart

_ROPES: dict[str, dict[str, Any]] = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
"""RoPE settings of configs without any."""
_GLOBAL_HEAD_DIM = 512
_PERIOD = 6
_UNUSED_OF_SHARED = re.compile(r"model\.layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.")


class Gemma4ForCausalLM(TextPart):
    """`Gemma4ForCausalLM` of Hugging Face checkpoints, and the text part of multimodal ones.

    Raises:
        ModelError: The checkpoint uses bidirectional attention for text.
        ConfigError: Pipeline stages would separate layers from inputs that they need.
    """

    ties_embeddings_by_default = True
    reads_per_layer_config = True
    first_stage_names = (*TextPart.first_stage_names, "model.embed_tokens_per_layer.", "model.per_layer_")

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        hf = config.hf_config
        _check(hf)
        self.first_shared = config.num_layers - shared_layers(config)
        self.per_layer_size = int(hf.get("hidden_size_per_layer_input", 256))
        if ctx.pp.world_size > 1 and (self.per_layer_size or self.first_shared < config.num_layers):
            raise ConfigError(
                f"{hf.source}: layers of this model read the input embeddings (per-layer embeddings) or the keys and "
                "values of earlier layers, which pipeline stages do not pass on. Use pipeline_parallel_size=1, with "
                "tensor_parallel_size or data_parallel_size."
            )
        self._attentions: dict[int, Gemma4Attention] = {}
        super().__init__(config, ctx)
        self.per_layer = PerLayerEmbedding(ctx, config, self.per_layer_size) if self.per_layer_size else None

    @staticmethod
    def windows(config: ModelConfig) -> tuple[int | None, ...]:
        """The last layer has no window, and without `layer_types` the last of every six."""
        return (*layer_windows(config, lambda layer: (layer + 1) % _PERIOD == 0)[:-1], None)

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """Norms around both blocks, and a RoPE for each type of layer."""
        hf = config.hf_config
        bias = bool(hf.get("attention_bias", False))
        return LlamaOptions(
            cls.windows(config),
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=True,
            norms=GEMMA_NORMS,
            hidden_act=hf.get("hidden_activation", "gelu_pytorch_tanh"),
            rope=_rope(config, "full_attention", global_sizes(config)[0]),
            local_rope=_rope(config, "sliding_attention", config.head_size),
            attention_scale=1.0,
            embedding_scale=config.hidden_size**0.5,
            logits_soft_cap=number_or_default(config, "final_logit_softcapping", None),
        )

    def build_attention(
        self, ctx: BuildContext, options: LlamaOptions, rotary: RotaryEmbedding, layer: int
    ) -> nn.Module:
        window = options.window(layer)
        head_size, num_kv_heads = self.config.head_size, self.config.num_kv_heads
        keys_are_values = False
        if window is None:
            head_size, num_kv_heads = global_sizes(self.config)
            keys_are_values = bool(self.config.hf_config.get("attention_k_eq_v", False))
        attention = Gemma4Attention(
            ctx,
            f"model.layers.{layer}.self_attn",
            self.config,
            options,
            rotary,
            head_size=head_size,
            num_kv_heads=num_kv_heads,
            window=window,
            keys_are_values=keys_are_values,
            shares=self._producer(layer, options),
        )
        self._attentions[layer] = attention
        return attention

    def build_mlp(self, ctx: BuildContext, options: LlamaOptions, layer: int) -> nn.Module:
        """In some models the MLPs of layers without keys and values of their own are twice as wide."""
        hf = self.config.hf_config
        is_wide = layer >= self.first_shared and hf.get("use_double_wide_mlp", False)
        size = hf.positive_int("intermediate_size") * (2 if is_wide else 1)
        assert options.hidden_act is not None, "options names it"
        return GatedMLP(ctx, f"model.layers.{layer}.mlp", self.config.hidden_size, size, options.hidden_act, bias=False)

    def build_layer(
        self, ctx: BuildContext, options: LlamaOptions, layer: int, attention: nn.Module, mlp: nn.Module
    ) -> nn.Module:
        return Gemma4Layer(self.config, ctx, options, layer, attention, mlp, self.per_layer_size)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        step: ForwardStep,
        intermediate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = intermediate if self.embed_tokens is None else self._embed(input_ids)
        assert x is not None, "every pipeline stage but the first needs `intermediate`"
        assert self.local_rotary is not None, "options has its parameters"
        angles = {r: r.angles(positions, step.prompt_lens) for r in (self.rotary, self.local_rotary)}
        if self.embed_tokens is not None:
            x = self.merge_items(x, step)
        inputs = None
        if self.per_layer is not None:
            inputs = self.per_layer(self._without_placeholders(input_ids, step), x)
        for number, layer in zip(self._layer_numbers(), self.layers, strict=True):
            if number in step.kept_layers:
                step.kept_states.append(x.clone())
            of_layer = None if inputs is None else inputs[:, number]
            x = layer(x, angles[self._rotary_of(number)], step, of_layer)
        return x if self.norm is None else self.norm(x)

    def _without_placeholders(self, input_ids: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """Token ids in which the positions of items are padding, whose per-layer embedding they have."""
        return replace_ids(input_ids, int(self.config.hf_config.get("pad_token_id", 0)), step)

    def ignores(self, name: str) -> bool:
        """Checkpoints may have key and value projections of layers that do not use them."""
        match = _UNUSED_OF_SHARED.match(name)
        if match is not None and self.first_shared <= int(match[1]) < self.config.num_layers:
            return True
        return super().ignores(name)

    def _producer(self, layer: int, options: LlamaOptions) -> Gemma4Attention | None:
        """The attention whose keys and values a layer uses; None for its own: the last one of the same type."""
        if layer < self.first_shared:
            return None
        own = (n for n in reversed(range(self.first_shared)) if options.window(n) == options.window(layer))
        number = next(own, None)
        if number is None:
            raise ModelError(
                f"{self.config.hf_config.source}: layer {layer} shares the keys and values of an earlier layer "
                "(num_kv_shared_layers), but no earlier layer has the same entry in layer_types."
            )
        return self._attentions[number]


class Gemma4Layer(nn.Module):
    """A decoder layer with an optional third block for the per-layer input, and a factor on its result."""

    def __init__(
        self,
        config: ModelConfig,
        ctx: BuildContext,
        options: LlamaOptions,
        layer: int,
        attention: nn.Module,
        mlp: nn.Module,
        per_layer_size: int,
    ) -> None:
        super().__init__()
        blocks = Gemma4MoeLayer if config.hf_config.get("enable_moe_block", False) else LlamaLayer
        self.blocks = blocks(config, ctx, options, layer, attention, mlp)
        name, eps = f"model.layers.{layer}", norm_eps(config, options)
        assert options.hidden_act is not None, "options names it"
        self.per_layer_block = (
            PerLayerBlock(ctx, name, config.hidden_size, per_layer_size, options.hidden_act, eps)
            if per_layer_size
            else None
        )
        self.scalar = LayerScalar(ctx, f"{name}.layer_scalar")

    def forward(
        self, x: torch.Tensor, angles: CosSinRows, step: ForwardStep, per_layer_input: torch.Tensor | None
    ) -> torch.Tensor:
        """The residual stream before and after the layer, [T, hidden_size]; the input is [T, per_layer_size]."""
        result, residual = self.blocks(x, None, angles, step)
        x = residual + result
        if self.per_layer_block is not None and per_layer_input is not None:
            x = x + self.per_layer_block(x, per_layer_input)
        return self.scalar(x)


def shared_layers(config: ModelConfig) -> int:
    """The number of last layers that use keys and values of earlier layers.

    Raises:
        ModelError: It is not a number of layers.
    """
    hf = config.hf_config
    count = hf.get("num_kv_shared_layers", 0)
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < config.num_layers:
        raise ModelError(
            f"{hf.source}: 'num_kv_shared_layers' should be less than the number of layers, {config.num_layers}, "
            f"found {count!r}."
        )
    return count


def global_sizes(config: ModelConfig) -> tuple[int, int]:
    """Head size and key/value heads of the layers without a window."""
    hf = config.hf_config
    by_layer = hf.get("per_layer_config", {})
    if by_layer:  # as transformers writes it: only those layers have entries, which are equal
        _check_per_layer_config(config, by_layer)
        own = HFConfig(next(iter(by_layer.values())), f"{hf.source}, per_layer_config")
        return own.positive_int("head_dim", config.head_size), own.positive_int(
            "num_key_value_heads", config.num_kv_heads
        )
    num_kv_heads = config.num_kv_heads
    if hf.get("attention_k_eq_v", False):
        num_kv_heads = hf.positive_int("num_global_key_value_heads", num_kv_heads)
    return hf.positive_int("global_head_dim", _GLOBAL_HEAD_DIM), num_kv_heads


def _check_per_layer_config(config: ModelConfig, by_layer: object) -> None:
    """Checks that the layers without a window have the same entry, and no other layer has one.

    Raises:
        ModelError: They differ, or have settings other than the sizes of their heads.
    """
    windows = Gemma4ForCausalLM.windows(config)
    expected = {str(layer) for layer, window in enumerate(windows) if window is None}
    entries = list(by_layer.values()) if isinstance(by_layer, dict) else []
    fits = isinstance(by_layer, dict) and set(map(str, by_layer)) == expected
    if not fits or any(
        not isinstance(entry, dict) or entry != entries[0] or not {*entry} <= {"head_dim", "num_key_value_heads"}
        for entry in entries
    ):
        raise ModelError(
            f"{config.hf_config.source}: per_layer_config should give the layers without a window "
            f"({', '.join(sorted(expected, key=int))}) the same 'head_dim' and 'num_key_value_heads', and have no "
            f"other entries, found {by_layer!r:.200}."
        )


def _rope(config: ModelConfig, kind: str, head_size: int) -> RopeParameters:
    settings = rope_settings(config.hf_config)
    own = settings.get(kind) if is_per_layer_type(settings) else None
    return RopeParameters.from_config(config.hf_config, head_size, settings=own or _ROPES[kind])


def _check(hf: HFConfig) -> None:
    if hf.get("use_bidirectional_attention") == "all":
        raise ModelError(
            f"{hf.source}: use_bidirectional_attention is 'all', which is not supported. Use a checkpoint with causal "
            "attention."
        )
