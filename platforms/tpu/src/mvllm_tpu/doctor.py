"""Checks of the TPU platform for `mvllm doctor`. They read files and metadata and open no device."""

from __future__ import annotations

from importlib import metadata

from mvllm.plugin_api import Check, CheckStatus, ConfigError
from mvllm_tpu import runtimes, xla_devices
from mvllm_tpu.probe import INSTALL


def checks() -> list[Check]:
    """Checks of the devices and of the package that connects torch and XLA."""
    return [_devices(), _runtime()]


def _devices() -> Check:
    found = xla_devices.find()
    if found.problem is not None:
        return Check("platform.tpu.devices", CheckStatus.BROKEN, f"{found.problem}.", found.remedy)
    return Check("platform.tpu.devices", CheckStatus.OK, f"Devices: {', '.join(found.names)}.")


def _runtime() -> Check:
    try:
        runtime = runtimes.choose()
    except ConfigError as e:
        return Check("platform.tpu.runtime", CheckStatus.BROKEN, str(e), f"Unset {runtimes.VARIABLE}.")
    if runtime is None:
        return Check("platform.tpu.runtime", CheckStatus.BROKEN, "Nothing here leads from torch to XLA.", INSTALL)
    if problem := runtime.problem(xla_devices.find()):
        return Check("platform.tpu.runtime", CheckStatus.BROKEN, f"{problem}.", INSTALL)
    versions = ", ".join(f"{name} {_version(name)}" for name in (runtime.name, "torch"))
    return Check("platform.tpu.runtime", CheckStatus.OK, f"{versions}.")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "(of unknown version)"
