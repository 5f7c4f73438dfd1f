"""What layers are built with, and what they are run with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from mvllm.distributed.group_coordinator import GroupCoordinator
from mvllm.ops.dtypes import dtype_name
from mvllm.ops.registry import OpTable, ResolvedOp
from mvllm.platform.attention import AttentionBackend, AttentionMetadata, AttentionSpec

if TYPE_CHECKING:
    from mvllm.layers.matrix_layout import MatrixLayout
    from mvllm.layers.quantization.interface import QuantizationMethod
    from mvllm.layers.quantization.quantized_matrix import QuantizedMatrix


@dataclass(frozen=True)
class ShardIndex:
    """One of the equal parts that layers are cut into.

    Attributes:
        number: Which of them.
        of: How many there are.
    """

    index: int
    count: int


@dataclass(frozen=True)
class BuildContext:
    """Everything outside the model that its layers need while they are built.

    Attributes:
        dtype: Compute dtype.
        device: Where parameters live.
        ops: The operations of this worker.
        attention: The backend for a spec; equal specs get the same backend.
        tp: The ranks that share each layer.
        pp: The ranks that each hold a run of layers.
        kv_dtype: Storage dtype of the KV cache by name.
        quantization: How the model's matrices are quantized; None for a model of floats.
        with_adapters: LoRA adapters will add to what linear layers compute.
        num_devices: Devices that this worker drives, and over which its share of each layer is cut once more.
        spread: `DeviceRuntime.place`, for tensors of several devices.
    """

    dtype: torch.dtype
    device: torch.device
    ops: OpTable
    attention: Callable[[AttentionSpec], AttentionBackend]
    tp: GroupCoordinator
    pp: GroupCoordinator
    kv_dtype: str
    quantization: QuantizationMethod | None = None
    with_adapters: bool = False
    num_devices: int = 1
    spread: Callable[[torch.Tensor, int | None], torch.Tensor] | None = None

    @property
    def shares(self) -> tuple[ShardIndex, ...]:
        """The share in each layer of each device of this worker. They lie side by side.

        tensor_parallel_size = 4, 2 workers with 2 devices each      worker   0   |   1
                                                                     share  0   1 | 2   3
        """
        first, of = self.tp.rank_in_group * self.num_devices, self.tp.world_size * self.num_devices
        return tuple(ShardIndex(first + i, of) for i in range(self.num_devices))

    def place(self, tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
        """The same tensor, each device of this worker with an equal part along `dim`; all of it with None."""
        return tensor if self.num_devices == 1 or self.spread is None else self.spread(tensor, dim)

    @property
    def dtype_name(self) -> str:
        """The compute dtype's name."""
        return dtype_name(self.dtype)

    def op(self, name: str, **facts: object) -> ResolvedOp:
        """The implementation of operation `name` in the compute dtype."""
        return self.ops.get(name, self.dtype, **facts)

    def floats(self, dtype: torch.dtype | None = None) -> BuildContext:
        """The same for a layer that is never quantized; `dtype` to compute it in, where that is another."""
        return dataclasses.replace(self, dtype=dtype or self.dtype, quantization=None)

    def quantized(self, layout: MatrixLayout, tied_to: nn.Parameter | None = None) -> QuantizedMatrix | None:
        """How a linear layer's matrix is quantized; None where it is floats. `tied_to` as in QuantizationMethod."""
        return None if self.quantization is None else self.quantization.matrix(self, layout, tied_to)

    def parameter(self, *shape: int) -> nn.Parameter:
        """A parameter on the device. It takes no memory where that is handed out on first use: loading fills it."""
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device), requires_grad=False)


@dataclass
class ForwardStep:
    """What the layers need to know about the batch of one step.

    Attributes:
        metadata: The attention metadata of the step, by the `metadata_key` of the layers that read it.
        prompt_lens: [T], int32, device: for each token the length of its request's prompt. Read only by models whose
            `uses_prompt_lens` is set (RoPE scalings that depend on the length of the sequence, see RotaryEmbedding);
            None treats every prompt as no longer than the original context.
        prompt_starts: Host, for encoders: where each prompt begins among the tokens, and where the last ends.
        token_types: [T], int32, device: which of two texts each token belongs to; None where all belong to the first.
            Read only by models whose `uses_token_types` is set.
    """

    metadata: Mapping[Hashable, AttentionMetadata]
    prompt_lens: torch.Tensor | None = None
    prompt_starts: Sequence[int] | None = None
    token_types: torch.Tensor | None = None
