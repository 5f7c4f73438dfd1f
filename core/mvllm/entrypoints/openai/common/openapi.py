"""The OpenAPI document of `/openapi.json`. The schemas of bodies are made from the structs that decode them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from mvllm.entrypoints.openai.common.api_format import OPENAI, APIFormat, find_format
from mvllm.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    ClassificationRequest,
    CollectiveRpcRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    FinishWeightUpdateRequest,
    InitWeightTransferRequest,
    LoadLoRAAdapterRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
    UnloadLoRAAdapterRequest,
    UpdateLoRAAdapterRequest,
    UpdateWeightsRequest,
)
from mvllm.version import __version__

_REF = "#/components/schemas/{name}"

TAGS = {
    "generation": "Chat completions, completions, responses, conversations and messages.",
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
    EmbeddingRequest: {"input": [_TEXT], "encoding_format": "float"},
    PoolingRequest: {"input": _TEXT},
    ClassificationRequest: {"input": _TEXT},
    ScoreRequest: {"text_1": "What is the capital of France?", "text_2": [_TEXT]},
    RerankRequest: {"query": "What is the capital of France?", "documents": [_TEXT, "Rome is in Italy."]},
    TokenizeRequest: {"prompt": _TEXT, "return_token_strs": True},
    DetokenizeRequest: {"tokens": [1, 2, 3]},
    LoadLoRAAdapterRequest: {"lora_name": "poems", "lora_path": "adapters/poems"},
    UnloadLoRAAdapterRequest: {"lora_name": "poems"},
    UpdateLoRAAdapterRequest: {"lora_name": "poems"},
    InitWeightTransferRequest: {
        "init_info": {"master_address": "10.0.0.1", "master_port": 29600, "world_size": 2},
    },
    UpdateWeightsRequest: {"update_info": {"path": "checkpoints/step-100"}},
    FinishWeightUpdateRequest: {"weight_version": 100},
    CollectiveRpcRequest: {"method": "name_of_a_method", "args": []},
}
"""An example of each of core's bodies."""


def request_body_schema(body_type: type[msgspec.Struct], example: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The `openapi_extra` of a route whose body is a struct of this type.

    Args:
        example: A body; by default core's own example.
    """
    content: dict[str, Any] = {"schema": {"$ref": _REF.format(name=body_type.__name__)}}
    if (shown := _EXAMPLES.get(body_type, example)) is not None:
        content["example"] = shown
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def openapi_document(
    app: FastAPI,
    parts: Mapping[str, FastAPI],
    body_types: Iterable[type[msgspec.Struct]],
    formats: Sequence[APIFormat] = (),
    more_tags: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """The OpenAPI document of an application.

    Args:
        parts: Applications that are mounted in it, by the prefix of their paths.
        body_types: The types of the bodies of its routes.
        formats: The formats of APIs other than OpenAI's.
        more_tags: Tags of plugins, with their descriptions.
    """
    if app.openapi_schema:
        return app.openapi_schema
    document = get_openapi(title="mvllm", version=__version__, routes=app.routes)
    _, schemas = msgspec.json.schema_components(body_types, ref_template=_REF)
    components = document.setdefault("components", {})
    part_schemas: dict[str, Any] = {}
    errors = {each.error_name: dict(each.error_schema) for each in (OPENAI, *formats)}
    for prefix, part in (parts or {}).items():
        found = get_openapi(title="mvllm", version=__version__, routes=part.routes)
        for path, operations in found["paths"].items():
            document["paths"][prefix + path] = operations
            for operation in operations.values():
                operation["tags"] = ["plugins"]
        part_schemas |= found.get("components", {}).get("schemas", {})
    components["schemas"] = {**part_schemas, **schemas, **errors}
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"key": []}]
    tags = {**TAGS, **more_tags}
    document["tags"] = [{"name": name, "description": description} for name, description in tags.items()]
    for path, operations in document["paths"].items():
        name = find_format(formats, {"path": path, "headers": []}).error_name
        content = {"application/json": {"schema": {"$ref": _REF.format(name=name)}}}
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = {"description": "An error.", "content": content}
    app.openapi_schema = document
    return document
