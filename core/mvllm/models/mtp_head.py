"""MTPHead: the multi-token-prediction (MTP) module of a checkpoint as a draft head.

An MTP module is one more decoder layer of the family behind a projection of two normalised vectors:

    embedding of token p + 1 ──norm──┐
                                     ├─[2 * hidden_size]──projection──> layer ──norm──> hidden p' ──head──> token p + 2
    hidden p ────────────────norm────┘                                                     │
                                                                                           └──> the next draft token

Hidden p is that of the served model behind its last norm. The next draft token reads the module's own result behind
its last norm in place of it. Every position is computed alike: the first one, too, reads an embedding. Embedding and
output matrix are those of the served model. Copies of them that checkpoints have are not loaded.

Of several modules in a checkpoint the first is loaded, and is used for every draft token.

Sources: DeepSeek-V3 Technical Report, section 2.2; `deepseek_nextn.py` of SGLang; `*_mtp.py` of vLLM; for ERNIE
`ernie4_5_mtp.py` of FastDeploy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch

from mvllm.config.model import ModelConfig
from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.layers.embedding import VocabEmbedding
from mvllm.layers.linear import ReplicatedLinear
from mvllm.layers.pipeline_stage import PipelineStage
from mvllm.layers.quantization.block_quantization import BlockQuantization
from mvllm.models.causal_lm import CausalLM
from mvllm.models.draft_head import DraftHead
from mvllm.models.llama import LlamaForCausalLM, LlamaOptions, norm_eps

_EMBEDDING = "model.embed_tokens"
_LAYER = re.compile(r"model\.layers\.\d+(?=\.|$)")


@dataclass(frozen=True)
class MTPNames:
    """The modules of an MTP module in checkpoints. `{layer}` stands for the number behind the model's last layer.

    Attributes:
        layer: The module with those of a decoder layer.
        embedding_norm, hidden_norm, projection: The modules in front of the layer.
        norm: The last norm; None if it is that of the served model.
        copies: Modules with copies of the model's embedding and output matrix, which are not loaded.
        hidden_first: The hidden state comes first in the input of the projection.
        quantizes_projection: Quantized checkpoints may have a quantized projection. If not, it is stored as floats
            whatever config.json says, except in files that name the format of each matrix.
    """

    layer: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str | None
    copies: tuple[str, ...] = ()
    hidden_first: bool = False
    quantizes_projection: bool = False

    def of(self, layer: int) -> MTPNames:
        """The names of the module with that number."""
        named: dict[str, Any] = {
            key: value.format(layer=layer) for key, value in vars(self).items() if isinstance(value, str)
        }
        return replace(self, **named, copies=tuple(name.format(layer=layer) for name in self.copies))

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
    quantizes_projection=True,
)
"""Those of Qwen3-Next and later, and of EXAONE: below `mtp`."""


class MTPHead(DraftHead, LlamaForCausalLM):
    """The first MTP module of a checkpoint on one rank. A base that stands before the class of the family.

    The head is the family's model with a single layer, whose number is that behind the last layer.

    Args:
        config: The served model's.
        ctx: Build context.
        shares_embedding: The served model has the embedding on this rank. If not, the head loads its own.

    Attributes:
        names: The checkpoint's modules.
    """

    names: ClassVar[MTPNames] = NEXTN_NAMES
    is_of_served_checkpoint = True

    def __init__(self, config: ModelConfig, ctx: BuildContext, *, shares_embedding: bool = True) -> None:
        self._names = self.names.of(config.num_layers)
        super().__init__(config, ctx)
        names, size, eps = self._names, config.hidden_size, norm_eps(config, self.family)
        if not shares_embedding:
            self.embed_tokens = VocabEmbedding(ctx, _EMBEDDING, config.vocab_size, size)
        make_norm = self.family.norm
        self.embedding_norm = make_norm(ctx, names.embedding_norm, size, eps)
        self.hidden_norm = make_norm(ctx, names.hidden_norm, size, eps)
        in_blocks = isinstance(ctx.quantization, BlockQuantization)
        of_projection = ctx if names.quantizes_projection or in_blocks else ctx.floats()
        self.projection = ReplicatedLinear(of_projection, names.projection, 2 * size, size, bias=False)
        self.norm = None if names.norm is None else make_norm(ctx, names.norm, size, eps)
        self._target: tuple[CausalLM, ...] = ()  # in a tuple, so that it is no submodule

    @classmethod
    def for_target(cls, config: ModelConfig, ctx: BuildContext, target: CausalLM) -> Self:
        return cls(config, ctx, shares_embedding=getattr(target, "embed_tokens", None) is not None)

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """The family's, with those of the head's layer behind the others."""
        options = super().options(config)
        return replace(options, windows=(*options.windows, cls.window(config, options))) if options.windows else options

    @classmethod
    def window(cls, config: ModelConfig, options: LlamaOptions) -> int | None:
        """The sliding window of the head's layer, or None."""
        return None

    def share(self, target: CausalLM) -> None:
        self._target = (target,)
        self._shared = {
            name: module
            for name, own in (("embed_tokens", self.embed_tokens), ("norm", self.norm))
            if own is None and (module := getattr(target, name)) is not None
        }

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        step: ForwardStep,
        intermediate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert intermediate is not None, "a draft head reads hidden states"
        embed = self._shared["embed_tokens"] if self.embed_tokens is None else self.embed_tokens
        parts = [self.embedding_norm(embed(input_ids)), self.hidden_norm(intermediate)]
        x = self.projection(torch.cat(parts[::-1] if self._names.hidden_first else parts, dim=-1))
        number, layer = self.stage.first, self.layers[0]
        angles = self._rotary_of(number).angles(positions, step.prompt_lens, step.rope_positions)
        x, residual = layer(x, None, angles, step)
        if self.norm is not None:
            return self.norm.add_norm(x, residual)[0]
        found: torch.Tensor = self._shared["norm"](x + residual)
        return found

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As the served model does."""
        return self._target[0].compute_logits(hidden)

    def ignores(self, name: str) -> bool:
        """Also all tensors of the model's layers, and those that the served model shares."""
        if name.startswith(tuple(f"{copy}." for copy in self._names.copies)):
            return True
        is_own = name.startswith((*self._names.prefixes, f"model.layers.{self.stage.first}."))
        return not is_own or super().ignores(name)

    def model_name(self, name: str) -> str:
        """The layer's modules as the family's class names them."""
        name, theirs = super().model_name(name), self._names.layer
        if not name.startswith(f"{theirs}.") or name.startswith(self._names.prefixes):
            return name
        return f"model.layers.{self.stage.first}{name.removeprefix(theirs)}"

    @classmethod
    def checkpoint_names(cls, name: str) -> tuple[str, ...]:
        """Also the name in the MTP module."""
        own = super().checkpoint_names(name)
        if "{layer}" in cls.names.layer:
            return own
        return *own, *(_LAYER.sub(cls.names.layer, each) for each in (name, *own) if _LAYER.match(each))

    def _make_stage(self, ctx: BuildContext) -> PipelineStage:
        number = self.config.num_layers
        return PipelineStage(number, number + 1, is_first=False, is_last=False)
