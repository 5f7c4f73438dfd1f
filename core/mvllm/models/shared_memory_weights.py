"""Weights in a segment of shared memory, as a safetensors file: written by a trainer, read by an engine's workers.

with SharedMemoryWeights(model.state_dict()) as weights:
    llm.update_weights(shared_memory=weights.name)
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from mvllm.errors import RequestError
from mvllm.models.safetensors_file import DTYPE_NAMES

if TYPE_CHECKING:
    import torch

_SEGMENTS = Path("/dev/shm")  # noqa: S108  (where Linux shows segments of POSIX shared memory as files)
_ALIGNMENT = 8


def segment_path(name: str) -> Path:
    """The file of a segment of shared memory.

    Raises:
        RequestError: There is no such segment, or this system does not show segments as files.
    """
    plain = name.removeprefix("/")
    if not plain or "/" in plain or "\0" in plain or plain in (".", ".."):
        raise RequestError(f"shared_memory must be the name of a segment, not {name!r:.80}.", parameter="shared_memory")
    path = _SEGMENTS / plain
    if not path.is_file():
        raise RequestError(
            f"There is no shared memory {plain!r:.80} on the machine of this worker (no file {str(path)!r:.100}).",
            parameter="shared_memory",
        )
    return path


class SharedMemoryWeights:
    """A segment of shared memory with named tensors. A context manager, which removes the segment at its end.

    Args:
        tensors: The tensors by their names in the checkpoint, or such pairs; on any device. Or the bytes of a
            safetensors file.

    Attributes:
        name: The segment's name.

    Raises:
        RequestError: A tensor has a dtype that safetensors files do not have, or there is no memory for the segment.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | bytes) -> None:
        self.name = f"mvllm-weights-{secrets.token_hex(8)}"
        if isinstance(tensors, bytes | bytearray | memoryview):
            self._create(len(tensors))
            with self._mapped() as target:
                target[: len(tensors)] = tensors
            return
        named = dict(tensors.items() if isinstance(tensors, Mapping) else tensors)
        header = _header(named)
        self._create(len(header) + sum(tensor.numel() * tensor.itemsize for tensor in named.values()))
        try:
            self._write(header, named)
        except BaseException:
            self.close()
            raise

    def _write(self, header: bytes, named: Mapping[str, torch.Tensor]) -> None:
        import torch

        with self._mapped() as target:
            target[: len(header)] = header
            start = len(header)
            for tensor in named.values():
                count = tensor.numel() * tensor.itemsize
                if count:
                    place = torch.frombuffer(target, dtype=torch.uint8, offset=start, count=count)
                    place.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
                    del place
                start += count

    def __enter__(self) -> SharedMemoryWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Removes the segment. Idempotent."""
        self._path.unlink(missing_ok=True)

    @property
    def _path(self) -> Path:
        return _SEGMENTS / self.name

    def _create(self, size: int) -> None:
        try:
            file = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            try:
                os.posix_fallocate(file, 0, max(size, 1))  # a write without space would end the process
            finally:
                os.close(file)
        except OSError as e:
            self.close()
            raise RequestError(
                f"{size:,} bytes of shared memory for the weights cannot be allocated: {e.strerror or e}. Enlarge "
                f"{_SEGMENTS}, send the weights in several parts, or save them to a folder."
            ) from e

    def _mapped(self) -> mmap.mmap:
        with self._path.open("r+b") as file:
            return mmap.mmap(file.fileno(), 0)


def _header(named: Mapping[str, torch.Tensor]) -> bytes:
    entries, start = {}, 0
    for name, tensor in named.items():
        dtype = DTYPE_NAMES.get(str(tensor.dtype).removeprefix("torch."))
        if dtype is None:
            raise RequestError(f"Tensor {name!r} has dtype {tensor.dtype}, which safetensors files do not have.")
        stop = start + tensor.numel() * tensor.itemsize
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
