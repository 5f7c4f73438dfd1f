"""Loads the library of compiled kernels, or explains why it is not available.

The library has a C interface, called through ctypes with pointers and numbers; it uses neither Python nor torch. It
shares torch's OpenMP runtime, so torch is imported before the library is opened.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mvllm.plugin_api import install_command

ABI_VERSION = 20
LIBRARY = Path(__file__).parent / "_kernels.so"


def no_compiler_remedy() -> str:
    """What to do where mvllm-cpu was installed without a compiler: a wheel has compiled kernels, a folder needs one."""
    command = install_command("mvllm-cpu", reinstall=True)
    return f"Install a C++ compiler (g++), which a build from a folder needs, then run: {command}"


@dataclass(frozen=True)
class Kernels:
    """The opened library, or the reason why there is none.

    Attributes:
        library: The library; None if it is not used.
        isa: Instruction set of the kernels.
        quantized_isa: Instruction set of products with integer weights, which also have VNNI variants.
        reason: Why `library` is None.
        remedy: How to get the kernels.
    """

    library: ctypes.CDLL | None
    isa: str = ""
    quantized_isa: str = ""
    reason: str = ""
    remedy: str | None = None


def load() -> Kernels:
    """The kernels, opened on first use. `MVLLM_CPU_KERNELS` may be 0 (do not use them) or the path of a library."""
    return find_absent() or _open(_path())


def find_absent() -> Kernels | None:
    """The reason why there is no library, as far as it is known without torch and without opening it; else None."""
    if os.environ.get("MVLLM_CPU_KERNELS") == "0":
        return Kernels(None, reason="MVLLM_CPU_KERNELS=0 is set.", remedy="Unset MVLLM_CPU_KERNELS.")
    if not _path().exists():
        return Kernels(None, reason=f"{_path()} was not built.", remedy=no_compiler_remedy())
    return None


def _path() -> Path:
    requested = os.environ.get("MVLLM_CPU_KERNELS", "")
    return LIBRARY if requested in ("", "1") else Path(requested)


@cache
def _open(path: Path) -> Kernels:
    import torch  # noqa: F401  loads its OpenMP runtime first

    try:
        library = ctypes.CDLL(str(path))
        found = int(library.mvllm_cpu_abi_version())
    except (OSError, AttributeError) as e:
        return Kernels(None, reason=f"{path} cannot be used: {e}", remedy=no_compiler_remedy())
    if found != ABI_VERSION:
        return Kernels(
            None,
            reason=f"{path} speaks version {found} of the kernels' interface, this package {ABI_VERSION}.",
            remedy=no_compiler_remedy(),
        )
    library.mvllm_cpu_isa.restype = library.mvllm_cpu_quantized_linear_isa.restype = ctypes.c_char_p
    isa, quantized_isa = library.mvllm_cpu_isa().decode(), library.mvllm_cpu_quantized_linear_isa().decode()
    return Kernels(library, isa=isa, quantized_isa=quantized_isa)
