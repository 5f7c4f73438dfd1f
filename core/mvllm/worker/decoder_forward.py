"""The forward pass of one decoder model, called with the inputs of a step and compiled where the platform compiles."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mvllm.errors import ModelError
from mvllm.layers.context import ForwardStep, StatePasses
from mvllm.layers.lora import CurrentLoRAMapping, LoRAMapping
from mvllm.platform.attention import AttentionBackend, AttentionMetadata, BatchLayout
from mvllm.platform.graphs import CompileBackend
from mvllm.platform.state import StateArguments, StateBackend
from mvllm.worker.encoder_runner import StepItemTensors
from mvllm.worker.kv_cache_layers import AttentionGroups, MetadataBuilder
from mvllm.worker.sampled_token_buffer import SampledTokenBuffer
from mvllm.worker.static_items import StaticItemInputs
from mvllm.worker.step_inputs import StepInputs

if TYPE_CHECKING:
    from mvllm.models.causal_lm import CausalLM


class StepForward(ABC):
    """The forward pass of one model, called with the inputs of a step.

    Attributes:
        token_buffer: Replaces placeholders among the token ids as part of the compiled function; None if token ids
            have no placeholders.
    """

    token_buffer: SampledTokenBuffer | None = None

    @abstractmethod
    def run(
        self,
        inputs: StepInputs,
        intermediate: torch.Tensor | None = None,
        adapters: LoRAMapping | None = None,
        items: StepItemTensors | None = None,
    ) -> torch.Tensor:
        """Hidden states of a step: [T, hidden_size].

        Args:
            intermediate: Hidden states of the previous pipeline stage; None on the first.
            adapters: LoRA adapters of the step's tokens.
            items: Images, audio and embeddings in the step.
        """

    def compile(self, compiler: CompileBackend) -> None:
        """Compiles the model for steps of any size. Default: does nothing."""

    def drop_compiled(self) -> None:
        """Drops the compiled function, which refers to weights and KV cache. Default: there is none."""


class DecoderForward(StepForward):
    """One decoder model, called with the inputs of a step.

    Args:
        model: The model, with its weights.
        attention_groups: The attention metadata of its layers.
        state_backend: Builds the metadata of its sequence states; None if no layer has a state.

    Attributes:
        lora: The LoRA mapping that the layers of the model read; None without LoRA.
        static_items: Places the items of every step, where shapes are static; None without items.
        layer_states: [T, n * hidden_size]: what the last `run` has kept, see `keep_layers`; None without such layers.
    """

    def __init__(
        self, model: CausalLM, attention_groups: AttentionGroups, state_backend: StateBackend | None = None
    ) -> None:
        self.model = model
        self.attention_groups = attention_groups
        self.state_backend = state_backend
        self.lora: CurrentLoRAMapping | None = None
        self.static_items: StaticItemInputs | None = None
        self.layer_states: torch.Tensor | None = None
        self._kept_layers: tuple[int, ...] = ()
        self._compiled: Callable[..., torch.Tensor] | None = None
        self._omits_prompt_lens = False

    def keep_layers(self, layers: tuple[int, ...]) -> None:
        """Lets every `run` keep the residual stream before these layers. Call it before `compile`.

        Raises:
            ModelError: The model does not keep it.
        """
        if layers and not self.model.keeps_layers:
            raise ModelError(
                f"The method of speculative_config reads hidden states between the layers of the model, which "
                f"{type(self.model).__name__} does not give. Choose another method."
            )
        self._kept_layers = layers

    def compile(self, compiler: CompileBackend) -> None:
        self._compiled = compiler.compile(self.call_model, dynamic=True)
        # A backend with a warm-up has compiled steps with all arguments.
        self._omits_prompt_lens = not compiler.needs_warm_up()

    def drop_compiled(self) -> None:
        self._compiled = None

    def run(
        self,
        inputs: StepInputs,
        intermediate: torch.Tensor | None = None,
        adapters: LoRAMapping | None = None,
        items: StepItemTensors | None = None,
    ) -> torch.Tensor:
        """As StepForward.run. Sets `layer_states`.

        A step with items is not compiled, unless shapes are static: the number of rows differs.
        """
        found = self._run(inputs, intermediate, adapters, items)
        if not self._kept_layers:
            return found
        size = found.shape[1] - len(self._kept_layers) * self.model.config.hidden_size
        self.layer_states = found[:, size:]
        return found[:, :size].contiguous()

    def _run(
        self,
        inputs: StepInputs,
        intermediate: torch.Tensor | None,
        adapters: LoRAMapping | None,
        items: StepItemTensors | None,
    ) -> torch.Tensor:
        """[T, hidden_size], with what is kept side by side behind it."""
        function = self.call_model if self._compiled is None else self._compiled
        metadata: list[Any] = [
            builder.build_metadata(_layout_for(builder, inputs, group))
            for builder, group in self.attention_groups.values()
        ]
        if self.state_backend is not None:
            assert inputs.state_layout is not None, "the step has slots for states"
            metadata.append(self.state_backend.build_metadata(inputs.state_layout))
            if (passes := inputs.state_passes) is not None:
                drafts = map(self.state_backend.build_metadata, passes.drafts)
                metadata += [passes.order, passes.place, *drafts]
        prompt_lens = inputs.prompt_lens
        if prompt_lens is not None and self._omits_prompt_lens:
            is_needed = inputs.longest_partial_prompt > self.model.original_context
            prompt_lens = prompt_lens if is_needed else None
        args = inputs.token_ids, inputs.positions, prompt_lens, intermediate, *metadata
        if self.static_items is not None:
            return function(*args, *self.static_items.arguments(items, inputs))
        if items is not None:
            with nullcontext() if adapters is None else self._active(adapters):
                return self._call_model(
                    inputs.token_ids, inputs.positions, prompt_lens, intermediate, tuple(metadata), vars(items)
                )
        if adapters is None:
            return function(*args)
        if inputs.layout.capture and adapters.is_on_device:
            return function(*args, adapters.slots)
        with self._active(adapters):
            return self.call_model(*args)  # not compiled: the sizes of the mapping differ in every step

    def call_model(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        prompt_lens: torch.Tensor | None,
        intermediate: torch.Tensor | None,
        *others: Any,
    ) -> torch.Tensor:
        """The function that is compiled.

        Args:
            others: Attention metadata in the order of `attention_groups`; for models with sequence states then a
                StateArguments, and in a step with draft tokens the fields of StatePasses; then in a captured step with
                LoRA the slot of each token's adapter, or with static shapes the tensors of items.
        """
        num_metadata = len(self.attention_groups) + (self.state_backend is not None)
        if num_drafts := sum(isinstance(each, StateArguments) for each in others[num_metadata:]):
            num_metadata += 2 + num_drafts
        metadata = others[:num_metadata]
        if self.static_items is not None:
            fields = self.static_items.fields(others[num_metadata:])
            return self._call_model(token_ids, positions, prompt_lens, intermediate, metadata, fields)
        if len(others) > num_metadata:
            with self._active(LoRAMapping(None, (), others[num_metadata])):
                return self._call_model(token_ids, positions, prompt_lens, intermediate, metadata)
        return self._call_model(token_ids, positions, prompt_lens, intermediate, metadata)

    def _call_model(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        prompt_lens: torch.Tensor | None,
        intermediate: torch.Tensor | None,
        metadata: tuple[Any, ...],
        fields: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        if self.token_buffer is not None:
            token_ids = self.token_buffer.replace_placeholders(token_ids)
        slots: StateArguments | None = None
        passes: StatePasses | None = None
        if self.state_backend is not None:
            count = len(self.attention_groups)
            metadata, (slots, *of_passes) = metadata[:count], metadata[count:]
            if of_passes:
                order, place, *drafts = of_passes
                passes = StatePasses(order, place, tuple(drafts))
        of_groups: dict[Hashable, AttentionMetadata] = dict(zip(self.attention_groups, metadata, strict=True))
        step = ForwardStep(
            of_groups,
            prompt_lens,
            state_metadata=slots,
            state_passes=passes,
            kept_layers=self._kept_layers,
            **(fields or {}),
        )
        hidden: torch.Tensor = self.model(token_ids, positions, step, intermediate)
        return torch.cat((hidden, *step.kept_states), dim=1) if self._kept_layers else hidden

    def _active(self, adapters: LoRAMapping) -> AbstractContextManager[None]:
        assert self.lora is not None
        return self.lora.active(adapters)


def _layout_for(builder: MetadataBuilder, inputs: StepInputs, group: int) -> BatchLayout:
    """The layout of a group, with `visible_lens` if the step has spans and the builder's layers attend to them."""
    layout = inputs.layouts[group]
    if inputs.visible_lens is None or not (isinstance(builder, AttentionBackend) and builder.spec.non_causal_spans):
        return layout
    return replace(layout, visible_lens=inputs.visible_lens, visible_lens_device=inputs.visible_lens_device)
