"""Converts a Llama, Qwen3 or Granite 4 checkpoint to GGUF in bf16: write_gguf.py FOLDER TARGET.

llama.cpp's Llama rotates neighbouring pairs of a head where the checkpoint rotates halves, so the rows of queries and
keys are interleaved; its converter does the same for Granite 4, which rotates nothing. Of Granite 4, models without
routed experts and position embedding are supported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
IN_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
    "shared_mlp.output_linear": "ffn_down",
}
ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "granitemoehybrid": "granitehybrid"}


def bf16_tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """(name, the tensor's bits as uint16) of a safetensors file: NumPy has no bfloat16."""
    data = np.memmap(path, dtype=np.uint8, mode="r")
    header = int(data[:8].view("<u8")[0])
    for name, entry in json.loads(bytes(data[8 : 8 + header])).items():
        if name != "__metadata__":
            assert entry["dtype"] == "BF16", (name, entry["dtype"])
            begin, end = entry["data_offsets"]
            bits = np.frombuffer(bytes(data[8 + header + begin : 8 + header + end]), dtype="<u2")
            yield name, bits.reshape(entry["shape"])


def as_float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def write(folder: Path, target: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    kind, heads = config["model_type"], config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    theta = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta", 10000.0)
    writer = gguf.GGUFWriter(str(target), ARCHITECTURES[kind])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(theta)
    writer.add_rope_dimension_count(head_size)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    if kind == "granitemoehybrid":
        _add_hybrid(writer, config)
    else:
        writer.add_head_count_kv(kv_heads)
        writer.add_key_length(head_size)
        writer.add_value_length(head_size)
    _add_tokenizer(writer, folder, config["vocab_size"])
    for name, bits in bf16_tensors(folder / "model.safetensors"):
        if name in WHOLE:
            _add(writer, WHOLE[name], bits)
            continue
        _, _, layer, part = name.split(".", 3)
        if kind != "qwen3" and (".q_proj." in name or ".k_proj." in name):
            rows = heads if ".q_proj." in name else kv_heads
            halves = bits.reshape(rows, 2, head_size // 2, -1)
            bits = halves.transpose(0, 2, 1, 3).reshape(bits.shape)
        for new_name, values in _in_layer(part, bits, config.get("mamba_n_groups", 1)):
            _add(writer, f"blk.{layer}.{new_name}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _in_layer(part: str, bits: np.ndarray, groups: int) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of the file for `part` of a layer: bits, or float32 where the file has that."""
    if part == "mamba.A_log":
        yield "ssm_a", -np.exp(as_float32(bits))[:, None]
    elif part == "mamba.D":
        yield "ssm_d", as_float32(bits)[:, None]
    elif part == "mamba.dt_bias":
        yield "ssm_dt.bias", as_float32(bits)
    elif part == "shared_mlp.input_linear.weight":
        gate, up = np.split(bits, 2)
        yield "ffn_gate.weight", gate
        yield "ffn_up.weight", up
    else:
        module, _, suffix = part.rpartition(".")
        if part == "mamba.conv1d.weight":
            bits = as_float32(bits[:, 0])
        elif part == "mamba.norm.weight":
            bits = as_float32(bits).reshape(groups, -1)
        yield f"{IN_LAYER[module]}.{suffix}", bits


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray) -> None:
    if values.dtype == np.float32:
        writer.add_tensor(name, np.ascontiguousarray(values))
    elif values.ndim == 1:  # llama.cpp stores norms as float32
        writer.add_tensor(name, as_float32(values))
    else:
        raw = np.ascontiguousarray(values).view(np.uint8)
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)


def _add_hybrid(writer: gguf.GGUFWriter, config: dict) -> None:
    kinds = [kind in ("attention", "full_attention") for kind in config["layer_types"]]
    writer.add_head_count_kv([config["num_key_value_heads"] if attention else 0 for attention in kinds])
    inner = config["mamba_expand"] * config["hidden_size"]
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    writer.add_rope_scaling_finetuned(False)  # no position embedding


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, vocab_size: int) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    words = {i: word for word, i in tokenizer["model"]["vocab"].items()}
    special = {entry["id"]: entry["content"] for entry in tokenizer["added_tokens"]}
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([special.get(i) or words[i] for i in range(vocab_size)])
    writer.add_token_types(
        [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(vocab_size)]
    )
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
