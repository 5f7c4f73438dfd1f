"""State backend: core's, with the device's memory and checks."""

from __future__ import annotations

import torch

import mvllm.plugin_api as api
from mvllm_example_device.runtime import ExampleRuntime
from mvllm_example_device.strict import Strict


class ExampleStates(Strict, api.StateBackend):
    """States in the device's memory. Begins steps of models without attention."""

    def __init__(self, spec: api.StateSpec, runtime: ExampleRuntime) -> None:
        super().__init__(spec)
        self._runtime = runtime

    def allocate(self, num_slots: int, device: torch.device) -> api.State:
        shapes = [((num_slots + 1, *tensor.shape), tensor.torch_dtype) for tensor in self.spec.tensors]
        return tuple(self._runtime.empty(shape, dtype).zero_() for shape, dtype in shapes)

    def build_metadata(self, layout: api.StateLayout) -> api.StateArguments:
        self._runtime.begin_step(layout.query_start_loc, layout.num_tokens, layout.num_requests)
        return super().build_metadata(layout)
