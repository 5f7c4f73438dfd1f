"""Parses and checks the header of a safetensors file, and reads its data.

    0         8              8 + n                                   file size
    ┌─────────┬──────────────┬─────────┬─────────┬───────────────────┐
    │ n (u64) │ JSON header  │ tensor  │ tensor  │ ...  no gaps, no  │
    │         │ n bytes      │         │         │      overlaps     │
    └─────────┴──────────────┴─────────┴─────────┴───────────────────┘

Data is read through a small buffer or directly into its destination, not memory-mapped: mapped pages count as this
process's memory, so that loading would seem to need the weights twice, and truncating a mapped file kills the process
instead of raising an error.
"""

from __future__ import annotations

import json
import math
import os
import re
import reprlib
import stat
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, TypeGuard

from mvllm.checkpoint_formats.tensor_entry import TensorEntry
from mvllm.errors import ModelError

# Bytes per element. Formats narrower than a byte belong to quantized checkpoints.
ITEM_SIZES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
    "C64": 8,
}

DTYPE_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Names of dtypes in a header, by torch's names."""

_SPLIT_FROM = 4 << 20
"""Minimum bytes for reading with two threads: below, a second thread does not pay off."""

MOST_TENSORS = 500_000
"""Limit for a checkpoint of an unknown model. Half a million entries take seconds and hundreds of MB."""

_LARGEST_HEADER = 100_000_000
_DATA_END = re.compile(rb'"data_offsets"\s*:\s*\[\s*\d{1,19}\s*,\s*(\d{1,19})\s*\]')
_BYTES_PER_TENSOR = 512  # of a header: a long name, dtype, shape and offsets have about 200
_METADATA_BYTES = 1 << 20
_LARGEST_SIZE = 2**63 - 1
_MOST_DIMENSIONS = 16
_DOWNLOAD_AGAIN = "The file is damaged: download or copy it again."

# A damaged header may contain values of any length: messages show their beginning.
_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 200
_shown.maxlist = _MOST_DIMENSIONS


class SafetensorsEntry(TensorEntry):
    """A tensor in a safetensors file."""

    def open_reader(self) -> SafetensorsReader:
        return SafetensorsReader(self.file)


def header_limit(most_tensors: int) -> int:
    """Maximum bytes of a header or an index with that many tensors."""
    return min(_LARGEST_HEADER, _METADATA_BYTES + _BYTES_PER_TENSOR * most_tensors)


def read_header(path: Path, most_tensors: int = MOST_TENSORS, *, is_segment: bool = False) -> list[TensorEntry]:
    """The tensors of a file, in the order of their data. Reads the header only.

    Args:
        most_tensors: A header that lists more is refused before it is parsed.
        is_segment: The file is a segment of shared memory, which may be longer than its contents.

    Raises:
        ModelError: The file is missing, cut short, or its header is not valid; says what was expected and found.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():
            raise ModelError(f"{path} is not a file but a pipe or a device; it will not be read. {_DOWNLOAD_AGAIN}")
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            text = _header_text(path, file, size, header_limit(most_tensors))
            _check_count(path, text, most_tensors)
            return _parse(path, text, size, is_segment=is_segment)
    except OSError as e:
        raise ModelError(f"{path} cannot be read: {e.strerror or e}") from e


def check_size(path: Path) -> None:
    """Checks that a file begins with a header and has the bytes that it describes, without parsing it.

    Raises:
        ModelError: As `read_header`.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            text = file.read(min(length, _LARGEST_HEADER)) if 8 + length <= size else b""
    except OSError as e:
        raise ModelError(f"{path} cannot be read: {e.strerror or e}") from e
    end = max((int(found[1]) for found in _DATA_END.finditer(text)), default=0)
    if not text.startswith(b"{") or 8 + length + end != size:
        read_header(path)  # says what is wrong


def _header_text(path: Path, file: BinaryIO, size: int, largest: int) -> bytes:
    prefix = file.read(8)
    if len(prefix) < 8:
        raise ModelError(f"{path} has {size} bytes, too few for a safetensors file. {_DOWNLOAD_AGAIN}")
    length = int.from_bytes(prefix, "little")
    if prefix == b"version ":
        raise ModelError(
            f"{path} is a pointer of Git LFS, not the weights themselves. Run `git lfs pull` in its repository, or "
            "download the file."
        )
    if length > largest:
        raise ModelError(
            f"{path} is not a safetensors file, or a damaged one: its header claims {length} bytes, and at most "
            f"{largest} are allowed for this model. {_DOWNLOAD_AGAIN}"
        )
    if 8 + length > size:
        raise ModelError(
            f"{path} is cut short: its header alone needs {8 + length} bytes, the file has {size}. {_DOWNLOAD_AGAIN}"
        )
    return file.read(length)


def _check_count(path: Path, text: bytes, most: int) -> None:
    """Estimates the number of tensors by counting braces: each tensor has its own object in the header."""
    count = text.count(b"{") - 1
    if count > most + _METADATA_BYTES // _BYTES_PER_TENSOR:  # a value of the metadata may be JSON in a string
        raise ModelError(
            f"{path}: its header lists about {count} tensors, and at most {most} are allowed for this model. Check "
            f"that config.json and the weights belong together. {_DOWNLOAD_AGAIN}"
        )


def _parse(path: Path, text: bytes, size: int, *, is_segment: bool) -> list[TensorEntry]:
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as e:
        raise ModelError(f"{path} has no valid safetensors header: {e}. {_DOWNLOAD_AGAIN}") from e
    if not isinstance(header, dict):
        raise ModelError(
            f"{path} has no valid safetensors header: expected a JSON object, found {type(header).__name__}. "
            f"{_DOWNLOAD_AGAIN}"
        )
    header.pop("__metadata__", None)
    data_start = 8 + len(text)
    entries = [_entry(path, name, facts, data_start) for name, facts in header.items()]
    entries.sort(key=lambda entry: (entry.start, entry.num_bytes))
    _check_layout(path, entries, data_start, size, is_segment=is_segment)
    return entries


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        repeated, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"it lists {_shown.repr(repeated)} twice")
    return values


def _entry(path: Path, name: str, facts: Any, data_start: int) -> TensorEntry:
    where = f"{path}: the header's entry for tensor {_shown.repr(name)}"
    if not isinstance(facts, dict):
        raise ModelError(f"{where} should be an object, found {_shown.repr(facts)}. {_DOWNLOAD_AGAIN}")
    dtype, shape, offsets = (facts.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        raise ModelError(f"{where} has dtype {_shown.repr(dtype)}, expected one of {', '.join(ITEM_SIZES)}.")
    if not _are_sizes(shape) or len(shape) > _MOST_DIMENSIONS:
        raise ModelError(f"{where} has shape {_shown.repr(shape)}, expected a list of integers >= 0. {_DOWNLOAD_AGAIN}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelError(f"{where} has data_offsets {_shown.repr(offsets)}, expected [begin, end]. {_DOWNLOAD_AGAIN}")
    num_bytes = offsets[1] - offsets[0]
    expected = math.prod(shape) * ITEM_SIZES[dtype]
    if num_bytes != expected:
        raise ModelError(
            f"{where}: {dtype} of shape {shape} takes {expected} bytes, but its data_offsets {offsets} span "
            f"{num_bytes}. {_DOWNLOAD_AGAIN}"
        )
    return SafetensorsEntry(name, path, dtype, tuple(shape), data_start + offsets[0], num_bytes)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= _LARGEST_SIZE for item in value)


def _check_layout(path: Path, entries: Sequence[TensorEntry], data_start: int, size: int, *, is_segment: bool) -> None:
    """Checks that the tensors fill the data part exactly, without gaps."""
    end = data_start
    before = None
    for entry in entries:
        if entry.start < end:
            raise ModelError(
                f"{path}: the data of tensors {_shown.repr(before)} and {_shown.repr(entry.name)} overlap "
                f"(at byte {entry.start}). {_DOWNLOAD_AGAIN}"
            )
        if entry.start > end:
            raise ModelError(
                f"{path}: {entry.start - end} bytes before tensor {_shown.repr(entry.name)} belong to no tensor. "
                f"{_DOWNLOAD_AGAIN}"
            )
        end, before = entry.start + entry.num_bytes, entry.name
    if end > size:
        raise ModelError(
            f"{path} is cut short: its header describes {end} bytes, the file has {size}. {_DOWNLOAD_AGAIN}"
        )
    if end < size and not is_segment:
        raise ModelError(
            f"{path} is {size - end} bytes longer than the {end} that its header describes. {_DOWNLOAD_AGAIN}"
        )


class SafetensorsReader:
    """Reads tensor data of one file. A context manager; owns a file descriptor between enter and exit.

    Raises:
        ModelError: The file cannot be opened, or has become shorter since its header was read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._helper: ThreadPoolExecutor | None = None

    def __enter__(self) -> SafetensorsReader:
        try:
            self._file = self._path.open("rb", buffering=0)
        except OSError as e:
            raise ModelError(f"{self._path} cannot be read: {e.strerror or e}") from e
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._helper is not None:
            self._helper.shutdown()
        self._file.close()

    def read_strided(self, target: memoryview, entry: TensorEntry, offset: int, length: int, stride: int) -> None:
        """Fills `target` with pieces of `entry` of `length` bytes, from `offset` on, `stride` bytes apart."""
        if length == stride:
            self.read_into(target, entry, offset)
            return
        for start in range(0, len(target), length):
            self.read_into(target[start : start + length], entry, offset)
            offset += stride

    def read_into(self, target: memoryview, entry: TensorEntry, offset: int) -> None:
        """Fills `target` with the bytes of `entry` from `offset` on. Two threads share large reads, where copying and
        page faults take most of the time.
        """
        start = entry.start + offset
        if len(target) < _SPLIT_FROM:
            self._read(target, entry, start)
            return
        if self._helper is None:
            self._helper = ThreadPoolExecutor(1, thread_name_prefix="read-weights")
        middle = len(target) // 2
        second = self._helper.submit(self._read, target[middle:], entry, start + middle)
        try:
            self._read(target[:middle], entry, start)
        finally:
            second.result()

    def _read(self, target: memoryview, entry: TensorEntry, start: int) -> None:
        try:
            done = 0
            while done < len(target):
                count = os.preadv(self._file.fileno(), [target[done:]], start + done)
                if not count:
                    raise ModelError(
                        f"{self._path} ended inside tensor {entry.name!r} while it was read. {_DOWNLOAD_AGAIN}"
                    )
                done += count
        except OSError as e:
            raise ModelError(f"{self._path}: tensor {entry.name!r} cannot be read: {e.strerror or e}") from e
