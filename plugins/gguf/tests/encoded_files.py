"""Builders of GGUF files: valid ones with the gguf package, and valid or invalid headers byte by byte."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

U32, TEXT, ARRAY = 4, 8, 9
F32, Q4_0 = 0, 2


def write_gguf(
    path: Path,
    tensors: Mapping[str, tuple[np.ndarray, int | None]] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """A file of architecture llama.

    Args:
        tensors: By name, the values and their GGUF type number, None for the type of the values. Values of quantized
            types are bytes. By default one float32 vector.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (metadata or {}).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, (values, kind) in (tensors or {"output_norm.weight": (np.ones(4, np.float32), None)}).items():
        writer.add_tensor(name, values, raw_dtype=None if kind is None else gguf.GGMLQuantizationType(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def text(value: str | bytes) -> bytes:
    """An encoded string."""
    content = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(content)) + content


def value(key: str | bytes, kind: int, content: bytes) -> bytes:
    """An encoded metadata entry."""
    return text(key) + struct.pack("<I", kind) + content


def array(kind: int, length: int, content: bytes) -> bytes:
    """The encoded content of an array."""
    return struct.pack("<IQ", kind, length) + content


def tensor(name: str | bytes = "a", sizes: Sequence[int] = (4,), kind: int = F32, offset: int = 0) -> bytes:
    """The encoded entry of a tensor; `sizes` in the order of the file, columns first."""
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def raw(
    path: Path,
    values: Sequence[bytes] = (),
    tensors: Sequence[bytes] | None = None,
    *,
    data: int = 64,
    num_values: int | None = None,
    num_tensors: int | None = None,
    version: int = 3,
) -> Path:
    """Writes a file from encoded entries and tensors (by default one vector), with `data` zeros after the header.

    The header has the numbers of `values` and `tensors`, unless `num_values` or `num_tensors` are given.
    """
    tensors = [tensor()] if tensors is None else tensors
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(values) if num_values is None else num_values,
    )
    header = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join((*values, *tensors))
    path.write_bytes(header + bytes(-len(header) % 32 + data))
    return path
