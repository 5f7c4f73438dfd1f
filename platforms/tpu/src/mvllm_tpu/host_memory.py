"""Memory statistics of the host, for XLA's CPU device, which reports none."""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")


def total() -> int:
    """Installed bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free() -> int:
    """Bytes that can be allocated now."""
    return _fields("meminfo").get("MemAvailable", total() // 2)


def resident() -> tuple[int, int]:
    """Resident bytes of this process: now, and the peak since `reset_peak`."""
    fields = _fields("self/status")
    used = fields.get("VmRSS", 0)
    return used, max(used, fields.get("VmHWM", 0))


def reset_peak() -> None:
    """Resets the peak to the resident memory, if the system allows it."""
    try:
        (PROC / "self/clear_refs").write_text("5")
    except OSError:
        return


def _fields(name: str) -> dict[str, int]:
    """`Name:   123 kB` lines, in bytes."""
    try:
        text = (PROC / name).read_text(encoding="ascii", errors="replace")
    except OSError:
        return {}
    lines = (line.split() for line in text.splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3 and words[2] == "kB"}
