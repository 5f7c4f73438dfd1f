"""Server-sent events: `data: {json}` and an empty line.

The idea: the chunks of one stream differ in a few bytes, so what they have in common is encoded once per stream, and a
chunk is those bytes around the encoded new text. One such chunk for each token of each stream is what a busy server
spends its time on.
"""

from __future__ import annotations

from typing import Any

import msgspec

from mvllm.entrypoints.openai.common.errors import APIError, error_body

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class ChunkEncoder:
    """What all chunks of one stream have in common.

    Args:
        head: The fields before `choices`.
        with_usage: Whether chunks have a `usage`, which is null but in the last one.
    """

    def __init__(self, head: dict[str, Any], *, with_usage: bool) -> None:
        self._before = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"

    def encode(self, choice: bytes) -> bytes:
        """A chunk with one choice, already encoded."""
        return self._before + choice + self._after

    def encode_with_usage(self, choice: bytes, usage: dict[str, Any]) -> bytes:
        """A chunk that says how many tokens there were; `choice` is empty in the last one."""
        return self._before + choice + b'],"usage":' + _encode(usage) + b"}\n\n"


def encode_json(value: Any) -> bytes:
    """Any value as JSON."""
    return _encode(value)


def error_event(error: APIError) -> bytes:
    """An error in the middle of a stream, and the stream's end."""
    body = error_body(error.status, error.message, param=error.param, code=error.code)
    return b"data: " + body + b"\n\n" + DONE
