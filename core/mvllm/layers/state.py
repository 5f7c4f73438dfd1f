"""The state of one layer that is not attention: a StateSpec, its platform backend, and the states of all slots."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from mvllm.errors import ConfigError
from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.platform.state import State, StateArguments, StateSpec, StateTensor

StateStep = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]
"""The arguments `query_start_loc, read_slots, write_slots, max_query_len` of operations on states."""

StateOperation = Callable[..., torch.Tensor]
"""(StateStep, *inputs of n tokens) -> [n, ...]."""


class SequenceState(nn.Module):
    """What one layer keeps of each sequence.

        x = self.cache.in_passes(self.projection(x), step)
        y = self.cache.run(lambda slots, x: self.conv(x, self.cache.state[0], slots), step, x)
        return self.output(self.cache.in_step(y, step))

    Args:
        ctx: Build context.
        tensors: The tensors of one sequence, as this rank holds them.

    Attributes:
        spec: The spec of the backend.
        backend: The platform's backend.
        state: The states of all slots, [num_slots + 1, *shape] each, set when the KV cache is allocated. The profiling
            step has one slot.

    Raises:
        ConfigError: The platform, or a setting of the engine, excludes models with states.
    """

    state: State

    def __init__(self, ctx: BuildContext, tensors: tuple[StateTensor, ...]) -> None:
        super().__init__()
        if ctx.num_devices > 1:
            raise ConfigError(
                f"The model has layers with a sequence state, which workers with {ctx.num_devices} devices do not "
                "support. Start a worker for each device, or choose a model with attention only."
            )
        self.spec = StateSpec(tensors)
        self.backend = ctx.state(self.spec)
        self.state = ()

    def in_passes(self, x: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """[T, ...], contiguous, in the order in which `run` takes the tokens; itself unless the step has draft tokens.

        What layers compute of each token alone may be computed before or afterwards.
        """
        return x if step.state_passes is None else x.index_select(0, step.state_passes.order)

    def in_step(self, y: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        """[T, ...] in the order of the step's tokens again, from that of `in_passes`."""
        return y if step.state_passes is None else y.index_select(0, step.state_passes.place)

    def run(self, operation: StateOperation, step: ForwardStep, *inputs: torch.Tensor) -> torch.Tensor:
        """Advances the states by the tokens of a step, in one pass or in several, see `StatePasses`.

        Args:
            operation: Calls an operation on states with inputs of some of the tokens.
            inputs: [T, ...] each, in the order of `in_passes`.

        Returns:
            The results of all tokens, in the same order.
        """
        first, passes = step.state_metadata, step.state_passes
        assert first is not None, "the step has slots for states"
        if passes is None:
            return operation(_arguments_of(first), *inputs)
        sizes = passes.sizes()
        parts = zip(*(x.split(sizes) for x in inputs), strict=True)
        return torch.cat(
            [operation(_arguments_of(slots), *part) for slots, part in zip((first, *passes.drafts), parts, strict=True)]
        )


def _arguments_of(slots: StateArguments) -> StateStep:
    return slots.query_start_loc, slots.read_slots, slots.write_slots, slots.max_query_len
