"""The forward pass of one step on one rank: attention metadata, the model (compiled where possible), logits.

A step runs two device programs. The shapes of the model depend on the numbers of tokens, requests and pages; those of
logits and sampling only on the number of requests.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from mvllm.config.encoder_limits import items_of
from mvllm.config.engine_config import EngineConfig
from mvllm.layers.context import ForwardStep
from mvllm.layers.lora import LoRAMapping
from mvllm.models.item_encoder import ItemEncoder
from mvllm.ops.dtypes import torch_dtype
from mvllm.platform.checked_calls import call_checked
from mvllm.platform.graphs import CompileBackend
from mvllm.platform.interface import Platform
from mvllm.platform.runtime import DeviceRuntime
from mvllm.platform.shapes import ShapePolicy
from mvllm.pooling.pooler import PoolingState, make_token_type_ids
from mvllm.worker.decoder_forward import DecoderForward, StepForward
from mvllm.worker.encoder_runner import StepItemTensors
from mvllm.worker.greedy_head import Argmax, GreedyHead
from mvllm.worker.kv_cache_layers import KVCacheLayers
from mvllm.worker.model_loader import ModelLoader
from mvllm.worker.pipeline_transport import PipelineTransport
from mvllm.worker.sampled_token_buffer import SampledTokenBuffer
from mvllm.worker.space_logits import LogitsModel, SpaceLogits
from mvllm.worker.state_layers import step_backend_of
from mvllm.worker.static_items import ItemInputSpec, StaticItemInputs
from mvllm.worker.step_inputs import StepInputs


class ModelForward:
    """The forward pass of the served model on one rank.

    Args:
        config: The engine's configuration.
        platform: The platform; compiles the model if it can.
        runtime: The bound device.
        loader: Holds the model and its LoRA adapters.
        layers: The attention layers and their KV cache.
        pipeline: The rank's pipeline stage.

    Attributes:
        is_static: The platform claims `static_shapes`.
        needs_warm_up: The compiler needs calls before the first request.
        decoder: The model; None before `bind_model` and after `release`.
        head: The head of captured steps that sample greedily; None if the platform does not compile it.
    """

    def __init__(
        self,
        config: EngineConfig,
        platform: Platform,
        runtime: DeviceRuntime,
        loader: ModelLoader,
        layers: KVCacheLayers,
        pipeline: PipelineTransport,
    ) -> None:
        self.config = config
        self.platform = platform
        self.runtime = runtime
        self.loader = loader
        self.layers = layers
        self.pipeline = pipeline
        self.is_static = platform.capabilities.static_shapes
        self.needs_warm_up = False
        self.decoder: StepForward | None = None
        self.head: GreedyHead | None = None
        has_spaces = bool(config.model.token_spaces)
        self._space_logits = SpaceLogits(config.model, runtime.from_numpy) if has_spaces else None

    def bind_model(self) -> None:
        """Prepares to run the loaded model, with the current KV cache groups."""
        model = self.loader.model
        groups = self.layers.attention_groups_of(model.attention_layers())
        decoder = DecoderForward(model, groups, step_backend_of(model.state_layers()))
        decoder.lora = self.loader.lora_manager.step if self.loader.supports_lora else None
        items = ItemInputSpec.of(items_of(self.config))
        if items is not None and self.loader.encoders_on_host:
            dtype, has_rows = torch_dtype(self.config.model.dtype), self.pipeline.is_first
            decoder.static_items = StaticItemInputs(items, dtype, self.runtime, has_rows=has_rows)
        if (speculative := self.config.speculative) is not None:
            decoder.keep_layers(speculative.reads_layers)
        self.decoder = decoder

    def release(self) -> None:
        """Drops the model and its compiled functions."""
        self.drop_compiled()
        self.decoder = None

    def drop_compiled(self) -> None:
        """Drops the compiled functions of the model: breaks reference cycles, so that memory is freed at once."""
        if self.decoder is not None:
            self.decoder.drop_compiled()
            self.decoder.token_buffer = None
        if (encoder := self._item_encoder) is not None:
            encoder.compile_towers(None)
        if self.head is not None:
            self.head.drop_compiled()
        self.head = None

    @property
    def has_states(self) -> bool:
        """Whether a layer of the model has a sequence state."""
        return self.layers.states.are_needed

    @property
    def is_compiled(self) -> bool:
        """Whether the platform compiles the model."""
        config = self.config
        return self.platform.capabilities.compile and not config.enforce_eager and not config.model.kind.is_encoder

    def compile(self, decoder: StepForward | None) -> CompileBackend | None:
        """Compiles a decoder if the platform compiles models. The KV cache must be allocated.

        Returns:
            The compiler; None if the decoder is not compiled.
        """
        if not self.is_compiled or decoder is None:
            return None
        compiler: CompileBackend = call_checked(self.platform, "compiler", returns=CompileBackend)
        self.needs_warm_up = compiler.needs_warm_up()
        decoder.compile(compiler)
        return compiler

    def compile_model(self, argmax: Argmax, buffer: SampledTokenBuffer | None) -> None:
        """Compiles the served model, and its head if the platform captures steps.

        Args:
            argmax: The operation of that name.
            buffer: The last sampled tokens, where they stay on the device.
        """
        compiler = self.compile(self.decoder)
        if compiler is not None and not self.loader.encoders_on_host and (encoder := self._item_encoder) is not None:
            encoder.compile_towers(compiler)
        if compiler is None or self.shapes().capture is None or not self.computes_logits:
            return
        head = GreedyHead(self.loader.model, argmax, buffer)
        if head.compile(compiler):
            assert self.decoder is not None
            self.head, self.decoder.token_buffer = head, buffer

    def shapes(self) -> ShapePolicy:
        """The platform's buckets; `capture` only if steps are captured."""
        shapes: ShapePolicy = call_checked(self.platform, "shapes", returns=ShapePolicy)
        is_captured = self.is_compiled and self.platform.capabilities.graphs and not self.is_static
        return shapes if is_captured else replace(shapes, capture=None)

    @property
    def _item_encoder(self) -> ItemEncoder | None:
        """The encoders of the model's items, if it is loaded and has any."""
        return self.loader.model.item_encoder if self.loader.is_loaded else None

    @property
    def layer_states(self) -> torch.Tensor | None:
        """As `DecoderForward.layer_states`, of the last step."""
        return self.decoder.layer_states if isinstance(self.decoder, DecoderForward) else None

    @property
    def logits_model(self) -> LogitsModel:
        """What computes logits of hidden states."""
        return self.loader.model

    @property
    def computes_logits(self) -> bool:
        """Whether this rank computes logits: on the last stage of a model that generates."""
        return self.pipeline.is_last and self.config.model.kind.generates

    def compute(
        self,
        inputs: StepInputs,
        intermediate: torch.Tensor | None,
        adapters: LoRAMapping | None = None,
        pooling: PoolingState | None = None,
        items: StepItemTensors | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs the model, and ends the device program of the forward pass.

        Returns:
            Hidden states of all tokens, [T, hidden_size]; and on the last stage the hidden states that need logits,
            [L, hidden_size], or None if no row samples or `head` may select them.
        """
        hidden, states = self.run(inputs, intermediate, adapters, pooling, items), None
        if self.computes_logits and (self.head is None or not inputs.layout.capture):
            states = self.select_states(hidden, inputs)
        elif self.is_compiled and not self.pipeline.is_last:
            hidden = hidden.clone()  # the next step may overwrite it before it is sent
        self.runtime.step_mark()
        return hidden, states

    def select_states(self, hidden: torch.Tensor, inputs: StepInputs) -> torch.Tensor | None:
        """The hidden states that need logits, [L, hidden_size]; None if no row samples."""
        if inputs.selects_all:
            return hidden
        if not self.is_static and not len(inputs.sampling_positions):
            return None
        return hidden.index_select(0, inputs.logits_indices)

    def run(
        self,
        inputs: StepInputs,
        intermediate: torch.Tensor | None,
        adapters: LoRAMapping | None = None,
        pooling: PoolingState | None = None,
        items: StepItemTensors | None = None,
    ) -> torch.Tensor:
        """Hidden states of a step: [T, hidden_size].

        Args:
            intermediate: Hidden states of the previous pipeline stage; None on the first.
            adapters: LoRA adapters of the step's tokens.
            pooling: The pooling requests, from which an encoder reads token types; None in the profile run.
            items: Images, audio and embeddings in the step; None without any.
        """
        if self.config.model.kind.is_encoder:
            return self._run_encoder(inputs, intermediate, pooling)
        assert self.decoder is not None, "the model is not loaded"
        return self.decoder.run(inputs, intermediate, adapters, items)

    def logits(self, states: torch.Tensor, num_rows: int, spaces: np.ndarray | None = None) -> torch.Tensor:
        """[num_rows, columns]; with static shapes one row for each of `states`, padding included.

        There is a column for each token id: the vocabulary, and the ids of token spaces behind it.

        Args:
            spaces: int [num_rows], host: the token space of each row, from `RowSpaces.of`.
        """
        if self._space_logits is None:
            logits = self.logits_model.compute_logits(states)
        else:
            logits = self._space_logits.compute(self.logits_model, states, spaces)
        return logits if self.is_static else logits[:num_rows]

    def prompt_logits(
        self, states: torch.Tensor, token_ids: np.ndarray, spaces: np.ndarray | None = None
    ) -> torch.Tensor:
        """Logits that predict tokens of a prompt: [n or more, columns].

        Args:
            states: [n or more, hidden_size].
            token_ids: int [n] on the host: the tokens.
            spaces: int [n] on the host: the token space of each token's request, from `RowSpaces.of`.
        """
        if self._space_logits is None:
            return self.logits_model.compute_logits(states)
        return self._space_logits.compute_for(self.logits_model, states, token_ids, spaces)

    def _run_encoder(
        self, inputs: StepInputs, intermediate: torch.Tensor | None, pooling: PoolingState | None
    ) -> torch.Tensor:
        """Runs a model without KV cache."""
        token_types = None
        if self.loader.model.uses_token_types and pooling is not None:
            types = make_token_type_ids(
                pooling,
                rows=inputs.rows.tolist(),
                starts=inputs.layout.query_start_loc.tolist(),
                firsts=inputs.first_positions.tolist(),
                num_tokens=len(inputs.token_ids),
            )
            token_types = None if types is None else self.runtime.from_numpy(types)
        return self.call_encoder(inputs, intermediate, token_types)

    def call_encoder(
        self, inputs: StepInputs, intermediate: torch.Tensor | None, token_types: torch.Tensor | None
    ) -> torch.Tensor:
        """Hidden states of a step of a model without KV cache: [T, hidden_size].

        Not compiled: the lengths of the prompts differ in every step.

        Args:
            token_types: As in ForwardStep.
        """
        starts = inputs.layout.query_start_loc.tolist()
        step = ForwardStep({}, prompt_starts=starts, token_types=token_types)
        hidden: torch.Tensor = self.loader.model(inputs.token_ids, inputs.positions, step, intermediate)
        return hidden
