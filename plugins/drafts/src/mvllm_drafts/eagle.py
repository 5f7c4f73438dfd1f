"""The heads of EAGLE (arXiv 2401.15077) and EAGLE-3 (arXiv 2503.01840), of one or several Llama layers.

    EAGLE       fc(embedding of token p+1, hidden state p)             ──> layers without the first norm
    EAGLE-3     fc(states p before three layers of the served model)   ──> layers, the first of which reads
                                                                           (norm of embedding, norm of that state)

What a pass returns is the state that the next pass reads in place of the served model's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from mvllm.extension_api import (
    BuildContext,
    CausalLM,
    ForwardStep,
    GatedMLP,
    LMHead,
    ModelConfig,
    ModelError,
    ReplicatedLinear,
    RMSNorm,
    RopeParameters,
    RotaryEmbedding,
    VocabEmbedding,
    WeightTarget,
)
from mvllm.extension_api.checkpoint_formats import read_checkpoint
from mvllm.extension_api.draft_heads import DraftHead
from mvllm.extension_api.layers import CosSinRows, whole_tensor_target
from mvllm.extension_api.models import LayerNorms, LlamaAttention, LlamaForCausalLM, LlamaLayer, LlamaOptions
from mvllm_drafts.eagle_config import HeadLayout


class TokenOffsets(nn.Module):
    """The tensor `d2t`: what is added to a token of the draft vocabulary to get that of the served model.

    Args:
        ctx: Build context.
        size: Tokens of the draft vocabulary.
    """

    def __init__(self, ctx: BuildContext, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.int64, device=ctx.device), requires_grad=False)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Checkpoint tensor names and their targets on this rank."""
        yield whole_tensor_target("d2t", self.weight)


class MaskState(nn.Module):
    """The tensor `mask_hidden`: the states of a position whose token is not known.

    Args:
        ctx: Build context.
        shape: Its shape in the checkpoint.
    """

    def __init__(self, ctx: BuildContext, *shape: int) -> None:
        super().__init__()
        self.weight = ctx.parameter(*shape)

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Checkpoint tensor names and their targets on this rank."""
        yield whole_tensor_target("mask_hidden", self.weight)


class LlamaHead(DraftHead):
    """What heads of Llama layers have in common: tensors that may be the served model's, names, and logits."""

    ignored_names = re.compile(r"(^|\.)(rotary_emb\.inv_freq|t2d)$|^verifier_")

    def __init__(self, config: ModelConfig, ctx: BuildContext, draft_vocab_size: int) -> None:
        super().__init__(config, ctx)
        self._shapes = {self.model_name(name): shape for name, shape in _tensor_shapes(config.path).items()}
        self.options = _options(config)
        self.rotary = RotaryEmbedding(
            ctx, RopeParameters.from_config(config.hf_config, config.head_size), config.max_model_len
        )
        self.uses_prompt_lens = self.rotary.uses_prompt_lens
        self.original_context = self.rotary.rope.native_len
        size = config.hidden_size
        self.embed_tokens = (
            VocabEmbedding(ctx, "model.embed_tokens", config.vocab_size, size)
            if "model.embed_tokens.weight" in self._shapes
            else None
        )
        has_head = "lm_head.weight" in self._shapes or draft_vocab_size != config.vocab_size
        self.lm_head = LMHead(ctx, "lm_head", draft_vocab_size, size) if has_head else None
        has_offsets = "d2t" in self._shapes or draft_vocab_size != config.vocab_size
        self.offsets = TokenOffsets(ctx, draft_vocab_size) if has_offsets else None
        self._target: CausalLM | None = None

    def model_name(self, name: str) -> str:
        """As in CausalLM. Checkpoints call the first layer `midlayer` or `layers.0`."""
        name = re.sub(r"^(model\.)?midlayer\.", "layers.0.", name)
        if name.startswith(("layers.", "embed_tokens.", "norm.")):
            return f"model.{name}"
        return re.sub(r"^model\.(fc|input_norm|fc_norm|lm_head|d2t|t2d|mask_hidden)\b", r"\1", name)

    def ignores(self, name: str) -> bool:
        """As in CausalLM: there are no other pipeline stages, and the head is not tied."""
        return self.ignored_names.search(name) is not None or (self.lm_head is None and name == "lm_head.weight")

    def share(self, target: CausalLM) -> None:
        """As in DraftHead. An embedding that equals that of the served model is dropped."""
        super().share(target)
        own, theirs = self.embed_tokens, self._shared.get("embed_tokens")
        if own is None and not isinstance(theirs, VocabEmbedding):
            raise ModelError(
                f"{self.config.path}: the checkpoint has no tensor embed_tokens.weight, and {type(target).__name__} "
                "has none that it could use here (with pipeline parallelism it is on the first stage). Use a "
                "checkpoint with it."
            )
        if self.lm_head is None and target.lm_head is None:
            raise ModelError(f"{self.config.path}: neither the checkpoint nor the model has a language-model head.")
        self._target = target
        if isinstance(own, VocabEmbedding) and isinstance(theirs, VocabEmbedding) and _equal(own.weight, theirs.weight):
            self.embed_tokens = None

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As in CausalLM: [n, columns of this head]."""
        if self.lm_head is not None:
            return self.lm_head(hidden)
        assert self._target is not None, "the head shares the output matrix of the served model"
        return self._target.compute_logits(hidden)

    def full_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """As in DraftHead. Tokens that the head does not predict have minus infinity."""
        if self.offsets is None:
            return logits
        tokens = torch.arange(logits.shape[1], device=logits.device) + self.offsets.weight
        full = logits.new_full((len(logits), self.config.vocab_size), float("-inf"))
        return full.index_copy_(1, tokens, logits)

    def _embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        embed = self.embed_tokens if self.embed_tokens is not None else self._shared["embed_tokens"]
        result: torch.Tensor = embed(input_ids)
        return result

    def _layer(self, ctx: BuildContext, number: int, input_size: int | None, norms: LayerNorms) -> LlamaLayer:
        attention = LlamaAttention(self.config, ctx, self.options, self.rotary, number, input_size)
        mlp = GatedMLP(
            ctx,
            f"model.layers.{number}.mlp",
            self.config.hidden_size,
            self.config.hf_config.positive_int("intermediate_size"),
            self.config.hf_config.get("hidden_act", "silu"),
            bias=self.options.mlp_bias,
        )
        return LlamaLayer(self.config, ctx, LlamaOptions(norms=norms), number, attention, mlp)


class EagleHead(LlamaHead):
    """The head of EAGLE."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx, config.vocab_size)
        size = config.hidden_size
        self.fc = ReplicatedLinear(ctx, "fc", 2 * size, size, bias="fc.bias" in self._shapes)
        self.layers = nn.ModuleList(
            self._layer(ctx, number, None, LayerNorms() if number else LayerNorms(before_attention=None))
            for number in range(config.num_layers)
        )

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        step: ForwardStep,
        intermediate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As in DraftHead."""
        assert intermediate is not None, "the head reads hidden states"
        x, residual = self.fc(torch.cat((self._embed(input_ids), intermediate), dim=-1)), None
        angles = self.rotary.angles(positions, step.prompt_lens)
        for layer in self.layers:
            x, residual = layer(x, residual, angles, step)
        return x if residual is None else x + residual


class Eagle3Layer(nn.Module):
    """The first layer of EAGLE-3: its attention reads the next token's embedding and the state, both normalised.

    Args:
        layer: The layer without that, whose first norm is for the embedding.
        hidden_norm: The norm of the state.
        norm_before_residual: As in HeadLayout.
    """

    def __init__(self, layer: LlamaLayer, hidden_norm: RMSNorm, *, norm_before_residual: bool) -> None:
        super().__init__()
        self.layer, self.hidden_norm, self._norm_before_residual = layer, hidden_norm, norm_before_residual

    def forward(
        self, embeddings: torch.Tensor, states: torch.Tensor, angles: CosSinRows, step: ForwardStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Results as those of LlamaLayer. Arguments are [T, hidden_size]."""
        layer = self.layer
        assert layer.input_norm is not None and layer.mlp_norm is not None, "the layer has the norms of a Llama"
        normalised = self.hidden_norm(states)
        residual = normalised if self._norm_before_residual else states
        x = layer.attention(torch.cat((layer.input_norm(embeddings), normalised), dim=-1), angles, step)
        x, residual = layer.mlp_norm.add_norm(x, residual.clone())
        return layer.mlp(x), residual


class Eagle3Head(LlamaHead):
    """The head of EAGLE-3. Its options are a HeadLayout."""

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        self.layout = layout = HeadLayout.of_model(config)
        super().__init__(config, ctx, layout.draft_vocab_size)
        size, eps = config.hidden_size, config.hf_config.positive_number("rms_norm_eps", 1e-6)
        num_states = len(layout.layers)
        wide = num_states * layout.target_hidden_size
        self.fc = ReplicatedLinear(ctx, "fc", wide, size, bias="fc.bias" in self._shapes) if num_states else None
        self.input_norm = RMSNorm(ctx, "input_norm", wide, eps) if layout.norm_before_fc else None
        self.fc_norms = nn.ModuleList(
            RMSNorm(ctx, f"fc_norm.{i}", layout.target_hidden_size, eps)
            for i in range(num_states if layout.fc_norm else 0)
        )
        self.first = Eagle3Layer(
            self._layer(ctx, 0, 2 * size, LayerNorms()),
            RMSNorm(ctx, "model.layers.0.hidden_norm", size, eps),
            norm_before_residual=layout.norm_before_residual,
        )
        self.layers = nn.ModuleList(
            self._layer(ctx, number, None, LayerNorms()) for number in range(1, config.num_layers)
        )
        self.norm = RMSNorm(ctx, "model.norm", size, eps)
        wide = wide or size
        masks = layout.mask_token_id is not None
        self.mask = MaskState(ctx, *self._shapes.get("mask_hidden", (1, wide))) if masks else None

    def mask_state(self) -> torch.Tensor:
        """[1, hidden_size]: what `forward` reads at a position whose token is not known, with `mask_token_id`."""
        assert self.mask is not None, "the head is for parallel drafts"
        states = self.mask.weight.view(1, -1)
        return self.combine(states, states)

    def ignores(self, name: str) -> bool:
        """As in CausalLM. A head for parallel drafts may also draft one token after the other."""
        return super().ignores(name) or (self.mask is None and name == "mask_hidden")

    def combine(self, hidden: torch.Tensor, layer_states: torch.Tensor | None) -> torch.Tensor:
        """As in DraftHead."""
        if self.fc is None:
            return hidden
        assert layer_states is not None, "the served model keeps the states of these layers"
        if len(self.fc_norms):
            parts = layer_states.split(self.layout.target_hidden_size, dim=-1)
            layer_states = torch.cat(
                [norm(part.contiguous()) for norm, part in zip(self.fc_norms, parts, strict=True)], -1
            )
        if self.input_norm is not None:
            layer_states = self.input_norm(layer_states.contiguous())
        return self.fc(layer_states.contiguous())

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        step: ForwardStep,
        intermediate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As in DraftHead."""
        assert intermediate is not None, "the head reads hidden states"
        angles = self.rotary.angles(positions, step.prompt_lens)
        x, residual = self.first(self._embed(input_ids), intermediate, angles, step)
        for layer in self.layers:
            x, residual = layer(x, residual, angles, step)
        return self.norm(x + residual) if self.layout.norm_output else x + residual

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As in LlamaHead; `forward` returns what the last norm reads."""
        return super().compute_logits(hidden if self.layout.norm_output else self.norm(hidden))


def _options(config: ModelConfig) -> LlamaOptions:
    """Biases as of a Llama; a sliding window in the layers that `layer_types` says."""
    options, types = LlamaForCausalLM.options(config), config.hf_config.get("layer_types", [])
    if config.sliding_window is None or "sliding_attention" not in types:
        return options
    windows = tuple(config.sliding_window if kind == "sliding_attention" else None for kind in types)
    return LlamaOptions(
        windows=windows, qkv_bias=options.qkv_bias, output_bias=options.output_bias, mlp_bias=options.mlp_bias
    )


def _tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a checkpoint's tensors; none where it has no weights, as with load_format='dummy'."""
    try:
        return {name: tuple(entry.shape) for name, entry in read_checkpoint(folder).items()}
    except ModelError:
        return {}  # loading will say why, if weights are read


def _equal(own: object, theirs: object) -> bool:
    return (
        isinstance(own, torch.Tensor)
        and isinstance(theirs, torch.Tensor)
        and (own.shape, own.dtype) == (theirs.shape, theirs.dtype)
        and torch.equal(own, theirs)
    )
