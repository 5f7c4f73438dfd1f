"""Qwen3-VL, dense and with experts: Qwen3 with three positions for each token, and a vision tower with DeepStack.

The embedding of a patch has several parts. The first takes the place of the token's embedding; the others are added to
the residual stream at that token, one behind each of the first layers (arXiv:2406.04334).

    item_embeds      [ embedding | behind layer 0 | behind layer 1 | behind layer 2 ]
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.errors import ConfigError
from mvllm.families.qwen_vl.family import deepstack_layers
from mvllm.families.qwen_vl.towers import Qwen3VLTower
from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.layers.item_rows import add_rows
from mvllm.layers.routing import Routing
from mvllm.layers.sparse_moe_block import SparseMoeBlock
from mvllm.layers.stacked_moe import StackedMoE
from mvllm.models.grid_model import GridModel
from mvllm.models.llama import LlamaForCausalLM, LlamaOptions
from mvllm.models.moe_config import check_activation, num_experts
from mvllm.models.qwen3 import Qwen3ForCausalLM
from mvllm.models.qwen3_moe import Qwen3MoeForCausalLM


class DeepStackModel(GridModel, LlamaForCausalLM):
    """A base that stands before a language model's class.

    Raises:
        ConfigError: A layer with DeepStack is not on the first pipeline stage.
    """

    tower = Qwen3VLTower

    def __init__(self, config: ModelConfig, ctx: BuildContext) -> None:
        super().__init__(config, ctx)
        self._num_added = 0
        if config.multimodal is None:
            return
        self._num_added = len(deepstack_layers(self.part_config("vision_config")))
        if self.stage.is_first and not self.stage.is_last and self.stage.stop < self._num_added:
            raise ConfigError(
                f"pipeline_parallel_size={ctx.pp.world_size} puts {self.stage.stop} layers on the first stage, but "
                f"images are added behind the first {self._num_added} layers, which must be on it. Lower "
                "pipeline_parallel_size, or pass language_model_only=True for text alone."
            )

    def add_behind_layer(self, layer: int, residual: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        if layer >= self._num_added or step.item_embeds is None:
            return residual
        size = residual.shape[1]
        return add_rows(residual, step.item_embeds[:, (layer + 1) * size : (layer + 2) * size], step)


class Qwen3VLForConditionalGeneration(DeepStackModel, Qwen3ForCausalLM):
    """`Qwen3VLForConditionalGeneration` of Hugging Face checkpoints."""


class Qwen3VLMoeForConditionalGeneration(DeepStackModel, Qwen3MoeForCausalLM):
    """`Qwen3VLMoeForConditionalGeneration` of Hugging Face checkpoints."""

    normalizes_weights_by_default: ClassVar[bool] = True

    def build_mlp(self, ctx: BuildContext, options: LlamaOptions, layer: int) -> nn.Module:
        """Experts in one tensor for each matrix, unless the checkpoint is quantized."""
        hf, name = self.config.hf_config, f"model.layers.{layer}.mlp"
        if not self._is_sparse(layer):
            return LlamaForCausalLM.build_mlp(self, ctx, options, layer)
        check_activation(hf)
        count, top_k = num_experts(hf, "num_experts", "num_local_experts"), hf.positive_int("num_experts_per_tok")
        experts = StackedMoE(
            ctx,
            f"{name}.experts",
            self.config.hidden_size,
            hf.positive_int("moe_intermediate_size", 1408),
            num_experts=count,
            top_k=top_k,
            transposed=True,
            is_stacked=ctx.quantization is None or ctx.quantization.quantizes_on_load,
        )
        return SparseMoeBlock(ctx, f"{name}.gate", experts, Routing(top_k, normalize=True))
