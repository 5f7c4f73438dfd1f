"""Persistent cache of compiled programs.

XLA's programs for a model take longer to compile than the model to load. With MVLLM_TPU_CACHE they are stored in that
folder, in a subfolder per version of the software; without it they are not stored. XLA's CPU device cannot load
programs that another process has compiled, so the folder is not used there.
"""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

from mvllm.plugin_api import get_logger
from mvllm_tpu import xla_devices

logger = get_logger("mvllm.tpu.compile_cache")

VARIABLE = "MVLLM_TPU_CACHE"
UNKNOWN_VERSION = "none"

_done = False


def folder() -> Path | None:
    """Folder of programs for these versions of torch_xla, the device's library and this plugin; None without a cache.

    It changes whenever older programs must not be used.
    """
    asked = os.environ.get(VARIABLE)
    if not asked:
        return None
    versions = [f"{name}-{version(name)}" for name in ("mvllm-tpu", "torch_xla", "libtpu")]
    return Path(asked).expanduser() / "_".join(versions)


def version(name: str) -> str:
    """Version of an installed distribution; UNKNOWN_VERSION if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return UNKNOWN_VERSION


def enable() -> None:
    """Enables torch_xla's cache. Call it before the first compilation; later calls in the process do nothing."""
    global _done
    where = folder()
    if where is None or _done:
        return
    if xla_devices.find().on_host:
        logger.info("%s is not used: XLA's CPU device cannot load programs that were compiled before.", VARIABLE)
        return
    import torch_xla.runtime as xr

    where.mkdir(parents=True, exist_ok=True)
    xr.initialize_cache(str(where))
    _done = True
    logger.info("Compiled programs are stored in %s.", where)
