"""OpTable: selects the implementation of each operation of a model.

Layers resolve an operation once, while the model is built, and keep the function, so the selection costs nothing per
step. The table records which provider was selected and why others were not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mvllm.errors import ConfigError, ContractError
from mvllm.ops.all_schemas import SCHEMAS
from mvllm.ops.dtypes import dtype_name
from mvllm.platform.op_provider import OpCase, OpProvider

REFERENCE = "reference"
"""Provider name of the plain-torch implementations."""


@dataclass(frozen=True)
class ResolvedOp:
    """The selected implementation of one case.

    Attributes:
        function: The implementation.
        provider: Its provider's name, or `reference`.
        prepare: Converts the loaded weight to the argument of `function`; None keeps it.
        lookup: Reads rows of the prepared weight; None if the provider has no lookup.
        asked_for: The user selected this provider, so no fused operation may replace it.
    """

    function: Callable[..., Any]
    provider: str
    prepare: Callable[[Any], Any] | None = None
    lookup: Callable[..., Any] | None = None
    asked_for: bool = False

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def may_replace(self, *parts: ResolvedOp) -> bool:
        """Whether this fused operation replaces its parts.

        It needs a provider, and must not replace a provider that the user selected unless the user selected it too.
        """
        return self.provider != REFERENCE and (self.asked_for or not any(part.asked_for for part in parts))


@dataclass(frozen=True)
class OpRow:
    """One line of `mvllm ops`.

    Attributes:
        op: Name of the operation.
        summary: What it does.
        candidates: Provider names in the order in which they are tried; `reference` is always last.
        case: The case that was resolved; None if no layer uses the operation.
        provider: The selected provider; None without a case.
        declined: Providers that do not support the case, and their reasons.
    """

    op: str
    summary: str
    candidates: tuple[str, ...]
    case: OpCase | None = None
    provider: str | None = None
    declined: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass
class OpTable:
    """The operations of one worker. Created by `resolve`.

    Attributes:
        batch_invariant: Only implementations whose rows do not depend on each other are selected.
    """

    batch_invariant: bool = False
    _providers: dict[str, list[OpProvider]] = field(default_factory=dict)
    _asked_for: tuple[OpProvider, ...] = ()
    _resolved: dict[tuple[Any, ...], tuple[ResolvedOp, OpRow]] = field(default_factory=dict)

    @classmethod
    def resolve(
        cls,
        providers: Sequence[OpProvider] = (),
        asked_for: Sequence[OpProvider] = (),
        *,
        batch_invariant: bool = False,
    ) -> OpTable:
        """A table that tries the user's providers `asked_for`, then `providers`, then the references.

        With `batch_invariant` only providers that declare it are tried, and references that are exact.

        Raises:
            ContractError: A provider names an unknown operation.
        """
        table = cls(batch_invariant, _asked_for=tuple(asked_for))
        for provider in (*asked_for, *providers):
            if provider.op not in SCHEMAS:
                raise ContractError(
                    f"Op provider {provider.name!r} replaces {provider.op!r}, which is not an operation of this core. "
                    f"Operations: {', '.join(sorted(SCHEMAS))}."
                )
            table._providers.setdefault(provider.op, []).append(provider)
        for candidates in table._providers.values():
            candidates.sort(key=lambda provider: -provider.priority)
        return table

    def get(self, op: str, dtype: torch.dtype, **facts: Any) -> ResolvedOp:
        """The implementation of `op` for a case.

        Args:
            op: Name of the operation.
            dtype: Compute dtype.
            facts: Exactly the facts that the schema lists.

        Raises:
            ConfigError: `batch_invariant` is set, and no such implementation takes the case.
        """
        schema = SCHEMAS[op]
        assert facts.keys() == schema.facts.keys(), f"{op} takes the facts {list(schema.facts)}, got {list(facts)}"
        key = (op, dtype, *sorted(facts.items()))
        if key not in self._resolved:
            self._resolved[key] = self._choose(OpCase(op, dtype_name(dtype), facts, self.batch_invariant))
        return self._resolved[key][0]

    def describe(self) -> list[OpRow]:
        """One row for each resolved case, and one for each unused operation."""
        rows = [row for _, row in self._resolved.values()]
        resolved = {row.op for row in rows}
        rows += [OpRow(op, SCHEMAS[op].summary, self._candidates(op)) for op in SCHEMAS if op not in resolved]
        order = list(SCHEMAS)
        return sorted(rows, key=lambda row: order.index(row.op))

    def _choose(self, case: OpCase) -> tuple[ResolvedOp, OpRow]:
        schema = SCHEMAS[case.op]
        chosen = ResolvedOp(schema.reference, REFERENCE)
        declined: list[tuple[str, tuple[str, ...]]] = []
        for provider in self._providers.get(case.op, ()):
            reasons = self._reasons(provider, case)
            if not reasons:
                asked_for = any(provider is selected for selected in self._asked_for)
                chosen = ResolvedOp(provider.function, provider.name, provider.prepare, provider.lookup, asked_for)
                break
            declined.append((provider.name, tuple(reasons)))
        if self.batch_invariant and chosen.provider == REFERENCE and not (schema.is_exact or schema.replaces_others):
            raise _not_batch_invariant(case, declined)
        candidates = self._candidates(case.op)
        return chosen, OpRow(case.op, schema.summary, candidates, case, chosen.provider, tuple(declined))

    def _reasons(self, provider: OpProvider, case: OpCase) -> list[str]:
        """Why a provider is not selected for a case; empty if it is."""
        if self.batch_invariant and not provider.batch_invariant:
            return ["it is not batch-invariant"]
        return provider.supports(case)

    def _candidates(self, op: str) -> tuple[str, ...]:
        return (*(provider.name for provider in self._providers.get(op, ())), REFERENCE)


def _not_batch_invariant(case: OpCase, declined: Sequence[tuple[str, tuple[str, ...]]]) -> ConfigError:
    why = "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in declined) or "no provider has it"
    return ConfigError(
        f"batch_invariant is set, and the model needs the operation {case.op} in {case.dtype}, of which this platform "
        f"has no batch-invariant implementation ({why}). Choose another model or dtype, or leave batch_invariant out."
    )
