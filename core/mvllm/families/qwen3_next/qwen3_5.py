"""Qwen3.5, dense and with experts: Qwen3-Next with separate projections of the gated delta net.

Checkpoints for text and images (`...ForConditionalGeneration`) have the language model below `model.language_model`.
Their vision tower is not loaded: images are not supported as input. For text alone the rotary embedding of several
position axes equals the ordinary one, because the axes agree.
"""

from __future__ import annotations

import re
from typing import ClassVar

from torch import nn

from mvllm.families.qwen3_next.qwen3_next import Qwen3NextForCausalLM
from mvllm.layers.context import BuildContext
from mvllm.layers.gated_delta_net import DeltaNetNames
from mvllm.models.llama import LlamaForCausalLM, LlamaOptions


class Qwen3_5MoeForCausalLM(Qwen3NextForCausalLM):
    """`Qwen3_5MoeForCausalLM` of Hugging Face checkpoints, and the text part of those with images."""

    ignored_names = re.compile(rf"^model\.visual\.|{Qwen3NextForCausalLM.ignored_names.pattern}")
    delta_net_names: ClassVar[DeltaNetNames] = Qwen3NextForCausalLM.separate_names

    def model_name(self, name: str) -> str:
        """Names as Llama's: `model.layers.0` for `model.language_model.layers.0`."""
        return re.sub(r"^model\.language_model\.", "model.", name)

    @classmethod
    def checkpoint_names(cls, name: str) -> tuple[str, ...]:
        """Also the name in checkpoints for text and images."""
        return (re.sub(r"^model\.", "model.language_model.", name),)


class Qwen3_5ForCausalLM(Qwen3_5MoeForCausalLM):
    """`Qwen3_5ForCausalLM` of Hugging Face checkpoints, and the text part of those with images."""

    def build_mlp(self, ctx: BuildContext, options: LlamaOptions, layer: int) -> nn.Module:
        """A dense MLP in every layer."""
        return LlamaForCausalLM.build_mlp(self, ctx, options, layer)
