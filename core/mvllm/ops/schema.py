"""OpSchema: an operation's name, parameters, facts for its resolution, and plain-torch reference."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class OpSchema:
    """One operation that layers use and a platform may replace.

    Attributes:
        reference: The plain-torch implementation. Its name is the operation's name; its signature and docstring specify
            replacements.
        facts: Descriptions, by name, of the facts that layers pass when they resolve the operation.
        may_overwrite: Parameters whose storage an implementation may reuse; callers do not read them afterwards.
    """

    reference: Callable[..., Any]
    facts: Mapping[str, str] = field(default_factory=dict)
    may_overwrite: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The operation's name."""
        return self.reference.__name__

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters, in order."""
        return tuple(inspect.signature(self.reference).parameters)

    @property
    def summary(self) -> str:
        """First line of the reference's docstring."""
        return (inspect.getdoc(self.reference) or "").partition("\n")[0]
