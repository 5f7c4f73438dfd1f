"""Maps checkpoint tensors to transformers' parameters, by transformers' own conversion lists.

Tensors may have other names in a checkpoint, and a checkpoint stores experts separately while transformers stacks them:

    experts.0.gate_proj.weight  ┐ rows of the    gate_up_proj [experts, 2 * size, hidden_size]
    experts.0.up_proj.weight    ┘ first matrix
    experts.1.gate_proj.weight  ...
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StackedTensorSlice:
    """A checkpoint tensor that fills a slice of a stacked parameter.

    Attributes:
        name: Name of the checkpoint tensor.
        shape: Its shape.
        place: The slice of the stack.
    """

    name: str
    shape: tuple[int, ...]
    place: tuple[slice | int, ...]


class CheckpointNameMap:
    """The conversion lists of one model.

    Args:
        renamings: Renamings, applied in order.
        conversions: Conversions that also change tensors.
    """

    def __init__(self, renamings: Sequence[Any], conversions: Sequence[Any]) -> None:
        self._renamings, self._conversions = renamings, conversions

    @classmethod
    def from_model(cls, causal: Any) -> CheckpointNameMap:
        """The conversion lists of a transformers model."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming

        transforms = get_model_conversion_mapping(causal)
        renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        return cls(renamings, [one for one in transforms if not isinstance(one, WeightRenaming)])

    def new_name(self, name: str) -> str:
        """transformers' name of a checkpoint tensor, before stacking."""
        for renaming in self._renamings:
            name = renaming.rename_source_key(name)[0]
        return name

    def pieces(self, name: str, shape: tuple[int, ...]) -> list[StackedTensorSlice] | None:
        """The checkpoint tensors that form a parameter; None if one tensor of the same shape does.

        Raises:
            ValueError: The conversion is not supported.
        """
        for one in self._conversions:
            for target in one.target_patterns:
                if re.search(re.escape(target).replace(r"\*", ".*"), name):
                    return _stacked(one, target, name, shape)
        return None


def _stacked(conversion: Any, target: str, name: str, shape: tuple[int, ...]) -> list[StackedTensorSlice]:
    sources = conversion.source_patterns
    steps = [(type(step).__name__, getattr(step, "dim", None)) for step in conversion.operations]
    known = steps == [("MergeModulelist", 0), ("Concatenate", 1)] or (steps == [("MergeModulelist", 0)])
    plain = len(conversion.target_patterns) == 1 and all(re.fullmatch(r"[\w.]*\*[\w.]*", text) for text in sources)
    if not (known and plain and len(shape) == 3 and target in name and len(sources) in (1, len(steps))):
        raise ValueError(f"checkpoints store {name} in another form than transformers computes with")
    rows = shape[1] // len(sources)
    return [
        StackedTensorSlice(
            name.replace(target, source.replace("*", str(expert)), 1),
            (rows, shape[2]),
            (expert, slice(part * rows, (part + 1) * rows), slice(0, shape[2])),
        )
        for expert in range(shape[0])
        for part, source in enumerate(sources)
    ]
