"""Nemotron-H: layers of one block each, which is a Mamba-2 layer, attention without position embedding, an MLP or a
mixture of experts without gates.

`hybrid_override_pattern` names the blocks by one character each, `layers_block_type` by words:

    M  linear_attention     *  full_attention     -  mlp     E  moe
"""

from __future__ import annotations

import re

import torch
from torch import nn

from mvllm.config.model import ModelConfig
from mvllm.errors import ModelError
from mvllm.layers.activation import ACTIVATIONS
from mvllm.layers.attention import Attention
from mvllm.layers.context import BuildContext, ForwardStep
from mvllm.layers.fused_moe import FusedMoE
from mvllm.layers.linear import QKVLinear, ReplicatedLinear, RowParallelLinear
from mvllm.layers.mamba2_mixer import Mamba2Config, Mamba2Mixer
from mvllm.layers.mlp import MLP
from mvllm.layers.norm import RMSNorm
from mvllm.layers.sparse_moe_block import SparseMoeBlock
from mvllm.models.causal_lm import CausalLM
from mvllm.models.layer_kinds import ATTENTION, layer_kinds
from mvllm.models.mamba2 import Mamba2ForCausalLM, SingleBlockLayer
from mvllm.models.mamba_hybrid import MAMBA, OLD_NAMES, time_step_limit
from mvllm.models.module_names import ModuleNames
from mvllm.models.moe_config import grouped_routing
from mvllm.ops.moe import UNGATED_ACTIVATIONS

_KINDS = {"M": MAMBA, "*": ATTENTION, "-": "mlp", "E": "moe"}


class NemotronHAttention(nn.Module):
    """Self-attention without position embedding."""

    def __init__(self, config: ModelConfig, ctx: BuildContext, name: str) -> None:
        super().__init__()
        heads, head_size, hidden_size = (config.num_heads, config.num_kv_heads), config.head_size, config.hidden_size
        bias = bool(config.hf_config.get("attention_bias", False))
        names = (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")
        self.qkv = QKVLinear(ctx, names, hidden_size, *heads, head_size, bias=bias)
        self.output = RowParallelLinear(ctx, f"{name}.o_proj", config.num_heads * head_size, hidden_size, bias=bias)
        self.attention = Attention(ctx, self.qkv.heads, head_size, head_size**-0.5)

    def forward(self, x: torch.Tensor, angles: None, step: ForwardStep) -> torch.Tensor:
        """[T, hidden_size] to [T, hidden_size]."""
        return self.output(self.attention(*self.qkv.split(x), step))


class NemotronHForCausalLM(Mamba2ForCausalLM):
    """`NemotronHForCausalLM` of Hugging Face checkpoints, without the multi-token-prediction layers."""

    root = "model"
    layer_names = CausalLM.layer_names
    first_stage_names = ("model.embeddings.",)
    last_stage_names = ("model.norm_f.",)
    ignored_names = re.compile(r"^mtp\.")
    module_names = ModuleNames({"backbone": "model"})

    def norm_eps(self) -> float:
        return _eps(self.config)

    def build_layer(self, ctx: BuildContext, name: str, layer: int) -> SingleBlockLayer:
        config, kind = self.config, self.block_kind(layer)
        norm = RMSNorm(ctx, f"{name}.norm", config.hidden_size, self.norm_eps())
        name = f"{name}.mixer"
        if kind == MAMBA:
            return SingleBlockLayer(norm, Mamba2Mixer(ctx, name, mamba2_config(config)))
        if kind == ATTENTION:
            return SingleBlockLayer(norm, NemotronHAttention(config, ctx, name))
        block = _mlp(config, ctx, name, "intermediate_size") if kind == "mlp" else _moe(config, ctx, name)
        return SingleBlockLayer(norm, block, reads_step=False)

    def block_kind(self, layer: int) -> str:
        """The kind of a layer's block."""
        return block_kinds(self.config)[layer]


class UngatedMoE(FusedMoE):
    """Experts down(f(up(x))), which stay quantized if the platform supports `quantized_ungated_moe`.

    Args:
        ctx: Build context.
        name: The checkpoint module whose children `0`, `1`, ... are the experts, with up_proj and down_proj.
        hidden_size, intermediate_size: Outer and inner size of one expert.
        act: The activation f, by its name in checkpoints.
        num_experts, top_k: Number of experts, and experts per token.

    Raises:
        ModelError: The activation is not supported in experts.
    """

    def __init__(
        self,
        ctx: BuildContext,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        act: str,
        *,
        num_experts: int,
        top_k: int,
    ) -> None:
        activation = ACTIVATIONS.get(act, act)
        if activation not in UNGATED_ACTIVATIONS:
            raise ModelError(
                f"{name}: the activation {act!r} is not supported in experts without a gate. Supported: "
                f"{', '.join(key for key, value in ACTIVATIONS.items() if value in UNGATED_ACTIVATIONS)}."
            )
        super().__init__(
            ctx,
            name,
            hidden_size,
            intermediate_size,
            num_experts=num_experts,
            top_k=top_k,
            names=("up_proj", "down_proj"),
            op="ungated_moe",
            activation=activation,
        )
        self._activation = activation

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """As FusedMoE.forward."""
        return self._moe(x, self.gate_up, self.down, ids, weights, self._activation)


class LatentExperts(nn.Module):
    """Experts that read and write a smaller vector than the hidden state (`moe_latent_size`).

    Args:
        ctx: Build context.
        name: The checkpoint module of the MoE block.
        hidden_size: Size of a hidden state.
        experts: The experts, whose `hidden_size` is that of the latent.
    """

    def __init__(self, ctx: BuildContext, name: str, hidden_size: int, experts: UngatedMoE) -> None:
        super().__init__()
        self.hidden_size, self.num_experts, self.experts = hidden_size, experts.num_experts, experts
        latent_size = experts.hidden_size
        self.down = ReplicatedLinear(ctx, f"{name}.fc1_latent_proj", hidden_size, latent_size, bias=False)
        self.up = ReplicatedLinear(ctx, f"{name}.fc2_latent_proj", latent_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """As in FusedMoE."""
        return self.up(self.experts(self.down(x), weights, ids))


def block_kinds(config: ModelConfig) -> tuple[str, ...]:
    """The kind of each layer's block.

    Raises:
        ModelError: The config does not name one for each layer.
    """
    hf = config.hf_config
    if "layers_block_type" in hf:
        return layer_kinds(config, MAMBA, "mlp", "moe", key="layers_block_type", old_names=OLD_NAMES)
    pattern = hf.require("hybrid_override_pattern", str)
    if len(pattern) != config.num_layers or not set(pattern) <= _KINDS.keys():
        raise ModelError(
            f"{hf.source}: 'hybrid_override_pattern' should have one of the characters {' '.join(_KINDS)} for each of "
            f"the {config.num_layers} layers, found {pattern!r}."
        )
    return tuple(_KINDS[character] for character in pattern)


def mtp_block_kinds(config: ModelConfig) -> tuple[str, ...]:
    """The kinds of the blocks of a multi-token-prediction module: attention and experts by default.

    Raises:
        ModelError: The config names a block that is neither, or none.
    """
    hf = config.hf_config
    found = hf.get("mtp_hybrid_override_pattern")
    if isinstance(found, str):
        found = [_KINDS.get(character, character) for character in found]
    else:
        found = hf.get("mtp_layers_block_type", [ATTENTION, "moe"])
    if isinstance(found, list):
        found = [OLD_NAMES.get(kind, kind) if isinstance(kind, str) else kind for kind in found]
    if not isinstance(found, list) or not found or any(kind not in (ATTENTION, "moe", "mlp") for kind in found):
        raise ModelError(
            f"{hf.source}: mtp_layers_block_type should name full_attention, moe or mlp for each block of a "
            f"multi-token-prediction module, found {found!r}."
        )
    return tuple(found)


def mamba2_config(config: ModelConfig) -> Mamba2Config:
    """Sizes and options of the Mamba-2 layers.

    `time_step_min` is a setting of the initialisation; the time step is limited by `time_step_limit` only.
    """
    hf = config.hf_config
    return Mamba2Config(
        hidden_size=config.hidden_size,
        num_heads=hf.positive_int("mamba_num_heads"),
        head_size=hf.positive_int("mamba_head_dim"),
        num_groups=hf.positive_int("n_groups", 8),
        state_size=hf.positive_int("ssm_state_size"),
        conv_kernel=hf.positive_int("conv_kernel", 4),
        conv_bias=bool(hf.get("use_conv_bias", True)),
        in_bias=bool(hf.get("use_bias", False)),
        out_bias=bool(hf.get("use_bias", False)),
        activation=hf.get("mamba_hidden_act", "silu"),
        eps=_eps(config),
        dt_limit=time_step_limit(hf),
    )


def _eps(config: ModelConfig) -> float:
    hf = config.hf_config
    return hf.positive_number("layer_norm_epsilon", hf.positive_number("rms_norm_eps", 1e-5))


def _mlp(config: ModelConfig, ctx: BuildContext, name: str, size_key: str) -> MLP:
    hf = config.hf_config
    names, act = (f"{name}.up_proj", f"{name}.down_proj"), hf.get("mlp_hidden_act", "relu2")
    bias = bool(hf.get("mlp_bias", False))
    return MLP(ctx, *names, config.hidden_size, hf.positive_int(size_key), act, bias=bias)


def _moe(config: ModelConfig, ctx: BuildContext, name: str) -> SparseMoeBlock:
    hf, hidden_size = config.hf_config, config.hidden_size
    latent_size, size = hf.get("moe_latent_size"), hf.positive_int("moe_intermediate_size")
    if latent_size and hf.get("mlp_bias", False):
        raise ModelError(f"{hf.source}: 'moe_latent_size' is not supported together with 'mlp_bias'.")
    routing = grouped_routing(hf, "sigmoid", top_k=2)
    experts = UngatedMoE(
        ctx,
        f"{name}.experts",
        hf.positive_int("moe_latent_size", hidden_size),
        size,
        hf.get("mlp_hidden_act", "relu2"),
        num_experts=hf.positive_int("n_routed_experts"),
        top_k=routing.top_k,
    )
    return SparseMoeBlock(
        ctx,
        f"{name}.gate",
        LatentExperts(ctx, name, hidden_size, experts) if latent_size else experts,
        routing,
        correction=f"{name}.gate.e_score_correction_bias",
        router_dtype=torch.float32,
        shared_experts=_mlp(config, ctx, f"{name}.shared_experts", "moe_shared_expert_intermediate_size"),
    )
