"""Parses and checks the header of a GGUF file.

    magic "GGUF" │ version u32 │ tensors u64 │ values u64 │ key, type, value ... │ name, shape, type, offset ... │ data

All numbers are little-endian. Before memory is allocated, every count is compared with the remaining bytes of the file,
and with a limit for all files of the model together: parsing a damaged or malicious file takes seconds and at most
about a gigabyte. Tensor data is not read.
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
from typing import Any

from mvllm.extension_api import ModelError
from mvllm_gguf.tensor_types import TensorType, tensor_type

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_LARGEST_KEY = 1024
_LARGEST_TEXT = 64 << 20
_MOST_DIMENSIONS = 4
_MOST_FILES = 1000
_CHUNK = 4 << 20
_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)
_DOWNLOAD_AGAIN = "Download or copy the file again."

# Value types by number: a struct format, or the type of texts and arrays.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")

_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 200


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor's entry in the header.

    Attributes:
        name: Its name in the file, for instance `blk.0.attn_q.weight`.
        type: Its tensor type.
        shape: Sizes of its dimensions, row-major; blocks are along the last dimension.
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


@dataclass
class _Limits:
    """Remaining limits for the headers of all files of a model together.

    The largest known header has 20 MB and 1.5 million list items (a vocabulary of 262,144 tokens and its merges).
    """

    header_bytes: int = 128 << 20
    tensors: int = 100_000
    values: int = 100_000
    items: int = 8_000_000


def read_gguf(path: Path) -> GGUFModel:
    """Reads the header of a GGUF file, or the headers of all files of a split model (`name-00001-of-00003.gguf`).

    Does not read tensor data.

    Raises:
        ModelError: A file is missing, damaged, truncated, or not a GGUF file, or the files have no tensors.
    """
    files = gguf_files(path)
    limits = _Limits()
    metadata: dict[str, Any] = {}
    tensors: dict[str, GGUFTensor] = {}
    for i, file in enumerate(files):
        values, found = _read_file(file, limits)
        _check_part(file, i, len(files), values)
        if i == 0:
            metadata = values
        for tensor in found:
            if tensor.name in tensors:
                raise ModelError(
                    f"Tensor {_shown.repr(tensor.name)} is in {tensors[tensor.name].file} and in {file}. "
                    f"{_DOWNLOAD_AGAIN}"
                )
            tensors[tensor.name] = tensor
    if not tensors:
        raise ModelError(
            f"{path} holds no tensors, only metadata (a vocabulary, for instance). Pass a file that holds the model."
        )
    return GGUFModel(files, metadata, tensors)


def gguf_files(path: Path) -> tuple[Path, ...]:
    """All files of the model of which `path` is one, by their names: one, or the parts of a split model in order.

    Raises:
        ModelError: A part of a split model is missing.
    """
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return (path,)
    count, number = int(match["count"]), int(match["number"])
    if not 1 <= number <= count <= _MOST_FILES:
        raise ModelError(
            f"{path} is file {number} of {count} according to its name; allowed are 1 to {_MOST_FILES} files. Give "
            "the files the names under which they were published."
        )
    files = tuple(path.with_name(f"{match['stem']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1))
    missing = [file.name for file in files if not os.path.exists(file)]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise ModelError(f"{path.parent} lacks {', '.join(missing[:5])}{more}, parts of the model. Download them.")
    return files


def _check_part(file: Path, i: int, num_files: int, values: Mapping[str, Any]) -> None:
    count, number = values.get("split.count", 0), values.get("split.no", 0)
    if count in (0, 1) and num_files == 1:  # merged files may keep the keys
        return
    if count != num_files or number != i:
        raise ModelError(
            f"{file} is file {i + 1} of {num_files} according to its name, but its metadata says split.no="
            f"{_shown.repr(number)} (counted from 0) and split.count={_shown.repr(count)}. Give the files the names "
            "under which they were published."
        )


def _read_file(path: Path, limits: _Limits) -> tuple[dict[str, Any], list[GGUFTensor]]:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ModelError(f"{path} is not a regular file and will not be read. Pass a GGUF file.")
        # Non-blocking, in case the path has become a pipe.
        file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        try:
            return _Header(path, file, os.fstat(file).st_size, limits).parse()
        finally:
            os.close(file)
    except ModelError:
        raise
    except OSError as e:
        raise ModelError(f"{path} cannot be read: {e.strerror or e}") from e
    except ValueError as e:  # the path contains a null character
        raise ModelError(f"{str(path)!r} cannot be read: {e}") from e


class _Header:
    """Reads values sequentially from the beginning of a file.

    Args:
        path: Path of the file, for messages.
        file: Descriptor of the file.
        size: Bytes of the file.
        limits: Reduced by the contents of the header.
    """

    def __init__(self, path: Path, file: int, size: int, limits: _Limits) -> None:
        self._path = path
        self._file = file
        self._size = size
        self._limits = limits
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
        self._check_count(num_tensors, 32, self._limits.tensors, "tensors")
        self._check_count(num_values, 13, self._limits.values, "metadata values")
        self._limits.tensors -= num_tensors
        self._limits.values -= num_values
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._text(_LARGEST_KEY)
            if key in metadata:
                raise self._damaged(f"the key {_shown.repr(key)} is there twice")
            metadata[key] = self._value(self._number("I"), key)
        entries = [self._tensor() for _ in range(num_tensors)]
        self._limits.header_bytes -= self._position
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
        """The tensors in the order of their data. Checks that they are inside of the file and do not overlap."""
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
            return self._text(_LARGEST_TEXT)
        if kind == _ARRAY:
            return self._array(key)
        raise self._damaged(f"{_shown.repr(key)} has the value type {kind}, which is not known")

    def _array(self, key: str) -> list[Any]:
        kind, length = self._number("I"), self._number("Q")
        if kind not in _NUMBERS and kind != _TEXT:
            raise self._damaged(f"{_shown.repr(key)} is a list of the value type {kind}, which is not supported")
        item_bytes = _LENGTH.size if kind == _TEXT else struct.calcsize("<" + _NUMBERS[kind])
        self._check_count(length, item_bytes, self._limits.items, f"items of the list {_shown.repr(key)}")
        self._limits.items -= length
        if kind == _TEXT:
            return self._texts(length)
        return list(struct.unpack(f"<{length}{_NUMBERS[kind]}", self._take(length * item_bytes)))

    def _texts(self, count: int) -> list[str]:
        """Like `count` calls of `_text`, but faster: a vocabulary has hundreds of thousands of texts."""
        buffer, position, texts = self._buffer, self._position, []
        for _ in range(count):
            start = position + _LENGTH.size
            if start > len(buffer):
                self._fill(start)
            position = start + _LENGTH.unpack_from(buffer, start - _LENGTH.size)[0]
            if position > len(buffer):
                self._fill(position)
            texts.append(buffer[start:position].decode("utf-8", "surrogateescape"))
        self._position = position
        return texts

    def _text(self, longest: int) -> str:
        length = self._number("Q")
        self._check_count(length, 1, longest, "bytes of a text")
        # Tokens may be invalid UTF-8; `surrogateescape` keeps them distinct and reversible.
        return self._take(length).decode("utf-8", "surrogateescape")

    def _number(self, form: str) -> Any:
        return struct.unpack("<" + form, self._take(struct.calcsize("<" + form)))[0]

    def _take(self, count: int) -> bytes:
        start, end = self._position, self._position + count
        if end > len(self._buffer):
            self._fill(end)
        self._position = end
        return bytes(memoryview(self._buffer)[start:end])

    def _fill(self, end: int) -> None:
        """Reads the file up to `end` or further."""
        if end > min(self._size, self._limits.header_bytes):
            if end > self._size:
                raise ModelError(
                    f"{self._path} is cut short, or damaged: its header needs at least {end} bytes, and the file has "
                    f"{self._size}. {_DOWNLOAD_AGAIN}"
                )
            raise self._damaged(f"its header has more than the allowed {self._limits.header_bytes} bytes")
        while end > len(self._buffer):
            chunk = os.read(self._file, min(_CHUNK, self._limits.header_bytes - len(self._buffer)))
            if not chunk:
                raise ModelError(f"{self._path} has become shorter while it was read. {_DOWNLOAD_AGAIN}")
            self._buffer += chunk

    def _check_count(self, count: int, item_bytes: int, most: int, what: str) -> None:
        if count > most or count * item_bytes > self._size - self._position:
            raise self._damaged(f"it claims {count} {what}, more than are allowed ({most}) or fit into the file")

    def _damaged(self, why: str) -> ModelError:
        return ModelError(f"{self._path} is damaged: {why}. {_DOWNLOAD_AGAIN}")
