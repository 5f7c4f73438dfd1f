"""Interface of attention by a package other than the Triton kernels, on the same paged cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import ModuleType
from typing import Any, ClassVar, Final

import torch

from mvllm.plugin_api import AttentionSpec, BatchLayout
from mvllm_torch_gpu.paged_metadata import PagedMetadata

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
UNSUPPORTED: Final = object()
"""The plan of a step that a library does not support."""


class AttentionLibrary(ABC):
    """Attention of one layer by one package.

    Args:
        module: The package.
        spec: The layer; `refusals` is empty for it.
    """

    name: str
    module_name: ClassVar[str]
    """Name of the module to import."""

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
        """Whether the package supports such steps."""

    def plan(self, batch: BatchLayout, device: torch.device) -> Any:
        """Prepares a step for `attend` from the host's arrays, without waiting for the device.

        Returns:
            Anything; UNSUPPORTED if the package does not support the step.
        """
        return None

    @abstractmethod
    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, metadata: PagedMetadata, plan: Any
    ) -> torch.Tensor:
        """Attention output [T, heads, size] for a query [T, heads, size]; finite for padding tokens.

        Args:
            query: The step's.
            keys, values: [num_blocks, block_size, num_kv_heads, size].
            metadata, plan: Of the step.
        """
