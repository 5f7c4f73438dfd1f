"""What a model folder says about pooling, in the files that sentence-transformers writes.

modules.json              [{"type": "...Transformer", "path": ""}, {"type": "...Pooling", "path": "1_Pooling"},
                           {"type": "...Normalize", "path": "2_Normalize"}]
1_Pooling/config.json     {"pooling_mode_lasttoken": true, ...} or {"pooling_mode": "lasttoken"}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mvllm.config.model import ModelConfig
from mvllm.errors import ModelError, RequestError
from mvllm.messages.pooling_params import PoolingParams, PoolingType

_MODES = {"lasttoken": PoolingType.LAST, "cls": PoolingType.CLS, "mean": PoolingType.MEAN}
_OLD_MODES = {
    "lasttoken": "pooling_mode_lasttoken",
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
}


@dataclass(frozen=True)
class PoolerConfig:
    """A model's own way to make a vector of a prompt.

    Attributes:
        pooling_type: Which hidden states count.
        normalize: Whether vectors are scaled to length 1.
        max_dimensions: Components of a whole vector.
        dimensions: The shorter sizes that vectors may be cut to; empty where the model names none, and then every size
            may be asked for.
    """

    pooling_type: PoolingType
    normalize: bool
    max_dimensions: int
    dimensions: tuple[int, ...] = ()

    @classmethod
    def of(cls, model: ModelConfig) -> PoolerConfig:
        """Of a model; what its folder does not say is what is usual for models that generate.

        Raises:
            ModelError: A file is not what it should be, or names a step that is not known here.
        """
        pooling_type, normalize = PoolingType.LAST, True
        if (model.path / "modules.json").is_file():
            pooling_type, normalize = _read_modules(model.path)
        hf = model.hf_config
        sizes = hf.get("matryoshka_dimensions", [])
        if not isinstance(sizes, list) or not all(isinstance(size, int) and size > 0 for size in sizes):
            raise ModelError(f"{hf.source}: 'matryoshka_dimensions' should be a list of sizes, found {sizes!r}.")
        return cls(pooling_type, normalize, _output_size(model), tuple(sizes))

    def settle(self, params: PoolingParams) -> PoolingParams:
        """`params` with every choice made.

        Raises:
            RequestError: The model cannot give what they ask for.
        """
        dimensions = params.dimensions
        if dimensions is not None:
            if dimensions > self.max_dimensions:
                raise RequestError(
                    f"dimensions is {dimensions}, but the model's vectors have {self.max_dimensions} components.",
                    parameter="dimensions",
                )
            allowed = (*self.dimensions, self.max_dimensions)
            if self.dimensions and dimensions not in allowed:
                raise RequestError(
                    f"dimensions is {dimensions}, but the model was trained for "
                    f"{', '.join(map(str, sorted(set(allowed))))}.",
                    parameter="dimensions",
                )
        return PoolingParams(
            pooling_type=params.pooling_type or self.pooling_type,
            normalize=self.normalize if params.normalize is None else params.normalize,
            dimensions=dimensions,
        )


def _output_size(model: ModelConfig) -> int:
    """Components of the last hidden state, which some models project once more."""
    size = model.hf_config.get("word_embed_proj_dim", model.hidden_size)
    return size if isinstance(size, int) and size > 0 else model.hidden_size


def _read_modules(folder: Path) -> tuple[PoolingType, bool]:
    """Which states count, and whether a module scales what comes out."""
    path = folder / "modules.json"
    modules = _read_json(path)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError(f"{path} should be a list of modules.")
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    unknown = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if unknown or kinds.count("Pooling") != 1:
        raise ModelError(
            f"{path} lists the modules {', '.join(kinds)}; what is known here is a Transformer, one Pooling and "
            "perhaps a Normalize."
        )
    where = modules[kinds.index("Pooling")].get("path")
    if not isinstance(where, str) or where in ("", ".", "..") or Path(where).name != where:
        raise ModelError(f"{path}: the path of the Pooling module should be a folder's name, found {where!r}.")
    return _read_mode(folder / where / "config.json"), "Normalize" in kinds


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
