"""Loads the models of one rank: the served model, its draft model, and the slots of its LoRA adapters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from mvllm.config.engine_config import EngineConfig
from mvllm.config.model import ModelConfig
from mvllm.distributed.group_coordinator import GroupCoordinator
from mvllm.errors import ConfigError, ModelError
from mvllm.layers.context import BuildContext
from mvllm.layers.quantization.registry import quantization_method
from mvllm.models.causal_lm import CausalLM
from mvllm.models.draft_head import DraftHead
from mvllm.models.registry import resolve_model_class
from mvllm.models.weight_loader import load_weights
from mvllm.models.weight_update import ModelWeightUpdate, UnallocatedContext, WeightUpdateWithHead
from mvllm.ops.dtypes import torch_dtype
from mvllm.ops.provider_plugins import installed_providers
from mvllm.ops.registry import OpTable
from mvllm.platform.checked_calls import call_checked
from mvllm.platform.interface import Platform
from mvllm.platform.op_provider import OpProvider
from mvllm.platform.runtime import DeviceRuntime
from mvllm.worker.kv_cache_layers import KVCacheLayers
from mvllm.worker.length_check import check_length
from mvllm.worker.lora_model_manager import LoRAModelManager
from mvllm.worker.out_of_memory import out_of_memory_as
from mvllm.worker.spec_decode.draft_model import DraftModel, class_of_method

if TYPE_CHECKING:
    from mvllm.layers.state import SequenceState

    ModelMaker = Callable[[type[CausalLM], ModelConfig, BuildContext], CausalLM]


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
        lora_only_by_slot: LoRA uses the operation `add_lora_by_slot` whoever provides it.
    """

    lora_only_by_slot: ClassVar[bool] = False

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
        self._draft_context: BuildContext | None = None
        self._adapters: LoRAModelManager | None = None
        self.draft: DraftModel | None = None

    def load(self) -> BuildContext:
        """Loads all models.

        Returns:
            The build context, from which the sampler gets its operations.

        Raises:
            ModelError: A model, or the LoRA slots, cannot be loaded. What has been built stays until `unload`.
        """
        config, context = self.served_config, self.make_context()
        self._context = context
        model = self._model = self.load_served_model(context)
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
            self._draft_context = whole
            self.draft = self._load_draft(draft, whole, model)
            layers = [*layers, *self.draft.model.attention_layers()]
            draft_states = self.draft.model.state_layers()
        if (lora := self._config.lora) is not None:
            with out_of_memory_as(
                ModelError, f"The slots of {lora.max_loras} adapters", "Lower max_loras or max_lora_rank."
            ):
                self._adapters = LoRAModelManager(
                    model, context, lora, self._runtime, only_by_slot=self.lora_only_by_slot
                )
        self._layers.set_layers(layers, model.state_layers(), draft_states)
        return context

    def _load_draft(self, config: ModelConfig, context: BuildContext, target: CausalLM) -> DraftModel:
        """Loads the draft model or draft head. A head shares modules with the served model."""
        head = self._head_class()
        if head is not None and issubclass(head, DraftHead) and head.is_of_served_checkpoint:
            config = self.served_config
        config = dataclasses.replace(config, multimodal=None)
        model = self._load(config, context, None if head is None else self._head_maker(head, target))
        if isinstance(model, DraftHead):
            model.share(target)
        return DraftModel(config, model)

    def _head_class(self) -> type[CausalLM] | None:
        """The class that the method of speculative decoding names; None for a draft model of its architecture."""
        settings = self._config.speculative
        assert settings is not None, "the method has a model"
        if not settings.model_class:
            return None
        return class_of_method(settings, settings.model_class, CausalLM, "CausalLM")

    @staticmethod
    def _head_maker(head: type[CausalLM], target: CausalLM) -> ModelMaker:
        def make(_: type[CausalLM], config: ModelConfig, context: BuildContext) -> CausalLM:
            if issubclass(head, DraftHead):
                return head.for_target(config, context, target)
            return head(config, context)

        return make

    def make_context(self) -> BuildContext:
        """What the served model is built with. The draft model's differs in groups, quantization and adapters."""
        config = self.served_config
        return BuildContext(
            dtype=torch_dtype(config.dtype),
            device=self._runtime.device,
            ops=self._resolve_ops(batch_invariant=self._config.batch_invariant),
            attention=self._layers.backend_for,
            tp=self._tp,
            pp=self._pp,
            kv_dtype=config.dtype if self._config.cache.dtype == "auto" else self._config.cache.dtype,
            quantization=quantization_method(config),
            with_adapters=self._config.lora is not None,
            num_devices=self._num_devices,
            spread=self._runtime.place,
            batch_invariant=self._config.batch_invariant,
            state=self._layers.states.backend_for,
            non_causal_spans=self._platform.capabilities.non_causal_spans,
            encoders_on_host=self.encoders_on_host,
        )

    @property
    def encoders_on_host(self) -> bool:
        """Whether encoders run on the host beside a model on the device: where every shape is a program of its own."""
        return self._platform.capabilities.static_shapes

    @property
    def served_config(self) -> ModelConfig:
        """The config of the served model; without encoders if the engine takes text alone."""
        config = self._config.model
        return config if self._config.multimodal.refusal is None else dataclasses.replace(config, multimodal=None)

    def _resolve_ops(self, *, batch_invariant: bool) -> OpTable:
        asked_for = installed_providers(self._config.op_providers)
        return OpTable.resolve(self.platform_ops(), asked_for, batch_invariant=batch_invariant)

    def platform_ops(self) -> Sequence[OpProvider]:
        """The operations that the platform replaces."""
        found: Sequence[OpProvider] = call_checked(self._platform, "ops", returns=Sequence)
        return found

    def load_served_model(self, context: BuildContext) -> CausalLM:
        """Builds the served model and loads its weights."""
        return self._load(self.served_config, context)

    def build(self, config: ModelConfig, context: BuildContext, make: ModelMaker | None = None) -> CausalLM:
        """Builds one model on the device, without values.

        Args:
            make: Called instead of the model's class.

        Raises:
            ModelError: It does not fit, or the checkpoint is too short for its sizes.
        """
        model_class = resolve_model_class(config.architecture, config.model_impl, config.language_architecture)
        remedy = (
            "Choose a smaller dtype, quantization='int8' or quantization='int4', or a larger tensor_parallel_size or "
            "pipeline_parallel_size, which leaves each device a smaller part."
        )
        what = f"The weights of {config.model}, whose sizes config.json gives,"
        with out_of_memory_as(ModelError, what, remedy):
            model = model_class(config, context) if make is None else make(model_class, config, context)
        check_length(model, self._runtime.memory())
        return model

    def _load(self, config: ModelConfig, context: BuildContext, make: ModelMaker | None = None) -> CausalLM:
        """Builds one model on the device and loads its weights. `make` as in `build`."""
        model = self.build(config, context, make)
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

    def start_weight_update(self) -> ModelWeightUpdate | WeightUpdateWithHead:
        """An update of the served model's weights, and of those of a draft head that are in the same checkpoint.

        Another draft model keeps its own.
        """
        update = ModelWeightUpdate(self.model, self.empty_model)
        head = None if self.draft is None else self.draft.model
        if not isinstance(head, DraftHead) or not head.is_of_served_checkpoint:
            return update
        return WeightUpdateWithHead(update, ModelWeightUpdate(head, self._empty_head))

    def _empty_head(self) -> CausalLM:
        """As `empty_model`, for the draft head."""
        head = self._head_class()
        assert head is not None and self.draft is not None and self._draft_context is not None, "a head is loaded"
        context = UnallocatedContext.of(self._draft_context)
        return self._head_maker(head, self.model)(head, self.draft.config, context)

    def empty_model(self) -> CausalLM:
        """Another model of the class and configuration of the served one, whose parameters have no memory."""
        assert self._context is not None, "the model is not loaded"
        config = self.served_config
        model_class = resolve_model_class(config.architecture, config.model_impl, config.language_architecture)
        return model_class(config, UnallocatedContext.of(self._context))

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
        self._model = self._adapters = self.draft = self._context = self._draft_context = None
