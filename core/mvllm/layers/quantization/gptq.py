"""GPTQ checkpoints: 4 or 8 bits, packed along the inputs.

qweight  int32 [in / n, out]        n = 8 or 4 inputs in a word, the first in the lowest bits
qzeros   int32 [groups, out / n]    n outputs in a word: their zero points less one, or as they are ('gptq_v2')
scales   float [groups, out]
g_idx    int32 [in]                 the group of each input, needed with desc_act
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from mvllm.config.hf_config import HFConfig
from mvllm.errors import ModelError
from mvllm.layers.matrix_layout import MatrixLayout
from mvllm.layers.quantization.config_fields import group_size, names, one_of, pattern
from mvllm.layers.quantization.interface import PackedFormat, QuantizationMethod, format_of_all

if TYPE_CHECKING:
    from torch import nn

    from mvllm.layers.context import BuildContext
    from mvllm.layers.quantization.quantized_matrix import QuantizedMatrix


class GPTQ(QuantizationMethod):
    """`quant_method: gptq`.

    Args:
        format: Default storage format of quantized matrices.
        head: Whether the language-model head is quantized as well.
        only: If not empty, name suffixes of the quantized modules.
        floats: A module whose name contains one of these is not quantized.
        dynamic: Other formats, or None for floats, by pattern; the first matching pattern applies.
    """

    def __init__(
        self,
        format: PackedFormat,
        *,
        head: bool = False,
        only: tuple[str, ...] = (),
        floats: tuple[str, ...] = (),
        dynamic: tuple[tuple[re.Pattern[str], PackedFormat | None], ...] = (),
    ) -> None:
        self.format, self.head, self.only, self.floats, self.dynamic = format, head, only, floats, dynamic

    @classmethod
    def from_config(cls, settings: HFConfig) -> GPTQ:
        packing = one_of(settings, ("checkpoint_format",), ("gptq", "gptq_v2"), default="gptq")
        format = PackedFormat(
            bits=one_of(settings, ("bits",), (4, 8)),
            group_size=group_size(settings, ("group_size",)),
            symmetric=one_of(settings, ("sym",), (True, False), default=True),
            order_tensor="g_idx" if one_of(settings, ("desc_act",), (True, False), default=False) else None,
            packing=packing,
        )
        return cls(
            _drop_irrelevant_act_order(format),
            head=one_of(settings, ("lm_head",), (True, False), default=False),
            only=_names_in_blocks(settings, "modules_in_block_to_quantize"),
            floats=names(settings, "modules_to_not_convert"),
            dynamic=_dynamic(settings, format),
        )

    def matrix(
        self, ctx: BuildContext, layout: MatrixLayout, tied_to: nn.Parameter | None = None
    ) -> QuantizedMatrix | None:
        if layout.is_head and (layout.tied or not self.head):
            return None
        format = format_of_all(layout, [self._format_of(name, is_head=layout.is_head) for name in layout.names])
        if format is None:
            return None
        from mvllm.layers.quantization.packed_matrix import PackedMatrix
        from mvllm.layers.quantization.packing_formats import GPTQPacking

        return PackedMatrix(ctx, layout, GPTQPacking(zeros_less_one=format.packing == "gptq"), format)

    def ignores(self, name: str) -> bool:
        """Trivial group indices, and biases: quantizers write zeros for layers without bias."""
        return name.endswith((".g_idx", ".bias"))

    def _format_of(self, name: str, *, is_head: bool) -> PackedFormat | None:
        names = self.names_of(name)
        for expression, format in self.dynamic:
            if any(expression.match(each) for each in names):
                return format
        if any(part in each for each in names for part in self.floats):
            return None
        is_listed = not self.only or is_head or any(each.endswith(self.only) for each in names)
        return self.format if is_listed else None


def _drop_irrelevant_act_order(format: PackedFormat) -> PackedFormat:
    """With one scale per row the activation order does not matter."""
    return format if format.group_size is not None else dataclasses.replace(format, order_tensor=None)


def _dynamic(settings: HFConfig, format: PackedFormat) -> tuple[tuple[re.Pattern[str], PackedFormat | None], ...]:
    """`{"+:regex": {changes}, "-:regex": {}}`: modules of another format, and modules that stay floats."""
    rules = settings.get("dynamic", {})
    if not isinstance(rules, dict) or not all(isinstance(changes, dict) for changes in rules.values()):
        raise ModelError(f"{settings.source}: 'dynamic' should be an object of objects, found {rules!r}.")
    found: list[tuple[re.Pattern[str], PackedFormat | None]] = []
    for text, changes in rules.items():
        sign, colon, expression = text.partition(":")
        if not colon or sign not in ("+", "-"):
            sign, expression = "+", text
        changed = None if sign == "-" else _changed(HFConfig(changes, f"{settings.source}: dynamic {text!r}"), format)
        found.append((pattern(expression, settings), changed))
    return tuple(found)


def _changed(changes: HFConfig, format: PackedFormat) -> PackedFormat:
    orders = one_of(changes, ("desc_act",), (True, False), default=format.order_tensor is not None)
    return _drop_irrelevant_act_order(
        dataclasses.replace(
            format,
            bits=one_of(changes, ("bits",), (4, 8), default=format.bits),
            group_size=group_size(changes, ("group_size",)) if "group_size" in changes else format.group_size,
            symmetric=one_of(changes, ("sym",), (True, False), default=format.symmetric),
            order_tensor="g_idx" if orders else None,
        )
    )


def _names_in_blocks(settings: HFConfig, key: str) -> tuple[str, ...]:
    """`[["self_attn.q_proj"], ["mlp.up_proj"]]` as one tuple; a single text is a list of one."""
    blocks = settings.get(key, [])
    listed = [blocks] if isinstance(blocks, str) else blocks
    if isinstance(listed, list):
        found = [name for block in listed for name in (block if isinstance(block, list) else [block])]
        if all(isinstance(name, str) for name in found):
            return tuple(found)
    raise ModelError(
        f"{settings.source}: {key!r} should be a list of texts, or of lists of texts, found {blocks!r:.200}."
    )
