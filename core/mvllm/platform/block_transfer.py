"""The handle of a copy of KV blocks or states between the device and host memory, which runs beside later work."""

from __future__ import annotations

from typing import Protocol

from mvllm.contract import Phase, phase


@phase(Phase.WORKER)
class BlockTransfer(Protocol):
    """A copy that `export_blocks`, `import_blocks`, `export_slots` or `import_slots` has submitted.

    Since contract 1.1. Work that is submitted later sees the copy as done: on the device it is in the order of the
    calls. Only the host array is not ready: core reads the array of an export, or overwrites that of an import, after
    `wait`. Transfers of several steps may be open at once, and are waited for in any order.
    """

    def wait(self) -> None:
        """Waits until the host array is complete (export), or no longer read (import). Called once.

        Raises:
            PlatformError: The copy has failed.
        """
