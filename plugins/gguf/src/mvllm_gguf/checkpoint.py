"""Reads the weights of a model folder that was derived from GGUF files, under their Hugging Face names.

The folder's `gguf_files.json` names the files:

    {"files": [{"path": "/models/x.gguf", "size": 98362432, "mtime_ns": 1738886400000000000}]}

Block-quantized tensors are provided as F32: a range of bytes of such a tensor corresponds to rows, or columns of rows,
which the reader reads from the file and dequantizes. So a rank dequantizes only its shard, a few rows at a time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from mvllm.extension_api import ModelError
from mvllm.extension_api.checkpoint_formats import TensorEntry, packed_name, read_json_object
from mvllm_gguf.header import GGUFModel, GGUFTensor, read_gguf
from mvllm_gguf.hf_tensor import HFTensor, Source
from mvllm_gguf.model_folder import FILES_NAME
from mvllm_gguf.tensor_names import hf_tensors
from mvllm_gguf.tensor_types import TensorType

_VALUES_AT_ONCE = 1 << 18
"""Values that are dequantized at a time, so that intermediate results stay in the L2 cache."""

_MOST_GAP = 16
"""Largest number of unused rows between two used ones that are read instead of skipped."""

_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "U8": "u1"}
_DOWNLOAD_AGAIN = "Download or copy the file again."


@dataclass(frozen=True, kw_only=True)
class GGUFEntry(TensorEntry):
    """A tensor of the checkpoint that a GGUF file stores.

    Attributes:
        tensor: The rows of the file that it consists of.
        packed: Whether its bytes are the stored blocks, with dtype U8.
    """

    tensor: HFTensor
    packed: bool = False

    @property
    def tensor_type(self) -> TensorType:
        """The tensor type of its first row in the file."""
        return self.tensor.sources[0].tensor.type

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the entry."""
        length = self.tensor.row_length
        return self.tensor_type.num_bytes(length) if self.packed else length * np.dtype(_DTYPES[self.dtype]).itemsize

    def open_reader(self) -> GGUFReader:
        return GGUFReader()


def read_gguf_folder(
    folder: Path, most_tensors: int, *, packed: Callable[[str], bool] | None = None
) -> dict[str, TensorEntry]:
    """Every tensor of the checkpoint in `folder`, by its Hugging Face name.

    Args:
        folder: A model folder with `gguf_files.json`.
        most_tensors: Maximum number of tensors, including each expert's matrices.
        packed: Returns whether a weight with a `packed_type` is also provided as stored: uint8 [..., rows, bytes per
            row], with the row order of the weight, under the name `packed_name`.

    Raises:
        ModelError: A file is missing, damaged, or has changed since the folder was written; its architecture is not
            supported; or there are too many tensors.
    """
    entries: dict[str, TensorEntry] = {}
    for tensor in hf_tensors(_read_model(folder), most_tensors).values():
        entries[tensor.name] = _entry(tensor, packed=False)
        if packed is not None and tensor.packed_type is not None and packed(tensor.name):
            entries[packed_name(tensor.name)] = _entry(tensor, packed=True)
    return entries


def _read_model(folder: Path) -> GGUFModel:
    index = folder / FILES_NAME
    files = read_json_object(index).get("files")
    if not isinstance(files, list) or not files or not all(map(_is_file, files)):
        raise ModelError(
            f"{index} should have a key 'files': a list of objects with path, size and mtime_ns. Delete {folder}: it "
            "is made again from the GGUF file."
        )
    model = read_gguf(Path(files[0]["path"]))
    listed = tuple(Path(file["path"]) for file in files)
    if model.files != listed:
        raise ModelError(
            f"{index} lists {len(listed)} files, but the model of {listed[0]} has {len(model.files)}. Delete {folder}: "
            "it is made again from the GGUF file."
        )
    for file in files:
        found = os.stat(file["path"])
        if (found.st_size, found.st_mtime_ns) != (file["size"], file["mtime_ns"]):
            raise ModelError(
                f"{file['path']} has changed since the model was opened: its config and tokenizer may be those of "
                "another file. Start the engine again with the path of the GGUF file."
            )
    return model


def _is_file(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("path"), str)
        and type(value.get("size")) is int
        and type(value.get("mtime_ns")) is int
    )


def _entry(tensor: HFTensor, *, packed: bool) -> GGUFEntry:
    first = tensor.sources[0].tensor
    name, shape, dtype = tensor.name, tensor.shape, "F32"
    types = {source.tensor.type for source in tensor.sources}
    if packed:
        name = packed_name(name)
        shape, dtype = (*shape[:-1], first.type.num_bytes(shape[-1])), "U8"
    elif len(types) == 1 and not first.type.is_quantized and not tensor.is_changed:
        dtype = first.type.name
    num_bytes = math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize
    return GGUFEntry(
        name,
        first.file,
        dtype,
        shape,
        first.start,
        num_bytes,
        tensor.transposed and not packed,
        tensor=tensor,
        packed=packed,
    )


class GGUFReader:
    """Reads tensors of GGUF files. A context manager; owns file descriptors between enter and exit.

    Raises:
        ModelError: A file cannot be opened, or has become shorter since its header was read.
    """

    def __init__(self) -> None:
        self._files: dict[Path, BinaryIO] = {}
        self._last: tuple[GGUFEntry, NDArray[np.int64]] | None = None

    def __enter__(self) -> GGUFReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def read_into(self, target: memoryview, entry: TensorEntry, offset: int) -> None:
        """As TensorReader: whole rows, or a part of one row."""
        assert isinstance(entry, GGUFEntry)
        first, within = divmod(offset, entry.row_bytes)
        if within == 0 and len(target) % entry.row_bytes == 0:
            self._fill(target, entry, np.arange(first, first + len(target) // entry.row_bytes), 0, entry.row_bytes)
        else:
            assert within + len(target) <= entry.row_bytes, "whole rows, or a part of one row"
            self._fill(target, entry, np.array([first]), within, within + len(target))

    def read_strided(self, target: memoryview, entry: TensorEntry, offset: int, length: int, stride: int) -> None:
        """As TensorReader: pieces are whole rows, or the same columns of rows."""
        assert isinstance(entry, GGUFEntry)
        first, within = divmod(offset, entry.row_bytes)
        step, rest = divmod(stride, entry.row_bytes)
        assert rest == 0 or length == stride or len(target) == length, "pieces begin in the same column"
        if rest or length == stride:
            self.read_into(target, entry, offset)
            return
        starts = first + step * np.arange(len(target) // length)
        if within == 0 and length % entry.row_bytes == 0:
            rows = starts[:, None] + np.arange(length // entry.row_bytes)
            self._fill(target, entry, rows.reshape(-1), 0, entry.row_bytes)
        else:
            self._fill(target, entry, starts, within, within + length)

    def _fill(self, target: memoryview, entry: GGUFEntry, rows: NDArray[np.int64], start: int, stop: int) -> None:
        """Fills `target` with bytes `start` to `stop` of rows of the entry."""
        numbers = self._row_numbers(entry)[rows]
        if stop - start == entry.row_bytes and self._read_adjacent(target, entry, numbers):
            return
        dtype = np.dtype(_DTYPES[entry.dtype])
        columns = slice(start // dtype.itemsize, stop // dtype.itemsize)
        out = np.frombuffer(target, dtype).reshape(len(rows), -1)
        at_once = max(1, _VALUES_AT_ONCE // max(1, out.shape[1]))
        for begin in range(0, len(rows), at_once):
            part, wanted = out[begin : begin + at_once], numbers[begin : begin + at_once]
            base = 0
            for source in entry.tensor.sources:
                chosen = (wanted >= base) & (wanted < base + source.num_rows)
                if chosen.all():
                    part[...] = self._rows(entry, source, wanted - base, columns, dtype)
                elif chosen.any():
                    part[chosen] = self._rows(entry, source, wanted[chosen] - base, columns, dtype)
                base += source.num_rows
            if entry.tensor.offset:
                part += entry.tensor.offset
            if entry.tensor.function is not None:
                part[...] = entry.tensor.function(part)

    def _read_adjacent(self, target: memoryview, entry: GGUFEntry, numbers: NDArray[np.int64]) -> bool:
        """Reads rows into `target` without a copy, if they are adjacent in the file and stored as the entry has them.

        Args:
            numbers: The rows of the concatenated sources, in the order of `target`.

        Returns:
            Whether they have been read.
        """
        first, stop = int(numbers[0]), int(numbers[-1]) + 1
        if stop - first != len(numbers) or (len(numbers) > 2 and (np.diff(numbers) != 1).any()):
            return False
        if entry.tensor.columns is not None:
            return False
        if not entry.packed and (entry.tensor.is_changed or self._is_converted(entry)):
            return False
        for source in entry.tensor.sources:
            if first < source.num_rows:
                if stop > source.num_rows or source.swapped:
                    return False
                self._read(target.cast("B"), source.tensor, source.tensor.start + first * entry.row_bytes)
                return True
            first, stop = first - source.num_rows, stop - source.num_rows
        return False

    @staticmethod
    def _is_converted(entry: GGUFEntry) -> bool:
        """Whether values have another dtype in the file than in the entry."""
        return any(source.tensor.type.name != entry.dtype for source in entry.tensor.sources)

    def _row_numbers(self, entry: GGUFEntry) -> NDArray[np.int64]:
        if self._last is None or self._last[0] is not entry:
            self._last = entry, entry.tensor.row_numbers()
        return self._last[1]

    def _rows(
        self, entry: GGUFEntry, source: Source, rows: NDArray[np.int64], columns: slice, dtype: np.dtype[Any]
    ) -> NDArray[Any]:
        """Columns of rows of a source, as the entry's dtype."""
        kind = source.tensor.type
        if not source.swapped:
            raw = self._stored(source.tensor, rows, kind.num_bytes(source.row_length))
            if entry.tensor.columns is None:
                return _values(raw, kind, columns, dtype, packed=entry.packed)
            size = entry.tensor.columns.size
            order = entry.tensor.columns.order(kind.num_bytes(size) if entry.packed else size)
            return _values(raw, kind, slice(0, len(order)), dtype, packed=entry.packed)[:, order[columns]]
        height, width = source.tensor.shape[-2:]
        found = np.empty((len(rows), columns.stop - columns.start), dtype)
        for matrix in np.unique(rows // width):
            stored = np.arange(matrix * height + columns.start, matrix * height + columns.stop)
            raw = self._stored(source.tensor, stored, kind.num_bytes(width))
            values = _values(raw, kind, slice(0, width), dtype, packed=False)
            chosen = rows // width == matrix
            found[chosen] = values.T[rows[chosen] % width]
        return found

    def _stored(self, tensor: GGUFTensor, rows: NDArray[np.int64], row_bytes: int) -> NDArray[np.uint8]:
        """Rows as stored, [rows, row_bytes]."""
        found = None
        for chosen, first, stop in _runs(rows):
            raw = np.empty((stop - first, row_bytes), np.uint8)
            self._read(raw.data.cast("B"), tensor, tensor.start + first * row_bytes)
            if len(rows[chosen]) == len(rows):
                return raw[rows - first]
            if found is None:
                found = np.empty((len(rows), row_bytes), np.uint8)
            found[chosen] = raw[rows[chosen] - first]
        assert found is not None, "at least one row is read"
        return found

    def _read(self, target: memoryview, tensor: GGUFTensor, start: int) -> None:
        try:
            file = self._files.get(tensor.file)
            if file is None:
                file = self._files[tensor.file] = tensor.file.open("rb", buffering=0)
            done = 0
            while done < len(target):
                count = os.preadv(file.fileno(), [target[done:]], start + done)
                if not count:
                    raise ModelError(
                        f"{tensor.file} ended inside tensor {tensor.name!r} while it was read. {_DOWNLOAD_AGAIN}"
                    )
                done += count
        except OSError as e:
            raise ModelError(f"{tensor.file}: tensor {tensor.name!r} cannot be read: {e.strerror or e}") from e


def _runs(rows: NDArray[np.int64]) -> Iterator[tuple[Any, int, int]]:
    """Groups rows that lie close together: which rows, and the range of stored rows that contains them."""
    first, stop = int(rows.min()), int(rows.max()) + 1
    if stop - first <= len(rows) + _MOST_GAP:
        yield slice(None), first, stop
        return
    order = np.argsort(rows, kind="stable")
    breaks = np.flatnonzero(np.diff(rows[order]) > _MOST_GAP) + 1
    for chosen in np.split(order, breaks):
        yield chosen, int(rows[chosen[0]]), int(rows[chosen[-1]]) + 1


def _values(
    raw: NDArray[np.uint8], kind: TensorType, columns: slice, dtype: np.dtype[Any], *, packed: bool
) -> NDArray[Any]:
    """Columns of stored rows: as they are, or dequantized to float32."""
    if packed:
        return raw[:, columns]
    if kind.name in _DTYPES and np.dtype(_DTYPES[kind.name]) == dtype:
        return raw.view(dtype)[:, columns]
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    size = kind.block_values
    first, stop = columns.start // size, -(-columns.stop // size)
    # As one row: `dequantize` processes a few rows at a time, which is slow for short ones.
    blocks = raw[:, first * kind.block_bytes : stop * kind.block_bytes].reshape(1, -1)
    values: NDArray[Any] = dequantize(blocks, GGMLQuantizationType(kind.number)).reshape(len(raw), -1)
    return values[:, columns.start - first * size : columns.stop - first * size]
