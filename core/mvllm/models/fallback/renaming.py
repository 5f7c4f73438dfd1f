"""Tensors that checkpoints have under other names than transformers' modules, by transformers' own list."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any


class Renaming:
    """The list of one model.

    Args:
        renamings: Applied one after the other.
        conversions: Those that change tensors as well.
    """

    def __init__(self, renamings: Sequence[Any], conversions: Sequence[Any]) -> None:
        self._renamings, self._conversions = renamings, conversions

    @classmethod
    def of(cls, causal: Any) -> Renaming:
        """The list for a model of transformers."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming

        transforms = get_model_conversion_mapping(causal)
        renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        return cls(renamings, [one for one in transforms if not isinstance(one, WeightRenaming)])

    def new_name(self, name: str) -> str:
        """What a tensor of the checkpoint is called in transformers' model."""
        for renaming in self._renamings:
            name = renaming.rename_source_key(name)[0]
        return name

    def converted(self, names: Iterable[str]) -> str | None:
        """The first parameter that is not stored as it is; None where there is none."""
        targets = [
            re.escape(target).replace(r"\*", ".*") for one in self._conversions for target in one.target_patterns
        ]
        return next((name for name in names if any(re.search(target, name) for target in targets)), None)
