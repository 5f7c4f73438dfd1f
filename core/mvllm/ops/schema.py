"""What an operation is: a name, parameters, the facts known when it is resolved, and a plain-torch reference."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class OpSchema:
    """One operation that layers use and a platform may replace.

    Attributes:
        reference: The plain-torch implementation. Its name is the operation's name; its signature and docstring are
            what a replacement has to honour.
        facts: What layers state when they resolve the operation, by name, each with a description.
        may_overwrite: Parameters whose storage an implementation may reuse: callers don't read them afterwards.
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
