"""Checkpoint tensors that stack the matrices of all experts of a layer, read as one tensor for each matrix.

    experts.gate_up_proj  [experts, 2 · inner, hidden]      experts.0.gate_proj.weight, experts.0.up_proj.weight, ...
    experts.down_proj     [experts, hidden, inner]          experts.0.down_proj.weight, experts.1.down_proj.weight, ...

The matrices are contiguous in the stack, so each is a tensor of its own that begins later in the file. A family's
checkpoints may have either form.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

from mvllm.checkpoint_formats.tensor_entry import TensorEntry
from mvllm.errors import ModelError
from mvllm.layers.weight_target import WeightTarget

_STACK = re.compile(r"(?P<experts>.*\.experts)\.(?P<kind>gate_up|down)_proj")
_QUANTIZED_STACK = re.compile(
    r".*\.(?:experts\.(?:gate_up|gate|up|down)_proj|block_sparse_moe\.(?:in|out)put_linear)(?P<part>[._]\w+)*"
)
_FLOATS = ("F64", "F32", "F16", "BF16")
_MATRICES = {"gate_up": ("gate", "up"), "down": ("down",)}


def split_expert_stack(name: str, entry: TensorEntry, known: Container[str]) -> dict[str, TensorEntry]:
    """The matrices of a stack as entries, by name; empty if the tensor is none, or the model has other experts.

    Args:
        name: The model's name of the tensor.
        entry: The tensor.
        known: Names of the tensors that the model has.
    """
    match = _STACK.fullmatch(name)
    if match is None or len(entry.shape) != 3 or entry.transposed:
        return {}
    kinds = _MATRICES[match["kind"]]
    num_experts, rows, columns = entry.shape
    if rows % len(kinds):
        return {}
    shape = rows // len(kinds), columns
    num_bytes = entry.num_bytes // math.prod((num_experts, len(kinds))) if num_experts else 0
    entries = {}
    for i in range(num_experts * len(kinds)):
        expert, kind = divmod(i, len(kinds))
        start = entry.start + i * num_bytes
        part = f"{match['experts']}.{expert}.{kinds[kind]}_proj.weight"
        if part not in known:
            return {}
        entries[part] = replace(entry, shape=shape, start=start, num_bytes=num_bytes)
    return entries


def check_quantized_stacks(
    unknown: Iterable[TensorEntry], matched: Iterable[tuple[TensorEntry, Sequence[WeightTarget]]]
) -> None:
    """Refuses quantized experts of a layer in one tensor, which layers with experts of floats have no place for.

    Args:
        unknown: Tensors without target.
        matched: Tensors with their targets.

    Raises:
        ModelError: A tensor holds quantized experts, or their scales.
    """
    misfits = [entry for entry in unknown if entry.dtype not in _FLOATS or "scale" in entry.name]
    misfits += [
        entry
        for entry, targets in matched
        if entry.dtype not in _FLOATS and any(target.parameter.dtype.itemsize > 1 for target in targets)
    ]
    for entry in misfits:
        if _QUANTIZED_STACK.fullmatch(entry.name):
            raise ModelError(
                f"{entry.file}: tensor {entry.name!r} holds the quantized experts of a layer in one tensor, which is "
                "supported for unquantized experts only. Use a checkpoint with a tensor for each expert, or the "
                "unquantized one, with quantization='int8' to quantize its other layers while it loads."
            )
