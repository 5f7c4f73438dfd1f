"""Compares responses of a server with what `/openapi.json` says of them.

A server of the tests gets its clients from here (`ServerProcess.client`), so all that e2e tests receive is compared.
The description is made from this environment's packages without a server, so that tests which count requests see none.
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
from functools import cache
from typing import Any

import httpx2
import jsonschema

OPEN = frozenset({"ResponseItem", "TokenizerInfo", "StoredMessage", "RequestMessage"})
"""Schemas of objects with fields that are the client's or the model's; others must have the declared fields only."""

MAX_BYTES = 1 << 16
"""Longer bodies repeat what shorter ones have, and take long to compare."""


@cache
def api_document() -> dict[str, Any]:
    """The description of the API with the routes of all installed packages."""
    from mvllm.entrypoints.openai.server.app import build_app_without_engine
    from mvllm.entrypoints.openai.server.settings import ServerSettings

    async def read() -> dict[str, Any]:
        app, close = build_app_without_engine(ServerSettings())
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://x") as client:
            found: dict[str, Any] = (await client.get("/openapi.json")).json()
        await close()
        return found

    return asyncio.run(read())


class ResponseChecker:
    """Compares responses with a description of the API.

    Args:
        document: The description.
    """

    def __init__(self, document: dict[str, Any]) -> None:
        document = copy.deepcopy(document)
        components = document["components"]["schemas"]
        for name, schema in components.items():
            if name not in OPEN and "properties" in schema:
                schema["additionalProperties"] = False
        self._components = components
        self._paths = [(_pattern(path), operations) for path, operations in document["paths"].items()]
        self._validators: dict[str, Any] = {}

    def check(self, method: str, path: str, status: int, media_type: str, body: bytes, *, anthropic: bool) -> bool:
        """Compares one response; returns whether its route is known.

        Args:
            anthropic: Whether the request had the header by which errors and models are Anthropic's.

        Raises:
            AssertionError: It is not as described.
        """
        operation = self._operation(method, path)
        if operation is None or len(body) > MAX_BYTES:
            return False
        responses = operation["responses"]
        is_error = status >= 400 and str(status) not in responses
        described = responses["default" if is_error else str(status)]
        media_type = media_type.partition(";")[0]
        where = f"{method} {path}: {status} {media_type}"
        assert "content" in described, f"{where} is not described"
        assert media_type in described["content"], f"{where}: described are {list(described['content'])}"
        schema = described["content"][media_type]["schema"]
        if is_error and anthropic:
            schema = {"$ref": "#/components/schemas/AnthropicError"}
        validator = self._validator(schema)
        for part in _parts(media_type, body):
            if "error" in part and "choices" not in part and media_type == "text/event-stream":
                continue  # the end of a stream that has failed
            error = jsonschema.exceptions.best_match(validator.iter_errors(part))
            assert error is None, f"{where} at {error.json_path}: {error.message}"
        return True

    def _operation(self, method: str, path: str) -> dict[str, Any] | None:
        found = [
            operations[method.lower()]
            for pattern, operations in self._paths
            if method.lower() in operations and pattern.fullmatch(path)
        ]
        return found[0] if found else None

    def _validator(self, schema: dict[str, Any]) -> Any:
        key = json.dumps(schema)
        if key not in self._validators:
            whole = {**schema, "components": {"schemas": self._components}}
            self._validators[key] = jsonschema.Draft202012Validator(whole)
        return self._validators[key]


def _pattern(path: str) -> re.Pattern[str]:
    """A pattern for a path with parameters. The plain paths of the document come first."""
    return re.compile(re.sub(r"\\{\w+\\}", "(?!input_tokens|compact)[^/]+", re.escape(path)))


def _parts(media_type: str, body: bytes) -> list[Any]:
    """The JSON values of a body: one, or those of the events or lines of a stream."""
    if media_type == "application/json":
        return [json.loads(body)]
    if media_type == "application/x-ndjson":
        return [json.loads(line) for line in body.splitlines() if line.strip()]
    if media_type == "text/event-stream":
        lines = [line[6:] for line in body.splitlines() if line.startswith(b"data: ")]
        return [json.loads(line) for line in lines if line != b"[DONE]"]
    return []


@cache
def installed_checker() -> ResponseChecker:
    """That of this environment's packages."""
    return ResponseChecker(api_document())


class CheckedClient(httpx2.Client):
    """A client that compares what it receives, unless it is read as a stream."""

    def send(self, request: httpx2.Request, *, stream: bool = False, **settings: Any) -> httpx2.Response:
        response = super().send(request, stream=stream, **settings)
        if not stream and request.method != "HEAD":
            installed_checker().check(
                request.method,
                request.url.path,
                response.status_code,
                response.headers.get("content-type", ""),
                response.content,
                anthropic="anthropic-version" in request.headers,
            )
        return response
