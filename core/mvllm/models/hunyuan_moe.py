"""Hunyuan with experts: the dense models with routed experts and a shared expert in every layer."""

from __future__ import annotations

import torch
from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.errors import ModelError
from mvllm.layers.context import BuildContext
from mvllm.layers.fused_moe import FusedMoE
from mvllm.layers.routing import Routing
from mvllm.layers.sparse_moe_block import SparseMoeBlock
from mvllm.models.hunyuan import HunYuanDenseV1ForCausalLM
from mvllm.models.llama import LlamaOptions
from mvllm.models.moe_config import check_activation, shared_mlp


class HunYuanMoEV1ForCausalLM(HunYuanDenseV1ForCausalLM):
    """`HunYuanMoEV1ForCausalLM` of Hugging Face checkpoints."""

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """As of the dense models.

        Raises:
            ModelError: Layers share keys and values (`use_cla`), which is not supported.
        """
        hf = config.hf_config
        if hf.get("use_cla", False):
            raise ModelError(f"{hf.source}: use_cla is set: attention across layers is not supported.")
        return super().options(config)

    def build_mlp(self, ctx: BuildContext, options: LlamaOptions, layer: int) -> nn.Module:
        """Sizes and numbers of experts may be given for each layer."""
        hf, name, hidden_size = self.config.hf_config, f"model.layers.{layer}.mlp", self.config.hidden_size
        check_activation(hf)
        size, routed_size = (self._of_layer(key, layer) for key in ("intermediate_size", "moe_intermediate_size"))
        count, top_k = self._of_layer("num_experts", layer) or 1, self._of_layer("moe_topk", layer) or 1
        if size is None:
            raise ModelError(f"{hf.source}: 'intermediate_size' is missing. Add it.")
        experts = FusedMoE(ctx, f"{name}.experts", hidden_size, routed_size or size, num_experts=count, top_k=top_k)
        return SparseMoeBlock(
            ctx,
            f"{name}.gate.wg",
            experts,
            Routing(top_k, normalize=True),
            router_dtype=torch.float32,
            shared_experts=shared_mlp(
                self.config, ctx, f"{name}.shared_mlp", size * (self._of_layer("num_shared_expert", layer) or 1)
            ),
        )

    def _of_layer(self, key: str, layer: int) -> int | None:
        """A positive integer, or that of `layer` in a list of one for each layer; None if there is none."""
        hf = self.config.hf_config
        value = hf.get(key)
        if isinstance(value, list) and len(value) == self.config.num_layers:
            value = value[layer]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ModelError(
                f"{hf.source}: {key!r} should be a positive integer, or one for each of the {self.config.num_layers} "
                f"layers, found {hf.get(key)!r}."
            )
        return value
