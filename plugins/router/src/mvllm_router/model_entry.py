"""One model that the router may load: its names, settings and limits."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mvllm.extension_api import ModelError
from mvllm.extension_api.server import DEMO, EngineArgs, ServerSettings, find_model, list_cached_models

_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_UNIT_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_MAX_SECONDS = 1e9


@dataclass(frozen=True)
class ModelEntry:
    """A model, before it is loaded.

    Attributes:
        name: Its name in requests and responses.
        engine: The engine's arguments.
        settings: The settings of its server.
        aliases: Other names in requests.
        is_pinned: Loaded at the start, and never unloaded for another model.
        keep_alive: Seconds without requests after which it is unloaded; None for never.
        max_concurrent_requests: Requests that it may have at once, including those that wait for its load; None for
            no limit.
        memory_bytes: The memory that it takes when loaded; None if the user did not say.
        environment: Environment variables of its processes.
    """

    name: str
    engine: EngineArgs
    settings: ServerSettings
    aliases: tuple[str, ...] = ()
    is_pinned: bool = False
    keep_alive: float | None = None
    max_concurrent_requests: int | None = None
    memory_bytes: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model, and of the LoRA adapters that are loaded with it."""
        return (self.name, *self.aliases, *(name for name, _ in self.settings.lora_modules))


def parse_keep_alive(value: object) -> float | None:
    """A time to keep a model loaded, as Ollama's clients send it: seconds, or `5m`, `1h30m`, `500ms`.

    Returns:
        Seconds; None, for a negative time, is for ever.

    Raises:
        ValueError: It is neither.
    """
    if isinstance(value, str) and (parts := _DURATION.findall(value.removeprefix("-"))):
        if "".join(number + unit for number, unit in parts) == value.removeprefix("-"):
            seconds = sum(float(number) * _UNIT_SECONDS[unit] for number, unit in parts)
            return None if value.startswith("-") else min(seconds, _MAX_SECONDS)
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise ValueError("must be seconds, or a duration such as '5m', '1h30m' or '-1' for ever")
    return None if value < 0 else min(float(value), _MAX_SECONDS)


def weight_bytes(models: Iterable[str]) -> dict[str, int]:
    """Bytes of the weight files of models on this machine; 0 for those that are not there. Reads folders."""
    found = {model: _bytes_at(model) for model in models}
    if unknown := [model for model, num_bytes in found.items() if num_bytes is None]:
        cached = {each.name: each.num_bytes for each in list_cached_models()}  # reads the whole cache, so once for all
        found |= {model: cached.get(model, 0) for model in unknown}
    return {model: num_bytes or 0 for model, num_bytes in found.items()}


def _bytes_at(model: str) -> int | None:
    """Bytes of the weights at a path; None if there is none."""
    path = Path(model).expanduser()
    try:
        if model == DEMO and not path.exists():
            path = find_model(DEMO)
        if path.exists():
            return bytes_of_weights(path)
    except (OSError, ModelError):
        return 0
    return None


def bytes_of_weights(path: Path) -> int:
    """Bytes of a file with weights, or of those in a folder.

    Raises:
        OSError: There is neither.
    """
    if path.is_file():
        return path.stat().st_size
    return sum(each.stat().st_size for each in path.iterdir() if each.suffix in _WEIGHTS)
