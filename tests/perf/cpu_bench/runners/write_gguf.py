"""Converts a Llama or Qwen3 checkpoint to GGUF in bf16: write_gguf.py FOLDER TARGET.

llama.cpp's Llama rotates neighbouring pairs of a head where the checkpoint rotates halves, so the rows of queries and
keys are interleaved.
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
}


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


def write(folder: Path, target: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    kind, heads = config["model_type"], config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    theta = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta", 10000.0)
    writer = gguf.GGUFWriter(str(target), kind)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(theta)
    writer.add_rope_dimension_count(head_size)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    _add_tokenizer(writer, folder, config["vocab_size"])
    for name, bits in bf16_tensors(folder / "model.safetensors"):
        if name in WHOLE:
            new_name = WHOLE[name]
        else:
            _, _, layer, part = name.split(".", 3)
            new_name = f"blk.{layer}.{IN_LAYER[part.removesuffix('.weight')]}.weight"
        if kind == "llama" and (".q_proj." in name or ".k_proj." in name):
            rows = heads if ".q_proj." in name else kv_heads
            halves = bits.reshape(rows, 2, head_size // 2, -1)
            bits = halves.transpose(0, 2, 1, 3).reshape(bits.shape)
        if bits.ndim == 1:  # llama.cpp stores norms as float32
            writer.add_tensor(new_name, (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            raw = np.ascontiguousarray(bits).view(np.uint8)
            writer.add_tensor(new_name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
