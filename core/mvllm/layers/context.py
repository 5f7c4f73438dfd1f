"""BuildContext, with which layers are built, and ForwardStep, with which they run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
import torch
from torch import nn

from mvllm.distributed.group_coordinator import GroupCoordinator
from mvllm.errors import ConfigError
from mvllm.ops.dtypes import dtype_name
from mvllm.ops.registry import OpTable, ResolvedOp
from mvllm.platform.attention import AttentionBackend, AttentionMetadata, AttentionSpec
from mvllm.platform.state import StateArguments, StateBackend, StateSpec

if TYPE_CHECKING:
    from mvllm.layers.matrix_layout import MatrixLayout
    from mvllm.layers.quantization.matrix_interface import QuantizedMatrix


class Quantization(Protocol):
    """What models and layers call of a QuantizationMethod, which documents it."""

    @property
    def quantizes_on_load(self) -> bool:
        """Whether the method quantizes an unquantized checkpoint."""

    def matrix(
        self, ctx: BuildContext, layout: MatrixLayout, tied_to: nn.Parameter | None = None
    ) -> QuantizedMatrix | None:
        """The quantized form of one matrix; None if it is not quantized."""

    def use_names(self, checkpoint_names: Callable[[str], Sequence[str]]) -> None:
        """Sets the names that checkpoints may have for a module."""

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint tensor without target may be skipped."""

    def given_name(self, name: str) -> str:
        """The name by which targets refer to a checkpoint tensor."""


@dataclass(frozen=True)
class ShardIndex:
    """The index of one tensor-parallel shard.

    Attributes:
        index: Its index.
        count: Number of shards.
    """

    index: int
    count: int


@dataclass(frozen=True)
class BuildContext:
    """Dtype, device, operations, parallel groups and settings with which layers are built.

    Attributes:
        dtype: Compute dtype.
        device: Device of the parameters.
        ops: The operations of this worker.
        attention: Returns the backend of a spec; equal specs have the same backend.
        tp: The ranks that share each layer.
        pp: The ranks that each hold a run of layers.
        kv_dtype: Storage dtype of the KV cache by name.
        quantization: Quantization method of the model's matrices; None for an unquantized model.
        with_adapters: Whether LoRA is enabled.
        num_devices: Devices that this worker drives, over which its shard of each layer is sharded again.
        spread: `DeviceRuntime.place`, for workers with several devices.
        batch_invariant: The engine was started with `batch_invariant`.
        state: Returns the backend of a spec of sequence states; equal specs have the same backend.
        non_causal_spans: The platform's attention supports spans of prompts that attend in both directions.
        encoders_on_host: The encoders of images and audio are built and run on the host: the platform compiles a
            program for every shape, and items differ in shape.
    """

    dtype: torch.dtype
    device: torch.device
    ops: OpTable
    attention: Callable[[AttentionSpec], AttentionBackend]
    tp: GroupCoordinator
    pp: GroupCoordinator
    kv_dtype: str
    quantization: Quantization | None = None
    with_adapters: bool = False
    num_devices: int = 1
    spread: Callable[[torch.Tensor, int | None], torch.Tensor] | None = None
    batch_invariant: bool = False
    state: Callable[[StateSpec], StateBackend] = StateBackend
    non_causal_spans: bool = False
    encoders_on_host: bool = False

    @classmethod
    def of(cls, context: BuildContext) -> Self:
        """A copy of a build context, of this class."""
        return cls(**{field.name: getattr(context, field.name) for field in dataclasses.fields(context)})

    @property
    def shares(self) -> tuple[ShardIndex, ...]:
        """The shards of the devices of this worker, which are adjacent.

        tensor_parallel_size = 4, 2 workers with 2 devices each      worker   0   |   1
                                                                     shard  0   1 | 2   3
        """
        first, of = self.tp.rank_in_group * self.num_devices, self.tp.world_size * self.num_devices
        return tuple(ShardIndex(first + i, of) for i in range(self.num_devices))

    def place(self, tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
        """The tensor sharded along `dim` over the devices of this worker; replicated with None."""
        return tensor if self.num_devices == 1 or self.spread is None else self.spread(tensor, dim)

    @property
    def dtype_name(self) -> str:
        """The compute dtype's name."""
        return dtype_name(self.dtype)

    def op(self, name: str, **facts: object) -> ResolvedOp:
        """The implementation of operation `name` in the compute dtype."""
        return self.ops.get(name, self.dtype, **facts)

    def refuse_batch_invariance(self, what: str) -> None:
        """For layers whose results depend on the other rows of a step.

        Args:
            what: The feature, at the start of a sentence.

        Raises:
            ConfigError: The engine was started with `batch_invariant`.
        """
        if self.batch_invariant:
            raise ConfigError(
                f"{what} is not batch-invariant, but batch_invariant is set. Choose another model, or leave "
                "batch_invariant out."
            )

    def floats(self, dtype: torch.dtype | None = None) -> BuildContext:
        """A copy for a layer that is never quantized, with another compute dtype if `dtype` is given."""
        return dataclasses.replace(self, dtype=dtype or self.dtype, quantization=None)

    def quantized(self, layout: MatrixLayout, tied_to: nn.Parameter | None = None) -> QuantizedMatrix | None:
        """The quantized matrix of a linear layer; None if it is unquantized. `tied_to` as in QuantizationMethod."""
        return None if self.quantization is None else self.quantization.matrix(self, layout, tied_to)

    def parameter(self, *shape: int) -> nn.Parameter:
        """An uninitialised parameter on the device. Loading fills it."""
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)


@dataclass(frozen=True)
class StatePasses:
    """The passes of a step over layers with a sequence state: over the known tokens, then over each draft token.

    Attributes:
        order: int32 [sum of the tokens of all passes], device: the tokens of the step, in the order of the passes.
        place: int32 [T], device: where each token is in that order.
        drafts: The slots of each pass over draft tokens, one token per request.
    """

    order: torch.Tensor
    place: torch.Tensor
    drafts: tuple[StateArguments, ...]

    def sizes(self) -> list[int]:
        """Tokens of each pass."""
        drafts = [len(each.read_slots) for each in self.drafts]
        return [len(self.order) - sum(drafts), *drafts]


@dataclass
class ForwardStep:
    """Attention metadata and per-token inputs of one step, for the layers.

    Attributes:
        metadata: The attention metadata of the step, by the `metadata_key` of the layers that read it.
        prompt_lens: [T], int32, device: the prompt length of each token's request. Read only by models with
            `uses_prompt_lens` (RoPE scalings that depend on the sequence length, see RotaryEmbedding); None in steps
            that do not need it, see `CausalLM.original_context`.
        prompt_starts: Host, for encoders: the first token of each prompt, and the end of the last prompt.
        prompt_starts_array: The same on the device, [R + 1], int32, for encoders that are traced; they read it instead.
        token_types: [T], int32, device: token type (first or second text) of each token; None means type 0 for all.
            Read only by models with `uses_token_types`.
        state_metadata: The slots of the step's sequence states; None for models without them. With `state_passes` those
            of the first pass.
        state_passes: The passes of a step with draft tokens over layers with a sequence state; None for a single pass.
        selected_positions: Sparse attention: the positions that the last indexer so far has selected for each token,
            which later layers without an indexer read; None before the first.
        item_indices: [n], int64, device: the tokens of the step that take a row of `item_embeds` instead of the
            embedding of their id; None in steps without images, audio or embeddings.
        item_index: [T], int32, device: the row of `item_embeds` that each token takes, -1 for none. With static shapes,
            and in models that are traced, it is read instead of `item_indices`, see `layers/item_rows.py`.
        item_embeds: [n, embedding_width], compute dtype, device.
        rope_positions: [3, T], int32, device: temporal position, height and width of each token; None in steps in which
            the three are equal, and are the `positions` of the model.
        cross_inputs: Of models with cross-attention, parallel to the requests of the step: the encoder's result of each
            request, [rows, width], compute dtype, device; None for a request without items. None in steps without any.
        query_start_loc: int32 [R + 1], host: the first token of each request; only with `cross_inputs`.
        kept_layers: Layers before which the model keeps the residual stream, rising; see `CausalLM.keeps_layers`.
        kept_states: What it has kept so far, [T, hidden_size] each.
    """

    metadata: Mapping[Hashable, AttentionMetadata]
    prompt_lens: torch.Tensor | None = None
    prompt_starts: Sequence[int] | None = None
    prompt_starts_array: torch.Tensor | None = None
    token_types: torch.Tensor | None = None
    state_metadata: StateArguments | None = None
    state_passes: StatePasses | None = None
    selected_positions: torch.Tensor | None = None
    item_indices: torch.Tensor | None = None
    item_index: torch.Tensor | None = None
    item_embeds: torch.Tensor | None = None
    rope_positions: torch.Tensor | None = None
    cross_inputs: Sequence[torch.Tensor | None] | None = None
    query_start_loc: np.ndarray | None = None
    kept_layers: tuple[int, ...] = ()
    kept_states: list[torch.Tensor] = field(default_factory=list)
