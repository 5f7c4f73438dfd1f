"""Compiles a model's step to one program with torch.compile, so that Python does not run the model in every step.

Shapes are padded to a few sizes (see `shapes`), and each shape is compiled separately in the warm-up.

    StepCompiler        torch_tpu, backend `tpu`
    LazyStepCompiler    torch_xla, backend `openxla`: the graph that torch.compile has found is recorded once as lazy
                        operations, and later steps of the shape run the program of this graph by its hash
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
    """CompileBackend over torch.compile, for torch_tpu."""

    def compile(self, function: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
        """One program per shape: XLA has static shapes only, so `dynamic` has no effect."""
        compile_with: Callable[..., Callable[..., Any]] = torch.compile  # its annotations lack the limit
        limits = {"recompile_limit": _MOST_SHAPES, "isolate_recompiles": True}
        return compile_with(function, backend="tpu", dynamic=False, **limits)

    def cache_key(self) -> str:
        """Versions of the compiling software."""
        return _versions("torch_tpu")


class LazyStepCompiler(CompileBackend):
    """CompileBackend over torch.compile, for torch_xla and workers with one device."""

    def compile(self, function: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
        """One program per shape; a step that cannot be one graph raises, because a part of it would run eagerly."""
        import torch_xla

        # torch.compile would run the graph of an earlier engine of this process whose model is alike. It has only the
        # hash of XLA's program, which XLA may have dropped from its cache of programs since, and it keeps the old
        # weights. Functions compiled before find their graphs anew.
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="openxla", dynamic=False, fullgraph=True)

        def step(*args: Any) -> Any:
            # The inputs are slices of one copy, which are lazy until here. The bridge would materialize each set of
            # pending inputs with a program of its own; a sync makes it one program, which the warm-up compiles.
            torch_xla.sync()
            with torch._dynamo.config.patch(
                recompile_limit=_MOST_SHAPES, accumulated_recompile_limit=_MOST_SHAPES, automatic_dynamic_shapes=False
            ):
                return compiled(*args)

        return step

    def cache_key(self) -> str:
        """Versions of the compiling software."""
        return _versions("torch_xla")


class NoStepCompiler(CompileBackend):
    """CompileBackend that returns functions as they are: lazy operations are recorded in every step."""

    def compile(self, function: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
        """The function."""
        return function

    def cache_key(self) -> str:
        """Versions of the compiling software."""
        return _versions("torch_xla")


def _versions(library: str) -> str:
    return "_".join(f"{name}-{version(name)}" for name in ("mvllm-tpu", library, "torch", "libtpu"))
