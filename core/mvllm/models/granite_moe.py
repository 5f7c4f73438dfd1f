"""Granite MoE: Granite with routed experts instead of an MLP, and in newer models a shared expert beside them.

Of GGUF files (`fused_mlp` is false then), gate and up of an MLP are separate matrices, and experts are read one by one.
"""

from __future__ import annotations

from torch import nn

from mvllm.config.hf_config import HFConfig
from mvllm.errors import ModelError
from mvllm.layers.context import BuildContext
from mvllm.layers.fused_moe import FusedMoE
from mvllm.layers.mlp import GatedMLP
from mvllm.layers.routing import Routing
from mvllm.layers.sparse_moe_block import SparseMoeBlock
from mvllm.layers.stacked_moe import StackedMoE
from mvllm.models.granite import GraniteForCausalLM
from mvllm.models.llama import LlamaOptions
from mvllm.models.module_names import ModuleNames
from mvllm.models.moe_config import check_activation


class GraniteMoeForCausalLM(GraniteForCausalLM):
    """`GraniteMoeForCausalLM` and `GraniteMoeSharedForCausalLM` of Hugging Face checkpoints."""

    module_names = ModuleNames(
        {"shared_mlp.input_linear": "shared_mlp.gate_up_proj", "shared_mlp.output_linear": "shared_mlp.down_proj"}
    )
    shared_size = 0
    """Default of `shared_intermediate_size`: the inner size of the shared expert; 0 for none."""

    def build_mlp(self, ctx: BuildContext, options: LlamaOptions, layer: int) -> nn.Module:
        hf, name, hidden_size = self.config.hf_config, f"model.layers.{layer}", self.config.hidden_size
        fused = bool(hf.get("fused_mlp", True))
        size, act = _shared_size(hf, self.shared_size), hf.get("hidden_act", "silu")
        shared = GatedMLP(ctx, f"{name}.shared_mlp", hidden_size, size, act, bias=False, fused=fused) if size else None
        if shared is not None and hf.get("num_local_experts", 8) == 0:
            return shared
        check_activation(hf)
        count, top_k = hf.positive_int("num_local_experts", 8), hf.positive_int("num_experts_per_tok", 2)
        name, size = f"{name}.block_sparse_moe", hf.positive_int("intermediate_size")
        experts: FusedMoE
        if fused:
            names = "input_linear.weight", "output_linear.weight"
            experts = StackedMoE(ctx, name, hidden_size, size, num_experts=count, top_k=top_k, names=names)
        else:
            experts = FusedMoE(ctx, f"{name}.experts", hidden_size, size, num_experts=count, top_k=top_k)
        routing = Routing(top_k, "softmax_of_chosen")
        return SparseMoeBlock(ctx, f"{name}.router.layer", experts, routing, shared_experts=shared)


def _shared_size(hf: HFConfig, default: int) -> int:
    size = hf.get("shared_intermediate_size", default)
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise ModelError(f"{hf.source}: 'shared_intermediate_size' should be an integer >= 0, found {size!r}.")
    return size
