"""Lowering: the functions that compute the nodes of a step graph with MLX, and what they are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import psutil  # type: ignore[import-untyped]

from mvllm_graph import Node, substitute

if TYPE_CHECKING:
    from mvllm_mlx.attention import AttentionStep
    from mvllm_mlx.states import StateStep

DTYPES = {
    "bool": mx.bool_,
    "uint8": mx.uint8,
    "int8": mx.int8,
    "int32": mx.int32,
    "int64": mx.int64,
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
    "float32": mx.float32,
}
"""MLX's dtypes by their names in a graph."""


@dataclass
class Run:
    """The values of one run, while its nodes are computed.

    Attributes:
        values: Arrays by name. KV caches are pairs of keys and values; the second is None for values in the keys.
        symbols: Sizes by symbol.
        attention: Indices that all attention layers of the step share; None for a graph without attention.
        states: Indices that all layers with a state share; None for a graph without states.
    """

    values: dict[str, Any]
    symbols: Mapping[str, int]
    attention: AttentionStep | None = None
    states: StateStep | None = None

    def inputs(self, node: Node) -> list[Any]:
        """The arrays of a node's inputs; None for absent ones."""
        return [None if name is None else self.values[name] for name in node.inputs]

    def sizes(self, dims: Sequence[int | str]) -> tuple[int, ...]:
        """A shape as numbers."""
        return tuple(int(substitute(dim, self.symbols)) for dim in dims)

    def size(self, dim: int | str) -> int:
        """One size as a number."""
        return int(substitute(dim, self.symbols))


Lowering = Callable[[Run, Node], Sequence[Any]]
"""Computes a node: its results as MLX arrays."""


def to_mlx(array: np.ndarray, dtype: str) -> mx.array:
    """A copy of a host array; bfloat16 arrives as bits."""
    made = mx.array(np.ascontiguousarray(array))
    if dtype == "bfloat16":
        return made.view(mx.bfloat16)
    return made if made.dtype == DTYPES[dtype] else made.astype(DTYPES[dtype])


def to_numpy(array: mx.array) -> np.ndarray:
    """A copy on the host; bfloat16 as bits."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def require_memory(num_bytes: int, what: str) -> None:
    """Raises MemoryError unless the machine has `num_bytes` for `what`: MLX ends the process where they do not fit."""
    available = psutil.virtual_memory().available
    if num_bytes > available:
        raise MemoryError(f"{what}: {num_bytes:,} bytes are needed, and {available:,} are available.")
