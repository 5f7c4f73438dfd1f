"""The state of one layer that is not attention: a StateSpec, its platform backend, and the states of all slots."""

from __future__ import annotations

import torch
from torch import nn

from mvllm.errors import ConfigError
from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.platform.state import State, StateSpec, StateTensor


class SequenceState(nn.Module):
    """What one layer keeps of each sequence.

        y = self._conv(x, self.weight, self.bias, self.cache.state[0], *self.cache.arguments(step), "silu")

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

    def arguments(self, step: ForwardStep) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """The arguments `query_start_loc, read_slots, write_slots, max_query_len` of operations on states."""
        metadata = step.state_metadata
        assert metadata is not None, "the step has slots for states"
        return metadata.query_start_loc, metadata.read_slots, metadata.write_slots, metadata.max_query_len
