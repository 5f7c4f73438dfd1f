"""Interface of quantization methods: for each linear layer, a method chooses the storage format of its weight.

    settings ──from_config──> QuantizationMethod ──matrix(layout)──> QuantizedMatrix ──weight_targets──> weight loader
                                                   (or None: not quantized)          ──finish──────────> op and weight

The front end creates a method to validate its settings before it starts processes. Each worker creates it again to
build the matrices. Only `matrix` needs torch, so modules of methods import torch only there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from mvllm.config.hf_config import HFConfig
from mvllm.errors import ModelError
from mvllm.layers.matrix_layout import MatrixLayout

if TYPE_CHECKING:
    from torch import nn

    from mvllm.layers.context import BuildContext
    from mvllm.layers.quantization.matrix_interface import QuantizedMatrix
    from mvllm.ops.float8_linear import Float8Inputs


class QuantizationMethod(ABC):
    """One quantization method with its settings.

    Attributes:
        quantizes_on_load: The method quantizes an unquantized checkpoint while loading, selected by the setting
            `quantization`. Otherwise it reads checkpoints that name it as their `quant_method`.
    """

    quantizes_on_load: ClassVar[bool] = False
    _checkpoint_names: Callable[[str], Sequence[str]] | None = None

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
        """The quantized form of one matrix: collects its tensors and provides its linear op. Phase: worker.

        Args:
            ctx: Build context.
            layout: The parts of the matrix.
            tied_to: For a tied layout, the token embedding [out_features, num_columns] of this rank if it has one. It
                is then the matrix.

        Returns:
            None if the matrix is not quantized.

        Raises:
            ConfigError: The stored matrix cannot be sharded over the ranks.
            ModelError: Its parts are stored in different formats, or in one that is not supported.
        """

    def use_names(self, checkpoint_names: Callable[[str], Sequence[str]]) -> None:
        """Called by the model before it builds layers.

        Args:
            checkpoint_names: The names that checkpoints may have for a module, given the model's name of it.
        """
        self._checkpoint_names = checkpoint_names

    def names_of(self, name: str) -> tuple[str, ...]:
        """The names that the settings may have for a module: the model's, and those of checkpoints."""
        return (name,) if self._checkpoint_names is None else (name, *self._checkpoint_names(name))

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint tensor without target may be skipped."""
        return False

    def given_name(self, name: str) -> str:
        """The name by which the matrices' targets refer to the checkpoint tensor `name`."""
        return name


@dataclass(frozen=True)
class IntegerFormat:
    """Bits, group size and activation format of an integer-quantized matrix.

    Attributes:
        bits: 8 or 4.
        group_size: Columns that share a scale; None for one scale per row.
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
    """Storage format of one integer-quantized matrix in a checkpoint.

    Attributes:
        order_tensor: Name of the tensor with each column's group (activation order); None without.
        packing: The packing format, one of its method's.
    """

    order_tensor: str | None = None
    packing: str = ""


@dataclass(frozen=True)
class Float8Format:
    """Storage format of one FP8 matrix in a checkpoint.

    Attributes:
        scale_tensor: Name of the tensor of scales.
        block_rows, block_columns: Size of a block that shares a scale; None for all rows, or columns.
        inputs: Rounding of the inputs, as in the operation `float8_linear`.
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
    """The common format of a matrix's parts; None for floats.

    Raises:
        ModelError: The parts have different formats.
    """
    if any(other != quantized[0] for other in quantized):
        how = "; ".join(
            f"{name}: {'floats' if q is None else q}" for name, q in zip(layout.names, quantized, strict=True)
        )
        raise ModelError(
            f"{layout} are one matrix in this engine, but the checkpoint stores them in different formats ({how}). "
            "Quantize the model again with the same settings for all of them, or take its unquantized checkpoint."
        )
    return quantized[0]
