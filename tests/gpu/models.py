"""Writes models of public sizes with random weights.

Configurations are those that the models' makers published; weights are random, repeated from one block, and of the
usual spread. So speed is that of the model, and what it says means nothing.

    FOLDER/config.json  model-00001.safetensors ...  model.safetensors.index.json  tokenizer.json
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Shape = tuple[int, ...]
Tensor = tuple[str, str, Shape]
"""Name, dtype as safetensors calls it, shape."""
BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "I32": 4, "U8": 1}
SHARD_BYTES = 4 << 30
BLOCK = (1 << 24) + 3  # elements of the block that weights repeat; odd, so that no two rows are the same
SPREAD = 0.02
BFLOAT16 = 2  # bytes

_COMMON = {"hidden_act": "silu", "torch_dtype": "bfloat16", "attention_bias": False, "bos_token_id": 0}
_QWEN3 = {
    **_COMMON,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "eos_token_id": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        **_COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        "eos_token_id": 1,
    },
    "qwen3-0.6b": {
        **_QWEN3,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        **_QWEN3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
}
_TINY = {"vocab_size": 1024, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
CONFIGS["tiny"] = {**CONFIGS["llama-3.1-8b"], **_TINY, "intermediate_size": 128, "num_key_value_heads": 2}
CONFIGS["tiny-experts"] = {
    **CONFIGS["qwen3-30b-a3b"],
    **_TINY,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
_FLOAT8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
_QWEN3_8B = {
    **CONFIGS["qwen3-0.6b"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}
CONFIGS["qwen3-8b-awq"] = {**_QWEN3_8B, "quantization_config": _AWQ}
CONFIGS["qwen3-8b-fp8"] = {**_QWEN3_8B, "quantization_config": _FLOAT8}
CONFIGS["gpt-oss-20b"] = {
    **_COMMON,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "head_dim": 64,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    },
}
CONFIGS["deepseek-v2-lite"] = {
    **_COMMON,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
CONFIGS["qwen3-next-80b-a3b"] = {
    **_COMMON,
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 262144,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
CUT = {
    "qwen3-30b-a3b": 16,
    "qwen3-8b-awq": 8,
    "qwen3-8b-fp8": 8,
    "gpt-oss-20b": 8,
    "deepseek-v2-lite": 6,
    "qwen3-next-80b-a3b": 4,
}
"""Layers of models that are made smaller, so that they are written and loaded within seconds."""
CONFIGS |= {f"{name}-{n}-layers": {**CONFIGS[name], "num_hidden_layers": n} for name, n in CUT.items()}
_SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 1024}
_FEW = {**_SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 64}
CONFIGS |= {
    "tiny-awq": {**CONFIGS["qwen3-8b-awq"], **_FEW, "head_dim": 32},
    "tiny-fp8": {**CONFIGS["qwen3-8b-fp8"], **_FEW, "head_dim": 32},
    "tiny-mxfp4": {**CONFIGS["gpt-oss-20b"], **_FEW, "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    "tiny-mla": {
        **CONFIGS["deepseek-v2-lite"],
        **_FEW,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
    },
    "tiny-hybrid": {
        **CONFIGS["qwen3-next-80b-a3b"],
        **_FEW,
        "num_hidden_layers": 2,
        "full_attention_interval": 2,
        "head_dim": 32,
        "shared_expert_intermediate_size": 64,
        "linear_key_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
}
RANDOM_ONLY = ("deepseek_v2", "qwen3_next")
"""Kinds of models for which no checkpoint is written: the engine draws their weights."""


@dataclass(frozen=True)
class Size:
    """What a model's step must read and compute.

    Attributes:
        dense: Weights that every step reads, without those that turn states into logits.
        head: Weights that turn states into logits.
        experts: Weights of all experts.
        num_experts, experts_per_token: How many there are, and how many a token goes through.
        kv: Elements of keys and values per token, over all layers.
        pair: Multiply-adds per pair of a query and a key, over all layers.
        vocab: Number of token ids.
        matrices: (inner, outer) sizes of the weights of a step that are read whole, experts left out.
    """

    dense: int
    head: int
    experts: int
    num_experts: int
    experts_per_token: int
    kv: int
    pair: int
    vocab: int
    matrices: tuple[Shape, ...] = ()

    @classmethod
    def of(cls, config: dict[str, Any]) -> Size:
        """Of one of CONFIGS."""
        depth, size = config["num_hidden_layers"], _head_size(config)
        matrices = {name: shape for name, shape in tensors(config) if "embed_tokens" not in name}
        experts = sum(math.prod(shape) for name, shape in matrices.items() if ".experts." in name)
        head = config["vocab_size"] * config["hidden_size"]
        everything = sum(math.prod(shape) for name, shape in matrices.items() if name != "lm_head.weight")
        return cls(
            dense=everything - experts,
            head=head,
            experts=experts,
            num_experts=config.get("num_experts", 1),
            experts_per_token=config.get("num_experts_per_tok", 1),
            kv=2 * depth * config["num_key_value_heads"] * size,
            pair=2 * depth * config["num_attention_heads"] * size,
            vocab=config["vocab_size"],
            matrices=tuple(shape for name, shape in matrices.items() if len(shape) == 2 and ".experts." not in name),
        )

    def step_bytes(self, batch: int, context: float) -> float:
        """Bytes that a decode step of `batch` requests, each with `context` tokens in the cache, must read.

        Of experts those that are expected if each token chooses its own evenly.
        """
        touched = 1 - (1 - self.experts_per_token / self.num_experts) ** batch
        weights = self.dense + self.head + self.experts * touched
        return BFLOAT16 * (weights + batch * context * self.kv)

    def step_seconds(self, batch: int, context: float, bytes_per_second: float, operations_per_second: float) -> float:
        """Lower bound of the time of such a step: of each product its bytes or its operations, whichever take longer.

        Attention is bound by its bytes. The bound of experts is that of their bytes.
        """
        products = sum(
            max(BFLOAT16 * math.prod(shape) / bytes_per_second, 2 * batch * math.prod(shape) / operations_per_second)
            for shape in self.matrices
        )
        rest = self.step_bytes(batch, context) - BFLOAT16 * sum(math.prod(shape) for shape in self.matrices)
        return products + rest / bytes_per_second

    def prompt_operations(self, length: int) -> float:
        """Operations (a multiply-add is two) for a prompt: each token sees itself and those before it."""
        per_token = self.dense + self.experts * self.experts_per_token / self.num_experts
        return 2 * (per_token * length + self.head + self.pair * length * (length + 1) / 2)


def tensors(config: dict[str, Any]) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of a checkpoint of the Llama or Qwen3 kind."""
    hidden, size = config["hidden_size"], _head_size(config)
    q, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        yield f"{at}.input_layernorm.weight", (hidden,)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
        yield f"{at}.self_attn.q_proj.weight", (q, hidden)
        yield f"{at}.self_attn.k_proj.weight", (kv, hidden)
        yield f"{at}.self_attn.v_proj.weight", (kv, hidden)
        yield f"{at}.self_attn.o_proj.weight", (hidden, q)
        if config["model_type"].startswith("qwen3"):
            yield f"{at}.self_attn.q_norm.weight", (size,)
            yield f"{at}.self_attn.k_norm.weight", (size,)
        if "num_experts" not in config:
            yield from _mlp(f"{at}.mlp", hidden, config["intermediate_size"])
            continue
        yield f"{at}.mlp.gate.weight", (config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            yield from _mlp(f"{at}.mlp.experts.{expert}", hidden, config["moe_intermediate_size"])
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def stored(config: dict[str, Any]) -> Iterator[Tensor]:
    """Names, dtypes and shapes of the tensors in the files of a checkpoint, in its quantization's format."""
    method = config.get("quantization_config", {}).get("quant_method")
    if method == "mxfp4":
        yield from _gpt_oss(config)
        return
    for name, shape in tensors(config):
        module = name.removesuffix(".weight")
        if method is None or len(shape) != 2 or "embed_tokens" in name or name == "lm_head.weight":
            yield name, "BF16", shape
        elif method == "awq":
            (outer, inner), group = shape, _AWQ["group_size"]
            yield f"{module}.qweight", "I32", (inner, outer // 8)
            yield f"{module}.qzeros", "I32", (inner // group, outer // 8)
            yield f"{module}.scales", "F16", (inner // group, outer)
        else:
            blocks = (-(-shape[0] // 128), -(-shape[1] // 128))
            yield name, "F8_E4M3", shape
            yield f"{name}_scale_inv", "F32", blocks


def _gpt_oss(config: dict[str, Any]) -> Iterator[Tensor]:
    """Experts in MXFP4: blocks of 32 values in 16 bytes, and the exponent of each block."""
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    heads, kv = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    yield "model.embed_tokens.weight", "BF16", (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}.{norm}.weight", "BF16", (hidden,)
        for name, outer, columns in (("q", heads, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, heads)):
            yield f"{at}.self_attn.{name}_proj.weight", "BF16", (outer, columns)
            yield f"{at}.self_attn.{name}_proj.bias", "BF16", (outer,)
        yield f"{at}.self_attn.sinks", "BF16", (config["num_attention_heads"],)
        yield f"{at}.mlp.router.weight", "BF16", (experts, hidden)
        yield f"{at}.mlp.router.bias", "BF16", (experts,)
        for name, outer, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            yield f"{at}.mlp.experts.{name}_blocks", "U8", (experts, outer, columns // 32, 16)
            yield f"{at}.mlp.experts.{name}_scales", "U8", (experts, outer, columns // 32)
            yield f"{at}.mlp.experts.{name}_bias", "BF16", (experts, outer)
    yield "model.norm.weight", "BF16", (hidden,)
    yield "lm_head.weight", "BF16", (config["vocab_size"], hidden)


def prepare_model(name: str, root: Path) -> tuple[Path, str]:
    """One of CONFIGS in a folder under `root`, in the place of others that were there before.

    Returns:
        The folder, and the load format: `safetensors`, or `dummy` where there is no room for weights.
    """
    folder = root / name
    if not (folder / "complete").exists():
        shutil.rmtree(root, ignore_errors=True)
        folder.mkdir(parents=True)
        config, room = CONFIGS[name], shutil.disk_usage(folder).free
        drawn = config["model_type"] in RANDOM_ONLY
        write_checkpoint(name, folder, weights=not drawn and room > 1.05 * checkpoint_bytes(config))
        (folder / "complete").touch()
    return folder, "safetensors" if any(folder.glob("*.safetensors")) else "dummy"


def checkpoint_bytes(config: dict[str, Any], without: str = "") -> int:
    """Bytes of the tensors of a checkpoint; without those that have this text in their names."""
    return sum(
        BYTES[dtype] * math.prod(shape) for name, dtype, shape in stored(config) if not without or without not in name
    )


def write_checkpoint(name: str, folder: Path, *, weights: bool = True) -> None:
    """Writes one of CONFIGS into `folder`."""
    config = CONFIGS[name]
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, config["vocab_size"])
    if not weights:
        return
    block = _block()
    places: dict[str, str] = {}
    for number, shard in enumerate(_shards(stored(config)), 1):
        file = f"model-{number:05d}.safetensors"
        _write_shard(folder / file, shard, block)
        places |= dict.fromkeys((name for name, _, _ in shard), file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer that has a text for every token id: bytes, then words that only outputs contain."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "</s>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġw{i}" for i in range(vocab_size - len(special) - len(letters))]
    vocabulary = {token: i for i, token in enumerate([*special, *letters, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)


def _head_size(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _mlp(at: str, hidden: int, inner: int) -> Iterator[tuple[str, Shape]]:
    yield f"{at}.gate_proj.weight", (inner, hidden)
    yield f"{at}.up_proj.weight", (inner, hidden)
    yield f"{at}.down_proj.weight", (hidden, inner)


def _shards(found: Iterator[Tensor]) -> Iterator[list[Tensor]]:
    shard: list[Tensor] = []
    size = 0
    for name, dtype, shape in found:
        if shard and size >= SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append((name, dtype, shape))
        size += BYTES[dtype] * math.prod(shape)
    yield shard


def _block() -> np.ndarray:
    """Random bfloat16 values as their bits: uint16 [BLOCK]."""
    random = np.random.default_rng(8).standard_normal(BLOCK, dtype=np.float32) * SPREAD
    return (random.view(np.uint32) >> 16).astype(np.uint16)


def _write_shard(path: Path, shard: list[Tensor], block: np.ndarray) -> None:
    """A safetensors file: eight bytes that say how long the header is, the header as JSON, then the values."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in shard:
        begin, end = end, end + BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    at = 0
    # Bits of bfloat16 are also integers; as float8 they have no NaN, whose lower seven bits are ones.
    octets = block.view(np.uint8) & 0xF7
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name, dtype, shape in shard:
            left = math.prod(shape)
            if (same := _constant(name, dtype, shape)) is not None:
                file.write(np.repeat(same, left).data)
                continue
            source = block if dtype == "BF16" else octets
            left = left * BYTES[dtype] // source.itemsize
            while left:
                piece = source[at % len(source) :][:left]
                file.write(piece.data)
                left -= len(piece)
                at = (at + len(piece)) % len(source)


def _constant(name: str, dtype: str, shape: Shape) -> np.ndarray | None:
    """The value of all elements: of scales, and of the gains of norms. None for random ones."""
    if name.endswith("_scales"):
        return np.array([118], dtype=np.uint8)  # 2 ** -9
    if name.endswith((".scales", "_scale_inv")):
        return np.array([2e-3 if dtype == "F16" else 1e-4], dtype=np.float16 if dtype == "F16" else np.float32)
    if len(shape) == 1:
        return np.array([0x3F80 if name.endswith("norm.weight") else 0], dtype=np.uint16)
    return None
