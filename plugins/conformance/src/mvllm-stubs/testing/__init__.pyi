"""`mvllm.testing` for type checkers, which read no entry points: every name exists, with any type."""

from typing import Any

def __getattr__(name: str) -> Any: ...
