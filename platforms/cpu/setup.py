"""Builds mvllm-cpu's kernels: one optional shared library with a plain C interface, loaded by ctypes.

The library makes things faster and is never a requirement. Without a compiler (or with one that fails) the installation
succeeds, `_kernels.so` is absent, and the platform computes with torch alone. It links neither Python nor torch nor an
OpenMP runtime, so one build serves every Python version and every torch: hence the plain file name and the
`py3-none-<machine>` wheel tag.
Instruction sets are chosen when the library runs, not when it is built: a wheel may move to another machine.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).resolve().parent
SOURCES = sorted(path.relative_to(HERE).as_posix() for path in HERE.glob("csrc/*.cpp"))
HEADERS = sorted(path.relative_to(HERE).as_posix() for path in HERE.glob("csrc/*.h*"))

KERNELS = Extension(
    "mvllm_cpu._kernels",
    sources=SOURCES,
    depends=HEADERS,
    include_dirs=["csrc"],
    extra_compile_args=["-O3", "-std=c++17", "-pthread", "-fPIC", "-g0"],
    extra_link_args=["-pthread"],
    language="c++",
    optional=True,
)


class BuildSharedLibrary(build_ext):
    """Builds `_kernels.so` as a library, without the interpreter's tag in its name and without an init symbol."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"

    def build_extensions(self) -> None:
        """Compiles the source files side by side; setuptools does one extension's files one after the other."""
        compile_in_turn = self.compiler.compile

        def compile_side_by_side(sources: list[str], **options: object) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = list(pool.map(lambda source: compile_in_turn([source], **options), sources))
            return [name for names in objects for name in names]

        self.compiler.compile = compile_side_by_side
        super().build_extensions()

    def copy_extensions_to_source(self) -> None:
        """For editable installs. An older library goes first: none is better than one of other sources."""
        for stale in HERE.glob("src/mvllm_cpu/_kernels*.so"):
            stale.unlink()  # not overwritten: a running process may have it mapped
        super().copy_extensions_to_source()

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return list(ext.export_symbols)


class AnyPythonWheel(bdist_wheel):
    """Tags the wheel for this machine and any Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, machine = super().get_tag()
        return "py3", "none", machine


setup(
    ext_modules=[KERNELS] if SOURCES else [],
    cmdclass={"build_ext": BuildSharedLibrary, "bdist_wheel": AnyPythonWheel},
)
