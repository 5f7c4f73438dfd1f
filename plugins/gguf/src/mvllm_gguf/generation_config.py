"""The `generation_config.json` of a GGUF file: tokens that end a sequence, and sampling defaults."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mvllm.extension_api import ModelError, get_logger
from mvllm_gguf.header import GGUFModel
from mvllm_gguf.vocabulary import read_vocabulary

logger = get_logger("mvllm.gguf.generation_config")

_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
"""Metadata keys with the names in `generation_config.json`. Other samplers of llama.cpp (XTC, Mirostat) have none."""


def generation_config(model: GGUFModel, *, with_vocabulary: bool = True) -> dict[str, Any]:
    """The contents of `generation_config.json`.

    `eos_token_id` lists eos, eot, eom and tokens whose texts are known to end a turn, as in llama.cpp, but without the
    separators of fill-in-the-middle prompts. For a file without vocabulary, whose tokenizer is another folder, only
    config.json has token ids.

    Args:
        model: The headers of the files.
        with_vocabulary: Whether the file's vocabulary is used. If not, a damaged one is ignored.

    Raises:
        ModelError: The vocabulary is damaged, or a sampling default is not a number.
    """
    config: dict[str, Any] = {}
    if "tokenizer.ggml.tokens" in model.metadata:
        try:
            config = _token_ids(model)
        except ModelError as e:
            if with_vocabulary:
                raise
            logger.warning("%s Tokens that end a sequence are those of config.json alone.", e)
    for key, name in _SAMPLING.items():
        value = model.metadata.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelError(f"{model.files[0]}: {key!r} should be a number, found {value!r:.100}.")
        # Files store float32 values; 0.95 is meant, not 0.949999988079071.
        config[name] = float(str(np.float32(value))) if isinstance(value, float) else value
    return config


def _token_ids(model: GGUFModel) -> dict[str, Any]:
    vocabulary = read_vocabulary(model)
    config: dict[str, Any] = {}
    if ends := vocabulary.end_ids():
        config["eos_token_id"] = ends
    for name, key in (("bos", "bos_token_id"), ("padding", "pad_token_id")):
        if name in vocabulary.special_ids:
            config[key] = vocabulary.special_ids[name]
    return config
