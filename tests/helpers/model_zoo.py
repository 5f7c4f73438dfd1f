"""Tiny random checkpoints of every architecture, made with transformers.

Weights are drawn so that attention is peaked and logits are spread: a wrong mask, a wrong RoPE angle or a swapped head
changes the greedy token, and the greedy token is far from a tie.

    for name in ZOO: folder = make_checkpoint(name, tmp_path / name)
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto import AutoModelForCausalLM

from tests.helpers.random_weights import draw_weight
from tests.helpers.zoo_delta import DELTA
from tests.helpers.zoo_dense import DENSE
from tests.helpers.zoo_hybrid import HYBRID
from tests.helpers.zoo_large_moe import LARGE_MOE
from tests.helpers.zoo_moe import SPARSE
from tests.helpers.zoo_recent import RECENT
from tests.helpers.zoo_sparse_attention import SPARSE_ATTENTION
from tests.helpers.zoo_state import STATE

VOCAB_SIZE = 320
EOS_TOKEN_ID = 1
BOS_TOKEN_ID = 0
MAX_LEN = 256

_LLAMA = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": None,
}
_OPT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_LEN,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": None,
}
_GPT2 = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": MAX_LEN,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
}
_ODD = VOCAB_SIZE + 3  # divisible by neither two nor four ranks
_HALF = 8  # rotary pairs in a head of 16
_OFFSET_NORMS = ("gemma2", "gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Families with norms that store weight - 1; those of delta nets do not."""


@dataclass(frozen=True)
class ZooEntry:
    """One checkpoint.

    Attributes:
        config: Makes its transformers config.
        max_prompt_len: Prompts up to this length have one correct result, independent of batching. Only RoPE scalings
        that depend on the sequence's length set it.
        edit_config: Changes `config.json` after saving.
        edit_tensors: Changes the saved tensors.
        max_shard_size: As in save_pretrained.
        exhaustive: Whether only the exhaustive tests use it.
        seed: Default seed of the weights.
    """

    config: Callable[[], PreTrainedConfig]
    max_prompt_len: int = MAX_LEN
    edit_config: Callable[[dict[str, Any]], None] | None = None
    edit_tensors: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None
    max_shard_size: str = "1GB"
    exhaustive: bool = False
    seed: int = 0


def _llama(**settings: Any) -> Callable[[], PreTrainedConfig]:
    return lambda: LlamaConfig(**{**_LLAMA, **settings})


def _mistral(**settings: Any) -> Callable[[], PreTrainedConfig]:
    return lambda: MistralConfig(**{**_LLAMA, **settings})


def _qwen2(**settings: Any) -> Callable[[], PreTrainedConfig]:
    return lambda: Qwen2Config(**{**_LLAMA, **settings})


def _qwen3(**settings: Any) -> Callable[[], PreTrainedConfig]:
    return lambda: Qwen3Config(**{**_LLAMA, "head_dim": 16, **settings})


def _opt(**settings: Any) -> Callable[[], PreTrainedConfig]:
    return lambda: OPTConfig(**{**_OPT, **settings})


def _gpt2(**settings: Any) -> Callable[[], PreTrainedConfig]:
    return lambda: GPT2Config(**{**_GPT2, **settings})


def _rope(rope_type: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 1000.0, **settings}}


_LLAMA3 = _rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
_YARN = _rope("yarn", factor=8.0, original_max_position_embeddings=32)
_LONGROPE = _rope(
    "longrope",
    short_factor=[1.0 + 0.05 * i for i in range(_HALF)],
    long_factor=[1.5 + 0.5 * i for i in range(_HALF)],
    original_max_position_embeddings=48,
)


def _use_legacy_rope_keys(config: dict[str, Any]) -> None:
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}


def _drop_prefix(prefix: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda tensors: {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def _as_original_gpt2(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names without prefix, and each layer's causal mask stored with the weights."""
    tensors = _drop_prefix("transformer.")(tensors)
    for layer in range(_GPT2["n_layer"]):
        tensors[f"h.{layer}.attn.bias"] = torch.tril(torch.ones(1, 1, 8, 8))
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    return tensors


def _with_rotary_buffers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(_HALF) for i in range(3)}
    return {**tensors, **buffers}


ZOO: dict[str, ZooEntry] = {
    "llama-gqa": ZooEntry(_llama()),
    "llama-mha-tied": ZooEntry(_llama(num_key_value_heads=4, tie_word_embeddings=True)),
    "llama-mqa-biases": ZooEntry(_llama(num_key_value_heads=1, attention_bias=True, mlp_bias=True)),
    "llama-head-dim": ZooEntry(_llama(head_dim=24, rms_norm_eps=1e-3)),
    "llama-gelu": ZooEntry(_llama(hidden_act="gelu")),
    "llama-gelu-tanh": ZooEntry(_llama(hidden_act="gelu_pytorch_tanh")),
    "llama-relu": ZooEntry(_llama(hidden_act="relu")),
    "llama-theta": ZooEntry(_llama(**_rope("default", rope_theta=500000.0))),
    "llama-partial-rotary": ZooEntry(_llama(**_rope("default", partial_rotary_factor=0.5))),
    "llama-rope-linear": ZooEntry(_llama(**_rope("linear", factor=4.0))),
    "llama-rope-dynamic": ZooEntry(
        _llama(max_position_embeddings=48, **_rope("dynamic", factor=4.0)), max_prompt_len=48
    ),
    "llama-rope-yarn": ZooEntry(_llama(**_YARN)),
    "llama-rope-yarn-settings": ZooEntry(
        _llama(
            **_rope(
                "yarn",
                factor=8.0,
                original_max_position_embeddings=32,
                beta_fast=16,
                beta_slow=2,
                mscale=0.8,
                mscale_all_dim=0.5,
                truncate=False,
            )
        )
    ),
    "llama-rope-longrope": ZooEntry(_llama(**_LONGROPE), max_prompt_len=48),
    "llama-rope-llama3": ZooEntry(_llama(**_LLAMA3)),
    "llama-rope-proportional": ZooEntry(_llama(**_rope("proportional", partial_rotary_factor=0.5))),
    "llama-old-rope-keys": ZooEntry(_llama(**_LLAMA3), edit_config=_use_legacy_rope_keys),
    "llama-without-prefix": ZooEntry(_llama(tie_word_embeddings=True), edit_tensors=_drop_prefix("model.")),
    "llama-rotary-buffers": ZooEntry(_llama(), edit_tensors=_with_rotary_buffers),
    "llama-many-files": ZooEntry(_llama(), max_shard_size="100KB"),
    "llama-odd-vocabulary-tied": ZooEntry(_llama(vocab_size=_ODD, tie_word_embeddings=True)),
    "mistral-window": ZooEntry(_mistral(sliding_window=11)),
    "mistral-no-window": ZooEntry(_mistral(sliding_window=None, head_dim=32)),
    "mistral-window-yarn": ZooEntry(_mistral(sliding_window=24, num_key_value_heads=1, **_YARN)),
    "qwen2": ZooEntry(_qwen2()),
    "qwen2-mqa-tied": ZooEntry(_qwen2(num_key_value_heads=1, tie_word_embeddings=True)),
    "qwen2-window": ZooEntry(_qwen2(use_sliding_window=True, sliding_window=9, max_window_layers=1)),
    "qwen2-unused-window": ZooEntry(_qwen2(use_sliding_window=False, sliding_window=9, max_window_layers=1)),
    "qwen2-layer-types": ZooEntry(
        _qwen2(
            use_sliding_window=True,
            sliding_window=9,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
    ),
    "qwen2-yarn": ZooEntry(_qwen2(**_YARN)),
    "qwen2-odd-vocabulary": ZooEntry(_qwen2(vocab_size=_ODD)),
    "qwen3": ZooEntry(_qwen3()),
    "qwen3-mqa": ZooEntry(_qwen3(num_key_value_heads=1)),
    "qwen3-head-dim-tied": ZooEntry(_qwen3(head_dim=32, tie_word_embeddings=True)),
    "qwen3-biases-window": ZooEntry(
        _qwen3(attention_bias=True, use_sliding_window=True, sliding_window=9, max_window_layers=2)
    ),
    "qwen3-linear": ZooEntry(_qwen3(num_key_value_heads=4, **_rope("linear", factor=2.0))),
    "opt": ZooEntry(_opt()),
    "opt-norm-after-projected": ZooEntry(_opt(do_layer_norm_before=False, word_embed_proj_dim=40)),
    "opt-projected": ZooEntry(_opt(word_embed_proj_dim=40)),
    "opt-no-bias-gelu": ZooEntry(_opt(enable_bias=False, activation_function="gelu")),
    "opt-untied-plain-norms": ZooEntry(
        _opt(tie_word_embeddings=False, layer_norm_elementwise_affine=False, activation_function="silu")
    ),
    "opt-without-prefix": ZooEntry(_opt(), edit_tensors=_drop_prefix("model.")),
    "gpt2": ZooEntry(_gpt2()),
    "gpt2-inner-relu": ZooEntry(_gpt2(n_inner=80, activation_function="relu")),
    "gpt2-unscaled": ZooEntry(_gpt2(scale_attn_weights=False)),
    "gpt2-scaled-by-layer": ZooEntry(_gpt2(scale_attn_by_inverse_layer_idx=True, layer_norm_epsilon=1e-3)),
    "gpt2-untied": ZooEntry(_gpt2(tie_word_embeddings=False)),
    "gpt2-first-names": ZooEntry(_gpt2(), edit_tensors=_as_original_gpt2),
    **{name: ZooEntry(**settings) for name, settings in DELTA.items()},
    **{name: ZooEntry(**settings) for name, settings in DENSE.items()},
    **{name: ZooEntry(**settings) for name, settings in LARGE_MOE.items()},
    **{name: ZooEntry(**settings) for name, settings in SPARSE.items()},
    **{name: ZooEntry(**settings) for name, settings in HYBRID.items()},
    **{name: ZooEntry(**settings) for name, settings in STATE.items()},
    **{name: ZooEntry(**settings) for name, settings in RECENT.items()},
    **{name: ZooEntry(**settings) for name, settings in SPARSE_ATTENTION.items()},
}


def marked(names: Iterable[str]) -> list[Any]:
    """Checkpoints as test parameters, the exhaustive ones marked."""
    return [pytest.param(name, marks=[pytest.mark.exhaustive] * ZOO[name].exhaustive) for name in names]


def make_checkpoint(name: str, folder: Path, *, seed: int | None = None, tokenizer: bool = True) -> Path:
    """Writes checkpoint `name` of the zoo into `folder`, with a tokenizer by default.

    Args:
        name: A key of ZOO.
        folder: Output folder; created if missing.
        seed: Seed of the weights; None for that of the checkpoint.
        tokenizer: Whether to write a tokenizer.

    Returns:
        `folder`.
    """
    entry = ZOO[name]
    model = make_model(name, seed=entry.seed if seed is None else seed)
    model.save_pretrained(folder, max_shard_size=entry.max_shard_size)
    if entry.edit_config is not None:
        path = folder / "config.json"
        values = json.loads(path.read_text())
        entry.edit_config(values)
        path.write_text(json.dumps(values))
    if entry.edit_tensors is not None:
        path = folder / "model.safetensors"
        save_file(entry.edit_tensors(load_file(path)), path, metadata={"format": "pt"})
    if tokenizer:
        make_tokenizer(folder)
    return folder


def make_model(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The transformers model of checkpoint `name`, eager attention, with the checkpoint's weights."""
    return model_of(ZOO[name].config(), seed=seed).to(dtype)


def model_of(config: PreTrainedConfig, *, seed: int = 0) -> PreTrainedModel:
    """The transformers model of a config, eager attention, float32, with drawn weights."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(_draw(parameter_name, parameter.shape, generator))
            if parameter_name.endswith("A_log") and "attn" in parameter_name:
                parameter -= 2.0  # so that a delta rule keeps more than a few tokens
            if "linear_attn.norm" in parameter_name:
                continue  # stores the weight itself
            if "c_attn" in parameter_name and not model.config.scale_attn_weights:
                parameter *= 0.5  # same spread of scores as with the usual scale
            if model.config.model_type in _OFFSET_NORMS and "norm" in parameter_name:
                parameter -= 1.0
            if model.config.model_type == "gemma4_text" and parameter_name.endswith("q_norm.weight"):
                parameter *= len(parameter) ** -0.5  # scores have no scale, so published norms have one
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(_draw(buffer_name, buffer.shape, generator))
            if buffer_name.endswith("layer_scalar"):
                buffer.copy_(1 + _draw(buffer_name, buffer.shape, generator))
    return model.eval()


def load_reference(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The checkpoint in `folder` as transformers runs it, eager attention."""
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype).eval()


def _draw(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    return draw_weight(name, shape, generator, embedding_scale=0.4)


_TEXT = (
    "the quick brown fox jumps over the lazy dog",
    "a tiny model says something about the weather and the sea",
    "to be or not to be, that is the question; whether it is nobler in the mind to suffer",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '[' + message['role'] + '] ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"
)


@functools.cache
def _tokenizer_json() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 8,  # tokenizer classes add their own tokens
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return tokenizer.to_str()


def base_tokenizer() -> Any:
    """A new `tokenizers.Tokenizer`, byte-level BPE."""
    from tokenizers import Tokenizer

    return Tokenizer.from_str(_tokenizer_json())


def make_tokenizer(folder: Path) -> None:
    """Writes a byte-level BPE tokenizer of at most VOCAB_SIZE tokens, with a chat template, into `folder`."""
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=base_tokenizer(),
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
