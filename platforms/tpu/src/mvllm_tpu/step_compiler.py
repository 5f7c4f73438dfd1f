"""A model's step as one program, made by torch.compile for torch_tpu.

Shapes are padded to few sizes (see `shapes`), so each is compiled for itself, during the warm-up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mvllm.plugin_api import CompileBackend
from mvllm_tpu.compile_cache import version

_MOST_SHAPES = 1 << 16
"""More than there are: torch gives up on a function after a few shapes, and runs it operation by operation then."""


class StepCompiler(CompileBackend):
    """See CompileBackend."""

    def compile(self, function: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
        """A program for each shape: XLA knows no others, so `dynamic` changes nothing."""
        compile_with: Callable[..., Callable[..., Any]] = torch.compile  # its annotations lack the limit
        limits = {"recompile_limit": _MOST_SHAPES, "isolate_recompiles": True}
        return compile_with(function, backend="tpu", dynamic=False, **limits)

    def cache_key(self) -> str:
        """Versions of what compiles."""
        return "_".join(f"{name}-{version(name)}" for name in ("mvllm-tpu", "torch_tpu", "torch", "libtpu"))
