"""Loads torch's largest library in a thread, beside what a front end does before `import torch`.

The system's loader runs no Python for it, so the thread does not wait for the tokenizer or the other imports.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import sys
import threading
from pathlib import Path

_LIBRARY = "libtorch_c*.so"
"""The operators; the library contains nothing of Python. The first name, if others follow."""


def preload_torch() -> threading.Thread | None:
    """Starts to load the library. Where there is none of this name, `import torch` loads everything itself.

    The library reads environment variables (OpenMP's, for example), so they must be set before.

    Returns:
        The thread; None if there is nothing to load.
    """
    if "torch" in sys.modules or not sys.platform.startswith("linux"):
        return None
    spec = importlib.util.find_spec("torch")  # does not import it
    if spec is None or spec.origin is None:
        return None
    library = min((Path(spec.origin).parent / "lib").glob(_LIBRARY), default=None)
    if library is None:
        return None
    thread = threading.Thread(target=_load, args=(library,), name="mvllm-torch-preload", daemon=True)
    thread.start()
    return thread


def _load(library: Path) -> None:
    with contextlib.suppress(OSError):  # `import torch` reports it
        ctypes.CDLL(str(library))
