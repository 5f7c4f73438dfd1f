"""Builds a library through which torch_tpu, which has no host device, uses XLA's CPU device in place of a TPU.

    python -m platforms.tpu.tests.host_devices FOLDER    builds it, and prints the environment variables for a shell

For tests only: torch_tpu's plugin interface is newer than this plugin's, so some functions are missing (torch-tpu.md of
the platform lists them).
"""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_suffix(".c")
NEEDED = ("torch_tpu", "xla_plugins.xla_cpu_pjrt")


def missing_requirements() -> str:
    """The missing requirements, as text; empty if nothing is missing."""
    for name in NEEDED:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return f"{name} is not installed: it wants an environment of its own"
    return "" if shutil.which("gcc") else "this machine has no gcc"


def build(folder: Path) -> dict[str, str]:
    """Builds the library into `folder`.

    Returns:
        Environment variables with which a process finds XLA's CPU device through torch_tpu.
    """
    spec = importlib.util.find_spec("xla_plugins.xla_cpu_pjrt")
    assert spec is not None and spec.origin is not None
    plugin = Path(spec.origin).parent
    library = folder / "libhost_devices.so"
    defines = [f'-DREAL_LIBRARY="{plugin / "xla_cpu_pjrt.so"}"', f"-I{plugin / 'include'}"]
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", *defines, "-o", library, SOURCE, "-ldl"], check=True)
    return {
        "PJRT_DEVICE": "CPU",
        "TPU_LIBRARY_PATH": str(library),
        "MVLLM_TPU_RUNTIME": "torch_tpu",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # torch would load it before a device can be selected
    }


def register_cumsum() -> None:
    """Registers a `cumsum` by doubling for this process, because this plugin does not support torch_tpu's operation."""
    import torch
    import torch_tpu  # noqa: F401

    def cumsum(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        sums = x if dtype is None else x.to(dtype)
        size, shift = sums.shape[dim], 1
        while shift < size:
            first, later = sums.narrow(dim, 0, shift), sums.narrow(dim, shift, size - shift)
            sums = torch.cat((first, later + sums.narrow(dim, 0, size - shift)), dim=dim)
            shift *= 2
        return sums

    _LENT.append(torch.library.Library("aten", "IMPL"))
    _LENT[0].impl("cumsum", cumsum, "PrivateUse1")


_LENT: list[Any] = []
"""Keeps the torch library alive; its operations are removed with it."""

if __name__ == "__main__":
    reason = missing_requirements()
    if reason or len(sys.argv) != 2:
        sys.exit(reason or "one folder is expected")
    for name, value in build(Path(sys.argv[1])).items():
        print(f"export {name}={shlex.quote(value)}")
