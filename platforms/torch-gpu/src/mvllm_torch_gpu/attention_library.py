"""AttentionLibrary: the interface of a package that computes attention over the cache that the Triton kernels write."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar, Final

import torch

from mvllm.plugin_api import AttentionSpec, BatchLayout
from mvllm_torch_gpu.paged_metadata import PagedMetadata

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
UNSUPPORTED: Final = object()
"""The plan of a step that a library does not support after all."""


class AttentionLibrary(ABC):
    """Attention of one layer by one package.

    Args:
        module: The package.
        spec: The layer; `refusals` is empty for it.

    Attributes:
        name: Name of the library, for settings and messages.
        module_name: Module to import.
    """

    name: ClassVar[str]
    module_name: ClassVar[str]

    def __init__(self, module: ModuleType, spec: AttentionSpec) -> None:
        self.module, self.spec = module, spec

    @classmethod
    def refusals(cls, module: ModuleType, spec: AttentionSpec) -> list[str]:
        """Reasons why the package does not support a layer; empty if it does."""
        reasons = []
        if spec.dtype not in DTYPES:
            reasons.append(f"{cls.name} computes in {' and '.join(DTYPES)}, not in {spec.dtype}")
        if spec.kv_dtype != spec.dtype:
            reasons.append(f"{cls.name} reads a cache of the compute dtype, not of {spec.kv_dtype}")
        if spec.sinks:
            reasons.append(f"{cls.name} has no sinks")
        if spec.values_in_keys or spec.value_size != spec.head_size:
            reasons.append(f"{cls.name} needs values of the keys' size, stored separately")
        return reasons + spec.contradictions()

    @abstractmethod
    def takes(self, metadata: PagedMetadata) -> bool:
        """Whether the package supports such steps. For decode steps, the answer depends on the sizes of the tables."""

    def accepts_block_size(self, block_size: int) -> bool:
        """Whether the package reads a cache with blocks of so many tokens."""
        return True

    def prepare(self, device: torch.device) -> None:
        """Allocates what every step uses, so that the measurement of memory includes it. Idempotent."""

    def plan(self, batch: BatchLayout, device: torch.device) -> Any:
        """Prepares a step that `takes` accepts from the host's arrays, without waiting for this step's inputs.

        Returns:
            Anything; UNSUPPORTED if the arrays show that the package does not support the step.
        """
        return None

    @abstractmethod
    def run(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, metadata: PagedMetadata, plan: Any
    ) -> torch.Tensor:
        """Attention output [T, heads, size] for a query [T, heads, size]; finite for padding tokens.

        Args:
            query: The step's; elements of a head are contiguous.
            keys, values: [num_blocks, block_size, num_kv_heads, size].
            metadata, plan: The step's metadata and plan.
        """


def parameters(function: Callable[..., Any] | None) -> set[str]:
    """Names of a function's parameters; none if it has no signature."""
    try:
        return set() if function is None else set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return set()


def without_padding(found: torch.Tensor, is_real: torch.Tensor) -> torch.Tensor:
    """`found` [T, heads, size] with zeros where `is_real` [T] is False: libraries leave these rows undefined."""
    return found.masked_fill(~is_real[:, None, None], 0.0)
