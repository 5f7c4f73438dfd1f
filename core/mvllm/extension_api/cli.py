"""For packages with a command (entry points of `mvllm.cli`): types of arguments."""

from __future__ import annotations

from mvllm.entrypoints.cli.number_arguments import positive_seconds as positive_seconds

__all__ = ["positive_seconds"]
