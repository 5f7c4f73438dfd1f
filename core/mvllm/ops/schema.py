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
        is_exact: Every element of the reference's result is an element of its arguments, or rounded once. So it does
            not depend on the other rows on any device.
        replaces_others: Layers use the operation only if a provider has it (`ResolvedOp.may_replace`), and other
            operations in place of its reference.
        updates: Parameters that the operation writes in place, as a part of its result.
    """

    reference: Callable[..., Any]
    facts: Mapping[str, str] = field(default_factory=dict)
    may_overwrite: tuple[str, ...] = ()
    is_exact: bool = False
    replaces_others: bool = False
    updates: tuple[str, ...] = ()

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
