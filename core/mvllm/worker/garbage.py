"""Collects garbage, also among objects that the process has frozen."""

from __future__ import annotations

import gc


def collect_garbage() -> None:
    """Frees modules and their compiled functions, which are in reference cycles."""
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()  # they are among the objects that a server's process has frozen
    gc.collect()
    if was_frozen:
        gc.freeze()
