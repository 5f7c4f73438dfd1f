"""Describes the machine and its software, and lists missing packages."""

from __future__ import annotations

import os
import platform as host
import shutil
import subprocess

from tests.gpu.installed import missing, version
from tests.gpu.result_log import FAILED, MEASURED, OK, ResultLog, Row
from tests.gpu.settings import Item, Settings

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pytest",
    "flashinfer",
    "flash-attn",
)
TOOLS = ("nvidia-smi", "rocm-smi", "xpu-smi")


def items(settings: Settings) -> list[Item]:
    """Three, of which the first needs nothing of the project."""
    return [Item("packages", 1, 60), Item("platform", 5, 60), Item("device", 5, 120)]


def run(item: str, settings: Settings, result_log: ResultLog) -> None:
    """See the module."""
    {"packages": _packages, "platform": _platform, "device": _device}[item](settings, result_log)


def _packages(settings: Settings, result_log: ResultLog) -> None:
    def add(name: str, status: str, note: str = "", **figures: str | int | float | None) -> None:
        result_log.add(Row("environment", "packages", name, status, figures, note))

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    disk = shutil.disk_usage(settings.scratch).free
    add("host", OK, host.platform(), cores=os.cpu_count(), memory_gib=memory / 2**30, scratch_gib=disk / 2**30)
    for tool in TOOLS:
        if shutil.which(tool):
            ask = ["--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"] * (tool == "nvidia-smi")
            found = subprocess.run([tool, *ask], capture_output=True, text=True, timeout=30)
            add(tool, OK, found.stdout.strip() or found.stderr.strip())
    add("packages", OK, python=host.python_version(), **{name: version(name) for name in PACKAGES})
    lacking = missing()
    if not lacking:
        add("missing packages", OK, "none")
    for name, what in lacking.items():
        add(f"missing package {name}", FAILED, f"needed for {what}; bring its wheel with --wheels FOLDER")


def _platform(settings: Settings, result_log: ResultLog) -> None:
    from mvllm.platform.choose import choose_platform, describe
    from mvllm.platform.discovery import discover
    from mvllm.plugin_api import CheckStatus

    candidates = discover(only=settings.platform)
    assert candidates, f"No plugin is called {settings.platform!r}"
    [candidate] = candidates
    text = describe(candidate)
    status = OK if candidate.available else FAILED
    result_log.add(Row("environment", "platform", f"platform {settings.platform}", status, note=text))
    if not candidate.available:
        return
    for check in choose_platform(settings.platform).platform.doctor():
        status = FAILED if check.status is CheckStatus.BROKEN else OK
        note = f"{check.status.value}: {check.found} {check.remedy or ''}"
        result_log.add(Row("environment", "platform", f"doctor {check.id}", status, note=note))


def _device(settings: Settings, result_log: ResultLog) -> None:
    import torch

    from tests.gpu.device import open_device

    with open_device(settings.platform) as runtime:
        runtime.health()
        memory = runtime.memory()
        figures = {"total_gib": memory.total / 2**30, "free_gib": memory.free / 2**30}
        built_for = {name: getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu")}
        build = ", ".join(f"{name} {value}" for name, value in built_for.items() if value) or "the host alone"
        note = f"torch {torch.__version__} was built for {build}"
        result_log.add(Row("environment", "device", f"device {runtime.device}", MEASURED, figures, note))
