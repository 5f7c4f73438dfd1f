"""Attention backend and op providers: core's references, run on the device, with one kernel of the device's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

import mvllm.plugin_api as api
from mvllm_example_device.block_copies import LateBlocks
from mvllm_example_device.faults import FaultPlan
from mvllm_example_device.plugin import DTYPES
from mvllm_example_device.runtime import ExampleRuntime
from mvllm_example_device.strict import Strict

MAX_HEAD_SIZE = 576


class ExampleAttention(Strict, LateBlocks, api.ReferenceAttention):
    """The reference on this device. Begins steps, counts shapes, and returns NaN for the fault `nan`."""

    def __init__(self, spec: api.AttentionSpec, runtime: ExampleRuntime, faults: FaultPlan) -> None:
        super().__init__(spec)
        self._runtime, self._faults = runtime, faults

    @classmethod
    def validate(cls, spec: api.AttentionSpec) -> list[str]:
        reasons = api.ReferenceAttention.validate(spec)
        if spec.head_size > MAX_HEAD_SIZE:
            reasons.append(f"heads have at most {MAX_HEAD_SIZE} elements, not {spec.head_size}")
        return reasons

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> api.KVCache:
        """One tensor for keys and values of equal size; otherwise one for each, or one for keys that hold values."""
        spec = self.spec
        shape = (2, num_blocks, block_size, spec.num_kv_heads, spec.head_size)
        is_one = not spec.values_in_keys and spec.value_size == spec.head_size
        sizes = (spec.head_size,) if spec.values_in_keys else (spec.head_size, spec.value_size)
        shapes = [shape] if is_one else [(*shape[1:4], size) for size in sizes]
        parts = tuple(self._runtime.empty(each, getattr(torch, spec.kv_dtype)).zero_() for each in shapes)
        return parts[0] if is_one else parts

    def build_metadata(self, batch: api.BatchLayout) -> api.AttentionMetadata:
        self._runtime.begin_step(batch)
        return super().build_metadata(batch)

    def forward(
        self, query: torch.Tensor, kv: api.KVCache, metadata: api.AttentionMetadata, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        self._runtime.check()
        self._runtime.compile("attention", *query.shape)
        output = super().forward(query, kv, metadata, sinks)
        return output * torch.nan if self._faults.poisoned else output

    def select(
        self, query: torch.Tensor, weights: torch.Tensor, kv: api.KVCache, metadata: api.AttentionMetadata
    ) -> torch.Tensor:
        self._runtime.check()
        self._runtime.compile("select", *query.shape)
        return super().select(query, weights, kv, metadata)

    def forward_selected(
        self, query: torch.Tensor, kv: api.KVCache, metadata: api.AttentionMetadata, positions: torch.Tensor
    ) -> torch.Tensor:
        self._runtime.check()
        self._runtime.compile("forward_selected", *query.shape)
        return super().forward_selected(query, kv, metadata, positions)


def providers(compiled: Callable[..., None]) -> Sequence[api.OpProvider]:
    """The operations of the device.

    Args:
        compiled: Called with the name and the shapes of each call, which identify a compiled program.
    """

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        compiled("rms_norm", *x.shape)
        return torch.ops.mvllm_example_device.rms_norm(x, weight, eps)

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiplies with the transposed weight, which `prepare` has made."""
        compiled("linear", *x.shape, *weight.shape)
        return F.linear(x, weight.t(), bias)

    return [
        api.OpProvider("rms_norm", "example_rms_norm", rms_norm, _supports),
        api.OpProvider("linear", "example_linear", linear, _supports, prepare=lambda weight: weight.t().contiguous()),
    ]


def _supports(case: api.OpCase) -> list[str]:
    return [] if case.dtype in DTYPES else [f"dtype {case.dtype} is not among {', '.join(DTYPES)}"]
