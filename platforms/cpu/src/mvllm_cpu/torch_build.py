"""Detects accelerator libraries in the installed torch, which the CPU platform never loads.

The default `torch` of a package index may be such a build, with gigabytes of unused libraries. It is detected from the
metadata of installed distributions; torch is not imported.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
from dataclasses import dataclass

from mvllm.plugin_api import get_logger, install_command

_LIBRARIES = re.compile(r"(nvidia|cuda|pytorch-triton|triton|rocm|intel|onemkl|oneccl|dpcpp|impi|tbb|umf|tcmlib)\b")
"""Requirements of torch with these names serve its accelerator backends."""
_ACCELERATOR_FILES = re.compile(r"lib(torch|c10)_(cuda|hip|xpu|nvshmem)")
_ACCELERATOR_PLATFORMS = ("mvllm-cuda", "mvllm-rocm", "mvllm-xpu")

logger = get_logger(__name__)


@dataclass(frozen=True)
class TorchBuild:
    """The installed torch.

    Attributes:
        version: torch's version; None if it is not installed.
        libraries: Installed accelerator distributions that it requires.
        unused_bytes: Size of these, and of torch's own accelerator libraries.
        wanted: An installed platform package that uses them, if any.
    """

    version: str | None
    libraries: tuple[str, ...] = ()
    unused_bytes: int = 0
    wanted: str | None = None

    @property
    def is_for_accelerators(self) -> bool:
        """Whether it has accelerator libraries that no installed platform uses."""
        return bool(self.unused_bytes) and self.wanted is None

    def describe(self) -> str:
        """A description in one sentence."""
        if self.version is None:
            return "torch is not installed."
        if not self.unused_bytes:
            return f"torch {self.version} carries no accelerator libraries."
        named = ", ".join(self.libraries[:3]) + (", ..." if len(self.libraries) > 3 else "")
        size = f"{self.unused_bytes / 1e6:,.0f} MB of accelerator libraries" + (f" ({named})" if named else "")
        if self.wanted is not None:
            return f"torch {self.version} carries {size}, for {self.wanted}."
        return f"torch {self.version} carries {size} that the CPU platform does not use."


def remedy() -> str:
    """How to get a torch without these libraries."""
    command = install_command("torch", reinstall=True, torch_backend="cpu")
    return f"Install a CPU build, and uninstall these libraries. Run: {command}"


def find_build() -> TorchBuild:
    """Reads the installed distributions."""
    torch = _distribution("torch")
    if torch is None:
        return TorchBuild(None)
    if torch.version.endswith("+cpu"):  # skips reading the long lists of files
        return TorchBuild(torch.version)
    libraries = _required_libraries(torch)
    own = sum(file.size or 0 for file in torch.files or () if _ACCELERATOR_FILES.match(file.name))
    rest = sum(file.size or 0 for library in libraries.values() for file in library.files or ())
    wanted = next((name for name in _ACCELERATOR_PLATFORMS if _distribution(name) is not None), None)
    return TorchBuild(torch.version, tuple(sorted(libraries)), own + rest, wanted)


@functools.cache
def warn_once() -> None:
    """Logs, once per process, that torch has unused accelerator libraries."""
    build = find_build()
    if build.is_for_accelerators:
        logger.warning("%s %s", build.describe(), remedy())


def _required_libraries(torch: importlib.metadata.Distribution) -> dict[str, importlib.metadata.Distribution]:
    """Installed accelerator distributions that torch requires, directly or indirectly, by name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    todo = [torch]
    while todo:
        for requirement in todo.pop().requires or ():
            match = re.match(r"[A-Za-z0-9._-]+", requirement)
            name = match[0].lower().replace("_", "-") if match else ""
            if not _LIBRARIES.match(name) or name in found or "extra ==" in requirement:
                continue
            if (library := _distribution(name)) is not None:
                found[name] = library
                todo.append(library)
    return found


def _distribution(name: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
