"""Checks that a head which is tied to the embedding does not differ from it in the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack

import torch

from mvllm.checkpoint_formats.tensor_entry import TensorEntry, TensorReader
from mvllm.errors import ModelError

_CHUNK = 1 << 20
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def check_tied_head(
    checkpoint: Mapping[str, TensorEntry], given_name: Callable[[str], str], head: str, embedding: str
) -> None:
    """Compares the head of a checkpoint, if it has one, with the embedding, which the model uses as its head.

    Reads both until they differ. Quantized tensors are not compared.

    Args:
        checkpoint: The tensors of safetensors files.
        given_name: The model's name of a checkpoint tensor.
        head, embedding: The model's names of the two tensors.

    Raises:
        ModelError: They differ.
    """
    found = {given_name(name): entry for name, entry in checkpoint.items() if given_name(name) in (head, embedding)}
    if len(found) < 2 or any(entry.dtype not in _FLOATS for entry in found.values()):
        return
    if found[head].shape == found[embedding].shape and _are_equal(found[head], found[embedding]):
        return
    raise ModelError(
        f"{found[head].file}: config.json sets tie_word_embeddings, but the checkpoint has a head "
        f"({found[head].name!r}) that differs from the token embedding ({found[embedding].name!r}). Pass "
        "hf_overrides={'tie_word_embeddings': False} to use the head of the checkpoint, or remove it from the "
        "checkpoint."
    )


def _are_equal(head: TensorEntry, embedding: TensorEntry) -> bool:
    with ExitStack() as stack:
        readers = [(stack.enter_context(entry.open_reader()), entry) for entry in (head, embedding)]
        total = math.prod(head.shape)
        for start in range(0, total, _CHUNK):
            one, other = (_values(reader, entry, start, min(_CHUNK, total - start)) for reader, entry in readers)
            if not torch.equal(one, other):
                return False
    return True


def _values(reader: TensorReader, entry: TensorEntry, start: int, count: int) -> torch.Tensor:
    """Elements of a tensor as float32."""
    dtype = _FLOATS[entry.dtype]
    buffer = bytearray(count * dtype.itemsize)
    reader.read_into(memoryview(buffer), entry, start * dtype.itemsize)
    return torch.frombuffer(buffer, dtype=dtype).float()
