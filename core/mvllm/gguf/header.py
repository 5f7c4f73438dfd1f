"""Parses and checks the header of a GGUF file.

    magic "GGUF" │ version u32 │ tensors u64 │ values u64 │ key, type, value ... │ name, shape, type, offset ... │ data

All numbers are little-endian. Every count is compared with the bytes that are left before memory is allocated for it,
so a damaged file costs no more than its size.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import reprlib
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mvllm.errors import ModelError
from mvllm.gguf.tensor_types import TensorType, tensor_type

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_LARGEST_HEADER = 256 << 20
_LARGEST_KEY = 1024
_MOST_TENSORS = 100_000
_MOST_VALUES = 100_000
_MOST_DIMENSIONS = 4
_MOST_FILES = 1000
_CHUNK = 4 << 20
_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_DOWNLOAD_AGAIN = "Download or copy the file again."

# Value types by number: a struct format, or the type of texts and arrays.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9

_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 200


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor's entry in the header.

    Attributes:
        name: Its name in the file, for instance `blk.0.attn_q.weight`.
        type: Its tensor type.
        shape: Sizes of its dimensions, row-major: the last is the one in which blocks lie.
        file: The file that holds its data.
        start: Position of its first byte in `file`.
        num_bytes: Its size.
    """

    name: str
    type: TensorType
    shape: tuple[int, ...]
    file: Path
    start: int
    num_bytes: int


@dataclass(frozen=True)
class GGUFModel:
    """The headers of a model's file, or of all its files.

    Attributes:
        files: In the order of their numbers; one if the model is not split.
        metadata: The values of the first file, by key. Integers, floats, bools, texts, and lists of one of these.
        tensors: The tensors of all files, by name.
    """

    files: tuple[Path, ...]
    metadata: Mapping[str, Any] = field(repr=False)
    tensors: Mapping[str, GGUFTensor] = field(repr=False)


def read_gguf(path: Path) -> GGUFModel:
    """Reads the header of a GGUF file; of a split model (`name-00001-of-00003.gguf`) those of all its files.

    Reads no tensor data.

    Raises:
        ModelError: A file is missing, damaged, cut short, or not a GGUF file; says what was expected and found.
    """
    files = _files_of(path)
    metadata: dict[str, Any] = {}
    tensors: dict[str, GGUFTensor] = {}
    for i, file in enumerate(files):
        values, found = _read_file(file)
        count = values.get("split.count", 1)
        if count != len(files) and (count or 1) != 1:
            raise ModelError(
                f"{file} is one of {_shown.repr(count)} files according to its metadata, but its name says "
                f"{len(files)}. Give the files the names under which they were published."
            )
        if i == 0:
            metadata = values
        for tensor in found:
            if tensor.name in tensors:
                raise ModelError(
                    f"Tensor {_shown.repr(tensor.name)} is in {tensors[tensor.name].file} and in {file}. "
                    f"{_DOWNLOAD_AGAIN}"
                )
            tensors[tensor.name] = tensor
    return GGUFModel(files, metadata, tensors)


def _files_of(path: Path) -> tuple[Path, ...]:
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return (path,)
    count = int(match["count"])
    if not 1 <= count <= _MOST_FILES:
        raise ModelError(f"{path} is one of {count} files according to its name; at most {_MOST_FILES} are allowed.")
    files = tuple(path.with_name(f"{match['stem']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise ModelError(f"{path.parent} lacks {', '.join(missing[:5])}{more}, parts of the model. Download them.")
    return files


def _read_file(path: Path) -> tuple[dict[str, Any], list[GGUFTensor]]:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ModelError(f"{path} is not a regular file and will not be read. Pass a GGUF file.")
        with path.open("rb", buffering=0) as file:
            return _Header(path, file, os.fstat(file.fileno()).st_size).parse()
    except OSError as e:
        raise ModelError(f"{path} cannot be read: {e.strerror or e}") from e


class _Header:
    """Reads values one after another from the beginning of a file.

    Args:
        size: Bytes of the file.
    """

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path = path
        self._file = file
        self._size = size
        self._buffer = bytearray()
        self._position = 0

    def parse(self) -> tuple[dict[str, Any], list[GGUFTensor]]:
        """Metadata and tensors."""
        if self._size < 24 or self._take(4) != MAGIC:
            raise ModelError(
                f"{self._path} is not a GGUF file: it does not begin with 'GGUF'. Pass a GGUF file, or a folder with "
                "safetensors weights."
            )
        version = self._number("I")
        if version not in _VERSIONS:
            big = int.from_bytes(int(version).to_bytes(4, "little"), "big") in _VERSIONS
            raise ModelError(
                f"{self._path} is a GGUF file "
                + ("in big-endian order, which is not supported." if big else f"of version {version}.")
                + f" Supported: little-endian files of version {' and '.join(map(str, _VERSIONS))}."
            )
        num_tensors, num_values = self._number("Q"), self._number("Q")
        self._check_count(num_tensors, 24, _MOST_TENSORS, "tensors")
        self._check_count(num_values, 13, _MOST_VALUES, "metadata values")
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._text(_LARGEST_KEY)
            if key in metadata:
                raise self._damaged(f"the key {_shown.repr(key)} is there twice")
            metadata[key] = self._value(self._number("I"), key)
        entries = [self._tensor() for _ in range(num_tensors)]
        return metadata, self._placed(entries, metadata.get("general.alignment", 32))

    def _tensor(self) -> tuple[str, TensorType, tuple[int, ...], int]:
        name = self._text(_LARGEST_KEY)
        dimensions = self._number("I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise self._damaged(f"tensor {_shown.repr(name)} has {dimensions} dimensions, allowed are 1 to 4")
        sizes = tuple(self._number("Q") for _ in range(dimensions))
        kind = tensor_type(self._number("I"), f"{self._path}: tensor {_shown.repr(name)}")
        offset = self._number("Q")
        if min(sizes) < 1 or math.prod(sizes) > 8 * self._size:  # the smallest type has more than a bit per value
            raise self._damaged(f"tensor {_shown.repr(name)} has the sizes {list(sizes)}, more than the file can hold")
        if sizes[0] % kind.block_values:
            raise self._damaged(
                f"tensor {_shown.repr(name)} has rows of {sizes[0]} values, but {kind} stores blocks of "
                f"{kind.block_values}"
            )
        return name, kind, sizes[::-1], offset

    def _placed(
        self, entries: list[tuple[str, TensorType, tuple[int, ...], int]], alignment: object
    ) -> list[GGUFTensor]:
        """The tensors in the order of their data, after a check that they lie within the file and do not overlap."""
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {_shown.repr(alignment)}, expected a power of two")
        data = -(-self._position // alignment) * alignment
        tensors = []
        for name, kind, shape, offset in entries:
            num_bytes = kind.num_bytes(math.prod(shape))
            if offset % alignment:
                raise self._damaged(f"tensor {_shown.repr(name)} begins at {offset}, no multiple of {alignment}")
            if data + offset + num_bytes > self._size:
                raise ModelError(
                    f"{self._path} is cut short: tensor {_shown.repr(name)} ends at byte {data + offset + num_bytes}, "
                    f"the file has {self._size}. {_DOWNLOAD_AGAIN}"
                )
            tensors.append(GGUFTensor(name, kind, shape, self._path, data + offset, num_bytes))
        tensors.sort(key=lambda tensor: tensor.start)
        for before, after in itertools.pairwise(tensors):
            if before.start + before.num_bytes > after.start:
                raise self._damaged(
                    f"the data of tensors {_shown.repr(before.name)} and {_shown.repr(after.name)} overlap"
                )
        names = {tensor.name for tensor in tensors}
        if len(names) < len(tensors):
            raise self._damaged("two tensors have the same name")
        return tensors

    def _value(self, kind: int, key: str) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _TEXT:
            return self._text(_LARGEST_HEADER)
        if kind == _ARRAY:
            return self._array(key)
        raise self._damaged(f"{_shown.repr(key)} has the value type {kind}, which is not known")

    def _array(self, key: str) -> list[Any]:
        kind, length = self._number("I"), self._number("Q")
        if kind in _NUMBERS:
            item = np.dtype(f"<{_NUMBERS[kind]}") if kind != 7 else np.dtype(np.bool_)
            self._check_count(length, item.itemsize, _LARGEST_HEADER, f"values of {_shown.repr(key)}")
            values: list[Any] = np.frombuffer(self._take(length * item.itemsize), item).tolist()
            return values
        if kind == _TEXT:
            self._check_count(length, 8, _LARGEST_HEADER, f"texts of {_shown.repr(key)}")
            return [self._text(_LARGEST_HEADER) for _ in range(length)]
        raise self._damaged(f"{_shown.repr(key)} is a list of the value type {kind}, which is not supported")

    def _text(self, longest: int) -> str:
        length = self._number("Q")
        self._check_count(length, 1, longest, "bytes of a text")
        # Vocabularies may have tokens that are no UTF-8; decoded so, they can be told apart and encoded again.
        return self._take(length).decode("utf-8", errors="surrogateescape")

    def _number(self, form: str) -> Any:
        return struct.unpack("<" + form, self._take(struct.calcsize("<" + form)))[0]

    def _take(self, count: int) -> bytes:
        end = self._position + count
        if end > min(self._size, _LARGEST_HEADER):
            raise ModelError(
                f"{self._path} is cut short, or damaged: its header needs at least {end} bytes, and "
                f"{min(self._size, _LARGEST_HEADER)} are there or allowed. {_DOWNLOAD_AGAIN}"
            )
        while end > len(self._buffer):
            chunk = self._file.read(_CHUNK)
            if not chunk:
                raise ModelError(f"{self._path} has become shorter while it was read. {_DOWNLOAD_AGAIN}")
            self._buffer += chunk
        found = bytes(memoryview(self._buffer)[self._position : end])
        self._position = end
        return found

    def _check_count(self, count: int, item_bytes: int, most: int, what: str) -> None:
        if count > most or count * item_bytes > self._size - self._position:
            raise self._damaged(f"it claims {count} {what}, more than are allowed or fit into the file")

    def _damaged(self, why: str) -> ModelError:
        return ModelError(f"{self._path} is damaged: {why}. {_DOWNLOAD_AGAIN}")
