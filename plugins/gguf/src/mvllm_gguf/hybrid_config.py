"""The keys of config.json for families whose layers keep a state: short convolutions, Mamba-2 and delta rules.

The kind of each layer follows from its tensors. Settings that files do not store are those of llama.cpp.

Source: convert_hf_to_gguf.py and src/models of llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from mvllm_gguf.decoder_config import (
    attention_bias,
    decoder,
    gated,
    has,
    head_dim,
    layer_kinds,
    num_experts,
    num_layers,
    num_mtp_modules,
    rows_of,
)
from mvllm_gguf.large_moe_config import check_sigmoid
from mvllm_gguf.metadata import Metadata

LINEAR = "linear_attention"
_STATE_OUTPUT = "ssm_out.weight"


# -------------------------------------------------------------------------------------------------- short convolutions


def _lfm2(values: Metadata) -> dict[str, Any]:
    size = values.integer("feed_forward_length")
    settings = {"block_ff_dim": size, "block_auto_adjust_ff_dim": False}
    return {**_short_conv(values, "Lfm2ForCausalLM", "lfm2"), **settings}


def _lfm2_moe(values: Metadata) -> dict[str, Any]:
    check_sigmoid(values)
    return {
        **_short_conv(values, "Lfm2MoeForCausalLM", "lfm2_moe"),
        "num_experts": num_experts(values),
        "num_experts_per_tok": values.integer("expert_used_count"),
        "moe_intermediate_size": values.integer("expert_feed_forward_length"),
        "num_dense_layers": values.integer("leading_dense_block_count", 0, at_least=0),
        "use_expert_bias": has(values, "exp_probs_b.bias"),
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


def _short_conv(values: Metadata, architecture: str, model_type: str) -> dict[str, Any]:
    values.refuse_other("attention.sliding_window", 0)
    return gated(
        values,
        architecture,
        model_type,
        norm_eps=values.number("attention.layer_norm_rms_epsilon"),
        layer_types=layer_kinds(values, "shortconv.conv.weight", "conv"),
        conv_L_cache=values.integer("shortconv.l_cache"),
        conv_bias=has(values, "shortconv.conv.bias"),
    )


# -------------------------------------------------------------------------------------------------------------- Mamba-2


def _mamba2(values: Metadata) -> dict[str, Any]:
    hidden_size, sizes = values.integer("embedding_length"), _MambaSizes(values)
    return {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers(values),
        "max_position_embeddings": values.integer("context_length"),
        "num_heads": sizes.heads,
        "head_dim": sizes.head_dim,
        "expand": sizes.expansion(values, hidden_size),
        "state_size": sizes.state,
        "n_groups": sizes.groups,
        "conv_kernel": sizes.kernel,
        "use_bias": has(values, "ssm_in.bias"),
        "use_conv_bias": has(values, "ssm_conv1d.bias"),
        "hidden_act": "silu",
        "layer_norm_epsilon": values.number("attention.layer_norm_rms_epsilon"),
    }


class _MambaSizes:
    """Sizes of Mamba-2 layers.

    Attributes:
        heads, head_dim, groups, state, kernel: As in config.json.
        inner: Heads times their size.
    """

    def __init__(self, values: Metadata) -> None:
        self.inner, self.heads = values.integer("ssm.inner_size"), values.integer("ssm.time_step_rank")
        if self.inner % self.heads:
            raise values.error(f"has Mamba layers of inner size {self.inner}, not a multiple of {self.heads} heads")
        self.head_dim = self.inner // self.heads
        self.groups, self.state = values.integer("ssm.group_count", 1), values.integer("ssm.state_size")
        self.kernel = values.integer("ssm.conv_kernel")

    def expansion(self, values: Metadata, hidden_size: int) -> int:
        """The inner size as a multiple of the hidden size."""
        factor, rest = divmod(self.inner, hidden_size)
        if rest:
            raise values.error(f"has Mamba layers of inner size {self.inner}, expected a multiple of {hidden_size}")
        return factor


def _mamba_keys(values: Metadata) -> dict[str, Any]:
    """Sizes and biases of Mamba-2 layers under the keys that Granite 4, Bamba and Falcon-H1 share."""
    sizes = _MambaSizes(values)
    return {
        "mamba_n_heads": sizes.heads,
        "mamba_d_head": sizes.head_dim,
        "mamba_d_ssm": sizes.inner,
        "mamba_d_state": sizes.state,
        "mamba_n_groups": sizes.groups,
        "mamba_d_conv": sizes.kernel,
        "mamba_proj_bias": has(values, "ssm_in.bias"),
        "mamba_conv_bias": has(values, "ssm_conv1d.bias"),
        "attention_bias": attention_bias(values),
    }


def is_bamba(values: Metadata) -> bool:
    """Whether a file of granitehybrid is Bamba: of the models with Mamba-2 layers only Bamba has RoPE."""
    return values.boolean("rope.scaling.finetuned", True)


def _granite_hybrid(values: Metadata) -> dict[str, Any]:
    types = layer_kinds(values, _STATE_OUTPUT, LINEAR)
    if is_bamba(values):
        config = gated(
            values,
            "BambaForCausalLM",
            "bamba",
            **_mamba_keys(values),
            attn_layer_indices=[layer for layer, kind in enumerate(types) if kind != LINEAR],
            mlp_bias=has(values, "ffn_up.bias"),
        )
        return {"partial_rotary_factor": 1.0, **config}  # the family's default is another one
    has_experts = values.integer("expert_count", 0, at_least=0) > 0
    config = gated(
        values,
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        **_mamba_keys(values),
        layer_types=types,
        position_embedding_type="nope",
        num_local_experts=num_experts(values) if has_experts else 0,
        num_experts_per_tok=values.integer("expert_used_count") if has_experts else 0,
        shared_intermediate_size=rows_of(
            values, "ffn_up_shexp.weight" if has_experts else "ffn_up.weight", "expert_shared_feed_forward_length"
        ),
        attention_multiplier=values.number("attention.scale", 1 / math.sqrt(head_dim(values))),
        embedding_multiplier=values.number("embedding_scale", 1.0),
        residual_multiplier=values.number("residual_scale", 1.0),
        logits_scaling=values.number("logit_scale", 1.0),
        fused_mlp=False,  # gate and up are separate tensors, and experts are read one by one
    )
    return {**config, "mamba_expand": max(1, config["mamba_d_ssm"] // config["hidden_size"])}


def _falcon_h1(values: Metadata) -> dict[str, Any]:
    """The weights of a file contain the family's multipliers."""
    return gated(
        values,
        "FalconH1ForCausalLM",
        "falcon_h1",
        **_mamba_keys(values),
        mlp_bias=has(values, "ffn_up.bias"),
        projectors_bias=has(values, "ssm_out.bias"),
        mamba_rms_norm=has(values, "ssm_norm.weight"),
        mamba_norm_before_gate=False,
    )


def _nemotron_h(values: Metadata) -> dict[str, Any]:
    sizes, kinds = _MambaSizes(values), [_block_kind(values, layer) for layer in range(num_layers(values))]
    config = decoder(
        values,
        "NemotronHForCausalLM",
        "nemotron_h",
        head_dim=head_dim(values),
        layers_block_type=kinds,
        mamba_num_heads=sizes.heads,
        mamba_head_dim=sizes.head_dim,
        ssm_state_size=sizes.state,
        n_groups=sizes.groups,
        conv_kernel=sizes.kernel,
        use_bias=has(values, "ssm_in.bias"),
        use_conv_bias=has(values, "ssm_conv1d.bias"),
        attention_bias=attention_bias(values),
        mlp_bias=has(values, "ffn_up.bias"),
        mlp_hidden_act="relu2",
        layer_norm_epsilon=values.number("attention.layer_norm_rms_epsilon"),
    )
    if "mlp" in kinds:
        config["intermediate_size"] = values.nonzero("feed_forward_length")
    return {**config, **(_nemotron_experts(values) if "moe" in kinds else {})}


def _block_kind(values: Metadata, layer: int) -> str:
    for tensor, kind in (
        (_STATE_OUTPUT, LINEAR),
        ("ffn_gate_inp.weight", "moe"),
        ("ffn_up.weight", "mlp"),
        ("attn_output.weight", "full_attention"),
    ):
        if values.has_tensor(f"blk.{layer}.{tensor}"):
            return kind
    raise values.error(f"has no tensors of attention, a Mamba layer or an MLP in layer {layer}")


def _nemotron_experts(values: Metadata) -> dict[str, Any]:
    check_sigmoid(values)
    settings: dict[str, Any] = {
        "n_routed_experts": num_experts(values),
        "num_experts_per_tok": values.integer("expert_used_count"),
        "moe_intermediate_size": values.integer("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": values.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": values.boolean("expert_weights_norm", True),
        "routed_scaling_factor": values.number("expert_weights_scale", 1.0),
        "n_group": values.integer("expert_group_count", 1),
        "topk_group": values.integer("expert_group_used_count", 1),
    }
    if "moe_latent_size" in values:
        settings["moe_latent_size"] = values.integer("moe_latent_size")
    return settings


# ---------------------------------------------------------------------------------------------------------- delta rules


def _qwen3_next(values: Metadata) -> dict[str, Any]:
    # q, k, v and z are separate in the file.
    settings = {**_delta_net(values), **_qwen_experts(values), "grouped_projections": False}
    return gated(values, "Qwen3NextForCausalLM", "qwen3_next", **settings)


def _qwen3_5(values: Metadata) -> dict[str, Any]:
    return gated(values, "Qwen3_5ForCausalLM", "qwen3_5_text", **_delta_net(values))


def _qwen3_5_moe(values: Metadata) -> dict[str, Any]:
    settings = {**_delta_net(values), **_qwen_experts(values)}
    return gated(values, "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", **settings)


def _delta_net(values: Metadata) -> dict[str, Any]:
    sizes = _MambaSizes(values)
    if sizes.heads % sizes.groups:
        raise values.error(f"has {sizes.heads} value heads for {sizes.groups} key heads, expected a multiple")
    return {
        "attention_bias": attention_bias(values),
        "layer_types": layer_kinds(values, _STATE_OUTPUT, LINEAR),
        "linear_num_key_heads": sizes.groups,
        "linear_num_value_heads": sizes.heads,
        "linear_key_head_dim": sizes.state,
        "linear_value_head_dim": sizes.head_dim,
        "linear_conv_kernel_dim": sizes.kernel,
        "mtp_num_hidden_layers": num_mtp_modules(values),
    }


def _qwen_experts(values: Metadata) -> dict[str, Any]:
    layers = range(num_layers(values))
    return {
        "num_experts": num_experts(values),
        "num_experts_per_tok": values.integer("expert_used_count"),
        "moe_intermediate_size": rows_of(values, "ffn_up_exps.weight", "expert_feed_forward_length"),
        "shared_expert_intermediate_size": rows_of(values, "ffn_up_shexp.weight", "expert_shared_feed_forward_length"),
        "norm_topk_prob": values.boolean("expert_weights_norm", True),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [each for each in layers if not values.has_tensor(f"blk.{each}.ffn_gate_inp.weight")],
    }


def _kimi_linear(values: Metadata) -> dict[str, Any]:
    check_sigmoid(values)
    rope_dim, key_length = values.integer("rope.dimension_count"), values.integer("attention.key_length_mla")
    if key_length <= rope_dim:
        raise values.error(f"has query heads of {key_length} elements, expected more than {rope_dim}")
    layers = range(num_layers(values))
    config = decoder(
        values,
        "KimiLinearForCausalLM",
        "kimi_linear",
        hidden_act="silu",
        rms_norm_eps=values.number("attention.layer_norm_rms_epsilon"),
        intermediate_size=values.integer("feed_forward_length"),
        layer_types=layer_kinds(values, "ssm_norm.weight", LINEAR),
        mlp_layer_types=["sparse" if values.has_tensor(f"blk.{i}.ffn_gate_inp.weight") else "dense" for i in layers],
        num_local_experts=num_experts(values),
        num_experts_per_tok=values.integer("expert_used_count"),
        moe_intermediate_size=values.integer("expert_feed_forward_length"),
        n_shared_experts=values.integer("expert_shared_count", 0, at_least=0),
        norm_topk_prob=values.boolean("expert_weights_norm", True),
        routed_scaling_factor=values.number("expert_weights_scale", 1.0),
        n_group=values.integer("expert_group_count", 1),
        topk_group=values.integer("expert_group_used_count", 1),
        kv_lora_rank=values.integer("attention.kv_lora_rank"),
        qk_rope_head_dim=rope_dim,
        qk_nope_head_dim=key_length - rope_dim,
        v_head_dim=values.integer("attention.value_length_mla"),
        linear_head_dim=values.integer("kda.head_dim"),
        linear_num_heads=values.integer("attention.head_count"),
        linear_conv_kernel_dim=values.integer("ssm.conv_kernel"),
    )
    if "attention.q_lora_rank" in values:
        config["q_lora_rank"] = values.integer("attention.q_lora_rank")
    config["num_key_value_heads"] = config["num_attention_heads"]  # files store 1, for the shared latent
    return config


HYBRID: dict[str, Callable[[Metadata], dict[str, Any]]] = {
    "falcon-h1": _falcon_h1,
    "granitehybrid": _granite_hybrid,
    "kimi-linear": _kimi_linear,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2_moe,
    "mamba2": _mamba2,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "qwen35": _qwen3_5,
    "qwen35moe": _qwen3_5_moe,
    "qwen3next": _qwen3_next,
}
"""By `general.architecture`."""
