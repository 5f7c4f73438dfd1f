"""Checkpoint tensors that stack the matrices of all experts of a layer, read as one tensor for each matrix.

    experts.gate_up_proj  [experts, 2 · inner, hidden]      experts.0.gate_proj.weight, experts.0.up_proj.weight, ...
    experts.down_proj     [experts, hidden, inner]          experts.0.down_proj.weight, experts.1.down_proj.weight, ...

The matrices are contiguous in the stack, so each is a tensor of its own that begins later in the file. A family's
checkpoints may have either form.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container
from dataclasses import replace

from mvllm.models.tensor_entry import TensorEntry

_STACK = re.compile(r"(?P<experts>.*\.experts)\.(?P<kind>gate_up|down)_proj")
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
