"""Checks that core uses only the contract's names, and only in the contract's phases."""

from __future__ import annotations

from typing import Any

from mvllm.plugin_api import ContractError, Phase, require_phase


class Strict:
    """Base class of every object that this platform returns to core."""

    def __getattr__(self, name: str) -> Any:
        """Raises for every name outside of the contract, also for `getattr` with a default."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise ContractError(f"Core accessed {type(self).__name__}.{name}, which is not part of the contract.")


def in_worker() -> None:
    """Checks that the call comes from a worker."""
    require_phase(Phase.WORKER)
