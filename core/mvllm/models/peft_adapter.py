"""Reads and checks the description of a LoRA adapter in PEFT format.

    adapter_config.json          r, lora_alpha, ... : rank and scale
    adapter_model.safetensors    base_model.model.<module>.lora_A.weight    [r, in_features]
                                 base_model.model.<module>.lora_B.weight    [out_features, r]

The module's matrix becomes W + scale · B · A. Other changes of the model (DoRA, biases, fully trained modules) are
refused, since ignoring them would give wrong results. Reads no tensor data, and needs no torch.
"""

from __future__ import annotations

import json
import math
import os
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mvllm.checkpoint_formats.tensor_entry import TensorEntry
from mvllm.errors import ModelError
from mvllm.models.safetensors_file import read_header

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"

_LARGEST_CONFIG = 1 << 20
_MOST_MATRICES = 100_000
_LARGEST_SCALE = 1e6
_PREFIX = "base_model.model."
_FLOATS = ("F64", "F32", "F16", "BF16")
_MATRIX = re.compile(r"(?P<module>.+)\.lora_(?P<kind>[AB])\.weight")
_LITERAL = re.compile(r"\^?[\w.-]+\$?")

_REFUSED = {
    "use_dora": "DoRA",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "BD-LoRA",
    "lora_bias": "biases of the adapter's own",
    "modules_to_save": "whole modules trained anew",
    "trainable_token_indices": "embeddings of single tokens",
    "target_parameters": "parameters that are no linear layers",
    "layer_replication": "copies of layers",
    "alora_invocation_tokens": "activation at a token",
    "arrow_config": "routing among adapters",
}
"""Keys of the config that, unless empty, request something unsupported."""

_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga", "orthogonal_base")
"""Initialisations that change the base model's weights."""

_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 100


@dataclass(frozen=True)
class LoRAModule:
    """An adapter's matrices for one linear layer.

    Attributes:
        name: The checkpoint module.
        down, up: The tensors A [r, in_features] and B [out_features, r].
        scale: Factor on their product.
    """

    name: str
    down: TensorEntry
    up: TensorEntry
    scale: float

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.up.shape[0], self.down.shape[1]


@dataclass(frozen=True)
class PeftAdapter:
    """A checked description of an adapter.

    Attributes:
        path: The file with its weights.
        modules: Its modules, by name.
        targets: `target_modules`: names or name suffixes of its modules, if it is a list for all layers; else empty.
    """

    path: Path
    modules: Mapping[str, LoRAModule]
    targets: tuple[str, ...]


def read_peft_adapter(folder: str, max_rank: int) -> PeftAdapter:
    """Reads the description of an adapter.

    Args:
        folder: The adapter's folder.
        max_rank: Largest supported rank.

    Raises:
        ModelError: It cannot be read, is damaged, or is not supported; says what was found.
    """
    path = Path(folder).expanduser()
    try:
        is_folder = path.is_dir()
    except (OSError, ValueError) as e:  # an invalid path
        raise ModelError(f"The adapter folder {_shown.repr(folder)} cannot be read: {e}") from e
    if not is_folder:
        raise ModelError(
            f"There is no adapter folder {_shown.repr(folder)}. Give the path of a folder with {CONFIG_NAME} and "
            f"{WEIGHTS_NAME}; one from the hub has to be downloaded first."
        )
    config = _read_config(path / CONFIG_NAME)
    _check_kind(config, path)
    weights = path / WEIGHTS_NAME
    if not weights.is_file():
        raise ModelError(_no_weights(path))
    pairs = _pairs(weights)
    modules = {}
    for name, (down, up) in pairs.items():
        rank = _rank_of(config, name, max_rank, path)
        _check_shapes(name, down, up, rank)
        modules[name] = LoRAModule(name, down, up, _scale_of(config, name, rank, path))
    return PeftAdapter(weights, modules, _targets(config))


def _read_config(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():
            raise ModelError(f"The adapter folder {path.parent} has no {CONFIG_NAME}: it is not one that PEFT saved.")
        with path.open("rb") as file:
            text = file.read(_LARGEST_CONFIG + 1)
    except OSError as e:
        raise ModelError(f"{path} cannot be read: {e.strerror or e}") from e
    if len(text) > _LARGEST_CONFIG:
        raise ModelError(f"{path} has more than {_LARGEST_CONFIG} bytes; it is no adapter's configuration.")
    try:
        config = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as e:
        raise ModelError(f"{path} is not valid JSON: {str(e)[:200]}. Download or copy it again.") from e
    if not isinstance(config, dict):
        raise ModelError(f"{path} should hold a JSON object, found {type(config).__name__}.")
    return config


def _check_kind(config: Mapping[str, Any], path: Path) -> None:
    where = path / CONFIG_NAME
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise ModelError(f"{where}: peft_type is {_shown.repr(kind)}; only LORA adapters are supported.")
    bias = config.get("bias", "none")
    if bias != "none":
        raise ModelError(
            f"{where}: bias is {_shown.repr(bias)}: the adapter changes biases of the model, which is not supported. "
            "Train it with bias='none', or merge it into the model."
        )
    for key, what in _REFUSED.items():
        if config.get(key):
            raise ModelError(
                f"{where}: {key} is set: {what}, which is not supported. Merge the adapter into the model "
                "(merge_and_unload), or train it without."
            )
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITS):
        raise ModelError(
            f"{where}: init_lora_weights is {_shown.repr(init)}: the adapter belongs to a model whose weights were "
            "changed when it was begun. Save it converted to a plain one (path_initial_model_for_weight_conversion)."
        )


def _no_weights(path: Path) -> str:
    if (path / "adapter_model.bin").exists():
        return (
            f"The adapter {path} has its weights in adapter_model.bin, a pickle, which can run any program and is not "
            f"read. Save it again with PEFT's save_pretrained(..., safe_serialization=True), as {WEIGHTS_NAME}."
        )
    return f"The adapter folder {path} has no {WEIGHTS_NAME}."


def _pairs(path: Path) -> dict[str, tuple[TensorEntry, TensorEntry]]:
    """The matrices A and B of each module."""
    found: dict[str, dict[str, TensorEntry]] = {}
    for entry in read_header(path, _MOST_MATRICES):
        match = _MATRIX.fullmatch(entry.name)
        if match is None:
            raise ModelError(
                f"{path}: the tensor {_shown.repr(entry.name)} is neither lora_A nor lora_B of a linear layer. "
                "Adapters of embeddings, biases, magnitudes (DoRA) and whole modules are not supported."
            )
        found.setdefault(match["module"].removeprefix(_PREFIX), {})[match["kind"]] = entry
    if not found:
        raise ModelError(f"{path} holds no tensors.")
    pairs = {}
    for name, matrices in found.items():
        if len(matrices) < 2:
            there = "".join(matrices)
            raise ModelError(f"{path}: of {_shown.repr(name)} there is only lora_{there}; the file is incomplete.")
        pairs[name] = matrices["A"], matrices["B"]
    return pairs


def _rank_of(config: Mapping[str, Any], name: str, max_rank: int, path: Path) -> int:
    rank = _of_pattern(config, "rank_pattern", name, path)
    rank = config.get("r", 8) if rank is None else rank
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ModelError(f"{path / CONFIG_NAME}: the rank r must be an integer >= 1, found {_shown.repr(rank)}.")
    if rank > max_rank:
        raise ModelError(
            f"The adapter {path} has rank {_shown.repr(rank)}, but the engine takes ranks up to {max_rank}. Start it "
            "with a larger max_lora_rank."
        )
    return rank


def _check_shapes(name: str, down: TensorEntry, up: TensorEntry, rank: int) -> None:
    for entry, dimension in ((down, 0), (up, 1)):
        if entry.dtype not in _FLOATS:
            raise ModelError(f"{entry.file}: {entry.name[:200]!r} is {entry.dtype}, expected one of {_FLOATS}.")
        if len(entry.shape) != 2 or entry.shape[dimension] != rank:
            expected = f"[{rank}, in_features]" if dimension == 0 else f"[out_features, {rank}]"
            raise ModelError(
                f"{entry.file}: {entry.name[:200]!r} has shape {list(entry.shape)}, expected {expected}, since the "
                f"rank is {rank}."
            )


def _scale_of(config: Mapping[str, Any], name: str, rank: int, path: Path) -> float:
    alpha = _of_pattern(config, "alpha_pattern", name, path)
    alpha = config.get("lora_alpha", 8) if alpha is None else alpha
    is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if not is_number or not abs(alpha) <= _LARGEST_SCALE:
        raise ModelError(
            f"{path / CONFIG_NAME}: lora_alpha must be a number of at most {_LARGEST_SCALE:g}, found "
            f"{_shown.repr(alpha)}."
        )
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _of_pattern(config: Mapping[str, Any], key: str, name: str, path: Path) -> Any:
    """The value of `rank_pattern` or `alpha_pattern` for a module: that of the first matching key."""
    patterns = config.get(key) or {}
    if not isinstance(patterns, dict):
        raise ModelError(f"{path / CONFIG_NAME}: {key} should be an object, found {_shown.repr(patterns)}.")
    for pattern, value in patterns.items():
        if not _LITERAL.fullmatch(pattern):  # a regular expression of an untrusted file could take forever
            raise ModelError(
                f"{path / CONFIG_NAME}: {key} has {_shown.repr(pattern)}. Only names and ends of names are supported, "
                "no regular expressions."
            )
        suffix = pattern.strip("^$")
        if name == suffix or (not pattern.startswith("^") and name.endswith(f".{suffix}")):
            return value
    return None


def _targets(config: Mapping[str, Any]) -> tuple[str, ...]:
    listed = config.get("target_modules")
    only_some = any(config.get(key) for key in ("layers_to_transform", "layers_pattern", "exclude_modules"))
    if only_some or not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        return ()
    return tuple(listed)


def folder_fingerprint(folder: str) -> tuple[int, ...]:
    """Sizes and modification times of an adapter's files; empty if they cannot be read."""
    try:
        found = [os.stat(file) for file in adapter_files(folder)]
    except (OSError, ValueError):
        return ()
    return tuple(number for stat in found for number in (stat.st_size, stat.st_mtime_ns))


def adapter_files(folder: str) -> list[Path]:
    """The files that decide what an adapter computes."""
    return [Path(folder).expanduser() / name for name in (CONFIG_NAME, WEIGHTS_NAME)]
