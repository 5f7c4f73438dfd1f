"""Loads the models of one rank as programs of the platform."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mvllm.extension_api import BuildContext, CausalLM, OpProvider, get_logger
from mvllm.extension_api.models import ModelWeightUpdate
from mvllm.extension_api.worker import (
    DraftModel,
    ItemInputSpec,
    KVCacheLayers,
    LogitsModel,
    ModelLoader,
    StepForward,
    call_checked,
    items_of,
)
from mvllm.plugin_api import GraphCompiler, ShapePolicy
from mvllm_graph.recorded_calls import RecordedGroup, recording_providers
from mvllm_graph.worker.graph_model import GraphForward, GraphModel
from mvllm_graph.worker.kv_cache_layers import GraphKVCacheLayers
from mvllm_graph.worker.weights import GraphWeightUpdate, ValuesInStructure, weightless_model

logger = get_logger(__name__)


@dataclass(frozen=True)
class GraphDraftModel(DraftModel):
    """A draft model as a program.

    Attributes:
        graph: The program.
    """

    graph: GraphModel

    @property
    def logits_model(self) -> LogitsModel:
        return self.graph

    def forward(self, layers: KVCacheLayers) -> StepForward:
        return GraphForward(self.graph)


class GraphModelLoader(ModelLoader):
    """ModelLoader for models that run as graphs: builds and traces them on the host. Arguments as for ModelLoader."""

    lora_only_by_slot: ClassVar[bool] = True

    _compiler: GraphCompiler | None = None
    _graph: GraphModel | None = None
    _loads_after_tracing = True

    def load(self) -> BuildContext:
        """As ModelLoader.load. The served model is traced first, so that it is never in memory as a whole."""
        self._loads_after_tracing = True
        try:
            return self._load_graphs()
        except ValuesInStructure as e:
            logger.info("The model is loaded on the host before it is traced: %s", e)
            self.unload()
        self._loads_after_tracing = False
        return self._load_graphs()

    def _load_graphs(self) -> BuildContext:
        self._compiler = call_checked(self._platform, "graph_compiler", returns=GraphCompiler)
        context = super().load()
        self._graph = GraphModel(
            self.model,
            self._compiler,
            self._tp,
            self.lora_manager if self.supports_lora else None,
            generates=self.served_config.kind.generates,
            items=ItemInputSpec.of(items_of(self._config)),
            shapes=call_checked(self._platform, "shapes", returns=ShapePolicy),
            is_static=self._platform.capabilities.static_shapes,
            load=self._load_weights if self._loads_after_tracing else None,
        )
        graphs = [self._graph]
        if (draft := self.draft) is not None:
            graphs.append(GraphModel(draft.model, self._compiler, self._tp, generates=True))
            self.draft = GraphDraftModel(draft.config, draft.model, graphs[-1])
        assert isinstance(self._layers, GraphKVCacheLayers)
        self._layers.set_programs(graphs)
        return context

    @property
    def graph(self) -> GraphModel:
        """The served model as a program. It must be loaded."""
        assert self._graph is not None, "the model is not loaded"
        return self._graph

    def make_context(self) -> BuildContext:
        return dataclasses.replace(super().make_context(), tp=RecordedGroup(self._tp.spec))

    def platform_ops(self) -> Sequence[OpProvider]:
        """Those that are recorded while the model is traced."""
        assert self._compiler is not None
        return recording_providers(self._compiler.operations())

    @property
    def encoders_on_host(self) -> bool:
        """False: what the models are built on is the host, and encoders run there as the platform's tensors."""
        return False

    def load_served_model(self, context: BuildContext) -> CausalLM:
        if self._loads_after_tracing:
            return self.build(self.served_config, context, weightless_model)
        return super().load_served_model(context)

    def start_weight_update(self) -> ModelWeightUpdate:
        return GraphWeightUpdate(self.model, self.empty_model, self.graph.arrays, self.graph.give)

    def _load_weights(self, graph: GraphModel) -> None:
        """Loads the weights of the served model, and gives them to its program."""
        update = GraphWeightUpdate(self.model, self.empty_model, graph.arrays, graph.give)
        update.load_all(self.served_config, self._config.load)

    @property
    def weight_owners(self) -> list[object]:
        """None: the programs have the weights."""
        return []

    def unload(self) -> None:
        self._layers.clear()
        draft = self.draft
        for graph in (self._graph, draft.graph if isinstance(draft, GraphDraftModel) else None):
            if graph is not None:
                graph.close()
        self._graph = None
        if self._compiler is not None:
            self._compiler.close()
        super().unload()
