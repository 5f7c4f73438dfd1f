"""How a platform replaces single operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class OpCase:
    """The facts known when an operation is resolved, once, at model load. Phase: worker.

    Attributes:
        op: Name of the operation.
        dtype: Compute dtype by name.
        facts: Further facts by name, as the operation's schema lists them (for instance `hidden_size`).
    """

    op: str
    dtype: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OpProvider:
    """A platform's implementation of one operation.

    Phase: worker. `function` has the same parameters and result as the reference in `mvllm.ops`, works without host
    synchronisation, and does not change its inputs unless the schema says so.

    Attributes:
        op: Name of the operation it replaces.
        name: Its own name, for `mvllm ops`.
        function: The implementation.
        supports: Returns the reasons why a case is not supported; empty when it is.
        priority: Among several that support a case, the highest is taken.
        prepare: For operations with a weight: turns the loaded weight into the form that `function` wants in its place
            (packed, say), once, after loading; the original is dropped, so its memory may be reused, but for that of a
            `linear` without `lookup`: the weight of a tied head stays the token embedding's. Takes and returns a tuple
            where there are several weights (`moe`). None keeps the weight as it is.
        lookup: For `linear` with `prepare`: the operation `embedding` on what `prepare` made of the weight, bit for bit
            what the reference gives for the weight itself. A tied head's weight is then kept in that form alone.
    """

    op: str
    name: str
    function: Callable[..., Any]
    supports: Callable[[OpCase], list[str]] = lambda case: []
    priority: int = 0
    prepare: Callable[[Any], Any] | None = None
    lookup: Callable[..., Any] | None = None
