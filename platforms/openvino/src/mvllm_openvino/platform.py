"""The OpenVINO platform: the host's processor, through OpenVINO's models instead of torch's operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata

from mvllm.plugin_api import Capabilities, Check, CheckStatus, Platform, PlatformSpec, install_command
from mvllm_graph import GraphCompiler, GraphPlatform
from mvllm_openvino.plugin import SPEC
from mvllm_openvino.probe import FLOOR


def make_platform() -> Platform:
    """The factory that the plugin's PlatformSpec names."""
    return OpenVINOPlatform()


class OpenVINOPlatform(GraphPlatform):
    """Workers whose step graphs are OpenVINO models on the host's processor."""

    dtypes = ("float32", "bfloat16")

    @property
    def spec(self) -> PlatformSpec:
        return SPEC

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, state=False, stores_by_block_table=True, kv_transfer=True)

    def graph_compiler(self) -> GraphCompiler:
        from mvllm_openvino.compiler import OpenVINOCompiler

        return OpenVINOCompiler()

    def doctor(self) -> Sequence[Check]:
        try:
            version = metadata.version("openvino")
        except metadata.PackageNotFoundError:
            remedy = install_command(f"openvino>={'.'.join(map(str, FLOOR))}")
            return (Check("platform.openvino.runtime", CheckStatus.BROKEN, "OpenVINO is not installed.", remedy),)
        return (Check("platform.openvino.runtime", CheckStatus.OK, f"OpenVINO {version}."),)
