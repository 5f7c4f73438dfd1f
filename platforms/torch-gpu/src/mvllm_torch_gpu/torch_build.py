"""Reads from the files of the installed torch what it was built for, because importing torch takes seconds."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

Version = tuple[int, int]


@dataclass(frozen=True)
class TorchBuild:
    """The installed torch.

    Attributes:
        version: For messages, for example `2.13.0+cu130`.
        cuda: CUDA version that it was built with, (major, minor); None for another build.
        hip: HIP version that it was built with, likewise.
        other: Another device type that it was built for.
    """

    version: str
    cuda: Version | None = None
    hip: Version | None = None
    other: str = "the host alone"

    @property
    def kind(self) -> str:
        """What it was built for, for messages."""
        return "CUDA" if self.cuda else "ROCm" if self.hip else self.other


def folder() -> Path | None:
    """Folder of the torch that an import would find, or None."""
    spec = importlib.util.find_spec("torch")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def find() -> TorchBuild | None:
    """The torch that an import would find, or None."""
    found = folder()
    if found is None:
        return None
    try:
        text = (found / "version.py").read_text(encoding="utf-8")
    except OSError:
        return TorchBuild("of unknown version", other="an unknown device")
    return parse(text)


def parse(text: str) -> TorchBuild:
    """Parses torch's `version.py`."""
    other = "XPU" if _value(text, "xpu") else "the host alone"
    version = _value(text, "__version__") or "of unknown version"
    return TorchBuild(version, _numbers(_value(text, "cuda")), _numbers(_value(text, "hip")), other)


def _numbers(version: str | None) -> Version | None:
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(found[1]), int(found[2])) if found else None


def _value(text: str, name: str) -> str | None:
    found = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]*)['\"]", text, re.MULTILINE)
    return found[1] if found else None
