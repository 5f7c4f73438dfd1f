"""Models from GGUF files produce the tokens of the checkpoints from which the files were written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf.quants import dequantize, quantize
from plugins.gguf.tests.written_files import TypeOf, make_folder, write_gguf
from safetensors.torch import load_file, save_file

from mvllm import LoRARequest, ModelError, SamplingParams
from mvllm.config.engine_args import EngineArgs
from mvllm_gguf.header import read_gguf
from mvllm_gguf.model_config import model_config
from mvllm_gguf.model_folder import model_folder
from tests.helpers import parity
from tests.helpers.lora_adapters import write_adapter
from tests.helpers.model_zoo import make_checkpoint
from tests.helpers.multi_device_plugin import VARIABLE
from tests.helpers.plugins import multi_device_platform_path, prepend
from tests.helpers.thread_executor import ThreadExecutor

NUM_TOKENS = 24
PROMPTS = (4, 9, 12)  # of parity.PROMPT_LENGTHS: 16, 5 and 3 tokens

# What a file does not store has the value that llama.cpp uses.
_FULL_SIZE_SCALE = {"query_pre_attn_scalar": 24}
_NO_WINDOW = {"sliding_window": None}
_MSCALE = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.7,
        "mscale_all_dim": 0.7,
        "beta_fast": 16,
        "beta_slow": 2,
    }
}
_UNTRUNCATED = {
    "rope_scaling": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "truncate": False}
}

_EQUAL_MSCALE = {
    "rope_parameters": {
        **_MSCALE["rope_parameters"],
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.4,
    }
}
_INTERLEAVED = {"rope_interleave": True}
_LLAMA4 = {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}
LARGE_MOE: dict[str, dict[str, Any]] = {
    "glm4moe": {},
    "glm4moe-groups": {},
    "minimaxm2": {},
    "ernie45moe": {},
    "ernie45moe-steps": {},
    "hunyuanmoe": {},
    "llama4": _LLAMA4,
}
"""Checkpoints of the zoo that only exhaustive runs test, with changes to their `config.json`."""

FAMILIES: dict[str, dict[str, Any]] = {
    "gemma4-experts": {},
    "granitemoe-shared": {},
    "llama-mqa-biases": {},
    "llama-rope-llama3": {},
    "mixtral": {},
    "qwen2-mqa-tied": {},
    "qwen3-head-dim-tied": {},
    "qwen2moe": {},
    "qwen3moe": {},
    "gemma2": _FULL_SIZE_SCALE,
    "gemma3": _FULL_SIZE_SCALE,
    "phi3-longrope-window": {},
    "gptoss": _UNTRUNCATED,
    "granite": {},
    "glm": {},
    "glm4": {},
    "deepseek2-groups": _MSCALE,
    "deepseek3": {},
    "starcoder2": _NO_WINDOW,
    "falcon": {},
    "falcon-new": {},
    "olmo2": {},
    "gpt2": {},
}
"""Checkpoints of the zoo, with changes to their `config.json`."""

RECENT: dict[str, dict[str, Any]] = {
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "seedoss-biases-tied": {},
    "olmo3": {},
    "exaone4": {},
    "exaone4-no-window": {},
    "cohere2": {},
    "ernie45": {},
    "hunyuan": {},
    "ministral3": _EQUAL_MSCALE,
    "mistral4": {},
    "mistral4-groups": _INTERLEAVED,
    "mistral4-dense-biases": {},
    "gemma4": {},
    "gemma4-keys-are-values": {},
    "gemma4-biases": {},
    "granitemoe": {},
}
"""Likewise, only in exhaustive runs."""


def _checkpoint(name: str, folder: Path, changes: dict[str, Any]) -> Path:
    make_checkpoint(name, folder, tokenizer=False)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def _derived(checkpoint: Path, folder: Path, type_of: TypeOf = lambda name: "F32", **how: Any) -> Path:
    file = write_gguf(checkpoint, folder.with_suffix(".gguf"), type_of, **how)
    return make_folder(file, folder, model_config(read_gguf(file)))


def _check(expected: parity.Oracle, folder: Path, **settings: object) -> None:
    with parity.engine(folder, skip_tokenizer_init=True, **settings) as llm:
        parity.check(expected, parity.generate(llm, expected.prompts, max_tokens=NUM_TOKENS))


@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in RECENT)])
def test_each_family_gives_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    checkpoint = _checkpoint(name, tmp_path / "hf", {**FAMILIES, **RECENT}[name])
    expected = parity.oracle_of(checkpoint, parity.prompts_of(name, PROMPTS), NUM_TOKENS)
    _check(expected, _derived(checkpoint, tmp_path / "gguf"))


def test_yarn_of_deepseek_without_a_multiplier_is_that_of_a_checkpoint_without_mscale(tmp_path: Path) -> None:
    rope = {key: value for key, value in _MSCALE["rope_parameters"].items() if not key.startswith("mscale")}
    checkpoint = _checkpoint("deepseek2-groups", tmp_path / "hf", {"rope_parameters": rope})
    expected = parity.oracle_of(checkpoint, parity.prompts_of("deepseek2-groups", PROMPTS), NUM_TOKENS)
    _check(expected, _derived(checkpoint, tmp_path / "gguf"))


@pytest.mark.parametrize(
    "vocabulary",
    [
        {"model": "bert", "tokens": ["[UNK]", "a"]},
        {"model": "t5", "tokens": ["<pad>", "a"], "scores": [0.0, 1.0]},
        {"model": "gpt2", "pre": "future", "tokens": ["a", "b"], "merges": ["a b"]},
        {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "a"], "merges": ["a a"]},  # damaged
    ],
    ids=["bert", "t5", "an unknown split", "damaged"],
)
def test_a_file_with_an_unsupported_tokenizer_runs_with_that_of_a_folder(
    vocabulary: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MVLLM_CACHE_DIR", str(tmp_path / "cache"))
    checkpoint = make_checkpoint("llama-gqa", tmp_path / "hf")
    extra = {f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()}
    file = write_gguf(checkpoint, tmp_path / "model.gguf", extra=extra)
    with pytest.raises(ModelError, match=r"name a Hugging Face folder or model .* with tokenizer='FOLDER'"):
        EngineArgs.from_kwargs(model=str(file)).create_model_config()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    texts = []
    for model in (checkpoint, file):
        with parity.engine(model, tokenizer=str(checkpoint)) as llm:
            texts.append(llm.generate("hello world", params, use_tqdm=False)[0].outputs[0].text)
    assert texts[0] == texts[1]


_THREADS = f"{ThreadExecutor.__module__}.{ThreadExecutor.__name__}"
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "weights quantized while they are loaded": ("qwen3moe", {"quantization": "int8"}),
    "four workers": (
        "llama-gqa",
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "distributed_executor_backend": _THREADS},
    ),
    "a worker of two devices": ("gpt2", {"tensor_parallel_size": 2, "platform": "several"}),
    "transformers' class": ("llama-gqa", {"model_impl": "transformers"}),
    "an adapter": ("llama-gqa", {"enable_lora": True}),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_a_gguf_file_gives_the_tokens_of_its_checkpoint_with_every_setting(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, settings = SETTINGS[case]
    if settings.get("platform") == "several":
        prepend(monkeypatch, multi_device_platform_path(tmp_path))
        monkeypatch.setenv(VARIABLE, "2")
    checkpoint = _checkpoint(name, tmp_path / "hf", {})
    request = {}
    if "enable_lora" in settings:
        request = {"lora_request": LoRARequest("one", 1, str(write_adapter(tmp_path / "adapter", checkpoint)))}
    tokens = []
    for folder in (checkpoint, _derived(checkpoint, tmp_path / "gguf", lambda name: "F32")):
        with parity.engine(folder, skip_tokenizer_init=True, **settings) as llm:
            prompts = [{"prompt_token_ids": prompt} for prompt in parity.prompts_of(name, PROMPTS)]
            params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
            outputs = llm.generate(prompts, params, use_tqdm=False, **request)
        tokens.append([list(output.outputs[0].token_ids) for output in outputs])
    assert tokens[0] == tokens[1]


def test_an_engine_wakes_up_after_its_file_was_touched_but_not_after_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MVLLM_CACHE_DIR", str(tmp_path / "cache"))
    file = write_gguf(make_checkpoint("llama-gqa", tmp_path / "hf", tokenizer=False), tmp_path / "model.gguf")
    with parity.engine(file, skip_tokenizer_init=True) as llm:
        prompts = parity.prompts_of("llama", PROMPTS)
        expected = [output.outputs[0].token_ids for output in parity.generate(llm, prompts)]
        for start_another in (False, True):
            llm.sleep(level=2)
            os.utime(file, ns=(0, 1 + start_another))
            if start_another:
                model_folder(file, with_tokenizer=False)
            llm.wake_up()
            assert [output.outputs[0].token_ids for output in parity.generate(llm, prompts)] == expected
        llm.sleep(level=2)
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        model_folder(file, with_tokenizer=False)  # leaves the folder that the engine uses
        with pytest.raises(ModelError, match="has changed since the model was opened"):
            llm.wake_up()


def test_a_split_and_quantized_model_gives_the_tokens_of_its_dequantized_weights(tmp_path: Path) -> None:
    """Its tokens are those of the checkpoint with the dequantized values."""
    checkpoint = _checkpoint("llama-mha-tied", tmp_path / "hf", {})
    kinds = {"attn_q": "Q8_0", "attn_k": "Q5_1", "ffn_down": "Q4_0", "token_embd": "Q8_0"}

    def type_of(name: str) -> str:
        return next((kind for part, kind in kinds.items() if part in name), "F16")

    first = tmp_path / "model-00001-of-00002.gguf"
    write_gguf(checkpoint, first, type_of, split_from="blk.1.")
    second = tmp_path / "model-00002-of-00002.gguf"
    folder = make_folder(first, tmp_path / "gguf", model_config(read_gguf(first)), second)
    file = checkpoint / "model.safetensors"
    parts = {"q_proj": "Q8_0", "k_proj": "Q5_1", "down_proj": "Q4_0", "embed_tokens": "Q8_0"}
    rounded = {}
    for name, values in load_file(file).items():
        kind = gguf.GGMLQuantizationType[next((kind for part, kind in parts.items() if part in name), "F16")]
        stored = dequantize(quantize(values.numpy(), kind).view("u1" if kind > 1 else "f2"), kind)
        rounded[name] = torch.from_numpy(stored) if values.ndim > 1 else values
    save_file(rounded, file, metadata={"format": "pt"})
    _check(parity.oracle_of(checkpoint, parity.prompts_of("llama", PROMPTS), NUM_TOKENS), folder)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LARGE_MOE)
def test_large_mixtures_give_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    checkpoint = _checkpoint(name, tmp_path / "hf", LARGE_MOE[name])
    expected = parity.oracle_of(checkpoint, parity.prompts_of(name, PROMPTS), NUM_TOKENS)
    _check(expected, _derived(checkpoint, tmp_path / "gguf"))
