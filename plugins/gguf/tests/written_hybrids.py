"""Metadata and tensors of GGUF files for families whose layers keep a state, as convert_hf_to_gguf.py writes them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

Tensors = Iterator[tuple[str, torch.Tensor]]

ARCHITECTURES = {
    "bamba": "granitehybrid",
    "falcon_h1": "falcon-h1",
    "granitemoehybrid": "granitehybrid",
    "kimi_linear": "kimi-linear",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "mamba2": "mamba2",
    "nemotron_h": "nemotron_h_moe",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_5_text": "qwen35",
    "qwen3_next": "qwen3next",
}
"""`general.architecture` by `model_type`."""

ALWAYS_F32 = re.compile(r"\.ssm_[ad]$|\.(ssm_conv1d(_[qkv])?|shortconv\.conv|ssm_norm)\.")
"""Names of tensors that are never quantized."""

_STATE_KINDS = ("mamba", "linear_attention", "conv", "M")
_ATTENTION_KINDS = ("attention", "full_attention", "*")


class HybridFile:
    """Converts the keys and tensors of one checkpoint.

    Args:
        arch: `general.architecture`.
        config: `config.json`.
        stacked_delta_net: Whether to store `ssm_in` of Qwen3-Next, as older converters do.
    """

    def __init__(self, arch: str, config: Mapping[str, Any], stacked_delta_net: bool) -> None:
        self._arch, self._config, self._stacked = arch, config, stacked_delta_net

    # ------------------------------------------------------------------------------------------------------- metadata

    def kinds(self) -> list[str]:
        """The kind of each layer."""
        config = self._config
        for key in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
            if config.get(key):
                return list(config[key])
        count = int(config["num_hidden_layers"])
        attention: list[int] = list(range(count))
        for key in ("full_attn_idxs", "attn_layer_indices"):
            attention = config.get(key, attention)
        if "linear_attn_config" in config:
            attention = [number - 1 for number in config["linear_attn_config"]["full_attn_layers"]]
        return ["attention" if layer in attention else "linear_attention" for layer in range(count)]

    def values(self, head_dim: int) -> dict[str, Any]:
        """Metadata beside that of all decoders."""
        match self._arch:
            case "lfm2" | "lfm2moe":
                return self._lfm2()
            case "mamba2":
                return self._mamba2()
            case "kimi-linear":
                return self._kimi()
            case "qwen3next" | "qwen35" | "qwen35moe":
                return self._qwen(head_dim)
            case "falcon-h1":
                return self._mamba()
            case "granitehybrid":
                return self._granite(head_dim)
            case _:
                return self._nemotron(head_dim)

    def _per_layer(self, value: int, *kinds: str) -> list[int]:
        return [value if kind in kinds else 0 for kind in self.kinds()]

    def _kv_heads(self) -> list[int]:
        return self._per_layer(self._config["num_key_value_heads"], *_ATTENTION_KINDS)

    def _lfm2(self) -> dict[str, Any]:
        config = self._config
        size = int(config.get("block_ff_dim") or config["intermediate_size"])
        if config.get("block_auto_adjust_ff_dim", self._arch == "lfm2"):
            multiple = config["block_multiple_of"]
            size = int(config.get("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
            size = (size + multiple - 1) // multiple * multiple
        values = {
            "attention.head_count_kv": self._kv_heads(),
            "attention.layer_norm_rms_epsilon": config["norm_eps"],
            "feed_forward_length": size,
            "shortconv.l_cache": config["conv_L_cache"],
        }
        if self._arch == "lfm2moe":
            values |= {
                "expert_feed_forward_length": config["moe_intermediate_size"],
                "leading_dense_block_count": config["num_dense_layers"],
                "expert_gating_func": 2,
            }
        return values

    def _ssm(self, inner: int, heads: int, groups: int, state: int, kernel: int) -> dict[str, Any]:
        sizes = {"inner_size": inner, "time_step_rank": heads, "group_count": groups}
        return {f"ssm.{key}": value for key, value in {**sizes, "state_size": state, "conv_kernel": kernel}.items()}

    def _mamba2(self) -> dict[str, Any]:
        config = self._config
        inner = config["expand"] * config["hidden_size"]
        return {
            **self._ssm(inner, config["num_heads"], config["n_groups"], config["state_size"], config["conv_kernel"]),
            "context_length": 1 << 20,
            "feed_forward_length": 0,
            "attention.head_count": 0,
            "attention.head_count_kv": None,
            "attention.key_length": None,
            "attention.value_length": None,
            "attention.layer_norm_epsilon": None,
            "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
            "rope.freq_base": None,
        }

    def _mamba(self) -> dict[str, Any]:
        config = self._config
        heads, head_dim = config["mamba_n_heads"], config["mamba_d_head"]
        inner = heads * (head_dim if head_dim != "auto" else config["mamba_d_ssm"] // heads)
        return self._ssm(inner, heads, config["mamba_n_groups"], config["mamba_d_state"], config["mamba_d_conv"])

    def _granite(self, head_dim: int) -> dict[str, Any]:
        config, is_bamba = self._config, self._config["model_type"] == "bamba"
        return {
            **self._mamba(),
            "attention.head_count_kv": self._kv_heads(),
            "attention.scale": config.get("attention_multiplier"),
            "embedding_scale": config.get("embedding_multiplier"),
            "residual_scale": config.get("residual_multiplier"),
            "logit_scale": config.get("logits_scaling"),
            "expert_shared_feed_forward_length": config.get("shared_intermediate_size"),
            "rope.dimension_count": head_dim // 2 if is_bamba else head_dim,
            "rope.scaling.finetuned": is_bamba,
        }

    def _nemotron(self, head_dim: int) -> dict[str, Any]:
        config, size = self._config, self._config["mamba_head_dim"]
        inner, experts = config["mamba_num_heads"] * size, ("moe", "E")
        state = config["ssm_state_size"]
        heads = config["mamba_num_heads"]
        return {
            **self._ssm(inner, heads, config["n_groups"], state, config.get("conv_kernel", 4)),
            "attention.head_count_kv": self._kv_heads(),
            "attention.key_length": head_dim,
            "attention.value_length": head_dim,
            "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
            "attention.layer_norm_epsilon": None,
            "feed_forward_length": [
                a + b
                for a, b in zip(
                    self._per_layer(config["intermediate_size"], "mlp", "-"),
                    self._per_layer(config["intermediate_size"], *experts),
                    strict=True,
                )
            ],
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
            "expert_shared_count": config["n_shared_experts"],
            "expert_weights_norm": config["norm_topk_prob"],
            "expert_weights_scale": float(config["routed_scaling_factor"]),
            "expert_group_count": config["n_group"],
            "expert_group_used_count": config["topk_group"],
            "moe_latent_size": config.get("moe_latent_size"),
        }

    def _qwen(self, head_dim: int) -> dict[str, Any]:
        config = self._config
        rope = config.get("rope_parameters") or {}
        partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 0.25
        heads = config["linear_num_value_heads"]
        inner = heads * config["linear_value_head_dim"]
        state, kernel = config["linear_key_head_dim"], config["linear_conv_kernel_dim"]
        return {
            **self._ssm(inner, heads, config["linear_num_key_heads"], state, kernel),
            "rope.dimension_count": int(head_dim * partial),
            "rope.dimension_sections": [11, 11, 10, 0] if self._arch != "qwen3next" else None,
            "expert_feed_forward_length": config.get("moe_intermediate_size"),
            "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
        }

    def _kimi(self) -> dict[str, Any]:
        config, rope = self._config, self._config["qk_rope_head_dim"]
        linear = config.get("linear_attn_config") or {
            "head_dim": config["linear_head_dim"],
            "short_conv_kernel_size": config["linear_conv_kernel_dim"],
        }
        return {
            "attention.head_count_kv": self._per_layer(1, *_ATTENTION_KINDS),
            "attention.q_lora_rank": config.get("q_lora_rank"),
            "attention.kv_lora_rank": config["kv_lora_rank"],
            "attention.key_length": config["kv_lora_rank"] + rope,
            "attention.value_length": None,
            "attention.key_length_mla": config["qk_nope_head_dim"] + rope,
            "attention.value_length_mla": config["v_head_dim"],
            "kda.head_dim": linear["head_dim"],
            "ssm.conv_kernel": linear["short_conv_kernel_size"],
            "rope.dimension_count": rope,
            "rope.freq_base": None,
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_shared_count": config.get("num_shared_experts", config.get("n_shared_experts")),
            "expert_weights_scale": float(config["routed_scaling_factor"]),
            "expert_weights_norm": config.get("moe_renormalize", config.get("norm_topk_prob")),
            "expert_gating_func": 2,
            "expert_group_count": config.get("num_expert_group", config.get("n_group")),
            "expert_group_used_count": config.get("topk_group"),
            "leading_dense_block_count": config.get("first_k_dense_replace"),
        }

    # -------------------------------------------------------------------------------------------------------- tensors

    def renamed(self, name: str) -> str:
        """The name that the converter looks up."""
        if self._arch == "nemotron_h_moe":
            name = re.sub(r"^model\.", "backbone.", name)
            return re.sub(r"^backbone(\.layers\.\d+\.)mixer\.experts\.", r"model\1mlp.experts.", name)
        if self._arch == "kimi-linear":  # transformers saves the MLP of dense layers under a name of its own
            return re.sub(r"\.block_sparse_moe\.(gate|up|down)_proj\.", r".mlp.\1_proj.", name)
        if self._arch == "lfm2moe":
            return re.sub(r"^model\.(layers\.\d+\.feed_forward\.experts\.)", r"\1", name)
        return name

    def tensors(self, name: str, tensor: torch.Tensor) -> Tensors:
        """The tensors of the file for one of the checkpoint, under the checkpoint's names or those of the file."""
        if name.endswith("A_log"):
            tensor = -tensor.float().exp()
        elif name.endswith("dt_bias"):
            name = name.replace("dt_bias", "dt.bias" if self._arch == "nemotron_h_moe" else "dt_proj.bias")
        if "conv1d.weight" in name or name.endswith("conv.conv.weight"):
            tensor = tensor.unsqueeze(0).swapaxes(1, 2) if self._arch == "kimi-linear" else tensor.squeeze(1)
        name = name.replace("expert_bias", "expert_bias.bias")
        match self._arch:
            case "qwen3next" | "qwen35" | "qwen35moe":
                yield from self._delta_net(name, tensor)
            case "falcon-h1":
                yield name, self._mamba_shape(name, tensor * self._factor(name, tensor))
            case "granitehybrid":
                yield from self._granite_mlp(name, self._mamba_shape(name, tensor))
            case "mamba2" | "nemotron_h_moe":
                yield name, self._mamba_shape(name, tensor)
            case _:
                yield name, tensor

    def _mamba_shape(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name.endswith(("A_log", ".D")):
            return tensor[:, None]
        if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
            groups = self._config.get("mamba_n_groups", self._config.get("n_groups"))
            return tensor.unflatten(0, (groups, -1))
        return tensor

    def _factor(self, name: str, tensor: torch.Tensor) -> torch.Tensor | float:
        """The multipliers of Falcon-H1 that the weights of a file contain."""
        config, into = self._config, self._config["attention_in_multiplier"]
        factors = {
            "down_proj": config["mlp_multipliers"][1],
            "gate_proj": config["mlp_multipliers"][0],
            "k_proj": config["key_multiplier"] * into,
            "q_proj": into,
            "v_proj": into,
            "o_proj": config["attention_out_multiplier"],
            "out_proj": config["ssm_out_multiplier"],
            "lm_head": config["lm_head_multiplier"],
            "embed_tokens": config["embedding_multiplier"],
        }
        if name.endswith("in_proj.weight"):
            inner, groups = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
            sizes = torch.tensor([inner, inner, groups, groups, config["mamba_n_heads"]])
            rows = torch.tensor(config["ssm_multipliers"]).repeat_interleave(sizes)
            return rows[:, None] * config["ssm_in_multiplier"]
        parts = name.split(".")
        return next((factor for part, factor in factors.items() if part in parts), 1.0)

    def _granite_mlp(self, name: str, tensor: torch.Tensor) -> Tensors:
        match = re.fullmatch(
            r"model\.layers\.(\d+)\.(block_sparse_moe|shared_mlp)\.(input|output)_linear\.weight", name
        )
        if match is None:
            yield name, tensor
            return
        suffix = "_exps" if match[2] == "block_sparse_moe" else "_shexp" if self._config["num_local_experts"] else ""
        if match[3] == "output":
            yield f"blk.{match[1]}.ffn_down{suffix}.weight", tensor
            return
        for kind, part in zip(("gate", "up"), tensor.chunk(2, dim=-2), strict=True):
            yield f"blk.{match[1]}.ffn_{kind}{suffix}.weight", part

    def _delta_net(self, name: str, tensor: torch.Tensor) -> Tensors:
        config = self._config
        keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
        size, key_rows = config["linear_value_head_dim"], config["linear_key_head_dim"]
        if name.endswith("norm.weight") and "linear_attn" not in name:
            yield name, tensor + 1
            return
        if "in_proj_qkvz" in name and not self._stacked:
            layer = name.split(".")[2]
            groups = tensor.unflatten(0, (keys, -1))
            per_group = values // keys * size
            q, k, v, z = (part.flatten(0, 1) for part in groups.split((key_rows, key_rows, per_group, per_group), 1))
            yield f"blk.{layer}.attn_qkv.weight", torch.cat((q, k, v))
            yield f"blk.{layer}.attn_gate.weight", z
            return
        if "linear_attn" in name and self._arch != "qwen3next":
            tensor = self._tiled(name, tensor, keys, size, 2 * keys * key_rows)
            if match := re.fullmatch(r"model\.layers\.(\d+)\.linear_attn\.in_proj_(qkv|z)\.weight", name):
                yield f"blk.{match[1]}.attn_{'qkv' if match[2] == 'qkv' else 'gate'}.weight", tensor
                return
        yield name, tensor

    @staticmethod
    def _tiled(name: str, tensor: torch.Tensor, keys: int, size: int, before: int) -> torch.Tensor:
        """The value heads in the order of the file: the first one of each key head, then the second ones."""
        if "out_proj" in name:
            return tensor.unflatten(1, (keys, -1, size)).swapaxes(1, 2).flatten(1)
        if "in_proj_qkv" in name or "conv1d" in name:
            rows = tensor[before:].unflatten(0, (keys, -1, size)).swapaxes(0, 1).flatten(0, 2)
            return torch.cat((tensor[:before], rows))
        if "in_proj_z" in name:
            return tensor.unflatten(0, (keys, -1, size)).swapaxes(0, 1).flatten(0, 2)
        if any(part in name for part in ("in_proj_a", "in_proj_b", "A_log", "dt_proj")):
            return tensor.unflatten(0, (keys, -1)).swapaxes(0, 1).flatten(0, 1)
        return tensor
