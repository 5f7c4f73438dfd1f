"""TransposedMoE: FusedMoE for checkpoints that store the matrices of all experts in one tensor, transposed.

    gate_up_proj    [experts, hidden_size, 2 · size]    the columns of gate, then those of up
    down_proj       [experts, size, hidden_size]

A tensor whose matrices are stored the other way around (`[experts, 2 · size, hidden_size]`) is read, too: the loader
recognises it by its shape.
"""

from __future__ import annotations

from collections.abc import Iterator

from mvllm.layers.context import BuildContext
from mvllm.layers.fused_moe import FusedMoE
from mvllm.layers.weight_target import WeightTarget


class TransposedMoE(FusedMoE):
    """Experts with a gate.

    Checkpoints of quantized weights and GGUF files store each expert's matrices separately, as FusedMoE expects them.

    Args:
        ctx: Build context.
        name: The checkpoint module.
        hidden_size, intermediate_size: Outer and inner size of one expert.
        num_experts, top_k: Number of experts, and experts per token.
        is_stacked: The checkpoint stores the matrices of all experts in one tensor, as above.
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
        is_stacked: bool,
    ) -> None:
        super().__init__(ctx, name, hidden_size, intermediate_size, num_experts=num_experts, top_k=top_k)
        self.name, self._intermediate_size = name, intermediate_size
        self._is_stacked = is_stacked

    def weight_targets(self) -> Iterator[tuple[str, WeightTarget]]:
        """Checkpoint tensor names and their targets on this rank. Before `prepare_weights` only."""
        for name, target in super().weight_targets():
            if not self._is_stacked:
                yield name, target
                continue
            number, matrix, _ = name.removeprefix(f"{self.name}.").split(".")
            expert = slice(int(number), int(number) + 1)
            rows, columns = target.source
            first = self._intermediate_size if matrix == "up_proj" else 0
            stacked = "down_proj" if matrix == "down_proj" else "gate_up_proj"
            shape = (
                (self.num_experts, self._intermediate_size, self.hidden_size)
                if stacked == "down_proj"
                else (self.num_experts, self.hidden_size, 2 * self._intermediate_size)
            )
            source = (expert, columns, slice(first + rows.start, first + rows.stop))
            of_expert = None if len(target.destination) == 2 else expert
            destination = (of_expert, *target.destination[-2:])
            yield f"{self.name}.{stacked}", WeightTarget(target.parameter, shape, source, destination, transpose=True)
