"""QuantizationAsStored: a quantization method for a part of a checkpoint that may be stored as floats.

config.json says which modules of the model are quantized. Of further parts, such as a multi-token-prediction module, it
often says nothing, and they may be quantized or not, wholly or in part. There the names of the tensors decide:

    q_proj.weight                          floats
    q_proj.weight, q_proj.weight_scale     quantized
    q_proj.qweight, q_proj.scales          quantized
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from mvllm.layers.matrix_layout import MatrixLayout

if TYPE_CHECKING:
    from torch import nn

    from mvllm.layers.context import BuildContext, Quantization
    from mvllm.layers.quantization.matrix_interface import QuantizedMatrix

_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(gate_proj|up_proj|down_proj)")
_STACKS = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}


class QuantizationAsStored:
    """Another method for all matrices but those that the checkpoint stores as floats.

    Args:
        method: The checkpoint's method.
        tensors: The names of its tensors. Without any, all matrices are that method's.
    """

    quantizes_on_load = False

    def __init__(self, method: Quantization, tensors: Iterable[str]) -> None:
        self._method = method
        self._names_of: Callable[[str], Sequence[str]] = lambda name: ()
        self._tensors = frozenset(tensors)
        others = (name.rpartition(".") for name in self._tensors)
        self._quantized = {module for module, _, kind in others if kind not in ("weight", "bias")}

    def matrix(
        self, ctx: BuildContext, layout: MatrixLayout, tied_to: nn.Parameter | None = None
    ) -> QuantizedMatrix | None:
        """As QuantizationMethod."""
        if all(self._is_float(name) for name in layout.names):
            return None
        return self._method.matrix(ctx, layout, tied_to)

    def use_names(self, checkpoint_names: Callable[[str], Sequence[str]]) -> None:
        """As QuantizationMethod."""
        self._names_of = checkpoint_names
        self._method.use_names(checkpoint_names)

    def ignores(self, name: str) -> bool:
        """As QuantizationMethod."""
        return self._method.ignores(name)

    def given_name(self, name: str) -> str:
        """As QuantizationMethod."""
        return self._method.given_name(name)

    def _is_float(self, module: str) -> bool:
        return any(self._is_stored_as_float(name) for name in (module, *self._names_of(module)))

    def _is_stored_as_float(self, module: str) -> bool:
        if f"{module}.weight" in self._tensors:
            return module not in self._quantized
        expert = _EXPERT.fullmatch(module)
        if expert is None:
            return False
        stack = f"{expert[1]}.{_STACKS[expert[2]]}"
        return stack in self._tensors and not self._tensors & {f"{stack}_scale", f"{stack}_scale_inv"}
