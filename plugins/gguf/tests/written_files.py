"""Writes GGUF files from Hugging Face checkpoints, as llama.cpp's convert_hf_to_gguf.py does.

Knows nothing of the code that reads such files. Without tokenizer: a model folder made of such a file is used with
`skip_tokenizer_init`.

    path = write_gguf(make_checkpoint("llama-gqa", tmp_path / "hf"), tmp_path / "model.gguf")
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from plugins.gguf.tests import written_hybrids
from plugins.gguf.tests.written_hybrids import ALWAYS_F32, HybridFile
from safetensors.torch import load_file

ARCHITECTURES = {
    **written_hybrids.ARCHITECTURES,
    "llama": "llama",
    "mistral": "llama",
    "ministral3": "mistral3",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "gpt_oss": "gpt-oss",
    "granite": "granite",
    "glm": "chatglm",
    "glm4": "glm4",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "starcoder2": "starcoder2",
    "falcon": "falcon",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "smollm3": "smollm3",
    "seed_oss": "seed_oss",
    "exaone4": "exaone4",
    "cohere2": "cohere2",
    "ernie4_5": "ernie4_5",
    "hunyuan_v1_dense": "hunyuan-dense",
    "gpt2": "gpt2",
    "glm4_moe": "glm4moe",
    "minimax_m2": "minimax-m2",
    "ernie4_5_moe": "ernie4_5-moe",
    "hunyuan_v1_moe": "hunyuan-moe",
    "llama4_text": "llama4",
    "gemma4_text": "gemma4",
    "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
    "mistral4": "mistral4",
}
"""`general.architecture` by `model_type`."""

_COMMON_RULES = ("kv_b_proj.weight", "e_score_correction_bias", "shared_expert_gate.weight")
"""Ends of names of tensors that hybrids share with other families."""
_ADJACENT_PAIRS = ("llama", "mistral3", "granite", "granitemoe", "smollm3", "granitehybrid", "nemotron_h_moe")
_LATENT = ("deepseek2", "mistral4")
_NEXTN = re.compile(r"model\.layers\.(\d+)\.(enorm|hnorm|eh_proj|embed_tokens|shared_head\.(?:norm|head))\.(\w+)")
_NEXTN_MODULES = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}
"""Modules below `mtp`, and their names in a layer of the file."""
Tensors = Iterator[tuple[str, torch.Tensor]]
TypeOf = Callable[[str], str]


def write_gguf(
    folder: Path,
    path: Path,
    type_of: TypeOf = lambda name: "F32",
    *,
    fused: bool = False,
    merged_latent: bool = False,
    extra: dict[str, Any] | None = None,
    split_from: str | None = None,
    dequantized: bool = False,
    stacked_delta_net: bool = False,
    architecture: str | None = None,
    more_tensors: Mapping[str, torch.Tensor] = {},
) -> Path:
    """Writes the checkpoint in `folder` as one file, or as two.

    Args:
        folder: A checkpoint.
        path: The file.
        type_of: Returns the type of a matrix by its name in the file. Vectors and routers are always F32.
        fused: Store query, key and value in one tensor, and gate and up of experts in one, as newer converters can.
        merged_latent: Store `attn_kv_b`, as older converters do.
        extra: Additional or replaced metadata by key.
        stacked_delta_net: Store `ssm_in` of Qwen3-Next, as older converters do.
        architecture: Replaces that of the family.
        more_tensors: Further tensors by their names in the file.
        dequantized: Store the values that quantized tensors would have, as F32.
        split_from: Tensors whose names begin with this prefix are in a second file. Then `path` ends in
            `-00001-of-00002.gguf`.

    Returns:
        `path`.
    """
    writer = _Writer(folder, fused, merged_latent, stacked_delta_net, architecture)
    paths = [path] if split_from is None else [path, path.with_name(path.name.replace("-00001-of", "-00002-of"))]
    outs = [gguf.GGUFWriter(each, writer.arch) for each in paths]
    for key, value in {**writer.metadata(), **(extra or {})}.items():
        _add_value(outs[0], key, value)
    for i, out in enumerate(outs):
        if split_from is not None:
            out.add_uint16("split.no", i)
            out.add_uint16("split.count", len(outs))
    for name, tensor in itertools.chain(writer.tensors(), more_tensors.items()):
        kind = gguf.GGMLQuantizationType[type_of(name)]
        values = tensor.contiguous().float().numpy()
        block = gguf.GGML_QUANT_SIZES[kind][0]
        is_small = values.ndim < 2 or name.endswith(".bias") or "ffn_gate_inp" in name
        if is_small or ALWAYS_F32.search(name) or values.shape[-1] % block:
            kind = gguf.GGMLQuantizationType.F32
        blocks = gguf.quants.quantize(values, kind)
        if dequantized:
            kind, blocks = gguf.GGMLQuantizationType.F32, gguf.quants.dequantize(blocks, kind)
        out = outs[-1 if split_from is not None and name.startswith(split_from) else 0]
        out.add_tensor(name, blocks, raw_dtype=kind)
    for out in outs:
        out.write_header_to_file()
        out.write_kv_data_to_file()
        out.write_tensors_to_file()
        out.close()
    return path


def make_folder(gguf_file: Path, folder: Path, config: dict[str, Any], *more_files: Path) -> Path:
    """Writes a model folder for a GGUF file, without tokenizer.

    Args:
        gguf_file: The file.
        folder: Output folder; created if missing.
        config: `config.json`.
        more_files: The other files of a split model.

    Returns:
        `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    files = [
        {"path": str(path), "size": path.stat().st_size, "mtime_ns": path.stat().st_mtime_ns}
        for path in (gguf_file, *more_files)
    ]
    (folder / "gguf_files.json").write_text(json.dumps({"files": files}))
    return folder


def _add_value(out: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            out.add_bool(key, value)
        case int():
            out.add_uint32(key, value)
        case float():
            out.add_float32(key, value)
        case str():
            out.add_string(key, value)
        case _:
            out.add_array(key, value)


class _Writer:
    """Converts one checkpoint to metadata and tensors of a GGUF file."""

    def __init__(
        self, folder: Path, fused: bool, merged_latent: bool, stacked_delta_net: bool, architecture: str | None
    ) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.arch = architecture or ARCHITECTURES[self.config["model_type"]]
        self.weights: dict[str, torch.Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            self.weights |= load_file(file)
        self.fused, self.merged_latent = fused, merged_latent
        self.num_layers = self._get("num_hidden_layers", "n_layer") or len(self.config["layers_block_type"])
        self.num_modules = self._get("num_nextn_predict_layers", "mtp_num_hidden_layers", default=0)
        self.num_modules = self.num_modules or int("mtp.fc.weight" in self.weights)
        self.weights = {self._numbered(name): tensor for name, tensor in self.weights.items()}
        self.num_heads = self._get("num_attention_heads", "n_head", "num_heads")
        hidden_size = self._get("hidden_size", "n_embd")
        self.head_dim = self.config.get("head_dim") or hidden_size // self.num_heads
        rope = self.config.get("rope_scaling") or self.config.get("rope_parameters") or {}
        self.rope: dict[str, Any] = rope.get("full_attention", rope)
        self.theta = self.rope.get("rope_theta") or self.config.get("rope_theta") or 10000.0
        self.hybrid: HybridFile | None = None
        if self.config["model_type"] in written_hybrids.ARCHITECTURES:
            self.hybrid = HybridFile(self.arch, self.config, stacked_delta_net)
        if "alpha" in self.rope:
            self.theta *= self.rope["alpha"] ** (self.head_dim / (self.head_dim - 2))

    def _get(self, *keys: str, default: Any = None) -> Any:
        return next((self.config[key] for key in keys if self.config.get(key) is not None), default)

    def _numbered(self, name: str) -> str:
        """The modules for multi-token prediction as layers behind the others."""
        if not name.startswith("mtp."):
            return name
        layer = f"model.layers.{self.num_layers}"
        if name.startswith("mtp.layers.0."):
            return name.replace("mtp.layers.0", layer)
        module, suffix = name.removeprefix("mtp.").rsplit(".", 1)
        return f"{layer}.{_NEXTN_MODULES[module]}.{suffix}"

    # ------------------------------------------------------------------------------------------------------- metadata

    def metadata(self) -> dict[str, Any]:
        values = {key: value for key, value in self._values().items() if value is not None}
        return {f"{self.arch}.{key}": value for key, value in values.items()}

    def _values(self) -> dict[str, Any]:
        get, arch = self._get, self.arch
        hidden_size = get("hidden_size", "n_embd")
        values = {
            "block_count": self.num_layers + self.num_modules,
            "nextn_predict_layers": self.num_modules or None,
            "context_length": 2048
            if arch == "falcon"
            else get("max_position_embeddings", "n_positions", "model_max_length"),
            "embedding_length": hidden_size,
            "feed_forward_length": get("intermediate_size", "ffn_hidden_size", "n_inner", default=4 * hidden_size),
            "attention.head_count": self.num_heads,
            "attention.head_count_kv": self._num_kv_heads(),
            "attention.layer_norm_rms_epsilon": get("rms_norm_eps"),
            "attention.layer_norm_epsilon": get("layer_norm_epsilon", "norm_epsilon", "layer_norm_eps"),
            "vocab_size": self.config["vocab_size"],
            "expert_count": get("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
            "expert_used_count": get(
                "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"
            ),
        }
        if arch not in ("gpt2", "falcon", "granite", "granitemoe"):
            values["attention.key_length"] = values["attention.value_length"] = self.config.get("head_dim")
        if arch not in ("gpt2", "falcon"):
            values |= self._rope_values()
        return values | self._own_values()

    def _num_kv_heads(self) -> int | None:
        if self.arch in _LATENT:
            return 1
        if self.arch == "falcon":
            is_new, one = self.config.get("new_decoder_architecture"), self.config.get("multi_query")
            return self.config["num_kv_heads"] if is_new else 1 if one else self.num_heads
        return self._get("num_key_value_heads")

    def _rope_values(self) -> dict[str, Any]:
        rope, values = self.rope, {"rope.freq_base": float(self.theta)}
        partial = rope.get("partial_rotary_factor") or self.config.get("partial_rotary_factor") or 1.0
        if self.arch in _LATENT:
            partial = 1.0
        if self.arch in ("llama", "granite", "granitemoe", "phi3", "glm4", "chatglm", *_LATENT):
            size = self.config.get("qk_rope_head_dim") or self.head_dim
            values["rope.dimension_count"] = int(size * partial)
        match rope.get("rope_type") or rope.get("type"):
            case "linear":
                values |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
            case "yarn":
                values |= {
                    "rope.scaling.type": "yarn",
                    "rope.scaling.factor": float(rope["factor"]),
                    "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
                    "rope.scaling.yarn_attn_factor": rope.get("attention_factor"),
                    "rope.scaling.yarn_beta_fast": rope.get("beta_fast"),
                    "rope.scaling.yarn_beta_slow": rope.get("beta_slow"),
                }
                if self.arch in _LATENT and "mscale_all_dim" in rope:
                    values["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
            case "longrope":
                longest = self.config["max_position_embeddings"]
                original = self._get("original_max_position_embeddings", default=longest)
                ratio = longest / original
                values |= {
                    "rope.scaling.type": "longrope",
                    "rope.scaling.original_context_length": original,
                    "rope.scaling.attn_factor": math.sqrt(1 + math.log(ratio) / math.log(original)),
                }
        return {key: float(v) if "beta" in key and v is not None else v for key, v in values.items()}

    def _own_values(self) -> dict[str, Any]:
        get, arch = self._get, self.arch
        match arch:
            case "gemma2" | "gemma3":
                types = get("layer_types")
                return {
                    "attention.sliding_window": get("sliding_window"),
                    "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in types]
                    if types
                    else get("sliding_window_pattern"),
                    "attn_logit_softcapping": get("attn_logit_softcapping"),
                    "final_logit_softcapping": get("final_logit_softcapping"),
                    "rope.freq_base_swa": get("rope_local_base_freq"),
                }
            case "olmo2" | "exaone4" | "cohere2":
                return {
                    "attention.sliding_window": get("sliding_window"),
                    "attention.sliding_window_pattern": [
                        kind == "sliding_attention"
                        for kind in get("layer_types", default=(["sliding_attention"] * 3 + ["full_attention"]) * 9)
                    ][: self.num_layers]
                    if get("sliding_window") and arch != "cohere2"
                    else None,
                    "logit_scale": get("logit_scale"),
                }
            case "phi3":
                return {"attention.sliding_window": get("sliding_window", default=0)}
            case "gpt-oss":
                return {
                    "attention.sliding_window": get("sliding_window"),
                    "expert_feed_forward_length": get("intermediate_size"),
                }
            case "mistral3":
                return {
                    "attention.temperature_scale": self.rope.get("llama_4_scaling_beta"),
                    "rope.scaling.yarn_log_multiplier": self.rope.get("mscale_all_dim"),
                }
            case "granite" | "granitemoe":
                return {
                    "expert_shared_feed_forward_length": get("shared_intermediate_size") or None,
                    "attention.scale": get("attention_multiplier"),
                    "embedding_scale": get("embedding_multiplier"),
                    "residual_scale": get("residual_multiplier"),
                    "logit_scale": get("logits_scaling"),
                }
            case "qwen2moe" | "qwen3moe":
                return {
                    "expert_feed_forward_length": get("moe_intermediate_size"),
                    "expert_shared_feed_forward_length": get("shared_expert_intermediate_size"),
                }
            case "deepseek2" | "mistral4":
                return self._latent_values()
            case "gemma4":
                return self._gemma4_values()
            case "glm4moe" | "minimax-m2" | "ernie4_5-moe" | "hunyuan-moe" | "llama4":
                return self._large_moe_values()
            case _:
                return {} if self.hybrid is None else self.hybrid.values(self.head_dim)

    def _large_moe_values(self) -> dict[str, Any]:
        get, arch = self._get, self.arch
        rope_dim = int(self.head_dim * (self.rope.get("partial_rotary_factor") or get("partial_rotary_factor") or 1.0))
        values = {
            "rope.dimension_count": get("rotary_dim", default=rope_dim),
            "expert_feed_forward_length": get("moe_intermediate_size", "intermediate_size"),
        }
        match arch:
            case "glm4moe":
                return values | {
                    "expert_shared_count": get("n_shared_experts"),
                    "expert_weights_scale": float(get("routed_scaling_factor")),
                    "expert_weights_norm": get("norm_topk_prob"),
                    "expert_gating_func": 2,
                    "expert_group_count": get("n_group"),
                    "expert_group_used_count": get("topk_group"),
                    "leading_dense_block_count": get("first_k_dense_replace"),
                }
            case "minimax-m2":
                return values | {"expert_gating_func": 2}
            case "ernie4_5-moe":
                return values | {
                    "expert_shared_count": get("moe_num_shared_experts"),
                    "leading_dense_block_count": get("moe_layer_start_index"),
                    "interleave_moe_layer_step": get("moe_layer_interval"),
                }
            case "hunyuan-moe":
                return values | {"expert_shared_feed_forward_length": get("intermediate_size")}
            case _:
                return values | {
                    "feed_forward_length": get("intermediate_size_mlp"),
                    "interleave_moe_layer_step": get("interleave_moe_layer_step"),
                }

    def _latent_values(self) -> dict[str, Any]:
        get = self._get
        rank, rope = get("kv_lora_rank"), get("qk_rope_head_dim")
        key, value = get("qk_nope_head_dim") + rope, get("v_head_dim")
        sizes = {"attention.key_length": key, "attention.value_length": value}
        if not self.merged_latent:
            sizes = {
                "attention.key_length": rank + rope,
                "attention.value_length": rank,
                "attention.key_length_mla": key,
                "attention.value_length_mla": value,
            }
        kind, scoring = self.config["model_type"], {"deepseek_v3": 2, "mistral4": None}
        return {
            **sizes,
            "attention.q_lora_rank": get("q_lora_rank"),
            "attention.kv_lora_rank": rank,
            "expert_feed_forward_length": get("moe_intermediate_size"),
            "expert_shared_count": get("n_shared_experts"),
            "expert_weights_scale": float(get("routed_scaling_factor", default=1.0)),
            "expert_weights_norm": get("norm_topk_prob") or None,
            "expert_gating_func": scoring.get(kind, 1),
            "attention.temperature_scale": self.rope.get("llama_4_scaling_beta") or None,
            "expert_group_count": get("n_group"),
            "expert_group_used_count": get("topk_group"),
            "leading_dense_block_count": get("first_k_dense_replace", default=0),
        }

    def _gemma4_values(self) -> dict[str, Any]:
        get, config = self._get, self.config
        windows = [kind == "sliding_attention" for kind in config["layer_types"]]
        of_full = config.get("per_layer_config", {}).get(str(windows.index(False)), config)
        size = of_full["head_dim"] if of_full is not config else config["global_head_dim"]
        shared = config["num_kv_shared_layers"]
        own, inner = self.num_layers - shared, config["intermediate_size"]
        full_heads = of_full.get("num_key_value_heads", config["num_key_value_heads"])
        return {
            "attention.shared_kv_layers": shared,
            "attention.sliding_window": config["sliding_window"],
            "attention.sliding_window_pattern": windows,
            "attention.key_length": size,
            "attention.value_length": size,
            "attention.key_length_swa": config["head_dim"],
            "attention.value_length_swa": config["head_dim"],
            "attention.head_count_kv": [config["num_key_value_heads"] if each else full_heads for each in windows],
            "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
            "expert_feed_forward_length": get("moe_intermediate_size"),
            "feed_forward_length": [inner] * own + [2 * inner] * shared if get("use_double_wide_mlp") else inner,
            "final_logit_softcapping": get("final_logit_softcapping"),
            "rope.dimension_count": size,
            "rope.dimension_count_swa": config["head_dim"],
            "rope.freq_base_swa": float(config["rope_parameters"]["sliding_attention"]["rope_theta"]),
        }

    # -------------------------------------------------------------------------------------------------------- tensors

    def tensors(self) -> Tensors:
        enum = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == self.arch)
        names = gguf.get_tensor_name_map(enum, self.num_layers + self.num_modules)
        yield from self._rope_tensors()
        for name, tensor in self._joined():
            if match := _NEXTN.fullmatch(name):
                yield f"blk.{match[1]}.nextn.{match[2].replace('.', '_')}.{match[3]}", tensor
                continue
            found = names.get_name(name, try_suffixes=(".weight", ".bias"))
            yield found or name, tensor  # a name that the table does not have is that of the file already

    def _rope_tensors(self) -> Tensors:
        kind = self.rope.get("rope_type") or self.rope.get("type")
        if kind == "longrope":
            yield "rope_factors_long.weight", torch.tensor(self.rope["long_factor"])
            yield "rope_factors_short.weight", torch.tensor(self.rope["short_factor"])
        if kind == "proportional":
            half = self._gemma4_values()["rope.dimension_count"] // 2
            rotating = int(half * self.rope["partial_rotary_factor"])
            yield "rope_freqs.weight", torch.tensor([1.0] * rotating + [1e30] * (half - rotating))
        if kind == "llama3":
            rope, half = self.rope, self.head_dim // 2
            turns = rope["original_max_position_embeddings"] * self.theta ** (-torch.arange(half) / half) / math.tau
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            smooth = ((turns - low) / (high - low)).clamp(0, 1)
            yield "rope_freqs.weight", 1 / ((1 - smooth) / rope["factor"] + smooth)

    def _joined(self) -> Tensors:
        """The tensors as the file stores them, most under their Hugging Face names."""
        stacks: dict[str, dict[int, torch.Tensor]] = {}
        for stored_name, tensor in self.weights.items():
            name = stored_name if self.hybrid is None else self.hybrid.renamed(stored_name)
            if expert := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name):
                module = expert[1].replace("block_sparse_moe.experts", "feed_forward.experts")
                if module != expert[1]:
                    module = module.removeprefix("model.")
                stacks.setdefault(f"{module}.{expert[3]}.weight", {})[int(expert[2])] = tensor
            else:
                yield from self._changed(name, tensor)
        stacked = {name: torch.stack([of[i] for i in range(len(of))]) for name, of in stacks.items()}
        if self.fused and stacked:
            for layer in range(self.num_layers):
                module = f"model.layers.{layer}.mlp.experts"
                gate, up = (stacked.pop(f"{module}.{kind}_proj.weight", None) for kind in ("gate", "up"))
                if gate is not None and up is not None:
                    yield f"blk.{layer}.ffn_gate_up_exps.weight", torch.cat((gate, up), dim=1)
        yield from stacked.items()

    def _changed(self, name: str, tensor: torch.Tensor) -> Tensors:
        if self.arch in _ADJACENT_PAIRS and re.search(r"\.[qk]_proj\.", name):
            heads = self.num_heads if ".q_proj." in name else self._num_kv_heads()
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        if self.arch == "llama4" and ".experts." in name:
            kinds = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
            for each, kind in zip(tensor.transpose(1, 2).chunk(len(kinds), dim=1), kinds, strict=True):
                yield f"{name.rpartition('.')[0]}.{kind}.weight", each
            return
        if self.arch in ("gemma4", *_LATENT):
            name = _renamed(self.arch, name)
        if self.arch == "granitemoe" and (match := re.search(r"layers\.(\d+)\.(\w+)\.input_linear", name)):
            suffix = "_exps" if match[2] == "block_sparse_moe" else "_shexp"
            for kind, part in zip(("gate", "up"), tensor.chunk(2, dim=-2), strict=True):
                yield f"blk.{match[1]}.ffn_{kind}{suffix}.weight", part
            return
        if name.endswith("moe_statics.e_score_correction_bias"):
            tensor = tensor.flatten()
        if self.hybrid is not None and not name.endswith(_COMMON_RULES):
            yield from self.hybrid.tensors(name, tensor)
        elif (self.fused or self.arch == "chatglm") and (match := re.search(r"layers\.(\d+)\..*([qkv])_proj\.", name)):
            yield from self._fused_heads(int(match[1]), match[2], name, tensor)
        elif self.arch in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            yield name, tensor + 1
        elif self.arch == "gpt2" and re.search(r"(c_attn|c_proj|c_fc)\.weight", name):
            yield name, tensor.T
        elif self.arch == "falcon" and "query_key_value" in name:
            yield name, self._ungrouped(tensor)
        elif self.arch == "gpt-oss" and ("experts" in name or name.endswith("sinks")):
            yield from self._gpt_oss(name, tensor)
        elif name.endswith("kv_b_proj.weight") and not self.merged_latent:
            nope, value = self.config["qk_nope_head_dim"], self.config["v_head_dim"]
            keys, values = tensor.unflatten(0, (-1, nope + value)).split((nope, value), dim=1)
            yield name.replace("kv_b", "k_b"), keys.transpose(1, 2)
            yield name.replace("kv_b", "v_b"), values
        elif name.endswith("shared_expert_gate.weight"):
            yield name, tensor.flatten()
        elif name.endswith("e_score_correction_bias"):
            yield name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor
        else:
            yield name, tensor

    def _fused_heads(self, layer: int, which: str, name: str, tensor: torch.Tensor) -> Tensors:
        parts = self.__dict__.setdefault("_parts", {}).setdefault((layer, name.rpartition(".")[2]), {})
        parts[which] = tensor
        if len(parts) == 3:
            yield f"blk.{layer}.attn_qkv.{name.rpartition('.')[2]}", torch.cat([parts[each] for each in "qkv"])

    def _ungrouped(self, tensor: torch.Tensor) -> torch.Tensor:
        kv_heads = self._num_kv_heads()
        assert kv_heads is not None
        groups = tensor.unflatten(0, (kv_heads, self.num_heads // kv_heads + 2, self.head_dim))
        return torch.cat([part.flatten(0, 2) for part in (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])])

    def _gpt_oss(self, name: str, tensor: torch.Tensor) -> Tensors:
        if name.endswith("sinks"):
            yield f"{name}.weight", tensor
            return
        is_bias = name.endswith("_bias")
        name = f"{name.removesuffix('_bias')}.{'bias' if is_bias else 'weight'}"
        rows = tensor if is_bias else tensor.transpose(1, 2)
        if "gate_up" in name:
            yield name.replace("gate_up", "gate"), rows[:, 0::2]
            yield name.replace("gate_up", "up"), rows[:, 1::2]
        else:
            yield name, rows


def _renamed(arch: str, name: str) -> str:
    """The name that the converter looks up, or that of the file."""
    if arch == "gemma4":
        if match := re.fullmatch(r"model\.layers\.(\d+)\.router\.(scale|per_expert_scale)", name):
            return f"blk.{match[1]}.ffn_{'gate_inp' if match[2] == 'scale' else 'down_exps'}.scale"
        return f"{name}.weight" if name.endswith(("layer_scalar", "gate_up_proj", "down_proj")) else name
    return f"{name}.weight" if name.endswith((".gate_up_proj", ".down_proj")) else name


def random_blocks(kind: gguf.GGMLQuantizationType, rows: int, columns: int, seed: int) -> np.ndarray[Any, Any]:
    """Random blocks of a type with finite scales, uint8 [rows, bytes of a row]."""
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows * columns // block, num_bytes), dtype=np.uint8)
    for start in _SCALES.get(kind.name, ()):
        blocks[:, start : start + 2] = rng.uniform(0.01, 0.1, (len(blocks), 1)).astype("<f2").view(np.uint8)
    if kind.name == "MXFP4":
        blocks[:, 0] = rng.integers(118, 126, len(blocks))
    return blocks.reshape(rows, -1)


_SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
"""Where blocks have scales in float16."""
