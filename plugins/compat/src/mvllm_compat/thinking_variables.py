"""The variables of chat templates that switch a model's thinking on or off."""

from __future__ import annotations

from typing import Any


def thinking_variables(enabled: bool) -> dict[str, Any]:
    """The variables, under the names that templates use. A template ignores those that it does not know."""
    return {"enable_thinking": enabled, "thinking": enabled}
