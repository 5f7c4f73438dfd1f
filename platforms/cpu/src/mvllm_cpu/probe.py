"""Probe of the CPU platform: it is available if torch is installed. Does not import torch."""

from __future__ import annotations

import importlib.util

from mvllm.plugin_api import DeviceInfo, ProbeResult, install_command
from mvllm_cpu import host_resources


def probe() -> ProbeResult:
    """Looks for torch and describes the processor."""
    if importlib.util.find_spec("torch") is None:
        return ProbeResult(
            available=False,
            reason="torch is not installed in this environment.",
            remedy=f"Run: {install_command('torch>=2.6', torch_backend='cpu')}",
        )
    threads = host_resources.usable_threads()
    device = DeviceInfo(index=0, name=host_resources.processor_name(), memory_bytes=host_resources.memory_total())
    found = f"{device.name}, {threads} {'core' if threads == 1 else 'cores'}"
    return ProbeResult(available=True, reason=found, devices=(device,))
