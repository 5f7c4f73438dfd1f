"""Random-weight checkpoints of two large mixtures of experts, written piece by piece.

    gpt-oss        gpt-oss-20b: a folder of safetensors, experts in MXFP4, the rest in bf16                 13.8 GB
    gpt-oss-gguf   the same shape as one GGUF file: experts in MXFP4, other matrices in Q8_0, as published   12.1 GB
    qwen3          Qwen3-30B-A3B: one GGUF file in Q4_0 or Q4_K, norms and routers in float32               17.2 GB

Weights are random blocks whose scales keep activations near 1. No more than PIECE bytes are in memory at a time, a
tensor's contents depend on its name only, and a stopped write goes on at the tensor or the file where it was.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PIECE = 32 << 20
MARGIN = 1 << 30  # bytes that stay free on the disk
GGUF_ALIGNMENT = 32

Fill = Callable[[np.random.Generator, int, float], np.ndarray]


def _bf16(rng: np.random.Generator, count: int, deviation: float) -> np.ndarray:
    values = rng.standard_normal(count, dtype=np.float32) * np.float32(deviation)
    return (values.view(np.uint32) >> 16).astype("<u2")


def _float32(rng: np.random.Generator, count: int, deviation: float) -> np.ndarray:
    return rng.standard_normal(count, dtype=np.float32) * np.float32(deviation)


def _bf16_ones(rng: np.random.Generator, count: int, deviation: float) -> np.ndarray:
    return np.full(count, 0x3F80, "<u2")


def _float32_ones(rng: np.random.Generator, count: int, deviation: float) -> np.ndarray:
    return np.ones(count, "<f4")


def _bytes(rng: np.random.Generator, count: int, deviation: float) -> np.ndarray:
    return np.frombuffer(rng.bytes(count), np.uint8)


def _mxfp4_scales(rng: np.random.Generator, count: int, deviation: float) -> np.ndarray:
    # The 16 codes have a deviation of 2.93; a scale of s stands for 2^(s - 127).
    below = math.floor(math.log2(deviation / 2.93)) + 127
    return rng.integers(below, below + 2, count, dtype=np.uint8)


def _q4_0(rng: np.random.Generator, count: int, deviation: float) -> np.ndarray:
    """Blocks of 32: a float16 scale d, then 4-bit codes q of the value d (q - 8), whose deviation is 4.6 d.

    The mean of q - 8 is -0.5, so d has a random sign: activations with a common offset would grow.
    """
    blocks = _bytes(rng, count * 18, 0).reshape(count, 18).copy()
    scales = rng.uniform(0.5, 1.5, count) * rng.choice([-1.0, 1.0], count) * deviation / 4.6
    blocks[:, :2] = scales.astype("<f2").view(np.uint8).reshape(count, 2)
    return blocks


def _q8_0(rng: np.random.Generator, count: int, deviation: float) -> np.ndarray:
    """Blocks of 32: a float16 scale d, then int8 codes q of the value d q, whose deviation is 73.9 d."""
    blocks = _bytes(rng, count * 34, 0).reshape(count, 34).copy()
    scales = rng.uniform(0.5, 1.5, count) * rng.choice([-1.0, 1.0], count) * deviation / 73.9
    blocks[:, :2] = scales.astype("<f2").view(np.uint8).reshape(count, 2)
    return blocks


def _mxfp4(rng: np.random.Generator, count: int, deviation: float) -> np.ndarray:
    """Blocks of 32: the exponent's byte, then 4-bit codes."""
    blocks = _bytes(rng, count * 17, 0).reshape(count, 17).copy()
    blocks[:, 0] = _mxfp4_scales(rng, count, deviation)
    return blocks


def _q4_k(rng: np.random.Generator, count: int, deviation: float) -> np.ndarray:
    """Blocks of 256: float16 d and dmin, 12 bytes of 6-bit factors s and m, then codes q of the value d s q - dmin m.

    With dmin = 7.5 d the mean is 0, and random s, m and q give a deviation of 258 d.
    """
    blocks = _bytes(rng, count * 144, 0).reshape(count, 144).copy()
    scales = rng.uniform(0.5, 1.5, count) * deviation / 258
    both = np.stack([scales, 7.5 * scales], axis=1).astype("<f2")
    blocks[:, :4] = both.view(np.uint8).reshape(count, 4)
    return blocks


@dataclass(frozen=True)
class Storage:
    """How numbers are stored: blocks of `numbers` in `num_bytes`, by `fill`; `name` as in safetensors or GGUF."""

    name: str
    numbers: int
    num_bytes: int
    fill: Fill


BF16, BF16_ONES = Storage("BF16", 1, 2, _bf16), Storage("BF16", 1, 2, _bf16_ones)
F32, F32_ONES = Storage("F32", 1, 4, _float32), Storage("F32", 1, 4, _float32_ones)
MXFP4_CODES, MXFP4_SCALES = Storage("U8", 1, 1, _bytes), Storage("U8", 1, 1, _mxfp4_scales)
Q8_0, MXFP4 = Storage("Q8_0", 32, 34, _q8_0), Storage("MXFP4", 32, 17, _mxfp4)
GGUF_FORMATS = {"q4_0": Storage("Q4_0", 32, 18, _q4_0), "q4_k": Storage("Q4_K", 256, 144, _q4_k)}


@dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint.

    Attributes:
        deviation: Standard deviation of its numbers; of MXFP4 tensors, that of the weights.
        share: Share of its bytes that one token reads: top_k / experts of an expert's, 0 of the embedding's.
    """

    name: str
    shape: tuple[int, ...]
    storage: Storage
    deviation: float = 0.02
    share: float = 1.0

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) // self.storage.numbers * self.storage.num_bytes

    def pieces(self) -> Iterator[bytes]:
        """Its contents."""
        rng = np.random.Generator(np.random.SFC64(zlib.crc32(self.name.encode())))
        blocks = math.prod(self.shape) // self.storage.numbers
        at_once = PIECE // self.storage.num_bytes
        for begin in range(0, blocks, at_once):
            yield self.storage.fill(rng, min(at_once, blocks - begin), self.deviation).tobytes()


@dataclass(frozen=True)
class Mixture:
    """A checkpoint to write and to measure.

    Attributes:
        path: What the engine loads: a folder, or a file.
        parts: Its files, by name, with their tensors.
        vocab_size: Number of token ids.
    """

    path: Path
    parts: dict[str, list[Tensor]]
    vocab_size: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.num_bytes for part in self.parts.values() for tensor in part)

    def bytes_per_token(self) -> tuple[float, float]:
        """Bytes that one token of one sequence reads: of the experts it is routed to, and of all other weights."""
        tensors = [tensor for part in self.parts.values() for tensor in part]
        experts = sum(t.num_bytes * t.share for t in tensors if t.share < 1)
        return experts, sum(t.num_bytes for t in tensors if t.share == 1)


# ------------------------------------------------------------------------------------------------------------ gpt-oss


def gpt_oss(folder: Path, layers: int = 24, vocab_size: int = 201_088) -> Mixture:
    """gpt-oss-20b's shape, with `layers` of its 24 layers."""
    hidden, inner, experts, top_k, heads, kv_heads, head = 2880, 2880, 32, 4, 64, 8, 64
    deviation, share = hidden**-0.5, top_k / experts

    def linear(name: str, rows: int, columns: int) -> list[Tensor]:
        weight = Tensor(f"{name}.weight", (rows, columns), BF16, columns**-0.5)
        return [weight, Tensor(f"{name}.bias", (rows,), BF16)]

    def mxfp4(name: str, rows: int, columns: int) -> list[Tensor]:
        groups = columns // 32
        return [
            Tensor(f"{name}_blocks", (experts, rows, groups, 16), MXFP4_CODES, deviation, share),
            Tensor(f"{name}_scales", (experts, rows, groups), MXFP4_SCALES, deviation, share),
            Tensor(f"{name}_bias", (experts, rows), BF16, share=share),
        ]

    def layer(i: int) -> list[Tensor]:
        name = f"model.layers.{i}"
        return [
            Tensor(f"{name}.input_layernorm.weight", (hidden,), BF16_ONES),
            *linear(f"{name}.self_attn.q_proj", heads * head, hidden),
            *linear(f"{name}.self_attn.k_proj", kv_heads * head, hidden),
            *linear(f"{name}.self_attn.v_proj", kv_heads * head, hidden),
            *linear(f"{name}.self_attn.o_proj", hidden, heads * head),
            Tensor(f"{name}.self_attn.sinks", (heads,), BF16, 1.0),
            Tensor(f"{name}.post_attention_layernorm.weight", (hidden,), BF16_ONES),
            *linear(f"{name}.mlp.router", experts, hidden),
            *mxfp4(f"{name}.mlp.experts.gate_up_proj", 2 * inner, hidden),
            *mxfp4(f"{name}.mlp.experts.down_proj", hidden, inner),
        ]

    groups = [
        [Tensor("model.embed_tokens.weight", (vocab_size, hidden), BF16, 1.0, share=0.0)],
        *(layer(i) for i in range(layers)),
        [
            Tensor("model.norm.weight", (hidden,), BF16_ONES),
            Tensor("lm_head.weight", (vocab_size, hidden), BF16, 4 * deviation),
        ],
    ]
    names = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    return Mixture(folder / f"gpt-oss-{layers}", dict(zip(names, groups, strict=True)), vocab_size)


def gpt_oss_config(layers: int, vocab_size: int) -> dict:
    """The published config.json, except for the number of layers and of token ids."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": min(200_002, vocab_size - 1),
        "pad_token_id": min(199_999, vocab_size - 1),
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": [("sliding_attention", "full_attention")[i % 2] for i in range(layers)],
        "max_position_embeddings": 131_072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "output_router_logits": False,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150_000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": vocab_size,
    }


def write_gpt_oss(mixture: Mixture, layers: int, report: Callable[[str], None] = print) -> None:
    """Writes the files that are missing.

    Raises:
        OSError: The disk has no room; nothing was written.
    """
    folder = mixture.path
    folder.mkdir(parents=True, exist_ok=True)
    missing = {name: part for name, part in mixture.parts.items() if not (folder / name).exists()}
    _check_space(folder, sum(tensor.num_bytes for part in missing.values() for tensor in part))
    for name, tensors in missing.items():
        draft = folder / f"{name}.draft"
        with draft.open("wb") as file:
            file.write(_safetensors_header(tensors))
            for tensor in tensors:
                for piece in tensor.pieces():
                    file.write(piece)
        draft.replace(folder / name)
        report(f"wrote {folder / name}")
    weight_map = {tensor.name: name for name, part in mixture.parts.items() for tensor in part}
    index = {"metadata": {"total_size": mixture.num_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(gpt_oss_config(layers, mixture.vocab_size), indent=1))


def _safetensors_header(tensors: Sequence[Tensor]) -> bytes:
    entries: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for tensor in tensors:
        end = begin + tensor.num_bytes
        entries[tensor.name] = {"dtype": tensor.storage.name, "shape": tensor.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def gpt_oss_gguf(folder: Path, layers: int = 24, vocab_size: int = 201_088) -> Mixture:
    """gpt-oss-20b's shape as a GGUF file, with `layers` of its 24 layers."""
    hidden, inner, experts, top_k, heads, kv_heads, head = 2880, 2880, 32, 4, 64, 8, 64
    share = top_k / experts

    def linear(name: str, rows: int, columns: int) -> list[Tensor]:
        weight = Tensor(f"{name}.weight", (rows, columns), Q8_0, columns**-0.5)
        return [weight, Tensor(f"{name}.bias", (rows,), F32)]

    def of_experts(name: str, rows: int, columns: int) -> list[Tensor]:
        weight = Tensor(f"{name}.weight", (experts, rows, columns), MXFP4, columns**-0.5, share)
        return [weight, Tensor(f"{name}.bias", (experts, rows), F32, share=share)]

    tensors = [Tensor("token_embd.weight", (vocab_size, hidden), Q8_0, 1.0, share=0.0)]
    for i in range(layers):
        tensors += [
            Tensor(f"blk.{i}.attn_norm.weight", (hidden,), F32_ONES),
            *linear(f"blk.{i}.attn_q", heads * head, hidden),
            *linear(f"blk.{i}.attn_k", kv_heads * head, hidden),
            *linear(f"blk.{i}.attn_v", kv_heads * head, hidden),
            *linear(f"blk.{i}.attn_output", hidden, heads * head),
            Tensor(f"blk.{i}.attn_sinks.weight", (heads,), F32, 1.0),
            Tensor(f"blk.{i}.post_attention_norm.weight", (hidden,), F32_ONES),
            Tensor(f"blk.{i}.ffn_gate_inp.weight", (experts, hidden), F32, hidden**-0.5),
            Tensor(f"blk.{i}.ffn_gate_inp.bias", (experts,), F32),
            *of_experts(f"blk.{i}.ffn_gate_exps", inner, hidden),
            *of_experts(f"blk.{i}.ffn_up_exps", inner, hidden),
            *of_experts(f"blk.{i}.ffn_down_exps", hidden, inner),
        ]
    tensors += [
        Tensor("output_norm.weight", (hidden,), F32_ONES),
        Tensor("output.weight", (vocab_size, hidden), Q8_0, 4 * hidden**-0.5),
    ]
    path = folder / f"gpt-oss-{layers}.gguf"
    return Mixture(path, {path.name: tensors}, vocab_size)


def write_gpt_oss_gguf(mixture: Mixture, layers: int, report: Callable[[str], None] = print) -> None:
    """Writes the file, or the rest of a draft.

    Raises:
        OSError: The disk has no room; nothing was written.
    """
    values = {
        "context_length": 131_072,
        "embedding_length": 2880,
        "block_count": layers,
        "feed_forward_length": 2880,
        "expert_feed_forward_length": 2880,
        "expert_count": 32,
        "expert_used_count": 4,
        "attention.head_count": 64,
        "attention.head_count_kv": 8,
        "attention.key_length": 64,
        "attention.value_length": 64,
        "attention.sliding_window": 128,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 150_000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096,
    }
    _write_gguf(mixture, GGUFKeys("gpt-oss", "gpt-4o", values), report)


# -------------------------------------------------------------------------------------------------------------- qwen3


def qwen3(folder: Path, layers: int = 48, vocab_size: int = 151_936, form: str = "q4_0") -> Mixture:
    """Qwen3-30B-A3B's shape, with `layers` of its 48 layers, in `form` of GGUF_FORMATS."""
    hidden, inner, experts, top_k, heads, kv_heads, head = 2048, 768, 128, 8, 32, 4, 128
    packed = GGUF_FORMATS[form]

    def matrix(name: str, rows: int, columns: int) -> Tensor:
        return Tensor(name, (rows, columns), packed, columns**-0.5)

    def of_experts(name: str, rows: int, columns: int) -> Tensor:
        return Tensor(name, (experts, rows, columns), packed, columns**-0.5, top_k / experts)

    tensors = [Tensor("token_embd.weight", (vocab_size, hidden), packed, 1.0, share=0.0)]
    for i in range(layers):
        tensors += [
            Tensor(f"blk.{i}.attn_norm.weight", (hidden,), F32_ONES),
            matrix(f"blk.{i}.attn_q.weight", heads * head, hidden),
            matrix(f"blk.{i}.attn_k.weight", kv_heads * head, hidden),
            matrix(f"blk.{i}.attn_v.weight", kv_heads * head, hidden),
            matrix(f"blk.{i}.attn_output.weight", hidden, heads * head),
            Tensor(f"blk.{i}.attn_q_norm.weight", (head,), F32_ONES),
            Tensor(f"blk.{i}.attn_k_norm.weight", (head,), F32_ONES),
            Tensor(f"blk.{i}.ffn_norm.weight", (hidden,), F32_ONES),
            Tensor(f"blk.{i}.ffn_gate_inp.weight", (experts, hidden), F32, hidden**-0.5),
            of_experts(f"blk.{i}.ffn_gate_exps.weight", inner, hidden),
            of_experts(f"blk.{i}.ffn_up_exps.weight", inner, hidden),
            of_experts(f"blk.{i}.ffn_down_exps.weight", hidden, inner),
        ]
    tensors += [
        Tensor("output_norm.weight", (hidden,), F32_ONES),
        Tensor("output.weight", (vocab_size, hidden), packed, 4 * hidden**-0.5),
    ]
    path = folder / f"qwen3-moe-{layers}-{form}.gguf"
    return Mixture(path, {path.name: tensors}, vocab_size)


def write_qwen3(mixture: Mixture, layers: int, report: Callable[[str], None] = print) -> None:
    """Writes the file, or the rest of a draft.

    Raises:
        OSError: The disk has no room; nothing was written.
    """
    values = {
        "context_length": 40_960,
        "embedding_length": 2048,
        "block_count": layers,
        "feed_forward_length": 6144,
        "expert_feed_forward_length": 768,
        "expert_count": 128,
        "expert_used_count": 8,
        "attention.head_count": 32,
        "attention.head_count_kv": 4,
        "attention.key_length": 128,
        "attention.value_length": 128,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
    }
    _write_gguf(mixture, GGUFKeys("qwen3moe", "qwen2", values), report)


# --------------------------------------------------------------------------------------------------------- GGUF files


@dataclass(frozen=True)
class GGUFKeys:
    """Metadata of a GGUF file: architecture, pre-tokenizer, and the values of the architecture's keys."""

    arch: str
    pre_tokenizer: str
    values: Mapping[str, int | float | str]


def _write_gguf(mixture: Mixture, keys: GGUFKeys, report: Callable[[str], None]) -> None:
    path = mixture.path
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    (tensors,) = mixture.parts.values()
    draft = path.with_suffix(".draft")
    header = _gguf_header(path.with_suffix(".header"), tensors, keys, mixture.vocab_size)
    there = draft.stat().st_size if draft.exists() else 0
    _check_space(path.parent, len(header) + mixture.num_bytes - there)
    with draft.open("r+b" if there else "wb") as file:
        if file.readable() and file.read(len(header)) != header:  # of another version of this program, or cut short
            there = 0
        if not there:
            file.seek(0)
            file.truncate()
            file.write(header)
        end = len(header)
        for tensor in tensors:
            begin, end = end, end + _padded(tensor.num_bytes)
            if there >= end:
                continue
            file.seek(begin)
            for piece in tensor.pieces():
                file.write(piece)
            file.write(bytes(end - begin - tensor.num_bytes))
            if tensor.name.endswith("down_exps.weight"):
                report(f"wrote {tensor.name}")
        file.truncate(end)
    draft.replace(path)
    report(f"wrote {path}")


def _gguf_header(scratch: Path, tensors: Sequence[Tensor], keys: GGUFKeys, vocab_size: int) -> bytes:
    """Everything before the first tensor's data. The vocabulary is of single bytes, and names without meaning."""
    import gguf
    from tokenizers import pre_tokenizers

    writer = gguf.GGUFWriter(scratch, keys.arch)
    writer.add_vocab_size(vocab_size)
    for key, value in keys.values.items():
        kind = {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32, str: gguf.GGUFValueType.STRING}
        writer.add_key_value(f"{keys.arch}.{key}", value, kind[type(value)])
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, letters[0] + letters[1]]
    words += [f"unused{i}" for i in range(vocab_size - len(words))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(keys.pre_tokenizer)
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.NORMAL] * vocab_size)  # special ones would be slow to load
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    writer.add_eos_token_id(vocab_size - 1)
    writer.add_bos_token_id(vocab_size - 1)
    for tensor in tensors:
        kind = gguf.GGMLQuantizationType[tensor.storage.name]
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.num_bytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    header = scratch.read_bytes()
    scratch.unlink()
    return header + bytes(_padded(len(header)) - len(header))


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // GGUF_ALIGNMENT) * GGUF_ALIGNMENT


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed + MARGIN:
        raise OSError(
            f"{folder} needs {(needed + MARGIN) / 1e9:.1f} GB, of which {MARGIN / 1e9:.1f} stay free; its disk has "
            f"{free / 1e9:.1f} GB. Pass a folder on another disk, or fewer --layers."
        )
