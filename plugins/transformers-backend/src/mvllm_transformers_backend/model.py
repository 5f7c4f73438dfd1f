"""TransformersForCausalLM: a transformers model with core's embedding, linear layers, attention and head."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mvllm.extension_api import (
    Attention,
    BuildContext,
    CausalLM,
    ColumnParallelLinear,
    ConfigError,
    ForwardStep,
    LMHead,
    ModelConfig,
    ReplicatedLinear,
    RowParallelLinear,
    VocabEmbedding,
    WeightTarget,
)
from mvllm.extension_api.layers import HeadShard, Linear, shard_slice
from mvllm_transformers_backend.meta_model import MetaModel, set_module
from mvllm_transformers_backend.replacement_modules import (
    CurrentStep,
    EmbeddingReplacement,
    LinearReplacement,
    LMHeadReplacement,
    PagedAttention,
    RecordingLinear,
)
from mvllm_transformers_backend.tp_plan import ParallelStyle

_UNSET = -(2**31) + 7
"""Fills buffers of integers before transformers computes them; NaN fills those of floats."""


class TransformersForCausalLM(CausalLM):
    """Any causal language model of transformers whose attention goes through its attention interface.

    Args:
        config: The checkpoint; its architecture names transformers' class.
        ctx: Build context.

    Raises:
        ModelError, ConfigError: The model is not supported, see `MetaModel`.
    """

    reads_per_layer_config = True

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        ctx.refuse_batch_invariance(f"{config.architecture}, which runs through transformers,")
        if ctx.pp.world_size > 1:
            raise ConfigError(
                f"{config.architecture} runs through transformers, whose models are not cut into stages here. Use "
                f"pipeline_parallel_size=1 (it is {ctx.pp.world_size}), with tensor_parallel_size for more devices."
            )
        if ctx.num_devices > 1:
            raise ConfigError(
                f"{config.architecture} runs through transformers, whose models are not cut for the {ctx.num_devices} "
                "devices that one worker drives here. Use tensor_parallel_size=1, with data_parallel_size for more "
                "devices."
            )
        skeleton = self.make_skeleton(config, ctx)
        self._precomputed = [skeleton.precomputed]  # in a list: it is a submodule of the head
        self._now = CurrentStep()
        self._renaming = skeleton.renaming
        self._unexpected = [re.compile(p) for p in skeleton.causal._keys_to_ignore_on_load_unexpected or ()]
        self._own_targets: list[tuple[str, WeightTarget]] = []
        self._aliases: set[str] = set()
        self.layers, self.head = skeleton.layers, skeleton.causal
        roots = [(f"{skeleton.layers_name}.", self.layers), ("", self.head), *self.build_encoders(skeleton)]
        _replace_embedding_and_head(skeleton, ctx)
        for prefix, root in roots:
            _replace_linear_layers(skeleton, ctx, prefix, root)
        made: dict[int, nn.Parameter] = {}
        for prefix, root in roots:
            self._make_weights(skeleton, ctx, prefix, root, made)
            _make_buffers(skeleton, root, ctx.device)
        self._replace_attention(skeleton, ctx)

    def make_skeleton(self, config: ModelConfig, ctx: BuildContext) -> MetaModel:
        """The model without weights."""
        return MetaModel(config, ctx.dtype, ctx.tp)

    def build_encoders(self, skeleton: MetaModel) -> list[tuple[str, nn.Module]]:
        """The encoders of items: modules whose weights have a prefix, and the prefix."""
        return []

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        step: ForwardStep,
        intermediate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._now.step = step
        output = self.layers(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        precomputed = self._precomputed[0]
        precomputed.hidden = hidden[None]
        ids = torch.zeros((1, len(hidden)), dtype=torch.int32, device=hidden.device)  # not read
        logits: torch.Tensor = self.head(input_ids=ids, use_cache=False).logits[0]
        precomputed.hidden = None
        return logits

    def weight_targets(self) -> dict[str, list[WeightTarget]]:
        targets = super().weight_targets()
        for name, target in self._own_targets:
            targets.setdefault(name, []).append(target)
        return targets

    def ignores(self, name: str) -> bool:
        if name in self._aliases or any(pattern.search(name) for pattern in self._unexpected):
            return True
        return super().ignores(name)

    def given_name(self, name: str) -> str:
        return super().given_name(self._renaming.new_name(name))

    def _make_weights(
        self, skeleton: MetaModel, ctx: BuildContext, prefix: str, root: nn.Module, made: dict[int, nn.Parameter]
    ) -> None:
        """Allocates the weights and persistent buffers of transformers' own modules."""
        for module_name, module in root.named_modules():
            stored = {**module._parameters, **_stored_buffers(module)}
            for name, tensor in stored.items():
                if tensor is None or not tensor.is_meta:
                    continue
                whole = prefix + (f"{module_name}.{name}" if module_name else name)
                if id(tensor) in made:
                    self._aliases.add(whole)
                else:
                    made[id(tensor)] = _parameter(ctx, tensor)
                    self._own_targets += _targets(whole, made[id(tensor)], skeleton, ctx)
                module._buffers.pop(name, None)
                module.register_parameter(name, made[id(tensor)])
        if skeleton.is_tied:
            self._aliases.add(f"{skeleton.head_name}.weight")

    def _replace_attention(self, skeleton: MetaModel, ctx: BuildContext) -> None:
        for module, facts in skeleton.attention.items():
            attention = Attention(
                ctx,
                HeadShard(facts.num_heads, facts.num_kv_heads, 0, 0),
                max(facts.head_size, facts.value_size),
                facts.scale,
                sliding_window=facts.window,
                soft_cap=facts.soft_cap,
                non_causal_spans=self.config.has_non_causal_spans,
                sinks=None if facts.sinks is None else module.get_parameter(facts.sinks),
            )
            module.paged_attention = PagedAttention(attention, facts, self._now)


def _replace_embedding_and_head(skeleton: MetaModel, ctx: BuildContext) -> None:
    """Replaces the token embedding and the head, if they are plain modules, by core's."""
    causal, prefix = skeleton.causal, f"{skeleton.layers_name}."
    head: Any = causal.get_submodule(skeleton.head_name)  # its bias may be None
    name = skeleton.embedding_name
    assert name.startswith(prefix), "the token embedding is a submodule of the layers"
    if skeleton.lacks_head:
        set_module(causal, skeleton.head_name, nn.Identity())
    original: nn.Embedding = skeleton.layers.get_submodule(name.removeprefix(prefix))  # type: ignore[assignment]
    table = None
    if type(original) is nn.Embedding and not (skeleton.is_tied and head.bias is not None):
        table = VocabEmbedding(ctx, name, original.num_embeddings, original.embedding_dim)
        set_module(skeleton.layers, name.removeprefix(prefix), EmbeddingReplacement(table))
    if skeleton.lacks_head:
        return
    if head.bias is not None and not skeleton.is_tied:
        whole = ReplicatedLinear(ctx, skeleton.head_name, head.in_features, head.out_features, bias=True)
        set_module(causal, skeleton.head_name, LinearReplacement(whole, head, ctx.tp))
    elif head.bias is None and not (skeleton.is_tied and table is None):
        where = name if skeleton.is_tied else skeleton.head_name
        placed = LMHead(
            ctx,
            where,
            head.out_features,
            head.in_features,
            tied=skeleton.is_tied,
            tied_to=table if skeleton.is_tied else None,
        )
        set_module(causal, skeleton.head_name, LMHeadReplacement(placed))


def _replace_linear_layers(skeleton: MetaModel, ctx: BuildContext, prefix: str, root: nn.Module) -> None:
    """Replaces linear layers that are only called by core's linear layers."""
    for local, dry in [(name, m) for name, m in root.named_modules() if isinstance(m, RecordingLinear)]:
        name, original, cut = prefix + local, dry.original, skeleton.cuts.style_of(prefix + local)
        if dry.is_called and not dry.is_read and original.weight.dtype == ctx.dtype:
            set_module(root, local, _linear(ctx, name, original, cut))
        elif cut is ParallelStyle.REPLICATED:
            set_module(root, local, original)
        else:
            raise ConfigError(
                f"{skeleton.causal.__class__.__name__} runs through transformers, which reads the weight of {name} "
                "directly, so it cannot be sharded. Use tensor_parallel_size=1."
            )


def _linear(ctx: BuildContext, name: str, original: nn.Linear, cut: ParallelStyle) -> LinearReplacement:
    size_in, size_out, bias = original.in_features, original.out_features, original.bias is not None
    linear: Linear
    if cut in (ParallelStyle.COLWISE, ParallelStyle.COLWISE_GATHERED):
        linear = ColumnParallelLinear(ctx, [(name, size_out)], size_in, bias=bias)
    elif cut in (ParallelStyle.ROWWISE, ParallelStyle.ROWWISE_SPLIT_INPUT):
        linear = RowParallelLinear(ctx, name, size_in, size_out, bias=bias)
    else:
        linear = ReplicatedLinear(ctx, name, size_in, size_out, bias=bias)
    columns = (
        shard_slice(size_in, ctx.shares, f"input features of {name}")
        if cut is ParallelStyle.ROWWISE_SPLIT_INPUT
        else None
    )
    return LinearReplacement(linear, original, ctx.tp, columns=columns, gathers=cut is ParallelStyle.COLWISE_GATHERED)


def _targets(
    name: str, parameter: nn.Parameter, skeleton: MetaModel, ctx: BuildContext
) -> list[tuple[str, WeightTarget]]:
    """Targets of a parameter of transformers' own modules: one checkpoint tensor or several."""
    pieces = skeleton.renaming.pieces(name, tuple(parameter.shape))
    if pieces is not None:
        return [
            (piece.name, WeightTarget(parameter, piece.shape, tuple(slice(0, n) for n in piece.shape), piece.place))
            for piece in pieces
        ]
    whole = tuple(slice(0, size) for size in parameter.shape)
    if skeleton.cuts.style_of(name) is ParallelStyle.REPLICATED:
        return [(name, WeightTarget(parameter, tuple(parameter.shape), whole, whole))]
    size = parameter.shape[0] * ctx.tp.world_size  # a vector with an element per output, see MetaModel
    return [(name, WeightTarget(parameter, (size,), (shard_slice(size, ctx.shares, "elements"),), whole))]


def _parameter(ctx: BuildContext, tensor: torch.Tensor) -> nn.Parameter:
    """An uninitialised parameter like `tensor`; of floats it is the context's, which may not allocate it yet."""
    if tensor.is_floating_point():
        return ctx.floats(tensor.dtype).parameter(*tensor.shape)
    return nn.Parameter(torch.empty(tensor.shape, dtype=tensor.dtype, device=ctx.device), requires_grad=False)


def _stored_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    kept = module._non_persistent_buffers_set
    return {name: buffer for name, buffer in module._buffers.items() if name not in kept}


def _make_buffers(skeleton: MetaModel, root: nn.Module, device: torch.device) -> None:
    """Lets transformers compute non-persistent buffers, for instance rotary frequencies.

    Raises:
        ModelError: transformers does not initialise a buffer.
    """
    for module_name, module in root.named_modules():
        names = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        if not names:
            continue
        for parameter in module.parameters():
            parameter._is_hf_initialized = True  # the checkpoint fills it
        for name in names:
            buffer = module._buffers[name]
            assert buffer is not None
            unset = float("nan") if buffer.is_floating_point() else _UNSET
            module._buffers[name] = torch.full(buffer.shape, unset, dtype=buffer.dtype, device=device)
        with torch.no_grad():
            _initialiser(root, module_name, skeleton.causal)(module)
        for name in names:
            buffer = module._buffers[name]
            assert buffer is not None
            if bool((buffer.isnan() if buffer.is_floating_point() else buffer == _UNSET).any()):
                raise skeleton.refusal(f"the contents of the buffer {module_name}.{name} are unknown")


def _initialiser(root: nn.Module, module_name: str, causal: Any) -> Callable[[nn.Module], None]:
    """The `_init_weights` that transformers uses for a module: that of the closest model around it."""
    found, module = getattr(root, "_init_weights", causal._init_weights), root
    for part in module_name.split(".") if module_name else ():
        module = module.get_submodule(part)
        found = getattr(module, "_init_weights", found)
    return found
