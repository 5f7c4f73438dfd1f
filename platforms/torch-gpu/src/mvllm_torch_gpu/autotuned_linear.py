"""Linear layers that measure torch's library and the Triton kernel for few rows, and use the faster one.

A decode step reads every weight once, so its products take the time that memory needs at least. Libraries are made for
many rows and reach less of it for some shapes. The kind of a product is: the number of rows, rounded up to a power of
two, the shape of the weight, and the dtype. The first product of a kind outside of a capture is timed with both, on
copies of its weight, so that the weight comes from memory and not from a cache, as it does between layers. Products
with more rows, and of other dtypes, use torch. So do weights with few rows: the routers of experts, which all ranks
must compute with the same bits, although each rank measures for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from mvllm.plugin_api import get_logger
from mvllm_torch_gpu.device_module import CUDA, DeviceModule
from mvllm_torch_gpu.settings import LINEAR
from mvllm_triton.activation import silu_and_mul
from mvllm_triton.skinny_gemm import is_supported, skinny_gemm, skinny_gemm_silu_and_mul

logger = get_logger("mvllm.torch_gpu.autotuned_linear")

MEASURED, TORCH, TRITON = LINEAR

MOST_EXPERTS = 512
"""Rows of a weight up to which it may be a router."""

_CALLS = 16
_ROUNDS = 3
_CACHES = 4
"""The copies of a weight take so many times the size of the device's cache."""

_USUAL_CACHE = 64 << 20

Ways = Mapping[str, Callable[..., torch.Tensor]]
"""Functions of a product by the way that computes it, TORCH and TRITON; arguments like those of the operation."""

Clock = Callable[[Sequence[Callable[[], Any]]], float | None]
"""Seconds that calls take on the device, one after the other; None if they cannot be timed now."""


def _separate(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return silu_and_mul(F.linear(x, weight, bias))


LINEAR_WAYS: Ways = {TORCH: F.linear, TRITON: skinny_gemm}
GATED_WAYS: Ways = {TORCH: _separate, TRITON: skinny_gemm_silu_and_mul}


class AutotunedLinear:
    """The operations `linear` and `linear_silu_and_mul`; see the module.

    Args:
        choice: One of settings.LINEAR.
        module: Torch's module for the device.
        clock: Times calls.
    """

    def __init__(self, choice: str = MEASURED, module: DeviceModule = CUDA, *, clock: Clock | None = None) -> None:
        self._choice = choice
        self._given_clock = clock
        self._module = module
        self._chosen: dict[Hashable, str] = {}
        self._failed = False

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x · weightᵀ + bias."""
        if self._takes(x, weight) and self.choose(x, weight, LINEAR_WAYS) == TRITON:
            return skinny_gemm(x, weight, bias)
        return F.linear(x, weight, bias)

    def linear_silu_and_mul(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """silu of the first half of x · weightᵀ + bias, times the second half; in one launch or in two."""
        if self._takes(x, weight) and self.choose(x, weight, GATED_WAYS) == TRITON:
            return skinny_gemm_silu_and_mul(x, weight, bias)
        return _separate(x, weight, bias)

    def _takes(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether the kernel may compute a product. A compiler of the step knows torch's operation instead."""
        return self._choice != TORCH and not torch.compiler.is_compiling() and is_supported(x, weight)

    def choose(self, x: torch.Tensor, weight: torch.Tensor, ways: Ways) -> str:
        """TORCH or TRITON, for a product that the kernel supports, with the function of each."""
        if self._choice != MEASURED:
            return self._choice
        if weight.shape[0] <= MOST_EXPERTS:
            return TORCH
        kind = (ways[TRITON].__name__, *_kind_of(x, weight))
        chosen = self._chosen.get(kind)
        if chosen is None:
            chosen = TORCH if self._failed else self._faster(x, weight, ways, kind)
        return chosen

    def _faster(self, x: torch.Tensor, weight: torch.Tensor, ways: Ways, kind: Hashable) -> str:
        """The faster way, stored for this kind; TORCH if nothing can be timed."""
        clock = self._given_clock
        if clock is None:
            if not _is_measurable(self._module, weight.device):
                return TORCH
            clock = partial(device_seconds, self._module)
        weights = [weight]
        try:
            weights += _copies(self._module, weight)
            seconds = {
                name: clock([partial(product, x, each, None) for each in weights]) for name, product in ways.items()
            }
        except Exception as e:  # noqa: BLE001  (compilers and drivers raise errors of many classes)
            logger.warning("The kernel for products of few rows failed and is not used: %s", e)
            self._failed = True
            return TORCH
        measured = {name: found for name, found in seconds.items() if found is not None}
        if len(measured) < len(seconds):
            return TORCH
        best = min(measured, key=lambda name: measured[name])
        logger.info("Products %s: %s, of %s.", kind, best, measured)
        self._chosen[kind] = best
        return best


def device_seconds(module: DeviceModule, calls: Sequence[Callable[[], Any]]) -> float | None:
    """Time of a round of calls, the best of a few, replayed from a graph so that the host's time does not count."""
    repeats = -(-_CALLS // len(calls))
    best = float("inf")
    with module.allows_waiting():
        for call in calls:  # compiles, and allocates what cannot be allocated in a capture
            call()
        graph = module.new_graph()
        with module.captures(graph, None):
            for _ in range(repeats):
                for call in calls:
                    call()
        for _ in range(_ROUNDS):
            begin, end = (module.api.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end) / 1e3 / repeats)
    return best


def _copies(module: DeviceModule, weight: torch.Tensor) -> list[torch.Tensor]:
    """Copies of a weight that, together with it, do not fit the device's cache; fewer if memory does not suffice."""
    if weight.device.type == "cpu":
        return []
    properties = module.api.get_device_properties(weight.device)
    cache = int(getattr(properties, "L2_cache_size", 0)) or _USUAL_CACHE
    count = _CACHES * cache // weight.nbytes
    try:
        return list(weight.unsqueeze(0).repeat(count, 1, 1)) if count else []
    except torch.OutOfMemoryError:
        return []


def _is_measurable(module: DeviceModule, device: torch.device) -> bool:
    if device.type in ("cpu", "meta"):
        return False
    capturing = getattr(module.api, "is_current_stream_capturing", None)
    return not (capturing is not None and capturing())


def _kind_of(x: torch.Tensor, weight: torch.Tensor) -> tuple[Hashable, ...]:
    num_rows = x.numel() // weight.shape[1]
    return 1 << (num_rows - 1).bit_length(), *weight.shape, x.dtype, weight.device
