"""Attention by FlashAttention and FlashInfer if these packages are installed; neither is required.

Both read the cache that the Triton kernels write, so each step may use either. The layers that a package supports are
derived from the parameters of its functions and from its documentation of sizes and dtypes.

    flash_attn   reads the block table on the device; blocks are multiples of 256 tokens
    flashinfer   needs a plan made on the host from the host's tables; not for steps that a graph replays
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch

from mvllm.plugin_api import AttentionSpec, BatchLayout, get_logger
from mvllm_torch_gpu.paged_metadata import PagedMetadata

logger = get_logger("mvllm.torch_gpu.attention_libraries")

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
WORKSPACE_BYTES = 128 << 20
"""Size of FlashInfer's workspace for split sums, as its documentation recommends; shared by all layers."""


class AttentionLibrary(ABC):
    """Attention of one layer by one package.

    Args:
        module: The package.
        spec: The layer; `refusals` is empty for it.
    """

    name: str

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

    def accepts_block_size(self, block_size: int) -> bool:
        """Whether the package reads a cache with blocks of so many tokens."""
        return True

    def plan(self, batch: BatchLayout, device: torch.device) -> Any:
        """Prepares a step for `attend` from the host's arrays, without waiting for the device."""
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


class FlashAttention(AttentionLibrary):
    """The package `flash_attn`."""

    name = "flash_attn"

    @classmethod
    def refusals(cls, module: ModuleType, spec: AttentionSpec) -> list[str]:
        reasons = super().refusals(module, spec)
        if spec.head_size > 256 or spec.head_size % 8:
            reasons.append(f"{cls.name} supports head sizes up to 256 in multiples of 8, not {spec.head_size}")
        needed = {"block_table", "window_size"} | ({"softcap"} if spec.soft_cap is not None else set())
        for function in ("flash_attn_varlen_func", "flash_attn_with_kvcache"):
            lacking = needed - _parameters(getattr(module, function, None))
            if lacking:
                reasons.append(f"the installed {cls.name} has no {', '.join(sorted(lacking))} in {function}")
        return reasons

    def takes(self, metadata: PagedMetadata) -> bool:
        return self.accepts_block_size(metadata.block_size)

    def accepts_block_size(self, block_size: int) -> bool:
        return block_size % 256 == 0

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, metadata: PagedMetadata, plan: Any
    ) -> torch.Tensor:
        spec, starts = self.spec, metadata.query_start_loc
        options: dict[str, Any] = {
            "softmax_scale": spec.scale,
            "causal": True,
            "window_size": (-1, -1) if spec.sliding_window is None else (spec.sliding_window - 1, 0),
            "block_table": metadata.block_table,
        }
        if spec.soft_cap is not None:
            options["softcap"] = spec.soft_cap
        found: torch.Tensor
        if metadata.is_decode(len(query)):
            found = self.module.flash_attn_with_kvcache(
                query.unsqueeze(1), keys, values, cache_seqlens=metadata.seq_lens, **options
            ).squeeze(1)
            is_real = metadata.seq_lens > 0
        else:
            key_starts = torch.nn.functional.pad(metadata.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
            found = self.module.flash_attn_varlen_func(
                query, keys, values, starts, key_starts, metadata.max_query_len, metadata.max_seq_len, **options
            )
            is_real = torch.arange(len(query), device=query.device) < starts[-1]
        return found.masked_fill(~is_real[:, None, None], 0.0)  # output after the last token is undefined


class FlashInfer(AttentionLibrary):
    """The package `flashinfer`, for steps with prompt tokens."""

    name = "flashinfer"
    _workspaces: Mapping[torch.device, torch.Tensor] = {}

    def __init__(self, module: ModuleType, spec: AttentionSpec) -> None:
        super().__init__(module, spec)
        self._wrappers: list[Any] = []

    @classmethod
    def refusals(cls, module: ModuleType, spec: AttentionSpec) -> list[str]:
        reasons = super().refusals(module, spec)
        if spec.head_size not in (64, 128, 256):
            reasons.append(f"{cls.name} supports head sizes 64, 128 and 256, not {spec.head_size}")
        wrapper = getattr(module, "BatchPrefillWithPagedKVCacheWrapper", None)
        needed = {"sm_scale", "window_left", "logits_soft_cap", "q_data_type", "causal"}
        lacking = needed - _parameters(getattr(wrapper, "plan", None))
        if lacking or "out" not in _parameters(getattr(wrapper, "run", None)):
            reasons.append(f"the installed {cls.name} has other parameters of plan and run than this version supports")
        return reasons

    def takes(self, metadata: PagedMetadata) -> bool:
        return metadata.max_query_len > 1 and not metadata.capture

    def plan(self, batch: BatchLayout, device: torch.device) -> Any:
        spec, size = self.spec, batch.block_size
        real = int(np.count_nonzero(batch.seq_lens))  # padding comes last
        lens = batch.seq_lens[:real]
        pages = -(-lens // size)
        table = batch.block_table[:real]
        indices = table[np.arange(table.shape[1]) < pages[:, None]]
        wrapper = self._wrapper(device)
        wrapper.plan(
            _copy(batch.query_start_loc[: real + 1]),
            _copy(np.concatenate(([0], pages.cumsum())).astype(np.int32)),
            _copy(indices).to(device, non_blocking=True),
            _copy(lens - (pages - 1) * size),
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_size,
            size,
            causal=True,
            sm_scale=spec.scale,
            window_left=-1 if spec.sliding_window is None else spec.sliding_window - 1,
            logits_soft_cap=spec.soft_cap,
            q_data_type=DTYPES[spec.dtype],
        )
        return wrapper, int(batch.query_start_loc[real])

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, metadata: PagedMetadata, plan: Any
    ) -> torch.Tensor:
        wrapper, num_real = plan
        found = torch.zeros_like(query, memory_format=torch.contiguous_format)
        wrapper.run(query[:num_real].contiguous(), (keys, values), out=found[:num_real])
        return found

    def _wrapper(self, device: torch.device) -> Any:
        """Alternates between two wrappers: the device may still read the previous plan."""
        if len(self._wrappers) < 2:
            if device not in FlashInfer._workspaces:
                room = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
                FlashInfer._workspaces = {**FlashInfer._workspaces, device: room}
            made = self.module.BatchPrefillWithPagedKVCacheWrapper(FlashInfer._workspaces[device], "NHD")
            self._wrappers.append(made)
            return made
        self._wrappers.reverse()
        return self._wrappers[0]


LIBRARIES: tuple[type[AttentionLibrary], ...] = (FlashAttention, FlashInfer)


def libraries_for(spec: AttentionSpec, names: tuple[str, ...]) -> tuple[list[AttentionLibrary], list[str]]:
    """The libraries of `names` that are installed and support a layer, and the reasons why the others do not."""
    found: list[AttentionLibrary] = []
    reasons: list[str] = []
    for kind in LIBRARIES:
        if kind.name not in names:
            continue
        module = _installed(kind.name)
        refused = [f"{kind.name} is not installed"] if module is None else kind.refusals(module, spec)
        reasons += refused
        if module is not None and not refused:
            found.append(kind(module, spec))
    return found, reasons


def _installed(name: str) -> ModuleType | None:
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError, AttributeError) as e:  # for example, it was built for another torch
        logger.warning("%s is installed, but cannot be imported, and is left out: %s: %s", name, type(e).__name__, e)
        return None


def _parameters(function: Callable[..., Any] | None) -> set[str]:
    """Names of a function's parameters; none if it has no signature."""
    try:
        return set() if function is None else set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return set()


def _copy(array: np.ndarray) -> torch.Tensor:
    """A copy on the host, because core overwrites its arrays."""
    return torch.from_numpy(np.array(array, dtype=np.int32))
