"""The forward pass of one decoder model, called with the inputs of a step and compiled where the platform compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from mvllm.layers.context import ForwardStep
from mvllm.layers.lora import CurrentLoRAMapping, LoRAMapping
from mvllm.platform.attention import AttentionMetadata
from mvllm.platform.graphs import CompileBackend
from mvllm.worker.kv_cache_layers import AttentionGroups
from mvllm.worker.sampled_token_buffer import SampledTokenBuffer
from mvllm.worker.step_inputs import StepInputs

if TYPE_CHECKING:
    from mvllm.models.causal_lm import CausalLM


class DecoderForward:
    """One decoder model, called with the inputs of a step.

    Args:
        model: The model, with its weights.
        attention_groups: The attention backends of its layers.

    Attributes:
        lora: The LoRA mapping that the layers of the model read; None without LoRA.
        token_buffer: Replaces placeholders among the token ids as part of the compiled function; None if token ids
            have no placeholders.
    """

    def __init__(self, model: CausalLM, attention_groups: AttentionGroups) -> None:
        self.model = model
        self.attention_groups = attention_groups
        self.lora: CurrentLoRAMapping | None = None
        self.token_buffer: SampledTokenBuffer | None = None
        self._compiled: Callable[..., torch.Tensor] | None = None

    def compile(self, compiler: CompileBackend) -> None:
        """Compiles the model for steps of any size."""
        self._compiled = compiler.compile(self.call_model, dynamic=True)

    def drop_compiled(self) -> None:
        """Drops the compiled function, which refers to weights and KV cache."""
        self._compiled = None

    def run(
        self,
        inputs: StepInputs,
        intermediate: torch.Tensor | None = None,
        adapters: LoRAMapping | None = None,
    ) -> torch.Tensor:
        """Hidden states of a step: [T, hidden_size].

        Args:
            intermediate: Hidden states of the previous pipeline stage; None on the first.
            adapters: LoRA adapters of the step's tokens.
        """
        function = self.call_model if self._compiled is None else self._compiled
        metadata = [backend.build_metadata(inputs.layouts[group]) for backend, group in self.attention_groups.values()]
        args = inputs.token_ids, inputs.positions, inputs.prompt_lens, intermediate, *metadata
        if adapters is None:
            return function(*args)
        if inputs.layout.capture and adapters.is_on_device:
            return function(*args, adapters.slots)
        assert self.lora is not None
        with self.lora.active(adapters):
            return self.call_model(*args)  # not compiled: the sizes of the mapping differ in every step

    def call_model(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        prompt_lens: torch.Tensor | None,
        intermediate: torch.Tensor | None,
        *others: AttentionMetadata,
    ) -> torch.Tensor:
        """The function that is compiled.

        Args:
            others: Attention metadata in the order of `attention_groups`; in a captured step with LoRA then the slot of
                each token's adapter.
        """
        num_groups = len(self.attention_groups)
        metadata = others[:num_groups]
        if len(others) > num_groups:
            assert self.lora is not None
            with self.lora.active(LoRAMapping(None, (), others[num_groups])):
                return self._call_model(token_ids, positions, prompt_lens, intermediate, metadata)
        return self._call_model(token_ids, positions, prompt_lens, intermediate, metadata)

    def _call_model(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        prompt_lens: torch.Tensor | None,
        intermediate: torch.Tensor | None,
        metadata: tuple[AttentionMetadata, ...],
    ) -> torch.Tensor:
        if self.token_buffer is not None:
            token_ids = self.token_buffer.replace_placeholders(token_ids)
        step = ForwardStep(dict(zip(self.attention_groups, metadata, strict=True)), prompt_lens)
        hidden: torch.Tensor = self.model(token_ids, positions, step, intermediate)
        return hidden
