"""Probe of the TPU platform: reads files and environment variables without loading torch or XLA."""

from __future__ import annotations

from pathlib import Path

from mvllm.plugin_api import ConfigError, DeviceInfo, ProbeResult
from mvllm_tpu import runtimes, xla_devices


def probe(root: Path | None = None) -> ProbeResult:
    """Checks that there are devices that XLA can open, and a package that connects torch and XLA.

    Args:
        root: Root folder of the files.
    """
    found = xla_devices.find(root)
    if found.problem is not None:
        return ProbeResult(False, f"{found.problem}.", remedy=found.remedy)
    devices = tuple(DeviceInfo(i, name) for i, name in enumerate(found.names))
    try:
        runtime = runtimes.choose()
    except ConfigError as e:
        return ProbeResult(False, str(e), devices, "See the message: it says what may stand there.")
    if runtime is None:
        reason = "Nothing here leads from torch to XLA: torch_xla is not installed, nor is its successor torch_tpu."
        return ProbeResult(False, reason, devices, INSTALL)
    if problem := runtime.problem(found):
        return ProbeResult(False, f"{problem}.", devices, INSTALL)
    count = f"{len(devices)} x " if len(devices) > 1 else ""
    return ProbeResult(True, f"{count}{devices[0].name}, through {runtime.name}", devices)


INSTALL = (
    "Make an environment for it, since torch_xla requires the torch of its own version, and install mvllm there with "
    "mvllm-tpu[torch-xla], or mvllm-tpu[torch-tpu] for its successor, as docs/how-to/install.md says."
)
