"""Runs steps of models that are programs of the platform."""

from __future__ import annotations

from typing import ClassVar

import torch

from mvllm.extension_api import SchedulerOutput
from mvllm.extension_api.worker import (
    ComputedStep,
    HostSamplerOutput,
    KVCacheLayers,
    ModelForward,
    ModelLoader,
    ModelRunner,
    StepInputs,
    StepItemTensors,
)
from mvllm_graph.worker.kv_cache_layers import GraphKVCacheLayers
from mvllm_graph.worker.model_forward import GraphModelForward
from mvllm_graph.worker.model_loader import GraphModelLoader


class GraphModelRunner(ModelRunner):
    """ModelRunner for models that run as graphs. Arguments as for ModelRunner."""

    layers_class: ClassVar[type[KVCacheLayers]] = GraphKVCacheLayers
    loader_class: ClassVar[type[ModelLoader]] = GraphModelLoader
    forward_class: ClassVar[type[ModelForward]] = GraphModelForward

    def compute_step(
        self,
        plan: SchedulerOutput,
        inputs: StepInputs,
        intermediate: torch.Tensor | None,
        items: StepItemTensors | None,
    ) -> ComputedStep:
        """Samples on the host if all rows sample greedily: by few calls, which is most of the time of a small model."""
        forward = self._forward
        assert isinstance(forward, GraphModelForward)
        sampling_rows = inputs.rows[inputs.sampling_positions]
        if not forward.samples_on_host or not self.rows.give_only_greedy_tokens(plan, sampling_rows):
            return super().compute_step(plan, inputs, intermediate, items)
        adapters = self.lora_batch_of(inputs)
        max_logits, token_ids = forward.graph.largest_logits(inputs, intermediate, adapters, items)
        self._runtime.step_mark()
        return ComputedStep(inputs, sampled=HostSamplerOutput(token_ids, max_logits))
