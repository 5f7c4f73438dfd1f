"""OpenAI's `response_format` as StructuredOutputsParams."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mvllm.errors import RequestError
from mvllm.messages.structured_outputs import StructuredOutputsParams
from mvllm.structured_output.additional_properties import STRICT_KEY, close_all_objects

_TYPES = "'text', 'json_object', 'json_schema' or 'structural_tag'"


def parse_response_format(response_format: Mapping[str, Any] | None) -> StructuredOutputsParams | None:
    """Converts a `response_format`; None if any text is allowed.

    Args:
        response_format: None, or `{"type": "text"}`, `{"type": "json_object"}`,
            `{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}, "strict": ...}}`, or
            `{"type": "structural_tag", "structures": [...], "triggers": [...]}`. A `json_object` may have a schema, as
            `schema` (llama.cpp and others) or as `value` (huggingface_hub, whatever its caller writes).

    Raises:
        RequestError: It is none of these, or the schema is not supported; its parameter is `response_format`.
    """
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    try:
        match kind:
            case "text":
                return None
            case "json_object":
                schema = response_format.get("schema", response_format.get("value"))
                return StructuredOutputsParams(json_object=True) if schema is None else _json_schema({"schema": schema})
            case "json_schema":
                return _json_schema(response_format.get("json_schema"))
            case "structural_tag":
                return StructuredOutputsParams(structural_tag=dict(response_format))
    except RequestError as e:
        raise RequestError(str(e), parameter="response_format") from e
    raise RequestError(
        f"response_format must be an object whose type is {_TYPES}; found {ascii(kind)[:40]}.",
        parameter="response_format",
    )


def _json_schema(value: object) -> StructuredOutputsParams:
    """The parameters of a JSON schema; with `strict`, every object in it is closed, and every keyword enforced."""
    schema = value.get("schema", value.get("json_schema")) if isinstance(value, Mapping) else None
    strict = value.get("strict") if isinstance(value, Mapping) else None
    if schema is None:
        raise RequestError('response_format of type json_schema needs {"json_schema": {"schema": {...}}}.')
    if not isinstance(strict, bool | None):
        raise RequestError("response_format: strict must be true or false.")
    params = StructuredOutputsParams(json=schema)
    if strict:
        checked = json.loads(str(params.json))
        if isinstance(checked, dict):
            params = StructuredOutputsParams(json={**close_all_objects(checked, "strict"), STRICT_KEY: True})
    return params
