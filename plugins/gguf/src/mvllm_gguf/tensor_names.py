"""Maps the tensors of a GGUF file to those of the Hugging Face checkpoint: names, and layout of values.

A table for each architecture names the modules. Rules cover the tensors that llama.cpp's converter changes:

    attn_q, attn_k          rows of rotary pairs are adjacent         _ADJACENT_PAIRS
    attn_qkv                query, key and value fused or separate    any
    ffn_*_exps              experts stacked                           all with experts
    attn_k_b, attn_v_b      kv_b_proj split, keys transposed          deepseek2, kimi-linear, mistral4
    *norm                   weight + 1                                gemma2, gemma3, qwen3next, qwen35, qwen35moe
    matrices                transposed                                gpt2; experts of gpt-oss

Tensors of layers that keep a state are in `state_tensors.py`.

Source: convert_hf_to_gguf.py of llama.cpp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from mvllm.extension_api import ModelError
from mvllm_gguf.header import GGUFModel, GGUFTensor
from mvllm_gguf.hf_tensor import HFTensor, Rows, Source, in_order, interleaved, joined_by_group, rotary_halves
from mvllm_gguf.metadata import Metadata
from mvllm_gguf.model_config import model_config
from mvllm_gguf.state_tensors import StateTensors

_WITHOUT_SUFFIX = re.compile(r"blk\.(?P<layer>\d{1,5})\.(?P<base>ssm_[ad]|ffn_norm)")
"""Tensors whose names end without `.weight`; `ffn_norm` only in falcon-h1."""
_LAYER = re.compile(r"blk\.(?P<layer>\d{1,5})\.(?P<base>.+)\.(?P<suffix>weight|bias|scale)")
_EXPERT = re.compile(r"ffn_(?P<kind>gate|up|down)\.(?P<expert>\d{1,5})")
_EXPERT_MODULE = re.compile(r"\.experts\.\d+\.")
_STACK = re.compile(r"ffn_(?P<kind>gate|up|down|gate_up)_exps")
_ROPE = re.compile(r"(rope_freqs|rope_factors_long|rope_factors_short)\.weight|blk\.\d{1,5}\.attn_rot_embd(\.weight)?")
"""RoPE factors and frequencies, which become settings in config.json (`rope_config`)."""

_TOP_MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_MLA = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
_GEMMA = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA4 = {
    **_GEMMA,
    "ffn_gate_inp": "router.proj",
    "inp_gate": "per_layer_input_gate",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "post_norm": "post_per_layer_input_norm",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "proj": "per_layer_projection",
}
_SCALES = {
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_inp.scale": "router.scale",
    "layer_output_scale.weight": "layer_scalar",
}
"""Tensors of Gemma 4 whose names in the checkpoint have no suffix."""
_SHARED_EXPERT = {f"ffn_{kind}_shexp": f"mlp.shared_expert.{kind}_proj" for kind in ("gate", "up", "down")}
_SHARED_EXPERTS = {base: name.replace("shared_expert", "shared_experts") for base, name in _SHARED_EXPERT.items()}


def _in_block(block: str, suffix: str) -> dict[str, str]:
    """The three matrices of a gated MLP."""
    return {f"ffn_{kind}{suffix}": f"{block}.{kind}_proj" for kind in ("gate", "up", "down")}


_NEMOTRON = {
    "attn_norm": "norm",
    **{f"attn_{letter}": f"mixer.{letter}_proj" for letter in "qkv"},
    "attn_output": "mixer.o_proj",
    "ffn_gate_inp": "mixer.gate",
    **_in_block("mixer", ""),
    **_in_block("mixer.shared_experts", "_shexp"),
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
_GRANITE = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    **_in_block("shared_mlp", ""),
    **_in_block("shared_mlp", "_shexp"),
}
_ARCHITECTURE_MODULES: dict[str, dict[str, str]] = {
    "chatglm": {"ffn_up": "mlp.gate_up_proj"},
    "deepseek2": {**_MLA, **_SHARED_EXPERTS},
    "exaone4": _POST_NORMS,
    "falcon-h1": {"ffn_norm": "pre_ff_layernorm", **_in_block("feed_forward", "")},
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "gemma4": _GEMMA4,
    "glm4": {
        "ffn_up": "mlp.gate_up_proj",
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
    "granitehybrid": _GRANITE,
    "granitemoe": _GRANITE,
    "gpt-oss": {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
    "hunyuan-dense": {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
    "olmo2": _POST_NORMS,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "ernie4_5-moe": _SHARED_EXPERTS,
    "glm4moe": {"post_attention_norm": "post_attention_layernorm", **_SHARED_EXPERTS},
    "hunyuan-moe": {
        "attn_q_norm": "self_attn.query_layernorm",
        "attn_k_norm": "self_attn.key_layernorm",
        "ffn_gate_inp": "mlp.gate.wg",
        **{base: name.replace("shared_expert", "shared_mlp") for base, name in _SHARED_EXPERT.items()},
    },
    "llama4": {
        "ffn_gate_inp": "feed_forward.router",
        **{f"ffn_{kind}": f"feed_forward.{kind}_proj" for kind in ("gate", "up", "down")},
        **{base: name.replace("mlp.", "feed_forward.") for base, name in _SHARED_EXPERT.items()},
    },
    "kimi-linear": {**_MLA, **_SHARED_EXPERTS},
    "mistral4": {**_MLA, **_SHARED_EXPERTS},
    "lfm2": {"attn_norm": "operator_norm", "ffn_norm": "ffn_norm"},
    "lfm2moe": {"attn_norm": "operator_norm", "ffn_norm": "ffn_norm"},
    "mamba2": {"attn_norm": "norm"},
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
    "qwen2moe": _SHARED_EXPERT,
    "qwen35": {"post_attention_norm": "post_attention_layernorm"},
    "qwen35moe": {"post_attention_norm": "post_attention_layernorm", **_SHARED_EXPERT},
    "qwen3next": {"post_attention_norm": "post_attention_layernorm", **_SHARED_EXPERT},
    "seed_oss": {"post_attention_norm": "post_attention_layernorm"},
    "starcoder2": {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
}
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_FALCON = {
    "attn_norm": "input_layernorm",
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_FUSED_QKV = {"phi3": "self_attn.qkv_proj", "gpt2": "attn.c_attn", "falcon": "self_attention.query_key_value"}
_ADJACENT_PAIRS = (
    *("granite", "granitehybrid", "granitemoe", "llama", "mistral3", "nemotron_h", "nemotron_h_moe", "smollm3"),
)
_OFFSET_NORMS = ("gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe")
_GATED_QUERIES = ("qwen3next", "qwen35", "qwen35moe")
"""Architectures whose query projection has a gate for each query."""
_MTP_MODULES = ("nemotron_h_moe", "qwen3next", "qwen35", "qwen35moe")
"""Architectures whose checkpoints have layers for multi-token prediction below `mtp`."""
_NEXTN = "nextn."
_NEXTN_NAMES = {"shared_head_norm": "shared_head.norm", "shared_head_head": "shared_head.head"}
_MTP_NAMES = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head_norm": "norm",
}
"""What is in front of the layer of a multi-token-prediction module and behind it."""
_OWN_TOP_MODULES = {
    "gemma4": {
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
        "per_layer_token_embd": "model.embed_tokens_per_layer",
    },
    "lfm2": {"token_embd_norm": "model.norm"},
    "lfm2moe": {"token_embd_norm": "model.norm"},
    "mamba2": {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"},
    "nemotron_h": {"token_embd": "model.embeddings", "output_norm": "model.norm_f"},
    "nemotron_h_moe": {"token_embd": "model.embeddings", "output_norm": "model.norm_f"},
}
_EXPERT_BLOCKS = {
    "gemma4": "",
    "granitehybrid": "block_sparse_moe.",
    "granitemoe": "block_sparse_moe.",
    "llama4": "feed_forward.",
    "nemotron_h_moe": "mixer.",
}
"""The module of a layer that has the experts, with a dot; `mlp.` in other architectures."""
_EXPERT_NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_MIXTRAL_NAMES = {"gate": "w1", "up": "w3", "down": "w2"}
_CORRECTIONS = {
    "ernie4_5-moe": "mlp.moe_statics.e_score_correction_bias",
    "lfm2moe": "mlp.expert_bias",
    "minimax-m2": "block_sparse_moe.e_score_correction_bias",
    "nemotron_h_moe": "mixer.gate.e_score_correction_bias",
}
"""The correction bias of routers; `mlp.gate.e_score_correction_bias` in other architectures."""


def packed_modules(model: GGUFModel, most_tensors: int) -> dict[str, str]:
    """The tensor type of each module whose blocks can be used without conversion.

    Experts whose matrices have the same type have one entry: `model.layers.0.mlp.experts.*.up_proj`.

    Args:
        model, most_tensors: As `hf_tensors`.

    Raises:
        ModelError: As `hf_tensors`.
    """
    types: dict[str, str] = {}
    experts: dict[str, dict[str, str]] = {}
    for name, tensor in hf_tensors(model, most_tensors).items():
        module, kind = name.removesuffix(".weight"), tensor.packed_type
        all_experts = _EXPERT_MODULE.sub(".experts.*.", module)
        if all_experts != module:
            experts.setdefault(all_experts, {})[module] = "" if kind is None else kind.name
        elif kind is not None:
            types[module] = kind.name
    for all_experts, of_module in experts.items():
        kinds = set(of_module.values())
        found = {all_experts: kinds.pop()} if len(kinds) == 1 else of_module
        types.update({module: kind for module, kind in found.items() if kind})
    return types


def hf_tensors(model: GGUFModel, most_tensors: int) -> dict[str, HFTensor]:
    """The tensors of the Hugging Face checkpoint, by name. Does not read tensor data.

    Tensors without counterpart in the checkpoint keep their names.

    Args:
        model: The headers of the files.
        most_tensors: Maximum number of tensors, including each expert's matrices.

    Raises:
        ModelError: The architecture is not supported, a tensor's shape does not match the metadata, or there are too
            many tensors.
    """
    found: dict[str, HFTensor] = {}
    for tensor in _TensorMapping(model).tensors():
        if tensor.name in found:
            raise ModelError(f"{model.files[0]} has two tensors for {tensor.name!r}. Convert the model again.")
        found[tensor.name] = tensor
        if len(found) > most_tensors:
            raise ModelError(
                f"{model.files[0]} has more than {most_tensors} tensors, each expert's counted, which is more than the "
                "model has. Check that config.json and the file belong together."
            )
    return found


class _TensorMapping:
    """Maps the tensors of one model."""

    def __init__(self, model: GGUFModel) -> None:
        self._model = model
        self._values = Metadata(model)
        self._config = model_config(model)
        self._arch = arch = self._values.architecture
        self._is_gpt2, self._is_falcon = arch == "gpt2", arch == "falcon"
        self._modules: Mapping[str, str] = {**_MODULES, **_ARCHITECTURE_MODULES.get(arch, {})}
        self._top: Mapping[str, str] = {**_TOP_MODULES, **_OWN_TOP_MODULES.get(arch, {})}
        self._prefix = "backbone.layers." if arch == "mamba2" else "model.layers."
        if self._is_gpt2 or self._is_falcon:
            embedding = "wte" if self._is_gpt2 else "word_embeddings"
            self._prefix, self._modules = "transformer.h.", _GPT2 if self._is_gpt2 else _FALCON
            self._top = {
                "token_embd": f"transformer.{embedding}",
                "position_embd": "transformer.wpe",
                "output_norm": "transformer.ln_f",
                "output": "lm_head",
            }
        self._is_mixtral = self._config["model_type"] in ("mixtral", "minimax_m2")
        if self._config["model_type"] == "bamba":
            self._modules = {**_MODULES, "ffn_norm": "pre_ff_layernorm"}
        self._states = StateTensors(self._values, self._config, self._prefix)
        self._num_layers = int(self._config.get("num_hidden_layers") or self._config["n_layer"])
        heads = self._config.get("num_attention_heads") or self._config.get("n_head") or self._config["num_heads"]
        self._num_heads = int(heads)
        kv_heads = self._config.get("num_key_value_heads") or self._config.get("num_kv_heads")
        self._num_kv_heads = int(kv_heads or self._num_heads)

    def tensors(self) -> Iterator[HFTensor]:
        for name, tensor in self._model.tensors.items():
            if _ROPE.fullmatch(name):
                continue
            match = _LAYER.fullmatch(name) or _WITHOUT_SUFFIX.fullmatch(name)
            if match is None:
                base, _, suffix = name.rpartition(".")
                yield self._plain(f"{self._top[base]}.{suffix}" if base in self._top else name, tensor)
            elif int(match["layer"]) >= self._num_layers:
                yield from self._of_mtp_module(tensor, match)
            else:
                layer, base, suffix = int(match["layer"]), match["base"], match.groupdict().get("suffix") or "weight"
                if self._states.has(layer, base):
                    yield from self._states.tensors(tensor, layer, base, suffix)
                else:
                    yield from self._of_layer(tensor, layer, base, suffix)

    def _of_mtp_module(self, tensor: GGUFTensor, match: re.Match[str]) -> Iterator[HFTensor]:
        """Tensors of a multi-token-prediction module: those of a layer, and those in front of it and behind it."""
        layer, base = int(match["layer"]), match["base"]
        suffix = match.groupdict().get("suffix") or "weight"
        is_below_mtp = self._arch in _MTP_MODULES
        ours, theirs = f"{self._prefix}{layer}.", f"mtp.layers.{layer - self._num_layers}."
        if base.startswith(_NEXTN):
            short = base.removeprefix(_NEXTN)
            known = (_MTP_NAMES if is_below_mtp else _NEXTN_NAMES).get(short, short)
            yield self._plain(f"{'mtp.' if is_below_mtp else ours}{known}.{suffix}", tensor, is_norm="norm" in base)
            return
        for found in self._of_layer(tensor, layer, base, suffix):
            is_renamed = is_below_mtp and found.name.startswith(ours)
            yield replace(found, name=theirs + found.name.removeprefix(ours)) if is_renamed else found

    def _of_layer(self, tensor: GGUFTensor, layer: int, base: str, suffix: str) -> Iterator[HFTensor]:
        name = f"{self._prefix}{layer}."
        if suffix == "scale" or f"{base}.{suffix}" in _SCALES:
            own = _SCALES.get(f"{base}.{suffix}") if self._arch == "gemma4" else None
            yield self._plain(tensor.name if own is None else f"{name}{own}", tensor)
        elif base in ("attn_qkv", "attn_q", "attn_k", "attn_v"):
            yield from self._projections(tensor, layer, base, suffix)
        elif stack := _STACK.fullmatch(base):
            yield from self._experts(tensor, layer, stack["kind"], suffix)
        elif expert := _EXPERT.fullmatch(base):
            yield self._plain(self._expert_name(layer, int(expert["expert"]), expert["kind"]), tensor)
        elif base in ("attn_k_b", "attn_v_b"):
            yield from self._latent_projections(layer, base)
        elif base == "attn_sinks":
            yield self._plain(f"{name}self_attn.sinks", tensor)
        elif base == "exp_probs_b":
            of_layer = f"{name}{_CORRECTIONS.get(self._arch, 'mlp.gate.e_score_correction_bias')}"
            shape = (1, *tensor.shape) if self._arch == "ernie4_5-moe" else tensor.shape
            source = Source(tensor)
            yield HFTensor(of_layer, shape, (source,), in_order(source.num_rows))
        elif base == "ffn_gate_inp_shexp":
            shape, source = (1, math.prod(tensor.shape)), Source(tensor)
            yield HFTensor(f"{name}mlp.shared_expert_gate.weight", shape, (source,), in_order(source.num_rows))
        elif base == "ffn_gate_inp" and self._is_mixtral:
            yield self._plain(f"{name}block_sparse_moe.gate.{suffix}", tensor)
        elif self._is_falcon and base in ("attn_norm", "attn_norm_2") and self._has(layer, "attn_norm_2.weight"):
            yield self._plain(f"{name}{'ln_mlp' if base == 'attn_norm' else 'ln_attn'}.{suffix}", tensor)
        elif base in self._modules:
            yield self._plain(f"{name}{self._modules[base]}.{suffix}", tensor)
        else:
            yield self._plain(tensor.name, tensor)

    def _plain(self, name: str, tensor: GGUFTensor, *, is_norm: bool = False) -> HFTensor:
        """A renamed tensor; Gemma's norms are shifted by one, and GPT-2's matrices are transposed."""
        offset = -1.0 if self._arch in _OFFSET_NORMS and (is_norm or name.endswith("norm.weight")) else 0.0
        source = Source(tensor)
        transposed = self._is_gpt2 and name.startswith(self._prefix) and len(tensor.shape) == 2
        return HFTensor(name, tensor.shape, (source,), in_order(source.num_rows), transposed, offset)

    # ------------------------------------------------------------------------------------------------------ attention

    def _projections(self, tensor: GGUFTensor, layer: int, base: str, suffix: str) -> Iterator[HFTensor]:
        """Query, key and value projections, which may be fused or separate in the file and in the checkpoint."""
        if self._arch in _FUSED_QKV:
            if base not in ("attn_qkv", "attn_q"):  # handled with the query
                return
            parts = [tensor]
            if base == "attn_q":
                parts += [self._values.tensor(f"blk.{layer}.{other}.{suffix}") for other in ("attn_k", "attn_v")]
            yield self._fused(f"{self._prefix}{layer}.{_FUSED_QKV[self._arch]}.{suffix}", parts)
            return
        total, single = tensor.shape[0], len(tensor.shape) == 1
        if base != "attn_qkv":
            rows = self._head_rows(tensor, base, 0, total)
            yield self._rows_of(f"{self._prefix}{layer}.{self._modules[base]}.{suffix}", tensor, total, rows, single)
            return
        query_heads = self._num_heads * (2 if self._arch in _GATED_QUERIES else 1)
        head_size = self._head_size(tensor, total, query_heads + 2 * self._num_kv_heads)
        start = 0
        for each, heads in (
            ("attn_q", query_heads),
            ("attn_k", self._num_kv_heads),
            ("attn_v", self._num_kv_heads),
        ):
            name, count = f"{self._prefix}{layer}.{self._modules[each]}.{suffix}", heads * head_size
            yield self._rows_of(name, tensor, count, self._head_rows(tensor, each, start, count), single)
            start += count

    def _head_rows(self, tensor: GGUFTensor, base: str, first: int, count: int) -> Rows:
        if self._arch not in _ADJACENT_PAIRS or base == "attn_v":
            return in_order(count, first)
        heads = self._num_heads if base == "attn_q" else self._num_kv_heads
        head_size = self._head_size(tensor, count, heads)
        if head_size % 2:
            raise self._wrong_shape(tensor, f"heads with an even number of rows, found {head_size}")
        return rotary_halves(heads, head_size, first)

    def _fused(self, name: str, parts: list[GGUFTensor]) -> HFTensor:
        total, single = sum(part.shape[0] for part in parts), len(parts[0].shape) == 1
        rows = in_order(total)
        if self._is_falcon:
            head_size = self._head_size(parts[0], total, self._num_heads + 2 * self._num_kv_heads)
            in_group, rest = divmod(self._num_heads, self._num_kv_heads)
            if rest:
                raise self._values.error(f"has {self._num_heads} heads for {self._num_kv_heads} key/value heads")
            rows = joined_by_group(self._num_kv_heads, in_group * head_size, head_size, head_size)
        sources = tuple(self._source(part, single) for part in parts)
        shape = (total,) if single else (total, sources[0].row_length)
        return self._checked(HFTensor(name, shape, sources, rows, self._is_gpt2 and not single))

    def _latent_projections(self, layer: int, base: str) -> Iterator[HFTensor]:
        if base == "attn_v_b" or self._has(layer, "attn_kv_b.weight"):  # handled with the keys, or stored as one matrix
            return
        keys, heads = self._values.tensor(f"blk.{layer}.attn_k_b.weight"), self._num_heads
        found = self._values.tensor(f"blk.{layer}.attn_v_b.weight")
        for tensor in (keys, found):
            if len(tensor.shape) != 3 or tensor.shape[0] != heads:
                raise self._wrong_shape(tensor, f"three dimensions, the first of {heads} heads")
        sizes = keys.shape[2], found.shape[1]
        shape = (heads * sum(sizes), keys.shape[1])
        sources = Source(keys, swapped=True), Source(found)
        name = f"{self._prefix}{layer}.self_attn.kv_b_proj.weight"
        yield self._checked(HFTensor(name, shape, sources, joined_by_group(heads, *sizes)))

    # -------------------------------------------------------------------------------------------------------- experts

    def _experts(self, tensor: GGUFTensor, layer: int, kind: str, suffix: str) -> Iterator[HFTensor]:
        if self._arch == "gpt-oss":
            yield from self._stacked_experts(tensor, layer, kind, suffix)
            return
        if len(tensor.shape) != 3:
            raise self._wrong_shape(tensor, "three dimensions")
        num_experts, num_rows, _ = tensor.shape
        kinds = ("gate", "up") if kind == "gate_up" else (kind,)
        if num_rows % len(kinds):
            raise self._wrong_shape(tensor, "as many rows of gate as of up")
        count = num_rows // len(kinds)
        for expert in range(num_experts):
            for i, each in enumerate(kinds):
                rows = in_order(count, expert * num_rows + i * count)
                yield self._rows_of(self._expert_name(layer, expert, each), tensor, count, rows, False)

    def _expert_name(self, layer: int, expert: int, kind: str) -> str:
        block, names = _EXPERT_BLOCKS.get(self._arch, "mlp."), _EXPERT_NAMES
        if self._is_mixtral:
            block, names = "block_sparse_moe.", _MIXTRAL_NAMES
        return f"{self._prefix}{layer}.{block}experts.{expert}.{names[kind]}.weight"

    def _stacked_experts(self, tensor: GGUFTensor, layer: int, kind: str, suffix: str) -> Iterator[HFTensor]:
        """The experts of GPT-OSS: one tensor for all experts, with alternating rows of gate and up."""
        name = f"{self._prefix}{layer}.mlp.experts.{'down' if kind == 'down' else 'gate_up'}_proj"
        single = suffix == "bias"
        if len(tensor.shape) != (2 if single else 3):
            raise self._wrong_shape(tensor, f"{2 if single else 3} dimensions")
        if kind == "up":  # handled with the gate
            return
        parts = [tensor]
        if kind == "gate":
            parts.append(self._values.tensor(f"blk.{layer}.ffn_up_exps.{suffix}"))
            if parts[0].shape != parts[1].shape:
                raise self._wrong_shape(parts[1], f"the shape {list(parts[0].shape)}")
        num_experts, num_rows = tensor.shape[:2]
        shape = (num_experts, num_rows * len(parts), *tensor.shape[2:])
        rows = interleaved(num_experts, num_rows) if kind == "gate" else in_order(num_experts * num_rows)
        if kind == "gate_up":
            raise self._wrong_shape(tensor, "gate and up in two tensors")
        sources = tuple(self._source(part, single) for part in parts)
        full_name = f"{name}_bias" if single else name
        yield self._checked(HFTensor(full_name, shape, sources, rows, transposed=not single))

    # --------------------------------------------------------------------------------------------------------- helpers

    def _rows_of(self, name: str, tensor: GGUFTensor, count: int, rows: Rows, single: bool) -> HFTensor:
        source = self._source(tensor, single)
        return HFTensor(name, (count,) if single else (count, source.row_length), (source,), rows)

    def _source(self, tensor: GGUFTensor, single: bool) -> Source:
        if single and tensor.type.is_quantized:
            raise self._wrong_shape(tensor, "a type that is not quantized")
        return Source(tensor, single=single)

    def _checked(self, tensor: HFTensor) -> HFTensor:
        """Checks that all sources of a tensor have the same row length."""
        first, *others = tensor.sources
        for other in others:
            if other.row_length != first.row_length:
                raise self._wrong_shape(other.tensor, f"rows of {first.row_length} values")
        return tensor

    def _head_size(self, tensor: GGUFTensor, rows: int, heads: int) -> int:
        if rows % heads:
            raise self._wrong_shape(tensor, f"a multiple of {heads} heads as rows")
        return rows // heads

    def _has(self, layer: int, name: str) -> bool:
        return self._values.has_tensor(f"blk.{layer}.{name}")

    def _wrong_shape(self, tensor: GGUFTensor, expected: str) -> ModelError:
        return self._values.error(
            f"has tensor {tensor.name!r} as {tensor.type} of shape {list(tensor.shape)}, expected {expected}"
        )
