"""The OpenAPI document of `/openapi.json`. The schemas of bodies are made from the structs that decode them."""

from __future__ import annotations

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


TAGS = {
    "generation": "Chat completions, completions and responses.",
    "embeddings": "Embeddings, classes, scores and ranks.",
    "models": "The models that requests may name.",
    "tokens": "Text to token ids, and back.",
    "monitoring": "Load, metrics and version.",
    "health": "Health probes, which need no key.",
    "admin": "Administration, which needs an administrator's key.",
    "plugins": "Routes of installed packages.",
}
"""The tags of routes, in the order in which they are shown, with their descriptions."""

_TEXT = "The capital of France is Paris."
_EXAMPLES: dict[type[msgspec.Struct], dict[str, Any]] = {
    ChatCompletionRequest: {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 32,
        "temperature": 0,
    },
    CompletionRequest: {"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0},
    ResponsesRequest: {"input": "What is the capital of France?", "max_output_tokens": 32, "temperature": 0},
    EmbeddingRequest: {"input": [_TEXT], "encoding_format": "float"},
    PoolingRequest: {"input": _TEXT},
    ClassificationRequest: {"input": _TEXT},
    ScoreRequest: {"text_1": "What is the capital of France?", "text_2": [_TEXT]},
    RerankRequest: {"query": "What is the capital of France?", "documents": [_TEXT, "Rome is in Italy."]},
    TokenizeRequest: {"prompt": _TEXT, "return_token_strs": True},
    DetokenizeRequest: {"tokens": [1, 2, 3]},
    LoadLoRAAdapterRequest: {"lora_name": "poems", "lora_path": "adapters/poems"},
    UnloadLoRAAdapterRequest: {"lora_name": "poems"},
}
"""The type of every body, with an example."""


def request_body_schema(body_type: type[msgspec.Struct]) -> dict[str, Any]:
    """The `openapi_extra` of a route whose body is a struct of this type."""
    content = {"schema": {"$ref": _REF.format(name=body_type.__name__)}, "example": _EXAMPLES[body_type]}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def openapi_document(app: FastAPI, parts: Mapping[str, FastAPI] | None = None) -> dict[str, Any]:
    """The OpenAPI document of an application.

    Args:
        parts: Applications that are mounted in it, by the prefix of their paths.
    """
    if app.openapi_schema:
        return app.openapi_schema
    document = get_openapi(title="mvllm", version=__version__, routes=app.routes)
    _, schemas = msgspec.json.schema_components(_EXAMPLES, ref_template=_REF)
    components = document.setdefault("components", {})
    part_schemas: dict[str, Any] = {}
    for prefix, part in (parts or {}).items():
        found = get_openapi(title="mvllm", version=__version__, routes=part.routes)
        for path, operations in found["paths"].items():
            document["paths"][prefix + path] = operations
            for operation in operations.values():
                operation["tags"] = ["plugins"]
        part_schemas |= found.get("components", {}).get("schemas", {})
    components["schemas"] = {**part_schemas, **schemas, "Error": _ERROR}
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"key": []}]
    document["tags"] = [{"name": name, "description": description} for name, description in TAGS.items()]
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
