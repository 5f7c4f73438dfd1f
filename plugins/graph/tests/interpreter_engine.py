"""Engines on the platform `graph-interpreter`, which runs models as graphs."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mvllm import LLM
from tests.helpers import parity


def start(stack: ExitStack, folder: Path, **settings: Any) -> LLM:
    """An engine that ends with `stack`. The test has put the plugin on the path, see `graph_platform_path`."""
    return stack.enter_context(parity.engine(folder, platform="graph-interpreter", **settings))
