"""Default methods of `AttentionBackend` for a KV cache made of tensors: measure, fill, read slots, copy and export
blocks.

The layout of a cache is derived from shapes: the block dimension is the one that is larger in a cache of two blocks
than in a cache of one, and the dimension of the tokens within a block is the one that grows with the block size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from mvllm.errors import PlatformError
from mvllm.platform.attention_spec import AttentionSpec, KVLayout

if TYPE_CHECKING:
    import numpy as np
    import torch


class TensorCacheBackend(Protocol):
    """What these functions call of an AttentionBackend."""

    spec: AttentionSpec

    def kv_layout(self) -> KVLayout: ...
    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> Any: ...


def tensors_of(kv: Any) -> list[torch.Tensor] | None:
    """The tensors of a cache that is a tensor, or a tuple or list of tensors; None for any other."""
    import torch

    parts = [kv] if isinstance(kv, torch.Tensor) else kv
    if not isinstance(parts, list | tuple) or not parts or not all(isinstance(part, torch.Tensor) for part in parts):
        return None
    return list(parts)


def bytes_of(backend: TensorCacheBackend, kv: Any) -> int:
    """Total bytes of the tensors."""
    return sum(part.numel() * part.element_size() for part in _tensors(backend, kv, "kv_bytes"))


def fill(backend: TensorCacheBackend, kv: Any, value: float) -> None:
    """Sets every number to `value`. Of 8-bit codes with scales in other tensors, codes become 1 and scales `value`."""
    import torch

    parts = _tensors(backend, kv, "fill")
    scaled = len({part.element_size() == 1 for part in parts}) == 2
    for part in parts:
        if part.element_size() > 1 or not scaled:
            part.fill_(value)
        else:  # bits of float8_e4m3fn are often kept as bytes: 0x38 is its 1
            part.fill_(0x38 if part.dtype == torch.uint8 else 1)


def read_slots(backend: TensorCacheBackend, kv: Any, slots: torch.Tensor) -> list[torch.Tensor]:
    """The contents of the slots in each tensor, [n, ...].

    Raises:
        PlatformError: The shapes do not show where the slots are.
    """
    parts = _tensors(backend, kv, "read_slots")
    for size in backend.kv_layout().block_sizes:
        axes = [_axes(backend, parts, index, size) for index in range(len(parts))]
        if all(found is not None for found in axes):
            return [_read(part, slots, found, size) for part, found in zip(parts, axes, strict=True) if found]
    raise _unreadable(backend, "read_slots", f"shapes {[tuple(part.shape) for part in parts]} do not show its slots")


def copy_blocks(backend: TensorCacheBackend, kv: Any, source: torch.Tensor, destination: torch.Tensor) -> None:
    """Copies block `source[i]` to block `destination[i]` in each tensor.

    Raises:
        PlatformError: The shapes do not show where the blocks are.
    """
    parts = _tensors(backend, kv, "copy_blocks")
    dimensions = _block_dimensions(backend, parts, backend.kv_layout().block_sizes, "copy_blocks")
    for part, (d, extent) in zip(parts, dimensions, strict=True):
        blocks = part.unflatten(d, (-1, extent)).movedim(d, 0)
        blocks[destination.to(part.device)] = blocks[source.to(part.device)]


def block_format(backend: TensorCacheBackend, kv: Any, block_size: int) -> str:
    """Names of the class, the spec's stored sizes, and dtype and shape of a block in each tensor.

    Raises:
        PlatformError: The shapes do not show where the blocks are.
    """
    spec, kind = backend.spec, type(backend)
    views = _block_views(backend, kv, block_size * backend.kv_layout().bytes_per_token, "block_format")
    parts = "; ".join(f"{str(view.dtype).removeprefix('torch.')}{list(view.shape[1:])}" for view in views)
    heads = f"{spec.num_kv_heads} heads of {spec.head_size}" + (
        ", values in keys" if spec.values_in_keys else f" and {spec.value_size}"
    )
    return f"{kind.__module__}.{kind.__qualname__} {block_size} tokens of {heads} in {spec.kv_dtype}: {parts}"


def export_blocks(backend: TensorCacheBackend, kv: Any, blocks: np.ndarray, out: np.ndarray) -> None:
    """Copies blocks to the rows of `out`, uint8 [n, bytes of a block]; waits.

    Raises:
        PlatformError: The shapes do not show where the blocks are.
    """
    export_rows(_block_views(backend, kv, out.shape[1], "export_blocks"), blocks, out)


def import_blocks(backend: TensorCacheBackend, kv: Any, blocks: np.ndarray, data: np.ndarray) -> None:
    """Copies the rows of `data`, uint8 [n, bytes of a block], to blocks.

    Raises:
        PlatformError: The shapes do not show where the blocks are.
    """
    import_rows(_block_views(backend, kv, data.shape[1], "import_blocks"), blocks, data)


def export_rows(tensors: Sequence[torch.Tensor], rows: np.ndarray, out: np.ndarray) -> None:
    """Copies `tensor[rows[i]]` of each tensor, one after the other, as bytes to `out[i]`; waits.

    Args:
        tensors: [rows, ...] each.
        rows: Host, int64 [n].
        out: Host, uint8 [n, bytes of a row of all tensors].
    """
    import torch

    start = 0
    for tensor in tensors:
        size = tensor[:1].numel() * tensor.element_size()
        found = tensor[torch.from_numpy(rows).to(tensor.device)].contiguous().cpu()
        found = found.view(len(rows), size // found.element_size())
        out[:, start : start + size] = found.view(torch.uint8).numpy()
        start += size


def import_rows(tensors: Sequence[torch.Tensor], rows: np.ndarray, data: np.ndarray) -> None:
    """Copies the bytes `data[i]` to `tensor[rows[i]]` of each tensor: the inverse of `export_rows`."""
    import torch

    start = 0
    for tensor in tensors:
        size = tensor[:1].numel() * tensor.element_size()
        # A copy: torch refuses arrays that cannot be written, and the array is not read after this call.
        copy = torch.from_numpy(data[:, start : start + size].copy())
        found = copy.view(tensor.dtype).view(len(rows), *tensor.shape[1:])
        tensor[torch.from_numpy(rows).to(tensor.device)] = found.to(tensor.device)
        start += size


_VIEWED: WeakKeyDictionary[TensorCacheBackend, dict[Any, list[tuple[int, int]]]] = WeakKeyDictionary()
"""Results of `_block_dimensions`, by backend, and by the shapes of its caches and the bytes of a block."""


def _block_views(backend: TensorCacheBackend, kv: Any, block_bytes: int, method: str) -> list[torch.Tensor]:
    """Views [num_blocks, ...] of the tensors.

    Args:
        block_bytes: Bytes of a block in all tensors.
        method: The method that needs them, for errors.
    """
    parts = _tensors(backend, kv, method)
    key = (block_bytes, tuple(part.shape for part in parts))
    known = _VIEWED.setdefault(backend, {})
    if key not in known:
        size = block_bytes // backend.kv_layout().bytes_per_token
        known[key] = _block_dimensions(backend, parts, (size,), method)
    views = [part.unflatten(d, (-1, extent)).movedim(d, 0) for part, (d, extent) in zip(parts, known[key], strict=True)]
    stored = sum(view[:1].numel() * view.element_size() for view in views)
    if stored != block_bytes:
        name = type(backend).__name__
        raise PlatformError(
            f"A block in the tensors of {name} has {stored} bytes, and kv_layout().bytes_per_token gives "
            f"{block_bytes}. Implement {name}.{method}, as AttentionBackend describes it."
        )
    return views


def _block_dimensions(
    backend: TensorCacheBackend, parts: Sequence[torch.Tensor], block_sizes: Sequence[int], method: str
) -> list[tuple[int, int]]:
    """For each tensor the dimension that grows with the number of blocks, and what one block takes of it.

    Args:
        block_sizes: Numbers of tokens per block with which the tensors may have been allocated.
        method: The method that needs them, for errors.
    """
    found: set[tuple[tuple[int, int], ...]] = set()
    for size in block_sizes:
        one, two = (tensors_of(backend.allocate(n, size, parts[0].device)) or [] for n in (1, 2))
        dimensions = []
        for part, single, double in zip(parts, one, two):
            grown = _differing(single.shape, double.shape)
            if len(grown) == 1 and set(_differing(single.shape, part.shape)) <= set(grown):
                dimensions.append((grown[0], single.shape[grown[0]]))
        if len(dimensions) == len(parts):
            found.add(tuple(dimensions))
    if len(found) != 1:
        raise _unreadable(backend, method, f"shapes {[tuple(part.shape) for part in parts]} do not show its blocks")
    return list(found.pop())


def _differing(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Dimensions in which two shapes differ; all of them where the numbers of dimensions differ."""
    if len(one) != len(other):
        return list(range(max(len(one), len(other))))
    return [d for d, (a, b) in enumerate(zip(one, other)) if a != b]


def _axes(
    backend: TensorCacheBackend, parts: Sequence[torch.Tensor], index: int, size: int
) -> tuple[int, int | None] | None:
    """Dimensions of the blocks and of the tokens within one; (d, None) where slots have a dimension; None if unknown.

    Args:
        size: The block size that the cache may have been allocated with.
    """

    def shape(num_blocks: int, block_size: int) -> list[int]:
        tensors = tensors_of(backend.allocate(num_blocks, block_size, parts[index].device))
        return list(tensors[index].shape) if tensors is not None else []

    one, found = shape(1, size), list(parts[index].shape)
    blocks = _differing(one, shape(2, size))
    if len(blocks) != 1 or not set(_differing(one, found)) <= set(blocks):
        return None
    d = blocks[0]
    if one[d] == size > 1:
        return d, None
    tokens = [e for e, extent in enumerate(one) if e != d and extent == size]
    other = next((s for s in backend.kv_layout().block_sizes if s != size), None)
    if other is not None and len(tokens) != 1:
        tokens = [e for e in _differing(one, shape(1, other)) if e != d and one[e] == size]
    return (d, tokens[0]) if one[d] == 1 and len(tokens) == 1 else None


def _read(part: torch.Tensor, slots: torch.Tensor, axes: tuple[int, int | None], size: int) -> torch.Tensor:
    d, e = axes
    slots = slots.to(part.device).long()
    if e is None:
        return part.index_select(d, slots).movedim(d, 0)
    return part.movedim((d, e), (0, 1))[slots // size, slots % size]


def _tensors(backend: TensorCacheBackend, kv: Any, method: str) -> list[torch.Tensor]:
    parts = tensors_of(kv)
    if parts is None:
        raise _unreadable(backend, method, f"it is a {type(kv).__name__}")
    return parts


def _unreadable(backend: TensorCacheBackend, method: str, why: str) -> PlatformError:
    name = type(backend).__name__
    return PlatformError(
        f"{name} does not describe the layout of its KV cache, and core cannot derive it: {why}. Implement "
        f"{name}.{method}, as AttentionBackend describes it."
    )
