"""Detects changes of the GGUF files from which a model folder was derived.

Size and modification time are compared first. If only the modification time differs, a digest of the header and of
samples of the data is compared, which reads some megabytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mvllm.extension_api import ModelError
from mvllm.extension_api.checkpoint_formats import plain_reason
from mvllm_gguf.header import GGUFModel

_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096
_CHUNK = 1 << 20


@dataclass(frozen=True)
class FileState:
    """Path, size and modification time of a file.

    Attributes:
        path: Absolute path.
        size: Size in bytes.
        mtime_ns: Modification time in nanoseconds.
    """

    path: str
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class FileContent:
    """A digest of a file's content.

    Attributes:
        header_bytes: Bytes before the first tensor.
        digest: Hexadecimal SHA-256 of its size, its header, and samples of its data.
    """

    header_bytes: int
    digest: str


def file_states(files: tuple[Path, ...]) -> list[FileState]:
    """The current states of files.

    Raises:
        ModelError: A file is missing or cannot be accessed.
    """
    states = []
    for file in files:
        try:
            found = file.stat()
        except (OSError, ValueError) as e:
            raise ModelError(f"{file} cannot be read: {plain_reason(e)}. Check the path.") from e
        states.append(FileState(str(file), found.st_size, found.st_mtime_ns))
    return states


def file_contents(model: GGUFModel, states: list[FileState]) -> list[FileContent]:
    """The contents of a model's files.

    Raises:
        ModelError: A file cannot be read.
    """
    contents = []
    for state in states:
        starts = [tensor.start for tensor in model.tensors.values() if str(tensor.file) == state.path]
        header_bytes = min(starts, default=state.size)
        contents.append(FileContent(header_bytes, _digest(state, header_bytes)))
    return contents


def has_content(state: FileState, content: FileContent) -> bool:
    """Whether a file still has this content. False if it cannot be read."""
    try:
        return _digest(state, content.header_bytes) == content.digest
    except ModelError:
        return False


def as_states(listed: Any) -> list[FileState] | None:
    """States from JSON; None if the JSON is invalid."""
    try:
        states = [FileState(each["path"], each["size"], each["mtime_ns"]) for each in listed]
    except (TypeError, KeyError):
        return None
    are_valid = all(
        isinstance(state.path, str) and type(state.size) is int and type(state.mtime_ns) is int for state in states
    )
    return states if states and are_valid else None


def as_contents(listed: Any) -> list[FileContent] | None:
    """Contents from JSON; None if the JSON is invalid."""
    try:
        contents = [FileContent(each["header_bytes"], each["digest"]) for each in listed]
    except (TypeError, KeyError):
        return None
    are_valid = all(type(each.header_bytes) is int and isinstance(each.digest, str) for each in contents)
    return contents if contents and are_valid else None


def _digest(state: FileState, header_bytes: int) -> str:
    header_bytes = min(max(0, header_bytes), state.size)
    digest = hashlib.sha256(f"{state.size} {header_bytes}".encode())
    step = max(_SAMPLE_BYTES, (state.size - header_bytes) // _NUM_SAMPLES)
    try:
        with open(state.path, "rb", buffering=0) as file:
            while (left := header_bytes - file.tell()) > 0:
                if not (chunk := file.read(min(_CHUNK, left))):
                    break
                digest.update(chunk)
            for start in range(header_bytes, state.size, step):
                file.seek(start)
                digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(header_bytes, state.size - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    except (OSError, ValueError) as e:
        raise ModelError(f"{state.path} cannot be read: {plain_reason(e)}. Check the path.") from e
    return digest.hexdigest()
