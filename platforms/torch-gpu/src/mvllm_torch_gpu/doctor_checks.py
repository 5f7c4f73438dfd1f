"""Checks of `mvllm doctor` that all platforms of this package share. Imports no torch."""

from __future__ import annotations

import importlib.util

from mvllm.plugin_api import Check, CheckStatus


def kernels_check(platform: str, note: str = "") -> Check:
    """Whether Triton and its kernels are installed.

    Args:
        platform: Name of the platform, in lower case.
        note: Further text about the installation of Triton.
    """
    name = f"platform.{platform}.kernels"
    missing = [module for module in ("triton", "mvllm_triton") if importlib.util.find_spec(module) is None]
    if missing:
        found = f"Attention runs in plain torch, which is many times slower: {', '.join(missing)} not installed."
        return Check(name, CheckStatus.WARNING, found, f"Run: pip install --force-reinstall mvllm-{platform}{note}")
    return Check(name, CheckStatus.OK, "Triton and the kernels are installed.")


def torch_check(platform: str, problem: tuple[str, str] | None, found: str) -> Check:
    """Whether the installed torch can use the platform's devices.

    Args:
        platform: Name of the platform, in lower case.
        problem: Why torch cannot use the devices, and the remedy; None if it can.
        found: Text of the check without a problem.
    """
    name = f"platform.{platform}.torch"
    return Check(name, CheckStatus.OK, found) if problem is None else Check(name, CheckStatus.BROKEN, *problem)
