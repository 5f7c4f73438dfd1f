"""Checks that core uses only the contract's names, and only in the contract's phases."""

from __future__ import annotations

from typing import Any

from mvllm.plugin_api import ContractError, Phase, require_phase


class Strict:
    """Base of every object that core gets from this platform."""

    def __getattr__(self, name: str) -> Any:
        """Only called for names that there are none of. `getattr` with a default is no way around it."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise ContractError(f"Core asked for {type(self).__name__}.{name}: the contract has no such name.")


def in_worker() -> None:
    """Fails where core calls what belongs to a worker from elsewhere."""
    require_phase(Phase.WORKER)
