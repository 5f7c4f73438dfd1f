"""Compiled programs, kept between runs.

XLA's programs for a model take longer to compile than the model to load. With MVLLM_TPU_CACHE, they are kept in that
folder, one below it for each version of what makes them; unset, they are not. XLA's CPU device cannot load programs
that another process has compiled: there the folder is not used.
"""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

from mvllm.plugin_api import get_logger
from mvllm_tpu import xla_devices

logger = get_logger("mvllm.tpu.compile_cache")

VARIABLE = "MVLLM_TPU_CACHE"

_done = False


def folder() -> Path | None:
    """Where programs are kept for these versions of torch_xla, the device's library and this plugin; None for nowhere.

    Changes whenever programs from before must not be used.
    """
    asked = os.environ.get(VARIABLE)
    if not asked:
        return None
    versions = [f"{name}-{version(name)}" for name in ("mvllm-tpu", "torch_xla", "libtpu")]
    return Path(asked).expanduser() / "_".join(versions)


def version(name: str) -> str:
    """Of an installed distribution; `none` without one."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def enable() -> None:
    """Has torch_xla keep its programs. Before anything is compiled; later calls in the process do nothing."""
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
    logger.info("Compiled programs are kept in %s.", where)
