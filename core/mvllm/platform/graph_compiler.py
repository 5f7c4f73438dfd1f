"""GraphCompiler and GraphProgram: what a device with a compiler or runtime of its own implements.

The package mvllm-graph traces a model to StepGraphs, hands every weight over once, and calls `run` in each step:

    program = compiler.program(graphs)
    program.set_weight(name, array)            once for each weight and constant, while the checkpoint is read;
                                               again for updates of weights
    program.finish_weights()
    program.kv_layout(cache)                   for each cache; core then divides the memory
    program.allocate_caches(num_blocks, block_size); program.allocate_states(num_slots)
    hidden = program.run("model", inputs, sizes)[0]
    logits = program.to_host(program.run("head", {"hidden": hidden, ...}, sizes)[0])

Scheduling, batching, sampling and everything about requests stay with core. Arrays are NumPy arrays; NumPy has no
bfloat16 and float8, so these are arrays of their bits, uint16 and uint8, and `Value.dtype` names the type. All of this
is since contract 1.1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mvllm.contract import Phase, phase
from mvllm.errors import PlatformError
from mvllm.platform.attention import KVLayout
from mvllm.platform.block_transfer import BlockTransfer
from mvllm.platform.step_graph import CacheValue, StateValue, StepGraph, StepSizes

if TYPE_CHECKING:
    import numpy as np

DeviceArray = Any
"""An array on the device, as `GraphProgram.run` returns it. Core passes it on without reading it."""


@phase(Phase.WORKER)
class GraphProgram(ABC):
    """The graphs of one model, compiled, with its weights, KV caches and states. One thread.

    Attributes:
        keeps_arrays: The runtime computes from the memory of the arrays that `set_weight` gets. Core then keeps each
            array unchanged until `close`; otherwise an array is valid only during the call. A runtime whose arrays may
            alias host memory (zero-copy) must copy the array, or set this.
    """

    keeps_arrays: bool = False

    @abstractmethod
    def set_weight(self, name: str, array: np.ndarray) -> None:
        """Takes one weight or constant, contiguous, by the name of its value.

        Core gives each of them once, in any order, before `finish_weights`; and again later, between runs, if the
        model's weights are updated, or a LoRA adapter moves to a slot (`down` and `up` of `add_lora_by_slot`).

        Raises:
            MemoryError: It does not fit.
        """

    @abstractmethod
    def finish_weights(self) -> None:
        """All weights and constants are there. The program compiles now or when it runs."""

    @abstractmethod
    def kv_layout(self, cache: CacheValue) -> KVLayout:
        """Block sizes and bytes per token of one layer's cache. No side effects."""

    @abstractmethod
    def allocate_caches(self, num_blocks: int, block_size: int) -> None:
        """Allocates the cache of every layer. Contents are unspecified but finite.

        Raises:
            MemoryError: They do not fit. No layer has a cache then.
        """

    @abstractmethod
    def free_caches(self) -> None:
        """Frees all caches and states. Idempotent; `allocate_caches` and `allocate_states` may follow."""

    def allocate_states(self, num_slots: int) -> None:
        """Allocates the states of every layer: zeros, [num_slots + 1, *shape]. Called if graphs have states.

        The last slot is scratch memory: write slot -1 may write to it.

        Raises:
            MemoryError: They do not fit. No layer has a state then.
        """
        raise PlatformError(f"{type(self).__name__} does not implement allocate_states.")

    @abstractmethod
    def run(
        self, graph: str, inputs: Mapping[str, np.ndarray | DeviceArray], sizes: StepSizes
    ) -> Sequence[DeviceArray]:
        """Runs one graph, or submits it; an error of the device may come later, from `to_host`.

        Args:
            graph: Its name.
            inputs: The step inputs by name: host arrays, which keep their values until the next `to_host` has returned;
                or results of an earlier `run`. They are not changed.
            sizes: Sizes of the step.

        Returns:
            The outputs in the order of the graph.

        Raises:
            MemoryError: The step does not fit.
        """

    @abstractmethod
    def to_host(self, array: DeviceArray) -> np.ndarray:
        """Waits for a result of `run` and copies it to the host. Later runs do not change the copy."""

    def kv_bytes(self, cache: CacheValue) -> int:
        """Bytes of one layer's allocated cache. The conformance suite compares it with `kv_layout`."""
        raise PlatformError(f"{type(self).__name__} does not implement kv_bytes.")

    def fill(self, cache: CacheValue, value: float) -> None:
        """Sets every stored key and value to `value`, which may be infinite or NaN. For the conformance suite."""
        raise PlatformError(f"{type(self).__name__} does not implement fill.")

    def read_slots(self, cache: CacheValue, slots: np.ndarray) -> Sequence[np.ndarray]:
        """Copies of the contents of slots, int64 [n], in their storage format: arrays [n, ...]. For the suite."""
        raise PlatformError(f"{type(self).__name__} does not implement read_slots.")

    def read_state(self, state: StateValue) -> np.ndarray:
        """A copy of one state tensor of all slots, [num_slots + 1, *shape]. For the conformance suite."""
        raise PlatformError(f"{type(self).__name__} does not implement read_state.")

    def write_state(self, state: StateValue, array: np.ndarray) -> None:
        """Replaces one state tensor of all slots, [num_slots + 1, *shape]. For the conformance suite."""
        raise PlatformError(f"{type(self).__name__} does not implement write_state.")

    def block_format(self, cache: CacheValue) -> str:
        """As `AttentionBackend.block_format`, for one layer's allocated cache. For `Capabilities.kv_transfer`."""
        raise PlatformError(f"{type(self).__name__} does not implement block_format.")

    def export_blocks(self, cache: CacheValue, blocks: np.ndarray, out: np.ndarray) -> BlockTransfer | None:
        """As `AttentionBackend.export_blocks`: the copy has what earlier runs have stored."""
        raise PlatformError(f"{type(self).__name__} does not implement export_blocks.")

    def import_blocks(self, cache: CacheValue, blocks: np.ndarray, data: np.ndarray) -> BlockTransfer | None:
        """As `AttentionBackend.import_blocks`: later runs read the new contents."""
        raise PlatformError(f"{type(self).__name__} does not implement import_blocks.")

    def export_slots(self, state: StateValue, slots: np.ndarray, out: np.ndarray) -> BlockTransfer | None:
        """As `StateBackend.export_slots`, for one state tensor: `out` has the bytes of its elements in C order."""
        raise PlatformError(f"{type(self).__name__} does not implement export_slots.")

    def import_slots(self, state: StateValue, slots: np.ndarray, data: np.ndarray) -> BlockTransfer | None:
        """As `StateBackend.import_slots`, for one state tensor."""
        raise PlatformError(f"{type(self).__name__} does not implement import_slots.")

    def close(self) -> None:
        """Frees everything. Idempotent; no call follows."""


@phase(Phase.WORKER)
class GraphCompiler(ABC):
    """Translates StepGraphs to programs of a runtime. Returned by `Platform.graph_compiler`."""

    @abstractmethod
    def operations(self) -> Collection[str]:
        """Names of GRAPH_OPERATIONS that it translates.

        Core traces a named operation that is not among them as the array operations of its definition, if
        `GraphOperation.if_left_out` is `traced`; otherwise it refuses models that have it. An optional operation occurs
        in a graph only if it is among them.
        """

    def unsupported(self, graph: StepGraph) -> list[str]:
        """Reasons, in sentences, why the graph cannot be translated; empty if it can.

        Default: one for each operation of the graph that is not among `operations`.
        """
        known = set(self.operations())
        missing = dict.fromkeys(node.op for node in graph.nodes if node.op not in known)
        return [f"{type(self).__name__} does not translate the operation {op!r}." for op in missing]

    @abstractmethod
    def program(self, graphs: Sequence[StepGraph]) -> GraphProgram:
        """A program of several graphs that share weights, caches and states.

        Raises:
            PlatformError: A graph cannot be translated.
        """

    def close(self) -> None:
        """Frees what the compiler holds, for instance a process. Idempotent; its programs are closed before.

        Core calls it when a model is unloaded. Another call may follow, when the model is loaded again.
        """
