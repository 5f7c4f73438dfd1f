"""Loads torch's largest libraries in a thread while a command reads its arguments and the model's configuration.

`import torch` takes most of the start of a small model, and a part of it is the system's loader, which runs no Python:
a thread can do that part beside everything that happens before the import.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

ENGINE_COMMANDS = ("chat", "complete", "generate")
"""Commands that run an engine in their own process."""

_NO_ENGINE = ("--url", "--help", "-h")
_LIBRARY = "libtorch_c*.so"  # the operators' library, which contains nothing of Python


def preload_torch(command: str | None, arguments: Sequence[str]) -> threading.Thread | None:
    """Starts to load torch's libraries if `command` will import torch in this process.

    Without torch, or where its libraries have other names, nothing happens, and `import torch` loads them itself.

    Args:
        command: Name of the command.
        arguments: Its arguments.

    Returns:
        The thread, or None if nothing is loaded.
    """
    if command not in ENGINE_COMMANDS or "torch" in sys.modules or not sys.platform.startswith("linux"):
        return None
    if any(argument.split("=", 1)[0] in _NO_ENGINE for argument in arguments):
        return None
    spec = importlib.util.find_spec("torch")  # imports nothing
    if spec is None or spec.origin is None:
        return None
    paths = sorted((Path(spec.origin).parent / "lib").glob(_LIBRARY))
    thread = threading.Thread(target=_load, args=(paths[:1],), name="mvllm-preload", daemon=True)
    thread.start()
    return thread


def _load(paths: Sequence[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):  # `import torch` reports it
            ctypes.CDLL(str(path))
