"""Compiles a model's step to one program with torch.compile, for torch_tpu.

Shapes are padded to a few sizes (see `shapes`), and each shape is compiled separately in the warm-up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mvllm.plugin_api import CompileBackend
from mvllm_tpu.compile_cache import version

_MOST_SHAPES = 1 << 16
"""Upper bound of the number of shapes. By default torch stops compiling a function after a few shapes."""


class StepCompiler(CompileBackend):
    """CompileBackend over torch.compile."""

    def compile(self, function: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
        """One program per shape: XLA has static shapes only, so `dynamic` has no effect."""
        compile_with: Callable[..., Callable[..., Any]] = torch.compile  # its annotations lack the limit
        limits = {"recompile_limit": _MOST_SHAPES, "isolate_recompiles": True}
        return compile_with(function, backend="tpu", dynamic=False, **limits)

    def cache_key(self) -> str:
        """Versions of the compiling software."""
        return "_".join(f"{name}-{version(name)}" for name in ("mvllm-tpu", "torch_tpu", "torch", "libtpu"))
