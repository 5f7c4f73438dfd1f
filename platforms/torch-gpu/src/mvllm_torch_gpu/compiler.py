"""Chooses the compile backend of a step: decode graphs, optionally of a function fused by torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mvllm.plugin_api import CompileBackend
from mvllm_torch_gpu.device_module import CUDA, DeviceModule
from mvllm_torch_gpu.graphs import DeviceGraphs
from mvllm_torch_gpu.step_graphs import TABLE_TOKENS, StepGraphBackend


class NoCompileBackend(CompileBackend):
    """Compile backend that returns functions unchanged."""

    def compile(self, function: Callable[..., Any], *, dynamic: bool) -> Callable[..., Any]:
        """Returns the function."""
        return function


def make_compiler(mode: str, module: DeviceModule = CUDA, *, table_tokens: int = TABLE_TOKENS) -> CompileBackend:
    """The compiler of a mode of `settings.COMPILE_MODES`, for the current device of a module.

    Args:
        mode: The mode.
        module: Torch's module for the device.
        table_tokens: See StepGraphBackend.
    """
    if mode == "none":
        return NoCompileBackend()
    version = f"{mode}-{torch.__version__}"
    return StepGraphBackend(
        lambda: DeviceGraphs(module.device(module.api.current_device()), module),
        version,
        fuse=fuse if mode == "inductor" else None,
        out_of_memory=lambda: _describe_free_memory(module),
        table_tokens=table_tokens,
    )


def fuse(function: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
    """The function with operations fused by torch.compile where it supports them."""
    return torch.compile(function, dynamic=dynamic)


def _describe_free_memory(module: DeviceModule) -> str:
    free, total = module.free_and_total(module.device(module.api.current_device()))
    there = f"{total / 2**30:.2f} GiB"
    return f"the device has {there}" if free is None else f"{free / 2**30:.2f} of {there} are free"
