"""StackedMoE: FusedMoE for checkpoints with one tensor for each matrix of all experts.

    gate_up_proj    [experts, 2 · inner, hidden_size]    the rows of gate, then those of up
    down_proj       [experts, hidden_size, inner]

or transposed:

    gate_up_proj    [experts, hidden_size, 2 · inner]    the columns of gate, then those of up
    down_proj       [experts, inner, hidden_size]

If transposed tensors are expected, tensors of the other form are read, too: the loader recognises them by their shape.
"""

from __future__ import annotations

from collections.abc import Iterator

from mvllm.layers.context import BuildContext
from mvllm.layers.fused_moe import FusedMoE
from mvllm.layers.weight_target import WeightTarget


class StackedMoE(FusedMoE):
    """Experts with a gate.

    Args:
        ctx: Build context.
        name: The checkpoint module.
        hidden_size, intermediate_size: Outer and inner size of one expert.
        num_experts, top_k: Number of experts, and experts per token.
        op: As in FusedMoE.
        names: Checkpoint names of both tensors.
        transposed: The matrices are stored as [in, out]. Quantization on load leaves other stacks as they are.
        is_stacked: False for a checkpoint that stores each expert's matrices separately, as FusedMoE expects them:
            GGUF files, and checkpoints of quantized weights.
    """

    def __init__(
        self,
        ctx: BuildContext,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        top_k: int,
        op: str = "moe",
        names: tuple[str, str] = ("gate_up_proj", "down_proj"),
        transposed: bool = False,
        is_stacked: bool = True,
    ) -> None:
        ctx, sizes = ctx if transposed or not is_stacked else ctx.floats(), (hidden_size, intermediate_size)
        super().__init__(ctx, name, *sizes, num_experts=num_experts, top_k=top_k, op=op)
        self.name, self._intermediate_size = name, intermediate_size
        self._gate_up_name, self._down_name = names
        self._transposed, self._is_stacked = transposed, is_stacked

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Checkpoint tensor names and their targets on this rank. Before `prepare_weights` only."""
        for name, target in super().weight_targets():
            if not self._is_stacked:
                yield name, target
                continue
            number, matrix, _ = name.removeprefix(f"{self.name}.").split(".")
            expert, is_down = slice(int(number), int(number) + 1), matrix == "down_proj"
            rows, columns = target.source
            first = self._intermediate_size if matrix == "up_proj" else 0
            source = slice(first + rows.start, first + rows.stop), columns
            num_rows, num_columns = target.source_shape
            shape = num_rows if is_down else 2 * num_rows, num_columns
            if self._transposed:
                source, shape = source[::-1], shape[::-1]
            destination = (None if len(target.destination) == 2 else expert, *target.destination[-2:])
            stack = self._down_name if is_down else self._gate_up_name
            stacked = WeightTarget(
                target.parameter, (self.num_experts, *shape), (expert, *source), destination, self._transposed
            )
            yield f"{self.name}.{stack}", stacked
