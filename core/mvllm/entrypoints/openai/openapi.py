"""The description of the API that `/openapi.json` gives, and a page of it that needs nothing from elsewhere.

Bodies are described from the very structs that decode them.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from mvllm.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    ClassificationRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    LoadLoRAAdapterRequest,
    PoolingRequest,
    RerankRequest,
    ResponsesRequest,
    ScoreRequest,
    TokenizeRequest,
    UnloadLoRAAdapterRequest,
)
from mvllm.version import __version__

_BODIES: tuple[type[msgspec.Struct], ...] = (
    CompletionRequest,
    ChatCompletionRequest,
    EmbeddingRequest,
    PoolingRequest,
    ClassificationRequest,
    ScoreRequest,
    RerankRequest,
    ResponsesRequest,
    TokenizeRequest,
    DetokenizeRequest,
    LoadLoRAAdapterRequest,
    UnloadLoRAAdapterRequest,
)
_REF = "#/components/schemas/{name}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def body_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """How a route says that its body is a struct of this type."""
    schema = {"$ref": _REF.format(name=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI, parts: Mapping[str, FastAPI] | None = None) -> dict[str, Any]:
    """The OpenAPI document of an application.

    Args:
        parts: Applications that are mounted in it, by the beginning of their paths.
    """
    if app.openapi_schema:
        return app.openapi_schema
    document = get_openapi(title="mvllm", version=__version__, routes=app.routes)
    _, schemas = msgspec.json.schema_components(_BODIES, ref_template=_REF)
    components = document.setdefault("components", {})
    of_parts: dict[str, Any] = {}
    for prefix, part in (parts or {}).items():
        found = get_openapi(title="mvllm", version=__version__, routes=part.routes)
        document["paths"].update({prefix + path: operations for path, operations in found["paths"].items()})
        of_parts |= found.get("components", {}).get("schemas", {})
    components["schemas"] = {**of_parts, **schemas, "Error": _ERROR}
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"key": []}]
    failure = {
        "description": "An error.",
        "content": {"application/json": {"schema": {"$ref": _REF.format(name="Error")}}},
    }
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = failure
    app.openapi_schema = document
    return document


def docs_page(document: dict[str, Any]) -> str:
    """The OpenAPI document as a page to read: routes, and the fields of their bodies."""
    parts = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2>")
            parts.append(f"<p>{html.escape(operation.get('summary', ''))}</p>")
            content = operation.get("requestBody", {}).get("content", {})
            name = content.get("application/json", {}).get("schema", {}).get("$ref", "").rpartition("/")[2]
            if name:
                parts.append(_fields(document["components"]["schemas"][name]))
    return _PAGE.replace("{{content}}", "\n".join(parts))


def _fields(schema: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td><code>{html.escape(name)}</code></td><td>{html.escape(_kind(field))}</td></tr>"
        for name, field in schema.get("properties", {}).items()
    )
    return f"<p>{html.escape(schema.get('description', ''))}</p><table>{rows}</table>"


def _kind(field: dict[str, Any]) -> str:
    kinds = [_kind(each) for each in field.get("anyOf", ()) if each.get("type") != "null"]
    if kinds:
        return " or ".join(kinds)
    if "$ref" in field:
        return str(field["$ref"].rpartition("/")[2])
    if field.get("type") == "array":
        return f"list of {_kind(field.get('items', {}))}"
    return str(field.get("type", "any")) if field.get("type") else json.dumps(field.get("enum", "any"))


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>mvllm: API</title>
<meta name="viewport" content="width=device-width">
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #ddd } code { font-size: .95em }
td { padding: .1rem 1rem .1rem 0; vertical-align: top }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd } h2 { border-color: #444 } }
</style></head><body><h1>mvllm</h1><p>The same for programs: <a href="/openapi.json">/openapi.json</a>.</p>
{{content}}
</body></html>
"""
