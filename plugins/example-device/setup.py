"""Compiles the device (torch operations, not a Python module) against the installed torch, which is required."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from setuptools import setup

try:
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError as e:
    raise SystemExit(
        f"error: mvllm-example-device is compiled against torch, which cannot be imported here: {e}\n"
        "remedy: install torch first, then: pip install --no-build-isolation ./plugins/example-device"
    ) from e

DEVICE = CppExtension("mvllm_example_device._device", ["csrc/device.cpp"], extra_compile_args=["-O1", "-g0", "-w"])


class BuildDevice(BuildExtension):
    """Fails with a hint if there is no compiler, and removes older libraries from the source folder."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "use_ninja": False, "no_python_abi_suffix": True})

    def build_extensions(self) -> None:
        try:
            super().build_extensions()
        except Exception as e:
            raise SystemExit(
                f"error: mvllm-example-device needs a C++ compiler (g++ or clang++), which failed: {e}\n"
                "remedy: install one (Debian, Ubuntu: apt install g++) or name it with the environment variable CXX"
            ) from e

    def copy_extensions_to_source(self) -> None:
        for stale in Path(__file__).parent.glob("src/mvllm_example_device/_device*.so"):
            stale.unlink()  # not overwritten: a running process may have it mapped
        super().copy_extensions_to_source()


setup(ext_modules=[DEVICE], cmdclass={"build_ext": BuildDevice})
