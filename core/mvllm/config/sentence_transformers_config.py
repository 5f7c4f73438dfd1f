"""Reads pooling settings from the files that sentence-transformers saves with a model.

modules.json                 [{"type": "...Transformer", "path": ""}, {"type": "...Pooling", "path": "1_Pooling"},
                              {"type": "...Normalize", "path": "2_Normalize"}]
1_Pooling/config.json        {"pooling_mode_lasttoken": true, ...} or {"pooling_mode": "lasttoken"}
sentence_bert_config.json    {"max_seq_length": 256}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mvllm.errors import ModelError
from mvllm.messages.pooling_params import PoolingType

_MODES = {
    "lasttoken": PoolingType.LAST,
    "cls": PoolingType.CLS,
    "mean": PoolingType.MEAN,
    "max": PoolingType.MAX,
    "mean_sqrt_len_tokens": PoolingType.MEAN_SQRT_LEN,
}
_OLD_MODES = {
    "lasttoken": "pooling_mode_lasttoken",
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
}

_LENGTH_FILES = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlm-roberta_config.json")


def has_sentence_transformers_modules(folder: Path) -> bool:
    """Whether a model folder has sentence-transformers modules."""
    return (folder / "modules.json").is_file()


def read_sentence_transformers_modules(folder: Path) -> tuple[PoolingType, bool]:
    """The pooling type, and whether vectors are normalised.

    Raises:
        ModelError: A file is invalid, or lists a module that is not supported.
    """
    path = folder / "modules.json"
    modules = _read_json(path)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError(f"{path} should be a list of modules.")
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    unknown = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if unknown or kinds.count("Pooling") != 1:
        raise ModelError(
            f"{path} lists the modules {', '.join(kinds)}. Supported: a Transformer, one Pooling and "
            "optionally a Normalize."
        )
    where = modules[kinds.index("Pooling")].get("path")
    if not isinstance(where, str) or where in ("", ".", "..") or Path(where).name != where:
        raise ModelError(f"{path}: the path of the Pooling module should be a folder's name, found {where!r}.")
    return _read_mode(folder / where / "config.json"), "Normalize" in kinds


def max_seq_length(folder: Path) -> int | None:
    """`max_seq_length`, or None if the files have none.

    Raises:
        ModelError: The value is not a positive integer.
    """
    for name in _LENGTH_FILES:
        path = folder / name
        if path.is_file():
            settings = _read_json(path)
            length = settings.get("max_seq_length") if isinstance(settings, Mapping) else settings
            if length is None:
                return None
            if isinstance(length, bool) or not isinstance(length, int) or length < 1:
                raise ModelError(f"{path}: 'max_seq_length' should be a number of tokens, found {length!r:.80}.")
            return length
    return None


def _read_mode(path: Path) -> PoolingType:
    pooling = _read_json(path)
    if not isinstance(pooling, Mapping):
        raise ModelError(f"{path} should be an object.")
    named = pooling.get("pooling_mode")
    if named is None:
        chosen = [key for key, value in pooling.items() if key.startswith("pooling_mode_") and value is True]
        modes = [mode for mode, key in _OLD_MODES.items() if key in chosen]
    else:
        chosen = list(named) if isinstance(named, list) else [named]
        modes = [mode for mode in _MODES if mode in chosen]
    if len(chosen) != 1 or len(modes) != 1:
        found = ", ".join(map(str, chosen)) or "none"
        raise ModelError(f"{path} should choose one of {', '.join(_MODES)}, found {found}.")
    return _MODES[modes[0]]


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise ModelError(f"{path} cannot be read: {e}") from e
