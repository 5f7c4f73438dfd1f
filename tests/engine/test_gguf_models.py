"""Models from GGUF files produce the tokens of the checkpoints from which the files were written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mvllm.gguf.header import read_gguf
from mvllm.gguf.model_config import model_config
from tests.helpers import parity
from tests.helpers.gguf_files import TypeOf, make_folder, write_gguf
from tests.helpers.model_zoo import make_checkpoint

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

FAMILIES: dict[str, dict[str, Any]] = {
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


def _checkpoint(name: str, folder: Path, changes: dict[str, Any]) -> Path:
    make_checkpoint(name, folder, tokenizer=False)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def _derived(checkpoint: Path, folder: Path, type_of: TypeOf = lambda name: "F32", **how: Any) -> Path:
    file = write_gguf(checkpoint, folder.with_suffix(".gguf"), type_of, **how)
    return make_folder(file, folder, model_config(read_gguf(file)))


def _check(name: str, expected: parity.Oracle, folder: Path, **settings: object) -> None:
    with parity.engine(folder, skip_tokenizer_init=True, **settings) as llm:
        parity.check(expected, parity.generate(llm, expected.prompts, max_tokens=NUM_TOKENS))


@pytest.mark.parametrize("name", FAMILIES)
def test_family(name: str, tmp_path: Path) -> None:
    checkpoint = _checkpoint(name, tmp_path / "hf", FAMILIES[name])
    expected = parity.oracle_of(checkpoint, parity.prompts_of(name, PROMPTS), NUM_TOKENS)
    _check(name, expected, _derived(checkpoint, tmp_path / "gguf"))
