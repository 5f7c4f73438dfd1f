"""Chooses torch's backend for collectives: XCCL, or oneCCL's own package for older stacks.

Older stacks have oneCCL in a separate package, which registers the backend `ccl` when it is imported.
"""

from __future__ import annotations

import importlib
import importlib.util

import torch.distributed as dist

from mvllm.plugin_api import PlatformError

OLDER = "oneccl_bindings_for_pytorch"

ADVICE = (
    "Set CCL_LOG_LEVEL=info to see what oneCCL tries; between machines, FI_TCP_IFACE names the network to use. Cards "
    "that cannot reach each other's memory need CCL_TOPO_P2P_ACCESS=0."
)


def backend() -> str:
    """Torch's name of the backend.

    Raises:
        PlatformError: No backend is installed.
    """
    if getattr(dist.distributed_c10d, "is_xccl_available", lambda: False)():
        return "xccl"
    if importlib.util.find_spec(OLDER) is not None:
        importlib.import_module(OLDER)
        return "ccl"
    raise PlatformError(
        "The installed torch has no collectives between XPU devices (XCCL), so several ranks cannot work together. "
        "Install torch 2.8 or newer, in its build for XPU, or use one rank."
    )
