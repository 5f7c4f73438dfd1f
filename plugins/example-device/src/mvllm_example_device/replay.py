"""Captured steps, in mode `replay`: the operations of a step are recorded once for each shape, and run again.

    step's inputs ──copy──> inputs of a shape ──recorded operations──> result of the shape

As on hardware, a replay runs on the tensors of the recording, numbers that Python has read stay constant, and work that
waits for the device cannot be recorded. So attention, LoRA and states have forms here that read lengths on the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mvllm.plugin_api as api
from mvllm_example_device.attention import ExampleAttention
from mvllm_example_device.strict import Strict

if TYPE_CHECKING:
    from mvllm_example_device.runtime import ExampleRuntime

logger = api.get_logger("mvllm.example_device")

SIZES = (1, 2, 4, 8, 16, 32, 64)
SHAPES = api.ShapePolicy(
    pages=(4, 16, 64, 256, 1024),
    capture=api.CaptureShapes(SIZES, SIZES, tuple((tokens, size) for tokens in (16, 64) for size in (8, tokens)), 64),
)
WIDEST_TABLE = 64
"""Attention in a recorded step computes the whole width of a block table; steps with wider ones are not recorded."""


class Recording(TorchDispatchMode):
    """Records the operations of a step; a call runs them again."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, result = _tensors((args, kwargs)), func(*args, **(kwargs or {}))
        made = _tensors(result)
        if any(x.device == self._device for x in given) and (
            func.overloadpacket.__name__ == "_local_scalar_dense" or any(x.device != self._device for x in made)
        ):
            raise api.PlatformError(f"{func} waits for the device, so the step cannot be recorded.")
        if any(x.dim() and x.device != self._device for x in given) and any(x.device == self._device for x in made):
            raise api.PlatformError(f"{func} copies from the host, so the step cannot be recorded.")
        storages, is_mutable = {_storage(x) for x in given}, func._schema.is_mutable
        is_view = all(_storage(x) in storages for x in made)
        if is_mutable or not (is_view or "empty" in func.overloadpacket.__name__):
            self._calls.append((func, args, kwargs or {}, [] if is_mutable else made))
        return result

    def __call__(self) -> None:
        for function, args, kwargs, results in self._calls:
            again = function(*args, **kwargs)
            for old, new in zip(results, _tensors(again) if results else [], strict=True):
                old.copy_(new)

    def forget_results(self) -> None:
        """Overwrites the results, so that only a replay gives them."""
        for *_, results in self._calls:
            for x in results:
                x.fill_(torch.nan if x.is_floating_point() else 101)


class ExampleGraphs(Strict):
    """Recordings of one device."""

    def __init__(self, runtime: ExampleRuntime) -> None:
        self._runtime = runtime

    def capture(self, step: Callable[[], Any]) -> Callable[[], Any]:
        recording = Recording(self._runtime.device)
        with recording:
            step()
        recording.forget_results()
        return recording


class ReplayCompiler(Strict, api.CompileBackend):
    """Replays the steps that core has marked."""

    def __init__(self, runtime: ExampleRuntime) -> None:
        self._graphs = ExampleGraphs(runtime)

    def compile(self, function: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
        return self._replayed(function, lambda marks: bool(marks) and all(marks))

    def compile_head(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return self._replayed(function, lambda marks: True)

    def _replayed(self, function: Callable[..., Any], is_marked: Callable[[list[bool]], bool]) -> Callable[..., Any]:
        shapes: dict[Any, tuple[tuple[Any, ...], Any, Callable[[], Any]] | None] = {}

        def run(*args: Any) -> Any:
            if not is_marked([getattr(arg, "capture", False) for arg in args if dataclasses.is_dataclass(arg)]):
                return function(*args)
            leaves = [leaf for arg in args for leaf in _leaves(arg)]
            key = tuple((x.shape, x.dtype) if isinstance(x, torch.Tensor) else x for x in leaves)
            if key not in shapes:
                shapes[key] = self._record(function, args)
            if (found := shapes[key]) is None:
                return function(*args)
            inputs, result, replay = found
            for target, source in zip([leaf for arg in inputs for leaf in _leaves(arg)], leaves, strict=True):
                if isinstance(source, torch.Tensor):
                    target.copy_(source)
            replay()
            return result

        return run

    def _record(
        self, function: Callable[..., Any], args: Sequence[Any]
    ) -> tuple[tuple[Any, ...], Any, Callable[[], Any]] | None:
        inputs = tuple(_copy(arg) for arg in args)
        for arg in inputs:
            if isinstance(arg, api.StateArguments):
                arg.write_slots.fill_(-1)  # the recording computes, too, and a state is to advance once
        results: list[Any] = []
        try:
            replay = self._graphs.capture(lambda: results.append(function(*inputs)))
        except api.PlatformError as e:
            logger.warning("Steps of this shape are not replayed: %s", e)
            return None
        return inputs, results[0], replay


@dataclasses.dataclass(frozen=True)
class Tables:
    """Attention metadata of a recorded step: int32 tensors of the device, as in BatchLayout."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    capture: bool = True


class ReplayAttention(ExampleAttention):
    """Attention whose operations do not depend on lengths, for recorded steps; other steps use the reference."""

    def build_metadata(self, batch: api.BatchLayout) -> api.AttentionMetadata:
        if not batch.capture or batch.block_table_device.shape[1] > WIDEST_TABLE:
            return super().build_metadata(batch)
        self._runtime.begin_step(batch)
        tables = batch.query_start_loc_device, batch.seq_lens_device, batch.block_table_device
        return Tables(*tables, batch.slot_mapping_device)

    def write_kv(
        self, kv: api.KVCache, key: torch.Tensor, value: torch.Tensor, metadata: api.AttentionMetadata
    ) -> None:
        if not isinstance(metadata, Tables):
            super().write_kv(kv, key, value, metadata)
            return
        slots = metadata.slot_mapping.long()
        first, is_padding = slots[:1].clamp(min=0), (slots < 0)[:, None, None]
        for cache, new in zip(kv.flatten(1, 2), (key, value), strict=True):
            # Padding repeats the first token. If that is padding, too, the step stores nothing.
            same = torch.where(is_padding[:1], cache.index_select(0, first), new[:1].to(cache.dtype))
            cache.index_copy_(
                0, torch.where(slots < 0, first, slots), torch.where(is_padding, same, new.to(cache.dtype))
            )

    def forward(
        self, query: torch.Tensor, kv: api.KVCache, metadata: api.AttentionMetadata, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not isinstance(metadata, Tables):
            return super().forward(query, kv, metadata, sinks)
        spec, (num_requests, pages), block_size = self.spec, metadata.block_table.shape, kv.shape[2]
        token, key_at = (torch.arange(n, device=query.device) for n in (len(query), pages * block_size))
        ends = metadata.query_start_loc[1:]
        request = (ends <= token[:, None]).sum(1).clamp(max=num_requests - 1)
        position = metadata.seq_lens.index_select(0, request) - ends.index_select(0, request) + token
        seen = (key_at <= position[:, None]) & (token < ends[-1])[:, None]
        if spec.sliding_window is not None:
            seen = seen & (key_at > position[:, None] - spec.sliding_window)
        blocks = metadata.block_table.index_select(0, request).flatten()
        keys, values = (part.index_select(0, blocks).view(len(query), -1, *kv.shape[3:]).float() for part in kv)
        grouped = query.float().unflatten(1, (spec.num_kv_heads, -1))
        scores = torch.einsum("tkgd,tmkd->tkgm", grouped, keys) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        scores = scores.masked_fill(~seen[:, None, None], -1e30)  # finite, for padding
        if sinks is not None:
            extra = sinks.float().view(1, spec.num_kv_heads, -1, 1).expand(len(query), -1, -1, 1)
            scores = torch.cat((scores, extra), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : len(key_at)]
        values = torch.where(seen[:, :, None, None], values, 0.0)  # unused slots may hold NaN
        return torch.einsum("tkgm,tmkd->tkgd", weights, values).flatten(1).to(query.dtype)


def add_lora_by_slot(
    y: torch.Tensor,
    x: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    slots: torch.Tensor,
    bands: tuple[tuple[int, int, int], ...],
) -> torch.Tensor:
    """The operation for adapters that are known on the device: gathers the matrices of each token."""
    adapters = slots.clamp(min=0).long()
    shrunk = torch.einsum("ti,tbri->tbr", x, down.index_select(0, adapters))
    for start, stop, block in bands:
        added = torch.einsum("tr,tor->to", shrunk[:, block], up[:, start:stop].index_select(0, adapters))
        y[:, start:stop].add_(torch.where((slots >= 0)[:, None], added, 0.0))
    return y


def providers() -> Sequence[api.OpProvider]:
    """Operations that can be recorded, in place of references that read lengths."""
    return [api.OpProvider("add_lora_by_slot", "example_lora", add_lora_by_slot), *api.static_state_ops()]


def _leaves(arg: Any) -> list[Any]:
    return [getattr(arg, f.name) for f in dataclasses.fields(arg)] if dataclasses.is_dataclass(arg) else [arg]


def _copy(arg: Any) -> Any:
    if dataclasses.is_dataclass(arg):
        kind: Any = type(arg)
        return kind(*(_copy(leaf) for leaf in _leaves(arg)))
    return arg.clone() if isinstance(arg, torch.Tensor) else arg


def _tensors(things: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(things) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
