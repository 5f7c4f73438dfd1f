"""Llama 2 and 3, and the base of the families derived from it, which differ in LlamaOptions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.config.rope_parameters import RopeParameters
from mvllm.layers.attention import Attention, Sinks
from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.layers.linear import QKVLinear, RowParallelLinear
from mvllm.layers.mlp import GatedMLP
from mvllm.layers.norm import FullWidthQKNorm, Norm, NormMaker, RMSNorm
from mvllm.layers.rotary import CosSinRows, RotaryEmbedding
from mvllm.layers.rotary_attention import RotaryAttention
from mvllm.models.causal_lm import CausalLM


@dataclass(frozen=True)
class LayerNorms:
    """Checkpoint names of a layer's norms; None for a norm that the layer does not have.

    Attributes:
        before_attention, before_mlp: Norms of the block's input.
        after_attention, after_mlp: Norms of the block's output, before it is added to the residual stream.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True)
class LlamaOptions:
    """The settings in which the families differ.

    Attributes:
        windows: Sliding window of each layer, None for a layer without one; empty where no layer has one.
        qkv_bias, output_bias, mlp_bias: Which linear layers have biases.
        qk_norm: Queries and keys are normalised per head before the rotary embedding.
        qk_norm_names: Checkpoint names of these norms.
        qk_norm_last: These norms come after the rotary embedding.
        qk_width_norm: Queries and keys are normalised over all heads together.
        fused_qkv, fused_gate_up: The checkpoint stores these as one matrix, `qkv_proj` and `gate_up_proj`.
        norms: Which norms a layer has.
        parallel_blocks: Attention and MLP read the same normalised input, and both results are added to the residual
            stream. Such layers have no norm before the MLP, nor after a block.
        norm, eps: Class and epsilon of the norms; None reads `rms_norm_eps`.
        hidden_act: Activation of the MLP; None reads `hidden_act`.
        rope: RoPE parameters; None reads them from the config.
        local_rope: RoPE parameters of the layers with a window, if they differ.
        nope_layers: Layers without positional encoding (NoPE).
        interleaved_rotary, query_scaling: As in RotaryEmbedding.
        attention_scale: Factor on query-key products; None means 1 / sqrt(head_size).
        soft_cap: Soft cap of query-key products, as in AttentionSpec.
        sinks: Each query head has a learned extra logit.
        gated_attention: The query projection also has a gate for the result of each head, as in QKVLinear.
        embedding_scale: Factor on embeddings, rounded to the compute dtype.
        residual_scale: Factor on a block's output before it is added to the residual stream.
        logits_scale, logits_soft_cap: Logits are divided by the first, then soft-capped by the second.
    """

    windows: tuple[int | None, ...] = ()
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    qk_norm_last: bool = False
    qk_width_norm: bool = False
    fused_qkv: bool = False
    fused_gate_up: bool = False
    norms: LayerNorms = LayerNorms()
    parallel_blocks: bool = False
    norm: NormMaker = RMSNorm
    eps: float | None = None
    hidden_act: str | None = None
    rope: RopeParameters | None = None
    local_rope: RopeParameters | None = None
    nope_layers: frozenset[int] = frozenset()
    interleaved_rotary: bool = False
    query_scaling: tuple[float, int] | None = None
    attention_scale: float | None = None
    soft_cap: float | None = None
    sinks: bool = False
    gated_attention: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    logits_soft_cap: float | None = None

    def window(self, layer: int) -> int | None:
        """Sliding window of one layer, or None."""
        return self.windows[layer] if self.windows else None


class LlamaAttention(nn.Module):
    """Self-attention with rotary position embedding.

    Args:
        input_size: Size of the input, if it is not `hidden_size`.
    """

    def __init__(
        self,
        config: ModelConfig,
        ctx: BuildContext,
        options: LlamaOptions,
        rotary: RotaryEmbedding,
        layer: int,
        input_size: int | None = None,
    ) -> None:
        super().__init__()
        name = f"model.layers.{layer}.self_attn"
        hidden_size, head_size, eps = config.hidden_size, config.head_size, norm_eps(config, options)
        separate = (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")
        self.qkv = QKVLinear(
            ctx,
            (f"{name}.qkv_proj",) if options.fused_qkv else separate,
            input_size or hidden_size,
            config.num_heads,
            config.num_kv_heads,
            head_size,
            bias=options.qkv_bias,
            gated=options.gated_attention,
        )
        self.output = RowParallelLinear(
            ctx, f"{name}.o_proj", config.num_heads * head_size, hidden_size, bias=options.output_bias
        )
        q_name, k_name = options.qk_norm_names
        self.q_norm = options.norm(ctx, f"{name}.{q_name}", head_size, eps) if options.qk_norm else None
        self.k_norm = options.norm(ctx, f"{name}.{k_name}", head_size, eps) if options.qk_norm else None
        names, heads = (f"{name}.q_norm", f"{name}.k_norm"), (config.num_heads, config.num_kv_heads)
        self.qk_norm = (
            FullWidthQKNorm(ctx, names, self.qkv.heads, *heads, head_size, eps) if options.qk_width_norm else None
        )
        scale = head_size**-0.5 if options.attention_scale is None else options.attention_scale
        self.sinks = Sinks(ctx, f"{name}.sinks", config.num_heads, self.qkv.heads) if options.sinks else None
        self.attention = Attention(
            ctx,
            self.qkv.heads,
            head_size,
            scale,
            sliding_window=options.window(layer),
            soft_cap=options.soft_cap,
            sinks=None if self.sinks is None else self.sinks.weight,
            non_causal_spans=config.has_non_causal_spans,
        )
        has_rotary = layer not in options.nope_layers
        is_ordered = False
        if has_rotary and rotary.host_order is not None and not (options.qk_norm or options.qk_width_norm):
            is_ordered = self.qkv.reorder_heads(ctx, rotary.host_order)
        self._rotary_attention = RotaryAttention(
            self.attention,
            rotary if has_rotary else None,
            self.q_norm,
            self.k_norm,
            norms_last=options.qk_norm_last,
            is_ordered=is_ordered,
        )

    def forward(self, x: torch.Tensor, angles: CosSinRows, step: ForwardStep) -> torch.Tensor:
        """[T, input_size] to [T, hidden_size]."""
        query, key, value = self.qkv.split(x)
        if angles.query_scale is not None:
            query = query * angles.query_scale
        if self.qk_norm is not None:
            query, key = self.qk_norm(query, key)
        return self.output(self._rotary_attention(angles, query, key, value, step))


class LlamaLayer(nn.Module):
    """A decoder layer: attention and MLP with norms before or after them, on a residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        ctx: BuildContext,
        options: LlamaOptions,
        layer: int,
        attention: nn.Module,
        mlp: nn.Module,
    ) -> None:
        super().__init__()

        def norm(name: str | None) -> Norm | None:
            full_name, eps = f"model.layers.{layer}.{name}", norm_eps(config, options)
            return None if name is None else options.norm(ctx, full_name, config.hidden_size, eps)

        self.input_norm = norm(options.norms.before_attention)
        self.attention = attention
        self.attention_result_norm = norm(options.norms.after_attention)
        self.mlp_norm = norm(options.norms.before_mlp)
        self.mlp = mlp
        self.mlp_result_norm = norm(options.norms.after_mlp)
        self.residual_scale = options.residual_scale
        self.parallel = options.parallel_blocks

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, angles: CosSinRows, step: ForwardStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes and returns the last block's output and the residual stream without that output."""
        x, residual = _add_norm(self.input_norm, x, residual)
        if self.parallel:
            return self.attention(x, angles, step) + self.mlp(x), residual
        x = self._result(self.attention_result_norm, self.attention(x, angles, step))
        x, residual = _add_norm(self.mlp_norm, x, residual)
        return self._result(self.mlp_result_norm, self.mlp(x)), residual

    def _result(self, norm: Norm | None, x: torch.Tensor) -> torch.Tensor:
        x = x if norm is None else norm(x)
        return x if self.residual_scale == 1.0 else x * self.residual_scale


class LlamaForCausalLM(CausalLM):
    """`LlamaForCausalLM` of Hugging Face checkpoints."""

    keeps_layers = True
    first_stage_names: tuple[str, ...] = ("model.embed_tokens.",)
    last_stage_names: tuple[str, ...] = ("model.norm.",)

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self.family = options = self.options(config)
        # Where no layer rotates anything, a table of one row replaces that of all positions.
        num_positions = 1 if len(options.nope_layers) == config.num_layers else config.max_model_len

        def rotary(rope: RopeParameters) -> RotaryEmbedding:
            multimodal = config.multimodal
            return RotaryEmbedding(
                ctx,
                rope,
                num_positions,
                interleaved=options.interleaved_rotary,
                query_scaling=options.query_scaling,
                sections=None if multimodal is None else multimodal.rope_sections,
                sections_interleaved=multimodal is not None and multimodal.rope_interleaved,
            )

        self.rotary = rotary(options.rope or RopeParameters.from_config(config.hf_config, config.head_size))
        self.local_rotary = None if options.local_rope is None else rotary(options.local_rope)
        scaled = [r for r in (self.rotary, self.local_rotary) if r is not None and r.uses_prompt_lens]
        self.uses_prompt_lens = bool(scaled)
        self.original_context = min((r.rope.native_len for r in scaled), default=0)
        self.embed_tokens = self._build_embedding(ctx, "model.embed_tokens", config.hidden_size)
        self.embedding_scale = torch.tensor(options.embedding_scale, dtype=ctx.dtype).item()
        self.layers = nn.ModuleList(
            self.build_layer(
                ctx,
                options,
                layer,
                self.build_attention(ctx, options, self._rotary_of(layer), layer),
                self.build_mlp(ctx, options, layer),
            )
            for layer in self._layer_numbers()
        )
        eps = norm_eps(config, options)
        self.norm = options.norm(ctx, "model.norm", config.hidden_size, eps) if self.stage.is_last else None
        self.lm_head = self._build_head(ctx, "model.embed_tokens", config.hidden_size, self.embed_tokens)
        if options.logits_soft_cap is not None:
            self._tanh = ctx.op("tanh", size=config.vocab_size).function
        if ctx.tp.fuses_add_rms_norm and type(self).forward is LlamaForCausalLM.forward:
            self._sum_in_norms()

    def _sum_in_norms(self) -> None:
        """Lets the norm after a block add up the ranks' results of the block, where nothing else reads them."""
        layers = [layer for layer in self.layers if isinstance(layer, LlamaLayer)]
        for layer, following in zip(layers, [*layers[1:], None], strict=True):
            after_mlp = self.norm if following is None else following.input_norm
            for block, result_norm, norm in (
                (layer.attention, layer.attention_result_norm, layer.mlp_norm),
                (layer.mlp, layer.mlp_result_norm, after_mlp),
            ):
                # By type, because a derived class may change the result.
                last = {LlamaAttention: "output", GatedMLP: "down"}.get(type(block))
                if last is None or result_norm is not None or layer.residual_scale != 1.0 or layer.parallel:
                    continue
                if isinstance(norm, RMSNorm):
                    norm.sum_results_of(getattr(block, last))

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """The options of this family."""
        attention_bias = bool(config.hf_config.get("attention_bias", False))
        return LlamaOptions(
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=bool(config.hf_config.get("mlp_bias", False)),
        )

    def build_attention(
        self, ctx: BuildContext, options: LlamaOptions, rotary: RotaryEmbedding, layer: int
    ) -> nn.Module:
        """The attention of a layer; `forward` as in LlamaAttention."""
        return LlamaAttention(self.config, ctx, options, rotary, layer)

    def build_mlp(self, ctx: BuildContext, options: LlamaOptions, layer: int) -> nn.Module:
        """The MLP of a layer: [T, hidden_size] to [T, hidden_size]."""
        hf = self.config.hf_config
        return GatedMLP(
            ctx,
            f"model.layers.{layer}.mlp",
            self.config.hidden_size,
            hf.positive_int("intermediate_size"),
            options.hidden_act or hf.get("hidden_act", "silu"),
            bias=options.mlp_bias,
            fused=options.fused_gate_up,
        )

    def build_layer(
        self, ctx: BuildContext, options: LlamaOptions, layer: int, attention: nn.Module, mlp: nn.Module
    ) -> nn.Module:
        """A layer of these blocks; `forward` as in LlamaLayer, or as the model's own `forward` calls it."""
        return LlamaLayer(self.config, ctx, options, layer, attention, mlp)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        step: ForwardStep,
        intermediate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = intermediate if self.embed_tokens is None else self.merge_items(self._embed(input_ids), step)
        assert x is not None, "every pipeline stage but the first needs `intermediate`"
        rotaries = [rotary for rotary in (self.rotary, self.local_rotary) if rotary is not None]
        angles = {each: each.angles(positions, step.prompt_lens, step.rope_positions) for each in rotaries}
        residual = None
        for number, layer in zip(self._layer_numbers(), self.layers, strict=True):
            if number in step.kept_layers:
                step.kept_states.append(_stream_before(layer, x, residual))
            x, residual = layer(x, residual, angles[self._rotary_of(number)], step)
            if step.item_embeds is not None:
                residual = self.add_behind_layer(number, residual, step)
        assert residual is not None
        return x + residual if self.norm is None else self.norm.add_norm(x, residual)[0]

    def add_behind_layer(self, layer: int, residual: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """The residual stream behind a layer, for models that add to it at the positions of images; first stage only.

        Args:
            layer: The layer's number.
            residual: [T, hidden_size], without the output of the layer's last block.
            step: A step with `item_embeds`.
        """
        return residual

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits, cap = super().compute_logits(hidden), self.family.logits_soft_cap
        if self.family.logits_scale != 1.0:
            logits = logits / self.family.logits_scale
        return logits if cap is None else cap * self._tanh(logits / cap)

    def _embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        assert self.embed_tokens is not None, "only the first pipeline stage embeds tokens"
        x = self.embed_tokens(input_ids)
        return x if self.embedding_scale == 1.0 else x * self.embedding_scale

    def _rotary_of(self, layer: int) -> RotaryEmbedding:
        if self.local_rotary is None or self.family.window(layer) is None:
            return self.rotary
        return self.local_rotary


def norm_eps(config: ModelConfig, options: LlamaOptions) -> float:
    """Epsilon of the family's norms."""
    return config.hf_config.positive_number("rms_norm_eps", 1e-6) if options.eps is None else options.eps


def _stream_before(layer: nn.Module, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """A copy of the residual stream before a layer, whose arguments may be overwritten and may be sums of one rank."""
    if residual is None:
        return x.clone()
    norm = getattr(layer, "input_norm", None)
    return residual + (norm.summed_over_ranks(x) if isinstance(norm, RMSNorm) else x)


def _add_norm(norm: Norm | None, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of residual stream and `x`: normalised (if there is a norm), and unchanged."""
    if norm is not None:
        return norm.add_norm(x, residual)
    total = x if residual is None else residual + x
    return total, total
