"""Reads `generation_config.json`: sampling defaults, and the tokens that end a sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mvllm.config.hf_config import HFConfig, read_json_object
from mvllm.errors import ConfigError, ModelError
from mvllm.logging import get_logger

logger = get_logger(__name__)

_LARGEST = 2**53  # larger integers are not exact in JSON readers that use float64

# key in the file -> (field of SamplingParams, kind, what is permitted in words and as a test)
_DEFAULTS: dict[str, tuple[str, type, str, Callable[[Any], bool]]] = {
    "temperature": ("temperature", float, ">= 0", lambda v: v >= 0),
    "top_p": ("top_p", float, "in (0, 1]", lambda v: 0 < v <= 1),
    "top_k": ("top_k", int, ">= -1", lambda v: v >= -1),
    "min_p": ("min_p", float, "in [0, 1]", lambda v: 0 <= v <= 1),
    "repetition_penalty": ("repetition_penalty", float, "> 0", lambda v: v > 0),
    "max_new_tokens": ("max_tokens", int, ">= 1", lambda v: v >= 1),
}


def load_generation_config(folder: Path) -> HFConfig:
    """Reads `folder/generation_config.json`; a folder without one gives an empty config.

    Raises:
        ModelError: The file is there but is not a JSON object.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return HFConfig({}, str(path))
    return HFConfig(read_json_object(path), str(path))


def sampling_defaults(generation: HFConfig) -> dict[str, Any]:
    """The fields of SamplingParams for which the checkpoint has defaults.

    Raises:
        ModelError: A value is invalid; names file, key, value and permitted range.
    """
    defaults: dict[str, Any] = {}
    for key, (field, kind, permitted, test) in _DEFAULTS.items():
        value = generation.get(key)
        if value is None:
            continue
        numeric = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST
        if not numeric or (kind is int and value != int(value)) or not test(value):
            raise ModelError(
                f"{generation.source}: {key!r} should be {'an integer' if kind is int else 'a number'} {permitted}, "
                f"found {value!r}. Correct the file, or pass generation_config='none' to ignore it."
            )
        defaults[field] = kind(value)
    return defaults


def end_token_ids(generation: HFConfig, hf_config: HFConfig, vocab_size: int) -> tuple[int, ...]:
    """Tokens that end a sequence: those of `generation_config.json`, then further ones of `config.json`.

    Raises:
        ModelError: `eos_token_id` is neither an integer nor a list of integers.
    """
    ids: list[int] = []
    for config in (generation, hf_config):
        value = config.get("eos_token_id")
        found = [] if value is None else value if isinstance(value, list) else [value]
        for token_id in found:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise ModelError(
                    f"{config.source}: 'eos_token_id' should be an integer or a list of integers, found {value!r}."
                )
            if not 0 <= token_id < vocab_size:
                logger.warning(
                    "%s: eos_token_id %d is outside the vocabulary of %d tokens and is ignored.",
                    config.source,
                    token_id,
                    vocab_size,
                )
            elif token_id not in ids:
                ids.append(token_id)
    return tuple(ids)


def describe_defaults(defaults: Mapping[str, Any]) -> str:
    """`temperature=0.6, top_p=0.9`, for the log."""
    return ", ".join(f"{name}={value}" for name, value in defaults.items())


def find_generation_folder(setting: str, model_folder: Path) -> Path | None:
    """The folder of the `generation_config.json` with sampling defaults; None for no defaults.

    Args:
        setting: 'auto' for the model's, 'none', or a folder.

    Raises:
        ConfigError: The folder has no such file.
    """
    if setting == "auto":
        return model_folder
    if setting == "none":
        return None
    folder = Path(setting).expanduser()
    if not (folder / "generation_config.json").is_file():
        raise ConfigError(
            f"generation_config must be 'auto', 'none', or a folder with a generation_config.json, found {setting!r}."
        )
    return folder
