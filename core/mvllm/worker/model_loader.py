"""Loads the models of one rank: the served model, its draft model, and the slots of its LoRA adapters."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mvllm.config.encoder_limits import items_of
from mvllm.config.engine_config import EngineConfig
from mvllm.config.model import ModelConfig
from mvllm.distributed.group_coordinator import GroupCoordinator
from mvllm.errors import ConfigError, ModelError
from mvllm.graph.recorded_calls import RecordedGroup, recording_providers
from mvllm.graph.trace import GraphItems
from mvllm.layers.context import BuildContext
from mvllm.layers.quantization.registry import quantization_method
from mvllm.logging import get_logger
from mvllm.models.registry import resolve_model_class
from mvllm.models.weight_loader import load_weights
from mvllm.models.weight_update import ModelWeightUpdate, UnallocatedContext
from mvllm.ops.dtypes import torch_dtype
from mvllm.ops.provider_plugins import installed_providers
from mvllm.ops.registry import OpTable
from mvllm.platform.checked_calls import call_checked
from mvllm.platform.graph_compiler import GraphCompiler
from mvllm.platform.interface import Platform
from mvllm.platform.op_provider import OpProvider
from mvllm.platform.runtime import DeviceRuntime
from mvllm.platform.shapes import ShapePolicy
from mvllm.worker.graph_layers import GraphKVCacheLayers
from mvllm.worker.graph_model import GraphModel
from mvllm.worker.graph_weights import GraphWeightUpdate, ValuesInStructure, weightless_model
from mvllm.worker.kv_cache_layers import KVCacheLayers
from mvllm.worker.length_check import check_length
from mvllm.worker.lora_model_manager import LoRAModelManager
from mvllm.worker.out_of_memory import out_of_memory_as
from mvllm.worker.spec_decode.draft_model import DraftModel
from mvllm.worker.static_items import encoders_on_host

if TYPE_CHECKING:
    from mvllm.layers.state import SequenceState
    from mvllm.models.causal_lm import CausalLM

logger = get_logger(__name__)


class ModelLoader:
    """Builds the models on the device, loads this rank's weights, and unloads them.

    Args:
        config: The engine's configuration.
        platform: Gives the op providers.
        runtime: The bound device.
        tp, pp: The rank's tensor-parallel and pipeline-parallel groups.
        layers: Receives the layers with a KV cache or a state, of all models.
        num_devices: As in WorkerContext.

    Attributes:
        draft: The draft model; None on pipeline stages but the last, and without one.
        graph: The served model as a program, on platforms with a graph compiler; else None.
    """

    def __init__(
        self,
        config: EngineConfig,
        platform: Platform,
        runtime: DeviceRuntime,
        tp: GroupCoordinator,
        pp: GroupCoordinator,
        layers: KVCacheLayers,
        *,
        num_devices: int,
    ) -> None:
        self._config = config
        self._platform = platform
        self._runtime = runtime
        self._tp, self._pp, self._num_devices = tp, pp, num_devices
        self._layers = layers
        self._model: CausalLM | None = None
        self._context: BuildContext | None = None
        self._adapters: LoRAModelManager | None = None
        self._graph_compiler: GraphCompiler | None = None
        self.draft: DraftModel | None = None
        self.graph: GraphModel | None = None

    def load(self) -> BuildContext:
        """Loads all models.

        Returns:
            The build context, from which the sampler gets its operations.

        Raises:
            ModelError: A model, or the LoRA slots, cannot be loaded. What has been built stays until `unload`.
        """
        if isinstance(self._layers, GraphKVCacheLayers):
            try:
                return self._load_models(weightless=True)
            except ValuesInStructure as e:
                logger.info("The model is loaded on the host before it is traced: %s", e)
                self.unload()
        return self._load_models()

    def _load_models(self, *, weightless: bool = False) -> BuildContext:
        """Builds and loads all models; with `weightless` the served one is traced first."""
        config = self._served_config
        if isinstance(self._layers, GraphKVCacheLayers):
            self._graph_compiler = call_checked(self._platform, "graph_compiler", returns=GraphCompiler)
        context = BuildContext(
            dtype=torch_dtype(config.dtype),
            device=self._runtime.device,
            ops=self._resolve_ops(batch_invariant=self._config.batch_invariant),
            attention=self._layers.backend_for,
            tp=self._tp if self._graph_compiler is None else RecordedGroup(self._tp.spec),
            pp=self._pp,
            kv_dtype=config.dtype if self._config.cache.dtype == "auto" else self._config.cache.dtype,
            quantization=quantization_method(config),
            with_adapters=self._config.lora is not None,
            num_devices=self._num_devices,
            spread=self._runtime.place,
            batch_invariant=self._config.batch_invariant,
            state=self._layers.states.backend_for,
            non_causal_spans=self._platform.capabilities.non_causal_spans,
            encoders_on_host=encoders_on_host(self._platform.capabilities),
        )
        self._context = context
        model = self._model = self._load(config, context, weightless=weightless)
        if config.kind.num_labels and self._pp.is_last and model.scores is None:
            raise ModelError(f"{type(model).__name__} is a classification model, but sets no `scores` as its head.")
        layers = model.attention_layers()
        draft = None if self._config.speculative is None else self._config.speculative.model
        draft_states: list[SequenceState] = []
        if draft is not None and self._pp.is_last:  # a draft model is not split into stages
            whole = dataclasses.replace(
                context, pp=GroupCoordinator.single("pp"), quantization=quantization_method(draft), with_adapters=False
            )
            if context.batch_invariant:  # draft tokens do not affect outputs
                whole = dataclasses.replace(whole, ops=self._resolve_ops(batch_invariant=False), batch_invariant=False)
            self.draft = DraftModel(draft, self._load(dataclasses.replace(draft, multimodal=None), whole))
            layers = [*layers, *self.draft.model.attention_layers()]
            draft_states = self.draft.model.state_layers()
        if (lora := self._config.lora) is not None:
            with out_of_memory_as(
                ModelError, f"The slots of {lora.max_loras} adapters", "Lower max_loras or max_lora_rank."
            ):
                self._adapters = LoRAModelManager(
                    model, context, lora, self._runtime, only_by_slot=self._graph_compiler is not None
                )
        if isinstance(self._layers, GraphKVCacheLayers):
            assert self._graph_compiler is not None
            load = self._load_graph if weightless else None
            self.graph = GraphModel(
                model,
                self._graph_compiler,
                self._tp,
                self._adapters,
                generates=config.kind.generates,
                items=GraphItems.of(items_of(self._config)),
                shapes=call_checked(self._platform, "shapes", returns=ShapePolicy),
                is_static=self._platform.capabilities.static_shapes,
                load=load,
            )
            graphs = [self.graph]
            if self.draft is not None:
                graph = GraphModel(self.draft.model, self._graph_compiler, self._tp, generates=True)
                self.draft = dataclasses.replace(self.draft, graph=graph)
                graphs.append(graph)
            self._layers.set_programs(graphs)
        self._layers.set_layers(layers, model.state_layers(), draft_states)
        return context

    @property
    def _served_config(self) -> ModelConfig:
        """The config of the served model; without encoders if the engine takes text alone."""
        config = self._config.model
        return config if self._config.multimodal.refusal is None else dataclasses.replace(config, multimodal=None)

    def _resolve_ops(self, *, batch_invariant: bool) -> OpTable:
        of_platform: Sequence[OpProvider]
        if self._graph_compiler is None:
            of_platform = call_checked(self._platform, "ops", returns=Sequence)
        else:
            of_platform = recording_providers(self._graph_compiler.operations())
        asked_for = installed_providers(self._config.op_providers)
        return OpTable.resolve(of_platform, asked_for, batch_invariant=batch_invariant)

    def _load(self, config: ModelConfig, context: BuildContext, *, weightless: bool = False) -> CausalLM:
        """Builds one model on the device and loads its weights; with `weightless` only builds it."""
        model_class = resolve_model_class(config.architecture, config.model_impl, config.language_architecture)
        remedy = (
            "Choose a smaller dtype, quantization='int8' or 'int4', or a larger tensor_parallel_size or "
            "pipeline_parallel_size, which leaves each device a smaller part."
        )
        what = f"The weights of {config.model}, whose sizes config.json gives,"
        with out_of_memory_as(ModelError, what, remedy):
            model = weightless_model(model_class, config, context) if weightless else model_class(config, context)
        check_length(model, self._runtime.memory())
        if weightless:
            return model
        load_weights(
            model,
            config.path,
            load_format=self._config.load.load_format,
            use_tqdm=self._config.load.use_tqdm,
            seed=config.weights_seed,
            on_loaded=model.tensor_loaded,
        )
        model.after_load()
        model.eval()
        return model

    def start_weight_update(self) -> ModelWeightUpdate:
        """An update of the served model's weights. The draft model keeps its own."""
        if self.graph is not None:
            return GraphWeightUpdate(self.model, self._empty_model, self.graph.arrays, self.graph.give)
        return ModelWeightUpdate(self.model, self._empty_model)

    def _empty_model(self) -> CausalLM:
        """Another model of the class and configuration of the served one, whose parameters have no memory."""
        assert self._context is not None, "the model is not loaded"
        config = self._served_config
        model_class = resolve_model_class(config.architecture, config.model_impl, config.language_architecture)
        return model_class(config, UnallocatedContext.of(self._context))

    def _load_graph(self, graph: GraphModel) -> None:
        """Loads the weights of the served model, and gives them to its program."""
        update = GraphWeightUpdate(self.model, self._empty_model, graph.arrays, graph.give)
        update.load_all(self._served_config, self._config.load)

    @property
    def is_loaded(self) -> bool:
        """Whether the model is loaded."""
        return self._model is not None

    @property
    def model(self) -> CausalLM:
        """The served model. It must be loaded."""
        assert self._model is not None, "the model is not loaded"
        return self._model

    @property
    def weight_owners(self) -> list[object]:
        """The loaded models, and the slots of adapters: whatever has weights on the device."""
        draft = None if self.draft is None else self.draft.model
        return [each for each in (self._model, draft, self._adapters) if each is not None]

    @property
    def caches(self) -> list[object]:
        """The KV caches and states that layers of the models refer to: they are not weights."""
        return self._layers.caches

    @property
    def supports_lora(self) -> bool:
        """Whether the engine was started with LoRA."""
        return self._adapters is not None

    @property
    def lora_manager(self) -> LoRAModelManager:
        """The LoRA adapters.

        Raises:
            ConfigError: The engine was started without LoRA.
        """
        if self._adapters is None:
            raise ConfigError("LoRA adapters need an engine that was started with enable_lora.")
        return self._adapters

    def unload(self) -> None:
        """Drops all models and their KV caches. Idempotent."""
        self._layers.clear()
        for graph in (self.graph, None if self.draft is None else self.draft.graph):
            if graph is not None:
                graph.close()
        self.graph = None
        if self._graph_compiler is not None:
            self._graph_compiler.close()
        self._model = self._adapters = self.draft = self._context = None
