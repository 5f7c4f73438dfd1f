"""The OpenAPI document of `/openapi.json`. The schemas of requests' bodies and of query parameters are made
from the structs that decode them, those of responses from the types that routes name (`response_types.py`)."""

from __future__ import annotations

import inspect
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType, UnionType
from typing import Any, Union, get_args, get_origin

import msgspec
from starlette.routing import BaseRoute, Route

from mvllm.entrypoints.openai.common.api_format import OPENAI, APIFormat, find_format
from mvllm.entrypoints.openai.common.api_router import APIRoute
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


def request_body_schema(body_type: type[msgspec.Struct], example: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The part of a route's `openapi_extra` about a body that is a struct of this type.

    Args:
        example: A body; by default `EXAMPLE` of the struct, if it has one.
    """
    content: dict[str, Any] = {"schema": {"$ref": _REF.format(name=body_type.__name__)}}
    shown = vars(body_type).get("EXAMPLE") if example is None else example
    if shown is not None:
        content["example"] = shown
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def response_schema(response: Any) -> dict[str, Any]:
    """The part of a route's `openapi_extra` about its responses.

    Args:
        response: The type of the JSON that it sends, or a mapping from media types to types: for `text/event-stream`,
            the type of an event's data, for text `str`. A type may be a union.
    """
    by_media_type = response if isinstance(response, Mapping) else {"application/json": response}
    content = {}
    for name, kind in by_media_type.items():
        schemas, _ = msgspec.json.schema_components(_members(kind), ref_template=_REF)
        content[name] = {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}}
    return {"responses": {"200": {"description": "The response.", "content": content}}}


def response_types(response: Any) -> list[Any]:
    """The types that the description of a response needs; for None, none."""
    kinds = response.values() if isinstance(response, Mapping) else [] if response is None else [response]
    return [member for kind in kinds for member in _members(kind)]


def _members(kind: Any) -> Sequence[Any]:
    """The types of a union, which msgspec does not describe if they are several TypedDicts."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def openapi_document(
    routes: Iterable[BaseRoute],
    parts: Mapping[str, Iterable[BaseRoute]],
    body_types: Iterable[Any],
    formats: Sequence[APIFormat] = (),
    more_tags: Mapping[str, str] = MappingProxyType({}),
    public_paths: Iterable[str] = (),
) -> dict[str, Any]:
    """The OpenAPI document of an application.

    Args:
        routes: Its routes.
        parts: The routes of applications that are mounted in it, by the prefix of their paths.
        body_types: Types of bodies, of requests and of responses, beside those that its routes name.
        formats: The formats of APIs other than OpenAI's.
        more_tags: Tags of plugins, with their descriptions.
        public_paths: Paths that need no key.
    """
    routes, parts = list(routes), {prefix: list(part) for prefix, part in parts.items()}
    types = {id(each): each for each in [*body_types, *_types_of([*routes, *itertools.chain(*parts.values())])]}
    paths, part_schemas = _describe(routes)
    for prefix, part in parts.items():
        part_paths, more_schemas = _describe(part)
        part_schemas |= more_schemas
        for path, operations in part_paths.items():
            paths[prefix + path] = {method: {**each, "tags": ["plugins"]} for method, each in operations.items()}
    names: Counter[str] = Counter()
    for path, operations in paths.items():
        name = find_format(formats, {"path": path, "headers": []}).error_name
        content = {"application/json": {"schema": {"$ref": _REF.format(name=name)}}}
        for method, operation in operations.items():
            plain = re.sub(r"\W+", "_", f"{method}{path}").rstrip("_")
            names[plain] += 1  # /items/{id} and /items/id
            operation["operationId"] = plain if names[plain] == 1 else f"{plain}__{names[plain]}"
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = {"description": "An error.", "content": content}
            if path in public_paths:
                operation["security"] = []
    _, schemas = msgspec.json.schema_components(types.values(), ref_template=_REF)
    for schema in schemas.values():
        schema["description"] = inspect.cleandoc(schema.get("description", ""))
    errors = {each.error_name: dict(each.error_schema) for each in (OPENAI, *formats)}
    tags = {**TAGS, **more_tags}
    return {
        "openapi": "3.1.0",
        "info": {"title": "mvllm", "version": __version__},
        "security": [{"key": []}],
        "tags": [{"name": name, "description": description} for name, description in tags.items()],
        "paths": paths,
        "components": {
            "schemas": {**part_schemas, **schemas, **errors},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _describe(routes: Iterable[BaseRoute]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The operations of routes by path and method, and the schemas that they need besides those of bodies."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {}
    for route in routes:
        if isinstance(route, Route):
            if route.include_in_schema:
                for method in sorted((route.methods or set()) - {"HEAD"}):
                    paths.setdefault(route.path_format, {})[method.lower()] = _operation(route)
        elif (describe := getattr(route, "openapi", None)) is not None:  # another framework's
            found = describe()
            for path, operations in found["paths"].items():
                paths.setdefault(path, {}).update(operations)
            schemas |= found.get("components", {}).get("schemas", {})
    return paths, schemas


def _types_of(routes: Iterable[BaseRoute]) -> Iterator[Any]:
    for route in routes:
        if isinstance(route, APIRoute):
            yield from response_types(route.response)


def _operation(route: Route) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in route.param_convertors
    ]
    operation: dict[str, Any] = {"responses": {"200": {"description": "The response."}}}
    if isinstance(route, APIRoute):
        if route.response is not None:
            operation = response_schema(route.response)
        named = {"tags": list(route.tags), "summary": route.summary}
        responses = {**operation["responses"], **route.openapi_extra.get("responses", {})}
        operation = {name: value for name, value in named.items() if value}
        operation |= {**route.openapi_extra, "responses": responses}
        description = inspect.cleandoc(route.description or "")
        if description and description != route.summary:
            operation["description"] = description
        if route.query is not None:
            parameters += _query_parameters(route.query)
    if parameters:
        operation["parameters"] = parameters
    return operation


def _query_parameters(kind: type[msgspec.Struct]) -> list[dict[str, Any]]:
    _, schemas = msgspec.json.schema_components([kind], ref_template=_REF)
    schema = schemas[kind.__name__]
    required = schema.get("required", ())
    return [
        {"name": name, "in": "query", "required": name in required, "schema": field}
        for name, field in schema["properties"].items()
    ]
