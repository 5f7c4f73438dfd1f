"""The request header with the time for which a request has waited for its model, which a router of models adds."""

from __future__ import annotations

from collections.abc import Mapping

LOAD_HEADER = b"x-mvllm-load-nanoseconds"


def waited_nanoseconds(headers: Mapping[str, str]) -> int:
    """The value of the header; 0 if it is missing or invalid."""
    value = headers.get(LOAD_HEADER.decode())
    return int(value) if value is not None and value.isascii() and value.isdecimal() and len(value) < 19 else 0
