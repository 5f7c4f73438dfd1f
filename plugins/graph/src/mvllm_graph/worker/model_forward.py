"""The forward pass of models that are programs of the platform."""

from __future__ import annotations

from typing import Any

import torch

from mvllm.extension_api.worker import (
    Argmax,
    LogitsModel,
    ModelForward,
    SampledTokenBuffer,
    StepInputs,
)
from mvllm.extension_api.worker import (
    argmax as reference_argmax,
)
from mvllm_graph.worker.graph_model import GraphForward, GraphModel
from mvllm_graph.worker.model_loader import GraphModelLoader


class GraphModelForward(ModelForward):
    """ModelForward for models that run as graphs, which are compiled when they are loaded.

    Arguments as for ModelForward.

    Attributes:
        samples_on_host: Tokens of greedy rows are chosen among logits on the host, with the reference of `argmax`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.samples_on_host = False

    @property
    def graph(self) -> GraphModel:
        """The served model."""
        assert isinstance(self.loader, GraphModelLoader)
        return self.loader.graph

    @property
    def logits_model(self) -> LogitsModel:
        return self.graph

    def bind_model(self) -> None:
        self.decoder = GraphForward(self.graph)

    @property
    def is_compiled(self) -> bool:
        """False: the platform's CompileBackend compiles no program."""
        return False

    def compile_model(self, argmax: Argmax, buffer: SampledTokenBuffer | None) -> None:
        is_plain = not self.config.model.token_spaces and argmax is reference_argmax and buffer is None
        self.samples_on_host = is_plain and self.computes_logits

    def call_encoder(
        self, inputs: StepInputs, intermediate: torch.Tensor | None, token_types: torch.Tensor | None
    ) -> torch.Tensor:
        return self.graph.run(inputs, intermediate, token_types=token_types)
