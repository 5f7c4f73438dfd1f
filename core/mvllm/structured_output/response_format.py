"""What OpenAI's `response_format` asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mvllm.errors import RequestError
from mvllm.messages.structured_outputs import StructuredOutputsParams

_TYPES = "'text', 'json_object', 'json_schema' or 'structural_tag'"


def structured_outputs_of(response_format: Mapping[str, Any] | None) -> StructuredOutputsParams | None:
    """Turns a `response_format` into what the engine understands; None where any text will do.

    Args:
        response_format: None, or `{"type": "text"}`, `{"type": "json_object"}`,
            `{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}`, or
            `{"type": "structural_tag", "structures": [...], "triggers": [...]}`.

    Raises:
        RequestError: It is none of these, or the schema is not acceptable; its parameter is `response_format`.
    """
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    try:
        match kind:
            case "text":
                return None
            case "json_object":
                return StructuredOutputsParams(json_object=True)
            case "json_schema":
                return StructuredOutputsParams(json=_schema(response_format.get("json_schema")))
            case "structural_tag":
                return StructuredOutputsParams(structural_tag=dict(response_format))
    except RequestError as e:
        raise RequestError(str(e), parameter="response_format") from e
    raise RequestError(
        f"response_format must be an object whose type is {_TYPES}; found {ascii(kind)[:40]}.",
        parameter="response_format",
    )


def _schema(value: object) -> Any:
    schema = value.get("schema", value.get("json_schema")) if isinstance(value, Mapping) else None
    if schema is None:
        raise RequestError('response_format of type json_schema needs {"json_schema": {"schema": {...}}}.')
    return schema
