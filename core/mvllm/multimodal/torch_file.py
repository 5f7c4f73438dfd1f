"""Reads the one tensor of a file that `torch.save` has written, without running anything in it.

Such a file is a zip archive with the tensor's bytes and a program for a stack machine, which can call any function. The
program that torch writes for one plain tensor is always the same up to the numbers in it. It is compared, instruction
by instruction, and not run; every other program is refused.

Clients of other engines send `prompt_embeds` in this form.
"""

from __future__ import annotations

import io
import math
import pickletools
import zipfile
from collections.abc import Iterator
from typing import Any

import numpy as np

_STORAGES = {
    "torch DoubleStorage": "f8",
    "torch FloatStorage": "f4",
    "torch HalfStorage": "f2",
    "torch BFloat16Storage": "bf16",
}
_UNUSED = ("PROTO", "FRAME", "BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE")
"""Instructions without an effect on the result of a program that reads nothing back."""
_INTEGERS = ("BININT", "BININT1", "BININT2", "LONG1")
_LARGEST_PROGRAM = 4096


def is_torch_file(data: bytes) -> bool:
    """Whether a file begins as those of `torch.save` do."""
    return data.startswith(b"PK\x03\x04")


def read_tensor(data: bytes) -> np.ndarray[Any, Any]:
    """The tensor of a file, of floats; bfloat16, which numpy does not have, as float32.

    Raises:
        ValueError: The file holds anything else, or is damaged.
    """
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
        entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        program = _content(archive, entries["data.pkl"], at_most=_LARGEST_PROGRAM)
        if "byteorder" in entries and _content(archive, entries["byteorder"], at_most=16) != b"little":
            raise ValueError("its bytes are not in little-endian order")
        kind, key, offset, shape = _read_program(program)
        raw = _content(archive, entries[f"data/{key}"], at_most=len(data))
    except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError) as e:
        raise ValueError(f"it is not a file of torch.save, or damaged ({type(e).__name__})") from e
    dtype = np.dtype("<u2" if kind == "bf16" else f"<{kind}")
    count = math.prod(shape)
    if (offset + count) * dtype.itemsize > len(raw):
        raise ValueError(f"a tensor of shape {list(shape)} is longer than its storage")
    found: np.ndarray[Any, Any] = np.frombuffer(raw, dtype, count, offset * dtype.itemsize).reshape(shape)
    return (found.astype("<u4") << 16).view("<f4") if kind == "bf16" else found


def _content(archive: zipfile.ZipFile, info: zipfile.ZipInfo, *, at_most: int) -> bytes:
    """The content of an entry. torch stores entries uncompressed, so none is larger than the file."""
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > at_most:
        raise ValueError("it has a compressed or too large entry")
    return archive.read(info)


def _read_program(program: bytes) -> tuple[str, str, int, tuple[int, ...]]:
    """Element type, key of the storage, first element, and shape of a contiguous tensor."""
    steps = ((code.name, value) for code, value, _ in pickletools.genops(program) if code.name not in _UNUSED)
    _expect(steps, ("GLOBAL", "torch._utils _rebuild_tensor_v2"), ("MARK", None), ("MARK", None))
    _expect(steps, ("BINUNICODE", "storage"))
    storage = _take(steps, "GLOBAL")
    if storage not in _STORAGES:
        raise ValueError(f"its elements are {storage!r:.60}, not floats of 16, 32 or 64 bits")
    key = _take(steps, "BINUNICODE")
    _take(steps, "BINUNICODE")  # the device on which the tensor was
    _take(steps, *_INTEGERS)  # elements of the storage
    _expect(steps, ("TUPLE", None), ("BINPERSID", None))
    offset = _take(steps, *_INTEGERS)
    shape, strides = _take_integers(steps), _take_integers(steps)
    if offset < 0 or min(shape, default=0) < 0:
        raise ValueError("it has negative sizes")
    wanted = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    if any(stride != right for size, stride, right in zip(shape, strides, wanted, strict=True) if size > 1):
        raise ValueError("the tensor is not contiguous; save tensor.contiguous()")
    _take(steps, "NEWTRUE", "NEWFALSE")  # requires_grad
    _expect(steps, ("GLOBAL", "collections OrderedDict"), ("EMPTY_TUPLE", None), ("REDUCE", None))
    _expect(steps, ("TUPLE", None), ("REDUCE", None), ("STOP", None))
    return _STORAGES[storage], key, offset, shape


def _take_integers(steps: Iterator[tuple[str, Any]]) -> tuple[int, ...]:
    """A tuple of one to three integers."""
    found: list[int] = []
    for name, value in steps:
        if name in _INTEGERS:
            found.append(value)
        elif name == f"TUPLE{len(found)}":
            return tuple(found)
        else:
            break
    raise ValueError("it holds more than one plain tensor of one to three dimensions")


def _take(steps: Iterator[tuple[str, Any]], *names: str) -> Any:
    """The value of the next instruction, which must be one of these."""
    name, value = next(steps, ("", None))
    if name not in names:
        raise ValueError("it holds more than one plain tensor of one to three dimensions")
    return value


def _expect(steps: Iterator[tuple[str, Any]], *expected: tuple[str, Any]) -> None:
    for name, value in expected:
        if _take(steps, name) != value:
            raise ValueError("it holds more than one plain tensor of one to three dimensions")
