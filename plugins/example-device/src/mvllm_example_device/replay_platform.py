"""ReplayPlatform: the platform in mode `replay`, whose steps are captured and replayed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import mvllm.plugin_api as api
from mvllm_example_device.platform import ExamplePlatform

if TYPE_CHECKING:
    pass


class ReplayPlatform(ExamplePlatform):
    """ExamplePlatform with a CompileBackend that replays steps, and with attention and operations for them."""

    @property
    def capabilities(self) -> api.Capabilities:
        return dataclasses.replace(super().capabilities, graphs=True, compile=True)

    def compiler(self) -> api.CompileBackend:
        from mvllm_example_device.replay import ReplayCompiler

        return ReplayCompiler(self._opened())

    def attention_backend(self, spec: api.AttentionSpec) -> api.AttentionBackend:
        super().attention_backend(spec)
        from mvllm_example_device.replay import ReplayAttention

        return ReplayAttention(spec, self._opened(), self._faults)

    def ops(self) -> Sequence[api.OpProvider]:
        from mvllm_example_device.replay import providers

        return [*super().ops(), *providers()]

    def shapes(self) -> api.ShapePolicy:
        super().shapes()
        from mvllm_example_device.replay import SHAPES

        return SHAPES
