"""Experts whose weights stay quantized, multiplied by the operation `quantized_moe` or `quantized_ungated_moe`.

    checkpoint ──> QuantizedMatrix of each expert ──expert_weight──> ReadOnce ──prepare──> the provider's form
                   (staging, in the checkpoint's bits)               one expert at a time

Experts stay quantized where all have weights of one operation in one format, and a provider has the operation for it.
Otherwise the layer dequantizes them.

Memory: while a layer is converted, its staging and its result exist, and one expert in the form of the operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, overload
from weakref import WeakSet

from mvllm.errors import ContractError
from mvllm.layers.context import BuildContext, Quantization
from mvllm.layers.matrix_layout import MatrixLayout
from mvllm.layers.quantization.quantized_matrix import ExpertFacts, QuantizedMatrix
from mvllm.layers.weight_target import WeightTarget
from mvllm.logging import get_logger
from mvllm.ops.quantized_moe import ExpertWeight
from mvllm.ops.registry import ResolvedOp

logger = get_logger(__name__)

_reported: WeakSet[Quantization] = WeakSet()
"""Methods of the models for which mixed formats were logged."""


Resolve = Callable[[ExpertFacts | None, ExpertFacts | None], ResolvedOp | None]


class ReadOnce(Sequence[ExpertWeight]):
    """The weights of all experts, each made when it is accessed; this sequence drops it then.

    Args:
        readers: Makes the weight of each expert.

    Raises:
        ContractError: An item is accessed again.
    """

    def __init__(self, readers: Iterable[Callable[[], ExpertWeight]]) -> None:
        self._readers: list[Callable[[], ExpertWeight] | None] = list(readers)

    def __len__(self) -> int:
        return len(self._readers)

    @overload
    def __getitem__(self, index: int) -> ExpertWeight: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ExpertWeight]: ...

    def __getitem__(self, index: int | slice) -> ExpertWeight | Sequence[ExpertWeight]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        reader = self._readers[index]
        if reader is None:
            raise ContractError(
                f"The weight of expert {index} was read before. `prepare` of a provider of operations with quantized "
                "experts must access each item once."
            )
        self._readers[index] = None
        return reader()


class QuantizedExperts:
    """The quantized matrices of a layer's experts until they are loaded.

    Args:
        ctx: Build context.
        layouts: Gate and up, or up alone, and down, of each expert.
        resolve: Returns the operation for weights with the result of `expert_facts` of both matrices of every expert;
            None to dequantize them. None for experts without such an operation.

    Attributes:
        op: The operation, `quantized_moe` or `quantized_ungated_moe`, if the experts stay quantized, else None.
    """

    def __init__(
        self,
        ctx: BuildContext,
        layouts: Sequence[tuple[MatrixLayout, MatrixLayout]],
        resolve: Resolve | None,
    ) -> None:
        self.op: ResolvedOp | None = None
        self._matrices: dict[tuple[int, int], QuantizedMatrix] = {}
        # By checkpoint tensor: its matrix, with the names of the matrix's tensors that are not loaded yet.
        self._unloaded: dict[str, tuple[QuantizedMatrix, set[str]]] = {}
        if ctx.quantization is not None:
            self._build(ctx, layouts, resolve)

    def matrix(self, expert: int, which: int) -> QuantizedMatrix | None:
        """The matrix of gate and up (0) or down (1); None if the checkpoint has floats."""
        return self._matrices.get((expert, which))

    def pop(self) -> Iterator[tuple[int, int, QuantizedMatrix]]:
        """Expert, 0 or 1 as above, and matrix; each is dropped."""
        for expert, which in list(self._matrices):
            yield expert, which, self._matrices.pop((expert, which))

    def targets(self, matrix: QuantizedMatrix) -> Iterator[tuple[str, WeightTarget]]:
        """The targets of a matrix."""
        found = list(matrix.targets())
        if self.op is not None:
            unloaded = matrix, {name for name, _ in found}
            self._unloaded.update((name, unloaded) for name, _ in found)
        yield from found

    def tensor_loaded(self, name: str) -> None:
        """Lets the matrix to which a checkpoint tensor belongs reduce its memory if it has all of its tensors."""
        if name in self._unloaded:
            matrix, names = self._unloaded.pop(name)
            names.discard(name)
            if not names:
                matrix.tensors_loaded()

    def prepare(self) -> tuple[Any, Any]:
        """gate_up and down as `op` takes them. The matrices are dropped."""
        assert self.op is not None, "the experts stay quantized"
        readers: tuple[list[Callable[[], ExpertWeight]], ...] = ([], [])
        for (_, which), matrix in self._matrices.items():
            readers[which].append(matrix.expert_weight)
        self._matrices.clear()
        self._unloaded.clear()
        return prepared_experts(self.op, *map(ReadOnce, readers))

    def _build(
        self,
        ctx: BuildContext,
        layouts: Sequence[tuple[MatrixLayout, MatrixLayout]],
        resolve: Resolve | None,
    ) -> None:
        formats: list[tuple[ExpertFacts | None, ...]] = []
        op = None
        for expert, pair in enumerate(layouts):
            made = [ctx.quantized(layout) for layout in pair]
            formats.append(tuple(None if matrix is None else matrix.expert_facts() for matrix in made))
            if expert == 0:
                op = None if resolve is None else resolve(*formats[0])
                if op is None and all(matrix is not None and matrix.checkpoint_has_floats for matrix in made):
                    return
            self._matrices.update(((expert, i), matrix) for i, matrix in enumerate(made) if matrix is not None)
        if _are_mixed(formats):
            log_mixed_formats(ctx, layouts[0][0].names[0])
            op = None
        if op is None:
            self._matrices = {k: matrix for k, matrix in self._matrices.items() if not matrix.checkpoint_has_floats}
            return
        self.op = op
        for matrix in self._matrices.values():
            matrix.keep_quantized()


def _are_mixed(formats: Sequence[tuple[ExpertFacts | None, ...]]) -> bool:
    """Whether the matrices of the experts have several formats, which no operation takes."""
    linears = {None if facts is None else facts[0] for facts in formats[0]}
    return len(linears) > 1 or any(each != formats[0] for each in formats)


def quantized_moe_op(
    ctx: BuildContext,
    gate_up: ExpertFacts | None,
    down: ExpertFacts | None,
    floats: ResolvedOp,
    facts: dict[str, Any],
    *,
    gated: bool = True,
    clamped: bool = False,
) -> ResolvedOp | None:
    """The operation for experts with weights of these formats; None if no provider has it, or it must not be used.

    Args:
        ctx: Build context.
        gate_up, down: Result of `expert_facts`, equal for all experts.
        floats: The operation for dequantized weights.
        facts: The facts of `floats`.
        gated: Whether the experts have a gate: `quantized_moe`, else `quantized_ungated_moe`.
        clamped: Whether there are biases and clamped gates.
    """
    if gate_up is None or down is None or gate_up[0] != down[0] or ctx.num_devices > 1:
        return None
    facts = {**facts, "linear": gate_up[0], "down": down[1]}
    if gated:
        op = ctx.op("quantized_moe", **facts, gate_up=gate_up[1], bias=clamped, clamped=clamped)
    else:
        op = ctx.op("quantized_ungated_moe", **facts, up=gate_up[1])
    return op if op.may_replace(floats) else None


def prepared_experts(op: ResolvedOp, gate_up: ReadOnce, down: ReadOnce) -> tuple[Any, Any]:
    """gate_up and down as `op` takes them."""
    if op.prepare is None:
        return list(gate_up), list(down)
    prepared: tuple[Any, Any] = op.prepare((gate_up, down))
    return prepared


def log_mixed_formats(ctx: BuildContext, name: str) -> None:
    """Logs once per model that experts are dequantized because their formats differ."""
    if ctx.quantization is not None and ctx.quantization not in _reported:
        _reported.add(ctx.quantization)
        logger.info(
            "The experts beside %s have weights in different formats, or this rank's columns cut blocks of some: they "
            "are dequantized, and so are those of other layers for which this holds.",
            name,
        )
