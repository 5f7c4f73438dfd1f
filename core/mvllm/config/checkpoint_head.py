"""Reads the names of a checkpoint's tensors, and finds out from them whether it lacks a language-model head.

Embedding models are published in the architecture of the generative model that they were made from, without its head.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from mvllm.config.hf_config import HFConfig

_LARGEST_HEADER = 100_000_000  # bytes, as in the format's own library
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_NOT_THE_MODEL = ("consolidated", "adapter_model", "optimizer", "scheduler")

_HEAD = re.compile(r"(\w+_)?heads?|embed_out|proj_out|output(_layer|_projection)?")
_OF_ENCODER = re.compile(r"(vision|visual|audio|image|speech)\w*|\w+_(vision|audio)")


class _Index(msgspec.Struct):
    weight_map: dict[str, msgspec.Raw]


def lacks_head(folder: Path, hf_config: HFConfig) -> bool:
    """Whether the model has a head of its own by its config, and its checkpoint has none.

    False if that is not certain: config.json does not say that the embedding is not the head, the folder has no weights
    in safetensors files, or they cannot be read (loading them reports it).
    """
    if hf_config.get("tie_word_embeddings") is not False or hf_config.get("tie_embedding", False):
        return False
    names = tensor_names(folder)
    return bool(names) and not any(_is_of_head(name) for name in names)


def _is_of_head(name: str) -> bool:
    """Whether a tensor is one of a head: outside of layers, which have numbers, and of encoders."""
    parts = name.split(".")[:-1]
    if any(part.isdigit() or _OF_ENCODER.fullmatch(part) for part in parts):
        return False
    return any(_HEAD.fullmatch(part) for part in parts)


def tensor_names(folder: Path) -> Iterable[str]:
    """The names of a checkpoint's tensors in safetensors files; none if there are no such files, or if they cannot be
    read (loading them reports it)."""
    try:
        return _read_names(folder)
    except (OSError, ValueError, msgspec.MsgspecError):
        return ()


def _read_names(folder: Path) -> Iterable[str]:
    if (single := folder / _SINGLE).is_file():
        return _names_of_file(single)
    if (index := folder / _INDEX).is_file():
        if index.stat().st_size > _LARGEST_HEADER:
            return []
        return msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    paths = [path for path in folder.glob("*.safetensors") if not path.name.startswith(_NOT_THE_MODEL)]
    return [name for path in paths for name in _names_of_file(path)]


def _names_of_file(path: Path) -> Iterable[str]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _LARGEST_HEADER:
            raise ValueError("no safetensors file")
        header = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
    header.pop("__metadata__", None)
    return header
