"""What a quantization method is: it looks at each linear layer's matrix and says how that one is stored, if at all.

    settings ──of──> QuantizationMethod ──matrix(layout)──> QuantizedMatrix ──weight_targets──> filled by the loader
                                          (or None: floats)                 ──finish──────────> function and weight

A method is made before any process is started, to hear its objections, and again in each worker. So this module and
those of methods import torch only where matrices are made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from mvllm.config.hf_config import HFConfig
from mvllm.errors import ModelError
from mvllm.layers.matrix_layout import MatrixLayout

if TYPE_CHECKING:
    from torch import nn

    from mvllm.layers.context import BuildContext
    from mvllm.layers.quantization.quantized_matrix import QuantizedMatrix
    from mvllm.ops.float8_linear import Float8Inputs


class QuantizationMethod(ABC):
    """One method with its settings.

    Attributes:
        quantizes_on_load: It makes quantized matrices out of a checkpoint of floats, for users who ask for it by the
            setting `quantization`; otherwise it reads checkpoints that name it as their `quant_method`.
    """

    quantizes_on_load: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """A subclass may implement `from_config` under its deprecated name `of`."""
        super().__init_subclass__(**kwargs)
        if "of" in vars(cls) and "from_config" not in vars(cls):
            cls.from_config = vars(cls)["of"]  # type: ignore[method-assign]

    @classmethod
    @abstractmethod
    def from_config(cls, settings: HFConfig) -> QuantizationMethod:
        """The method with a checkpoint's settings.

        The front end calls it too, so it neither needs torch nor reads files.

        Args:
            settings: `quantization_config` of config.json; empty for a method that quantizes on load.

        Raises:
            ModelError: A setting is wrong or not supported; the message lists what is.
        """

    @classmethod
    def of(cls, settings: HFConfig) -> QuantizationMethod:
        """Deprecated name of `from_config`."""
        return cls.from_config(settings)

    @abstractmethod
    def matrix(
        self, ctx: BuildContext, layout: MatrixLayout, tied_to: nn.Parameter | None = None
    ) -> QuantizedMatrix | None:
        """How one matrix is stored, and what will multiply with it. Phase: worker.

        Args:
            ctx: Build context.
            layout: What the matrix is made of.
            tied_to: [out_features, num_columns]: where the layout is tied, the token embedding of this rank if it has
                it. The matrix is this one then.

        Returns:
            None where the checkpoint stores it as floats, and it is to stay so.

        Raises:
            ConfigError: The matrix cannot be cut along the ranks as it is stored.
            ModelError: Its parts are stored differently, or in a way that is not supported.
        """

    def ignores(self, name: str) -> bool:
        """Whether a tensor of the checkpoint that no matrix asks for carries nothing that is needed."""
        return False

    def given_name(self, name: str) -> str:
        """What the matrices' targets call a tensor that a checkpoint has under this name."""
        return name


@dataclass(frozen=True)
class IntegerFormat:
    """What a matrix of integers holds, and what it is multiplied with.

    Attributes:
        bits: 8 or 4.
        group_size: Columns that share a scale; None where a row has one.
        symmetric: There are no zero points.
        int8_activations: Inputs are rounded to int8, row by row.
    """

    bits: int
    group_size: int | None = None
    symmetric: bool = True
    int8_activations: bool = False

    def __str__(self) -> str:
        size = "rows" if self.group_size is None else f"groups of {self.group_size}"
        kind = "symmetric" if self.symmetric else "with zero points"
        inputs = ", int8 inputs" if self.int8_activations else ""
        return f"{self.bits} bits in {size}, {kind}{inputs}"


@dataclass(frozen=True)
class PackedFormat(IntegerFormat):
    """How a checkpoint stores one matrix of integers.

    Attributes:
        order_tensor: Name of the tensor that gives each column's group, where columns were ordered by importance.
        packing: Which of its method's ways to pack.
    """

    order_tensor: str | None = None
    packing: str = ""


@dataclass(frozen=True)
class Float8Format:
    """How a checkpoint stores one matrix of FP8.

    Attributes:
        scale_tensor: Name of the tensor of scales.
        block_rows, block_columns: Size of a block, whose elements share a scale; None for all rows, or columns.
        inputs: What the model was meant to be multiplied with: see the operation `float8_linear`.
    """

    scale_tensor: str
    block_rows: int | None = None
    block_columns: int | None = None
    inputs: Float8Inputs = "floats"

    @property
    def is_whole(self) -> bool:
        """Whether the whole matrix has one scale."""
        return self.block_rows is None and self.block_columns is None

    def __str__(self) -> str:
        rows, columns = (size or "all" for size in (self.block_rows, self.block_columns))
        return f"FP8 with scales of {rows} rows and {columns} columns, {self.inputs} inputs"


Format = TypeVar("Format", bound=PackedFormat | Float8Format)


def format_of_all(layout: MatrixLayout, quantized: Sequence[Format | None]) -> Format | None:
    """How a matrix is stored, from one entry per part; None for floats.

    Raises:
        ModelError: The parts are not all stored in the same way.
    """
    if any(other != quantized[0] for other in quantized):
        how = "; ".join(
            f"{name}: {'floats' if q is None else q}" for name, q in zip(layout.names, quantized, strict=True)
        )
        raise ModelError(
            f"{layout} are one matrix in this engine, but the checkpoint stores them in different ways ({how}). "
            "Quantize the model again with the same settings for all of them, or take its unquantized checkpoint."
        )
    return quantized[0]
