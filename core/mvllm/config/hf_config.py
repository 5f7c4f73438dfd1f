"""HFConfig: a checkpoint's `config.json`, with checked access to its keys."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mvllm.contract import ANY, phase
from mvllm.errors import ModelError

MOST_BYTES = 64 << 20
"""Size limit of a JSON file of a model folder, which takes several times as much memory when parsed."""

_MISSING = object()
_LARGEST = 2**63 - 1
_KIND_NAMES = {
    int: "an integer",
    float: "a number",
    str: "a text",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


@phase(ANY)
class HFConfig:
    """Read-only view of a `config.json`; errors name the file and the key.

    Args:
        values: The parsed JSON object.
        source: The file it came from, for error messages.
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = dict(values)
        self.source = source

    @classmethod
    def load(cls, folder: Path, overrides: Mapping[str, Any] | None = None) -> HFConfig:
        """Reads `folder/config.json`.

        Args:
            folder: A Hugging Face model folder.
            overrides: Keys to replace (`hf_overrides`).

        Raises:
            ModelError: The file is missing, is not JSON, or is not an object.
        """
        path = folder / "config.json"
        if not path.is_file():
            raise ModelError(
                f"{folder} is not a model folder: it has no config.json. "
                "Pass a folder written by save_pretrained() or a model name from the hub."
            )
        return cls({**read_json_object(path), **(overrides or {})}, str(path))

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`, or `default` where the key is absent or null."""
        value = self._values.get(key)
        return default if value is None else value

    def require(self, key: str, kind: type | tuple[type, ...] = object) -> Any:
        """The value of the required `key`, an instance of `kind`.

        Raises:
            ModelError: The key is absent or has another type; names file, key, expected and found type.
        """
        value = self._values.get(key, _MISSING)
        if value is _MISSING or value is None:
            raise ModelError(f"{self.source} lacks the key {key!r}, which this architecture needs.")
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise ModelError(f"{self.source}: {key!r} should be {_kind_name(kind)}, found {value!r}.")
        return value

    def positive_int(self, key: str, default: int | None = None, *, at_most: int = _LARGEST) -> int:
        """An integer >= 1 (and below 2**63, so that nothing computed from it can overflow).

        Raises:
            ModelError: The key is absent (and no default is given), not an integer, or out of range.
        """
        if default is not None and key not in self:
            return default
        value = self.require(key, int)
        if value < 1:
            raise ModelError(f"{self.source}: {key!r} should be at least 1, found {value}.")
        if value > at_most:
            raise ModelError(f"{self.source}: {key!r} should be at most {at_most}, found {value}.")
        return int(value)

    def positive_number(self, key: str, default: float) -> float:
        """A finite number > 0.

        Raises:
            ModelError: The value is not a finite number > 0.
        """
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ModelError(f"{self.source}: {key!r} should be a number > 0, found {value!r}.")
        return float(value)

    def as_dict(self) -> dict[str, Any]:
        """A copy of the JSON object."""
        return dict(self._values)


def read_json_object(path: Path, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """The JSON object of a file of a model folder.

    Args:
        most_bytes: A larger file is not read.

    Raises:
        ModelError: The file cannot be read, is too large, or is not a JSON object.
    """
    try:
        if (size := path.stat().st_size) > most_bytes:
            raise ModelError(
                f"{path} has {size} bytes, and at most {most_bytes} are allowed. Download the model again, or check "
                "where it comes from."
            )
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as e:
        raise ModelError(f"{path} cannot be read as JSON: {e}") from e
    if not isinstance(values, dict):
        raise ModelError(f"{path} must hold a JSON object, found {type(values).__name__}.")
    return values


def _kind_name(kind: type | tuple[type, ...]) -> str:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return " or ".join(_KIND_NAMES.get(k, k.__name__) for k in kinds)
