"""Which operations a graph compiler needs for a model: traces the model without its weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import torch

from mvllm.extension_api import BuildContext
from mvllm.extension_api.models import OpTable, quantization_method, resolve_model_class, torch_dtype
from mvllm.extension_api.worker import GroupCoordinator, ItemInputSpec
from mvllm.plugin_api import AttentionSpec, GraphCompiler, ModelConfig, PlatformError
from mvllm_graph.recorded_calls import RecordedAttention, recording_providers
from mvllm_graph.trace import trace_model
from mvllm_graph.worker.weights import weightless_model


@dataclass(frozen=True)
class ModelOperations:
    """The operations of a model's graphs.

    Attributes:
        counts: Number of nodes of each operation.
        reasons: Why the compiler cannot translate the graphs, as from `GraphCompiler.unsupported`; empty if it can.
    """

    counts: Counter[str]
    reasons: tuple[str, ...]


def operations_of_model(config: ModelConfig, compiler: GraphCompiler) -> ModelOperations:
    """Traces a model for a compiler. Its `config.json` is enough.

    Args:
        config: The model, with its dtype.
        compiler: The compiler, which need not translate everything.

    Raises:
        ConfigError, PlatformError: The model has a feature or an operation that graphs do not have.
        ValuesInStructure: The model cannot be traced without its weights.
    """
    backends: dict[AttentionSpec, RecordedAttention] = {}
    operations = compiler.operations()

    def attention(spec: AttentionSpec) -> RecordedAttention:
        if spec.index_topk is not None:
            raise PlatformError(
                f"The model attends to {spec.index_topk} selected tokens of longer sequences (sparse attention), which "
                f"graphs of a step do not have. Set max_model_len to at most {spec.index_topk}."
            )
        return backends.setdefault(spec, RecordedAttention(spec))

    context = BuildContext(
        dtype=torch_dtype(config.dtype),
        device=torch.from_numpy(np.empty(0)).device,
        ops=OpTable.resolve(recording_providers(operations)),
        attention=attention,
        tp=GroupCoordinator.single("tp"),
        pp=GroupCoordinator.single("pp"),
        kv_dtype=config.dtype,
        quantization=quantization_method(config),
    )
    if config.multimodal is not None and not config.multimodal.takes_rows_only:
        config = replace(config, multimodal=None)  # as in an engine, which refuses its items
    model_class = resolve_model_class(config.architecture, config.model_impl, config.language_architecture)
    model = weightless_model(model_class, config, context)
    graphs = trace_model(
        model,
        computes_logits=config.kind.generates,
        operations=operations,
        items=ItemInputSpec.of(config.multimodal),
    ).graphs
    reasons = dict.fromkeys(reason for graph in graphs for reason in compiler.unsupported(graph))
    return ModelOperations(Counter(node.op for graph in graphs for node in graph.nodes), tuple(reasons))
