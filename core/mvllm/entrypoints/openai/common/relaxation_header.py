"""The response header with the keywords of a JSON schema that are not enforced while an output is generated."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import Scope

from mvllm.structured_output.schema_rewriting import keyword

RELAXATIONS_HEADER = "x-mvllm-not-enforced"

RELAXATIONS_SCOPE_KEY = "mvllm.relaxations"
"""Key of the ASGI scope under which the keywords for the header are stored."""


def set_relaxations(scope: Scope, relaxations: Iterable[str]) -> None:
    """Has the response name the keywords. Names of formats come from clients and are left out."""
    if isinstance(header := scope.get(RELAXATIONS_SCOPE_KEY), list):
        header[:] = dict.fromkeys(keyword(each).split(" ")[0] for each in relaxations)


def relaxations_header(keywords: Iterable[str]) -> tuple[bytes, bytes]:
    """The header, by the names of `set_relaxations`."""
    return RELAXATIONS_HEADER.encode(), ", ".join(keywords).encode("ascii")
