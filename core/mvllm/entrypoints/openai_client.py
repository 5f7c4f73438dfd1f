"""Client side of the OpenAI API without a transport: URLs, server-sent events, model list and error texts.

`mvllm chat --url` and `mvllm complete --url` use it with httpx2, `mvllm bench serve` with a client of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

API_KEY_VARIABLE = "OPENAI_API_KEY"
DONE = b"[DONE]"
"""Data of the event that ends a stream."""

_MAX_ERROR_LENGTH = 500


def join_url(base_url: str, path: str) -> str:
    """The URL of an API path. `base_url` may end with a slash, or with the `/v1` with which `path` begins."""
    base = base_url.rstrip("/")
    if base.endswith("/v1") and path.startswith("/v1/"):
        base = base.removesuffix("/v1")
    return base + path


def authorization_headers(api_key: str | None) -> dict[str, str]:
    """The header for an API key, by default the key in the environment; empty without a key."""
    key = api_key or os.environ.get(API_KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


def split_lines(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of a stream that arrives in parts. Only a newline ends a line: JSON may have other separators."""
    rest = b""
    for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        yield from lines
    if rest:
        yield rest


def event_data(line: bytes) -> bytes:
    """The data of one line of a stream of server-sent events; empty for lines without data."""
    return line[5:].strip() if line.startswith(b"data:") else b""


def first_model_id(body: bytes) -> str:
    """The first model that `/v1/models` lists.

    Raises:
        ValueError, LookupError, TypeError: `body` is not such a list, or it is empty.
    """
    model_id: str = msgspec.json.decode(body)["data"][0]["id"]
    return model_id


def error_text(body: bytes) -> str:
    """The error message in the body of a failed response, shortened; the body itself where it is not JSON."""
    try:
        return error_message(msgspec.json.decode(body))
    except (ValueError, RecursionError):
        return shorten(body.decode("utf-8", "replace"))


def error_message(found: Any) -> str:
    """The message of an error object, or of an object with an error object under `error`, shortened."""
    error = found.get("error", found) if isinstance(found, dict) else found
    return shorten(str(error.get("message", error) if isinstance(error, dict) else error))


def shorten(text: str) -> str:
    """`text` on one line, of limited length."""
    text = " ".join(text.split())
    return text if len(text) <= _MAX_ERROR_LENGTH else text[:_MAX_ERROR_LENGTH] + "..."
