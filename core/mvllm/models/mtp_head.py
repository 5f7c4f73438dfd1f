"""MTPHead: the multi-token-prediction (MTP) module of a checkpoint as a draft head.

An MTP module is one more decoder layer of the family, behind a projection of two normalised vectors:

    embedding of token p + 1 ──norm──┐
                                     ├─[2 * hidden_size]──projection──> layer ──norm──> hidden p' ──head──> token p + 2
    hidden p ────────────────norm────┘                                                     │
                                                                                           └──> the next draft token

Hidden p is that of the served model behind its last norm. The next draft token reads the module's own result behind
its last norm in place of it. Every position is computed alike: the first one, too, reads an embedding. Embedding and
output matrix are those of the served model. Copies of them that checkpoints have are not loaded.

Whether a matrix is quantized follows from its tensors: config.json often does not mention modules.

Of several modules in a checkpoint the first is loaded, and is used for every draft token.

Sources: DeepSeek-V3 Technical Report, section 2.2; `deepseek_nextn.py` of SGLang; `*_mtp.py` of vLLM; for ERNIE
`ernie4_5_mtp.py` of FastDeploy.
"""

from __future__ import annotations

import functools
import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import nn

from mvllm.config.checkpoint_head import tensor_names
from mvllm.config.model import ModelConfig
from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.layers.embedding import VocabEmbedding
from mvllm.layers.linear import ReplicatedLinear
from mvllm.layers.norm import Norm
from mvllm.layers.pipeline_stage import PipelineStage
from mvllm.layers.quantization.as_stored import QuantizationAsStored
from mvllm.models.causal_lm import CausalLM
from mvllm.models.draft_head import DraftHead
from mvllm.models.llama import LlamaForCausalLM, LlamaOptions, norm_eps

_LAYER = re.compile(r"model\.layers\.(\d+)(?=\.|$)")


@dataclass(frozen=True)
class MTPNames:
    """The modules of an MTP module in checkpoints.

    `{layer}` stands for the number behind the model's last layer, `{last}` for that of the module's last layer.

    Attributes:
        layer: The module with those of a decoder layer; of several layers, without the number at its end.
        embedding_norm, hidden_norm, projection: The modules in front of the layer.
        norm: The last norm; None if it is that of the served model.
        copies: Modules with copies of the model's embedding and output matrix, which are not loaded.
        hidden_first: The hidden state comes first in the input of the projection.
    """

    layer: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str | None
    copies: tuple[str, ...] = ()
    hidden_first: bool = False

    def of(self, layer: int, last: int) -> MTPNames:
        """The names where `layer` and `last` have these values."""

        def filled(name: str) -> str:
            return name.format(layer=layer, last=last)

        named: dict[str, Any] = {key: filled(value) for key, value in vars(self).items() if isinstance(value, str)}
        return replace(self, **named, copies=tuple(map(filled, self.copies)))

    def layer_of(self, number: int) -> str:
        """The module of one of the layers, counted from 0."""
        return f"{self.layer}{number}" if self.layer.endswith(".") else self.layer

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Prefixes of the names of all tensors but those of the layer."""
        modules = self.embedding_norm, self.hidden_norm, self.projection, self.norm, *self.copies
        return tuple(f"{module}." for module in modules if module is not None)


NEXTN_NAMES = MTPNames(
    "model.layers.{layer}",
    "model.layers.{layer}.enorm",
    "model.layers.{layer}.hnorm",
    "model.layers.{layer}.eh_proj",
    "model.layers.{layer}.shared_head.norm",
    ("model.layers.{layer}.embed_tokens", "model.layers.{layer}.shared_head.head"),
)
"""Those of DeepSeek and GLM: numbered behind the last layer."""

MTP_NAMES = MTPNames(
    "mtp.layers.0",
    "mtp.pre_fc_norm_embedding",
    "mtp.pre_fc_norm_hidden",
    "mtp.fc",
    "mtp.norm",
)
"""Those of Qwen3-Next and later, and of EXAONE: below `mtp`."""


class MTPHead(DraftHead):
    """The first MTP module of a checkpoint on one rank. A base that stands before the class of the family.

    The head is the family's model with one layer, or a few, whose numbers follow that of the last layer.

    Args:
        config: The served model's.
        ctx: Build context.
        shares_embedding: The served model has the embedding on this rank. If not, the head loads its own.

    Attributes:
        names: The checkpoint's modules.
        embedding_name: The checkpoint module of the model's embedding; its last part is the model's attribute.
    """

    names: ClassVar[MTPNames] = NEXTN_NAMES
    embedding_name: ClassVar[str] = "model.embed_tokens"
    is_of_served_checkpoint = True
    layers: nn.ModuleList

    def __init__(self, config: ModelConfig, ctx: BuildContext, *, shares_embedding: bool = True) -> None:
        self._names = self.names.of(config.num_layers, self.num_layers(config) - 1)
        if ctx.quantization is not None and not ctx.quantization.quantizes_on_load:
            as_stored = QuantizationAsStored(ctx.quantization, tensor_names(config.path))
            ctx = replace(ctx, quantization=as_stored)
        super().__init__(config, ctx)
        names, size = self._names, config.hidden_size
        self.embedding = None if shares_embedding else VocabEmbedding(ctx, self.embedding_name, config.vocab_size, size)
        self.embedding_norm, self.hidden_norm = (
            self.build_norm(ctx, name) for name in (names.embedding_norm, names.hidden_norm)
        )
        # Methods that quantize while they load leave the projection alone: it is small, and drafts depend on it.
        of_projection = ctx.floats() if ctx.quantization is not None and ctx.quantization.quantizes_on_load else ctx
        self.projection = ReplicatedLinear(of_projection, names.projection, 2 * size, size, bias=False)
        self.final_norm = None if names.norm is None else self.build_norm(ctx, names.norm)
        self._target: tuple[CausalLM, ...] = ()  # in a tuple, so that it is no submodule

    @classmethod
    def for_target(cls, config: ModelConfig, ctx: BuildContext, target: CausalLM) -> Self:
        return cls(config, ctx, shares_embedding=cls._embedding_of(target) is not None)

    @abstractmethod
    def build_norm(self, ctx: BuildContext, name: str) -> Norm:
        """A norm of the family over a hidden state; `name` is its checkpoint module."""

    @abstractmethod
    def run_layers(
        self, x: torch.Tensor, positions: torch.Tensor, step: ForwardStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the head's layers.

        Args:
            x: [T, hidden_size]: the result of the projection.
            positions, step: As in `forward`.

        Returns:
            The last block's output, and the residual stream without that output, [T, hidden_size] each.
        """

    @classmethod
    def num_layers(cls, config: ModelConfig) -> int:
        """The number of layers of the module."""
        return 1

    def share(self, target: CausalLM) -> None:
        self._target = (target,)
        shared = {"embedding": self._embedding_of(target), "norm": getattr(target, "norm", None)}
        self._shared = {name: module for name, module in shared.items() if isinstance(module, nn.Module)}

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        step: ForwardStep,
        intermediate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert intermediate is not None, "a draft head reads hidden states"
        embed = self._shared["embedding"] if self.embedding is None else self.embedding
        parts = [self.embedding_norm(embed(input_ids)), self.hidden_norm(intermediate)]
        x = self.projection(torch.cat(parts[::-1] if self._names.hidden_first else parts, dim=-1))
        x, residual = self.run_layers(x, positions, step)
        if self.final_norm is not None:
            return self.final_norm.add_norm(x, residual)[0]
        found: torch.Tensor = self._shared["norm"](x + residual)
        return found

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As the served model does."""
        return self._target[0].compute_logits(hidden)

    def ignores(self, name: str) -> bool:
        """Also all tensors of the model's layers, and those that the served model shares."""
        if name.startswith(tuple(f"{copy}." for copy in self._names.copies)):
            return True
        layers = (f"model.layers.{layer}." for layer in self._layer_numbers())
        return not name.startswith((*self._names.prefixes, *layers)) or super().ignores(name)

    def model_name(self, name: str) -> str:
        """The layers' modules as the family's class names them."""
        name = super().model_name(name)
        if name.startswith(self._names.prefixes):
            return name
        for number, layer in enumerate(self._layer_numbers()):
            theirs = self._names.layer_of(number)
            if name.startswith(f"{theirs}."):
                return f"model.layers.{layer}{name.removeprefix(theirs)}"
        return name

    def _checkpoint_namer(self) -> Callable[[str], Sequence[str]]:
        """Also the names in the MTP module."""
        return functools.partial(_names_in_module, self.checkpoint_names, self._names, self.config.num_layers)

    @classmethod
    def _embedding_of(cls, target: CausalLM) -> nn.Module | None:
        found: nn.Module | None = getattr(target, cls.embedding_name.rpartition(".")[2], None)
        return found

    def _make_stage(self, ctx: BuildContext) -> PipelineStage:
        first = self.config.num_layers
        return PipelineStage(first, first + self.num_layers(self.config), is_first=False, is_last=False)


class LlamaMTPHead(MTPHead, LlamaForCausalLM):
    """The MTP module of a family that is derived from Llama: a single layer."""

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """The family's, with those of the head's layer behind the others."""
        options = super().options(config)
        return replace(options, windows=(*options.windows, cls.window(config, options))) if options.windows else options

    @classmethod
    def window(cls, config: ModelConfig, options: LlamaOptions) -> int | None:
        """The sliding window of the head's layer, or None."""
        return None

    def build_norm(self, ctx: BuildContext, name: str) -> Norm:
        return self.family.norm(ctx, name, self.config.hidden_size, norm_eps(self.config, self.family))

    def run_layers(
        self, x: torch.Tensor, positions: torch.Tensor, step: ForwardStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (number,), (layer,) = self._layer_numbers(), self.layers
        angles = self._rotary_of(number).angles(positions, step.prompt_lens, step.rope_positions)
        found: tuple[torch.Tensor, torch.Tensor] = layer(x, None, angles, step)
        return found


def _names_in_module(
    of_model: Callable[[str], Sequence[str]], names: MTPNames, num_layers: int, name: str
) -> tuple[str, ...]:
    """The names that checkpoints may have for the module `name` of a head.

    Args:
        of_model: Returns those that they may have for a module of the model.
        names: The head's.
        num_layers: The number of layers of the model.
    """
    own, found = of_model(name), []
    for each in (name, *own):
        match = _LAYER.match(each)
        if match is not None:
            found.append(f"{names.layer_of(int(match[1]) - num_layers)}{each.removeprefix(match[0])}")
    return *own, *found
