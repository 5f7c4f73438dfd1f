"""Attention by the package `flashinfer`, for steps with prompt tokens and for decode steps, captured ones included.

FlashInfer divides the work of a step on the host: `plan` reads the lengths and block numbers and copies tables to the
device, `run` launches the kernels. A captured step contains only `run`; it reads the tables at the addresses of its
wrapper, which the plan of each later step of the same size overwrites before the replay.

    host     plan(step 1) run ──captured──   plan(step 2)   replay   plan(step 3)   replay
    device                                   tables 2       run      tables 3       run

    prompts         two wrappers in turn, because the device may still read the tables of the previous plan
    decode steps    one wrapper per number of requests, because a graph is bound to it. A plan writes the wrapper's
                    page-locked host buffer, so it first waits until the device has copied the previous plan; that is
                    long past unless the host is a whole step ahead.

Its kernels are compiled when they are first used, which needs nvcc and takes minutes, unless they are cached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from mvllm.plugin_api import AttentionSpec, BatchLayout
from mvllm_torch_gpu.attention_library import DTYPES, AttentionLibrary, parameters, without_padding
from mvllm_torch_gpu.paged_metadata import PagedMetadata
from mvllm_torch_gpu.shapes import LARGEST_CAPTURE, decode_sizes
from mvllm_torch_gpu.step_graphs import TABLE_TOKENS

WORKSPACE_BYTES = 128 << 20
"""Size of FlashInfer's workspace for split sums, as its documentation recommends; shared by all layers."""

DECODE_SIZES = frozenset(decode_sizes())
"""Numbers of requests with a wrapper for decode steps: each takes 8 MiB of device memory."""

_TENSOR_CORE_GROUP = 4
"""Query heads per key/value head from which the kernel on tensor cores is faster, as the documentation says."""

_PREFILL, _DECODE = "BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"
_PLAN = {"sm_scale", "window_left", "logits_soft_cap", "q_data_type"}
_BUFFERS = {"use_cuda_graph", "paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer"}


class FlashInfer(AttentionLibrary):
    """The package `flashinfer`."""

    name = module_name = "flashinfer"
    _workspaces: Mapping[torch.device, torch.Tensor] = {}

    def __init__(self, module: ModuleType, spec: AttentionSpec) -> None:
        super().__init__(module, spec)
        self._prefills: list[Any] = []
        self._decodes: dict[int, _DecodeWrapper] = {}
        self._pages = _PageBuffer()

    @classmethod
    def refusals(cls, module: ModuleType, spec: AttentionSpec) -> list[str]:
        reasons = super().refusals(module, spec)
        if spec.head_size not in (64, 128, 256):
            reasons.append(f"{cls.name} supports head sizes 64, 128 and 256, not {spec.head_size}")
        for name, more, constructor in ((_PREFILL, {"causal"}, set()), (_DECODE, set(), _BUFFERS)):
            wrapper = getattr(module, name, None)
            if (
                (_PLAN | more) - parameters(getattr(wrapper, "plan", None))
                or {"out"} - parameters(getattr(wrapper, "run", None))
                or constructor - parameters(wrapper)
            ):
                reasons.append(f"the installed {cls.name} has other parameters of {name} than this version supports")
        return reasons

    def takes(self, metadata: PagedMetadata) -> bool:
        if metadata.is_decode(metadata.num_tokens):
            fits = metadata.pages * metadata.block_size <= TABLE_TOKENS
            return fits and metadata.num_tokens in DECODE_SIZES
        return metadata.max_query_len > 1 and not metadata.capture

    def prepare(self, device: torch.device) -> None:
        if device not in FlashInfer._workspaces:
            room = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            FlashInfer._workspaces = {**FlashInfer._workspaces, device: room}

    def plan(self, batch: BatchLayout, device: torch.device) -> Any:
        self.prepare(device)
        is_decode = batch.max_query_len == 1 and batch.num_requests == batch.num_tokens
        return self._plan_decode(batch, device) if is_decode else self._plan_prefill(batch, device)

    def run(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, metadata: PagedMetadata, plan: Any
    ) -> torch.Tensor:
        wrapper, num_real = plan
        if num_real is None:
            found = torch.empty_like(query, memory_format=torch.contiguous_format)
            wrapper.run(query.contiguous(), (keys, values), out=found)
            return without_padding(found, metadata.seq_lens > 0)
        found = torch.zeros_like(query, memory_format=torch.contiguous_format)
        wrapper.run(query[:num_real].contiguous(), (keys, values), out=found[:num_real])
        return found

    def _plan_prefill(self, batch: BatchLayout, device: torch.device) -> tuple[Any, int]:
        """The planned wrapper, and the number of tokens without padding."""
        real = int(np.count_nonzero(batch.seq_lens))  # padding comes last
        pages = _Pages.of(batch.seq_lens[:real], batch.block_table[:real], batch.block_size)
        if len(self._prefills) < 2:
            workspace = FlashInfer._workspaces[device]
            self._prefills.insert(0, self.module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD"))
        else:
            self._prefills.reverse()
        wrapper = self._prefills[0]
        wrapper.plan(
            _on_host(batch.query_start_loc[: real + 1]),
            _on_host(pages.starts),
            _to_device(pages.indices, device),
            _on_host(pages.last_lens),
            *self._sizes(batch),
            causal=True,
            **self._options(),
        )
        return wrapper, int(batch.query_start_loc[real])

    def _plan_decode(self, batch: BatchLayout, device: torch.device) -> tuple[Any, None]:
        """The planned wrapper for this number of requests."""
        rows = batch.num_requests
        # A padding request reads one token of block 0; its result is replaced by zeros.
        is_real = batch.seq_lens > 0
        table = np.where(is_real[:, None], batch.block_table, 0)
        pages = _Pages.of(np.maximum(batch.seq_lens, 1), table, batch.block_size)
        if rows not in self._decodes:
            indices = self._pages.of_rows(rows, batch.block_size, device)
            spec, workspace = self.spec, FlashInfer._workspaces[device]
            self._decodes[rows] = _DecodeWrapper(
                self.module.BatchDecodeWithPagedKVCacheWrapper(
                    workspace,
                    "NHD",
                    use_cuda_graph=True,
                    use_tensor_cores=spec.num_heads // spec.num_kv_heads >= _TENSOR_CORE_GROUP,
                    paged_kv_indptr_buffer=torch.empty(rows + 1, dtype=torch.int32, device=device),
                    paged_kv_indices_buffer=indices,
                    paged_kv_last_page_len_buffer=torch.empty(rows, dtype=torch.int32, device=device),
                ),
                None if device.type == "cpu" else torch.get_device_module(device).Event(),
            )
        made = self._decodes[rows]
        made.wait_for_previous_plan()
        made.wrapper.plan(
            _on_host(pages.starts),
            _to_device(pages.indices, device),
            _on_host(pages.last_lens),
            *self._sizes(batch),
            **self._options(),
        )
        made.has_planned()
        return made.wrapper, None

    def _sizes(self, batch: BatchLayout) -> tuple[int, int, int, int]:
        return self.spec.num_heads, self.spec.num_kv_heads, self.spec.head_size, batch.block_size

    def _options(self) -> dict[str, Any]:
        spec = self.spec
        return {
            "sm_scale": spec.scale,
            "window_left": -1 if spec.sliding_window is None else spec.sliding_window - 1,
            "logits_soft_cap": spec.soft_cap,
            "q_data_type": DTYPES[spec.dtype],
        }


class _DecodeWrapper:
    """A wrapper for decode steps, and the event after its last plan's copies (None on the host)."""

    def __init__(self, wrapper: Any, event: Any) -> None:
        self.wrapper = wrapper
        self._event = event
        self._is_planned = False

    def wait_for_previous_plan(self) -> None:
        if self._event is not None and self._is_planned:
            self._event.synchronize()

    def has_planned(self) -> None:
        if self._event is not None:
            self._event.record()
            self._is_planned = True


class _PageBuffer:
    """Block numbers of decode steps on the device: wrappers share one buffer, because one step runs at a time."""

    def __init__(self) -> None:
        self._buffers: dict[int, torch.Tensor] = {}

    def of_rows(self, rows: int, block_size: int, device: torch.device) -> torch.Tensor:
        """int32, with space for `rows` sequences of TABLE_TOKENS tokens."""
        pages = max(1, TABLE_TOKENS // block_size)
        if block_size not in self._buffers:
            self._buffers[block_size] = torch.zeros(LARGEST_CAPTURE * pages, dtype=torch.int32, device=device)
        return self._buffers[block_size][: rows * pages]


@dataclass(frozen=True)
class _Pages:
    """Blocks of a step's sequences in FlashInfer's form.

    Attributes:
        starts: int32 [R + 1]: the blocks of sequence r are indices[starts[r]:starts[r + 1]].
        indices: int32, block numbers.
        last_lens: int32 [R]: tokens in the last block of each sequence.
    """

    starts: np.ndarray
    indices: np.ndarray
    last_lens: np.ndarray

    @classmethod
    def of(cls, seq_lens: np.ndarray, block_table: np.ndarray, block_size: int) -> _Pages:
        """From the lengths [R], all positive, and the block table [R, P] of a step."""
        counts = -(-seq_lens // block_size)
        indices = block_table[np.arange(block_table.shape[1]) < counts[:, None]]
        return cls(np.concatenate(([0], counts.cumsum())), indices, seq_lens - (counts - 1) * block_size)


def _on_host(array: np.ndarray) -> torch.Tensor:
    """A copy on the host, because core overwrites its arrays."""
    return torch.from_numpy(np.array(array, dtype=np.int32))


def _to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on the device, without waiting for it: torch frees page-locked memory after the copy has run."""
    host = _on_host(array)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
