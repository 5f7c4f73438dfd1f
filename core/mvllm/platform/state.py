"""The interface of sequence states: tensors of fixed size that a layer reads and overwrites in each step.

Layers such as Mamba-2 or gated DeltaNet have no keys and values. What they keep of a sequence is a *state*: one or
several tensors whose size does not grow. A worker holds `num_slots` states of each layer. A *slot* is an index that is
the same in all layers and tensors:

    slot            0     1     2     3   | 4: scratch memory, written by padding
    conv state      [---] [---] [---] [---] [---]
    SSM state       [---] [---] [---] [---] [---]

A step reads a request's state in one slot and writes it to another, or to the same:

    read_slots   write_slots
    -1           2              a sequence starts: its state is zeros
    2            2              ordinary decoding, in place
    2            0              slot 2 is kept unchanged for other sequences that begin with the same tokens
    -1           -1             padding

Index -1 of a torch tensor is its last element, so each state tensor has one more slot, to which padding may write.
All of this is since contract 1.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mvllm.contract import Phase, phase
from mvllm.platform import tensor_caches
from mvllm.platform.block_transfer import BlockTransfer
from mvllm.platform.shapes import StepKind

if TYPE_CHECKING:
    import numpy as np
    import torch


@phase(Phase.WORKER)
@dataclass(frozen=True)
class StateTensor:
    """One state tensor of one sequence in one layer, as this rank holds it.

    Attributes:
        shape: Its shape, without the dimension of the slots.
        dtype: Storage dtype by name: `float32`, `bfloat16` or `float16`.
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """The storage dtype of torch."""
        import torch

        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[self.dtype]


@phase(Phase.WORKER)
@dataclass(frozen=True)
class StateSpec:
    """The state of one sequence in one layer, as this rank holds it.

    Attributes:
        tensors: Its tensors, in the order in which the layer passes them to operations.
    """

    tensors: tuple[StateTensor, ...]

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes of the tensors, without padding."""
        return sum(math.prod(tensor.shape) * tensor.torch_dtype.itemsize for tensor in self.tensors)


State = tuple["torch.Tensor", ...]
"""The states of one layer: a tensor [num_slots + 1, *shape] for each StateTensor of its spec."""


@phase(Phase.WORKER)
@dataclass
class StateLayout:
    """Requests and slots of one step. The argument of `StateBackend.build_metadata`.

    R and T are the numbers of requests and tokens after padding, as in BatchLayout. A padding request has no tokens and
    slots -1. Padding tokens come last and belong to no request. All arrays are int32. Host arrays are core's buffers:
    they keep this step's values until `build_metadata` and the model have returned.

    Attributes:
        num_requests: R.
        num_tokens: T.
        max_query_len: As in BatchLayout. With `static_shapes` 1 if R = T and every request has at most one token, and T
            otherwise, so that it may be a constant of a compiled program.
        query_start_loc: Host, [R + 1]: tokens of request r are [query_start_loc[r], query_start_loc[r + 1]).
        read_slots: Host, [R]: slot with the state before the request's first token; -1 for zeros.
        write_slots: Host, [R]: slot for the state after its last token; -1 for padding. No two requests write to the
            same slot, and none writes to a slot that another request reads in this step.
        query_start_loc_device, read_slots_device, write_slots_device: The same on the device.
        kind, num_decodes, capture: As in BatchLayout.
    """

    num_requests: int
    num_tokens: int
    max_query_len: int
    query_start_loc: np.ndarray
    read_slots: np.ndarray
    write_slots: np.ndarray
    query_start_loc_device: torch.Tensor
    read_slots_device: torch.Tensor
    write_slots_device: torch.Tensor
    kind: StepKind = StepKind.MIXED
    num_decodes: int = 0
    capture: bool = False


@phase(Phase.WORKER)
@dataclass(frozen=True)
class StateArguments:
    """The last arguments of operations on states, in one step. Returned by `build_metadata`.

    Attributes:
        query_start_loc: int32 [R + 1], device.
        read_slots, write_slots: int32 [R], device.
        max_query_len: As in StateLayout.
        capture: As in StateLayout.
    """

    query_start_loc: torch.Tensor
    read_slots: torch.Tensor
    write_slots: torch.Tensor
    max_query_len: int
    capture: bool = False


@phase(Phase.WORKER)
class StateBackend:
    """Memory for the states of one platform's layers with one spec.

    Core asks `Platform.state_backend` once for each distinct spec of the model. Then it calls `bytes_per_sequence`,
    before it divides the memory, and `allocate` once per layer; in each step `build_metadata`. The states are read and
    written by operations (`OpProvider`), which get the tensors of `allocate`.

    The methods are implemented for torch tensors on the device. A platform overrides those that it does otherwise.
    """

    def __init__(self, spec: StateSpec) -> None:
        self.spec = spec

    def bytes_per_sequence(self) -> int:
        """Bytes of one slot of one layer, as `allocate` stores it."""
        return self.spec.bytes_per_sequence

    def allocate(self, num_slots: int, device: torch.device) -> State:
        """The states of one layer: zeros, [num_slots + 1, *shape] for each tensor of the spec.

        Operations require the shapes and dtypes; strides may differ.

        Raises:
            MemoryError: They do not fit.
        """
        import torch

        return tuple(
            torch.zeros((num_slots + 1, *tensor.shape), dtype=tensor.torch_dtype, device=device)
            for tensor in self.spec.tensors
        )

    def build_metadata(self, layout: StateLayout) -> StateArguments:
        """The arguments of a step's operations, or an instance of a subclass with more data.

        Core calls it once per step, on the backend of any of the model's specs. So the result does not depend on the
        spec. In a step with draft tokens core calls it once more for each draft position: operations are called once
        with each result, as in a step whose requests have one token. It does not wait for the device. Compiled
        functions get the result as an argument, see CompileBackend.
        """
        return StateArguments(
            layout.query_start_loc_device,
            layout.read_slots_device,
            layout.write_slots_device,
            layout.max_query_len,
            layout.capture,
        )

    def copy_slots(self, state: State, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copies the states of one layer from slot `source[i]` to slot `destination[i]`, both int64 [n].

        Optional: core does not call it. The conformance suite checks it. No slot is among both.
        """
        for tensor in state:
            tensor[destination.to(tensor.device)] = tensor[source.to(tensor.device)]

    def fill(self, state: State, value: float) -> None:
        """Sets every element of a layer's states to `value`, which may be NaN. The suite simulates reused memory."""
        for tensor in state:
            tensor.fill_(value)

    def slot_format(self) -> str:
        """How the bytes of `export_slots` represent a state. As `AttentionBackend.block_format`."""
        tensors = ", ".join(f"{tensor.dtype}{list(tensor.shape)}" for tensor in self.spec.tensors)
        return f"{type(self).__module__}.{type(self).__qualname__} {tensors}"

    def export_slots(self, state: State, slots: np.ndarray, out: np.ndarray) -> BlockTransfer | None:
        """Copies states of one layer to host memory, as `AttentionBackend.export_blocks` copies blocks.

        For `Capabilities.kv_transfer`. The copy has what operations submitted earlier have written.

        Args:
            state: The layer's states.
            slots: Host, int64 [n], distinct.
            out: Host, uint8 [n, spec.bytes_per_sequence], contiguous: receives the bytes of slot `slots[i]` in row i.

        Returns:
            None if the copy is done; otherwise `out` is complete after `wait` of the result.
        """
        tensor_caches.export_rows(state, slots, out)
        return None

    def import_slots(self, state: State, slots: np.ndarray, data: np.ndarray) -> BlockTransfer | None:
        """Replaces states of one layer by bytes that `export_slots` has returned. Other slots keep theirs.

        For `Capabilities.kv_transfer`. Operations submitted later read the new contents.

        Args:
            state: The layer's states.
            slots: Host, int64 [n], distinct.
            data: Host, uint8 [n, spec.bytes_per_sequence], contiguous, not changed: row i is for slot `slots[i]`.

        Returns:
            None if `data` is not read any more; otherwise it is read until `wait` of the result.
        """
        tensor_caches.import_rows(state, slots, data)
        return None
