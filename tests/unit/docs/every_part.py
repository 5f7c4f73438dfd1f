"""The parts of mvllm whose commands the pages describe, and the mark of tests that need all of them."""

from __future__ import annotations

import importlib.metadata

import pytest

from mvllm.entrypoints.cli.main import COMMANDS, command_summary, installed_commands
from mvllm.installable import installable_parts


def documented_commands() -> dict[str, str]:
    """The commands of mvllm and of its installed parts, with their summaries; those of other packages are left out."""
    parts = set(installable_parts().values())
    sources = {name: source for name, source in installed_commands().items() if source.distribution in parts}
    return {**COMMANDS, **{name: f"{command_summary(s)} ({s.distribution})" for name, s in sources.items()}}


MISSING = sorted(set(installable_parts().values()) - {each.name for each in importlib.metadata.distributions()})
needs_every_part = pytest.mark.skipif(
    bool(MISSING), reason=f"the page describes every part of mvllm; not installed: {', '.join(MISSING)}"
)
