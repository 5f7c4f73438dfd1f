"""The OpenAPI document of `/openapi.json`. The schemas of bodies are made from the structs that decode them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from mvllm.entrypoints.anthropic.protocol import CountTokensRequest, MessagesRequest
from mvllm.entrypoints.ollama.protocol import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from mvllm.entrypoints.openai.common.errors import ErrorFormat
from mvllm.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    ClassificationRequest,
    CollectiveRpcRequest,
    CompletionRequest,
    CompletionUpdateRequest,
    ConversationItemsRequest,
    ConversationRequest,
    ConversationUpdateRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    FinishWeightUpdateRequest,
    ImageGenerationRequest,
    InitWeightTransferRequest,
    LoadLoRAAdapterRequest,
    PoolingRequest,
    RerankRequest,
    ResponsesRequest,
    ScoreRequest,
    TokenizeRequest,
    UnloadLoRAAdapterRequest,
    UpdateLoRAAdapterRequest,
    UpdateWeightsRequest,
)
from mvllm.version import __version__

_REF = "#/components/schemas/{name}"
_TEXT_FIELD = {"type": "string"}
_OPENAI_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _TEXT_FIELD,
                "type": _TEXT_FIELD,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": _TEXT_FIELD, "message": _TEXT_FIELD},
        },
        "request_id": {"type": ["string", "null"]},
    },
}
_OLLAMA_ERROR = {"type": "object", "required": ["error"], "properties": {"error": _TEXT_FIELD}}
_ERRORS = {
    ErrorFormat.OPENAI: ("Error", _OPENAI_ERROR),
    ErrorFormat.ANTHROPIC: ("AnthropicError", _ANTHROPIC_ERROR),
    ErrorFormat.OLLAMA: ("OllamaError", _OLLAMA_ERROR),
}
"""Name and schema of the errors of each API."""


TAGS = {
    "generation": "Chat completions, completions, responses, conversations and messages.",
    "embeddings": "Embeddings, classes, scores and ranks.",
    "models": "The models that requests may name.",
    "tokens": "Text to token ids, and back.",
    "ollama": "The API of Ollama, for its clients.",
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
    ImageGenerationRequest: {"prompt": "A dog that runs in the rain.", "n": 1},
    ResponsesRequest: {"input": "What is the capital of France?", "max_output_tokens": 32, "temperature": 0},
    ConversationRequest: {"metadata": {"topic": "cities"}},
    ConversationUpdateRequest: {"metadata": {"topic": "rivers"}},
    CompletionUpdateRequest: {"metadata": {"topic": "rivers"}},
    ConversationItemsRequest: {"items": [{"role": "user", "content": "What is the capital of France?"}]},
    EmbeddingRequest: {"input": [_TEXT], "encoding_format": "float"},
    PoolingRequest: {"input": _TEXT},
    ClassificationRequest: {"input": _TEXT},
    ScoreRequest: {"text_1": "What is the capital of France?", "text_2": [_TEXT]},
    RerankRequest: {"query": "What is the capital of France?", "documents": [_TEXT, "Rome is in Italy."]},
    MessagesRequest: {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 32,
        "temperature": 0,
    },
    CountTokensRequest: {"messages": [{"role": "user", "content": _TEXT}]},
    OllamaChatRequest: {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "stream": False,
        "options": {"temperature": 0},
    },
    OllamaGenerateRequest: {"prompt": "What is the capital of France?", "stream": False, "options": {"temperature": 0}},
    OllamaEmbedRequest: {"input": [_TEXT]},
    OllamaEmbeddingsRequest: {"prompt": _TEXT},
    OllamaShowRequest: {},
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
    components["schemas"] = {**part_schemas, **schemas, **dict(_ERRORS.values())}
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"key": []}]
    document["tags"] = [{"name": name, "description": description} for name, description in TAGS.items()]
    for path, operations in document["paths"].items():
        name, _ = _ERRORS[ErrorFormat.of_request({"path": path, "headers": []})]
        content = {"application/json": {"schema": {"$ref": _REF.format(name=name)}}}
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = {"description": "An error.", "content": content}
    app.openapi_schema = document
    return document
