"""Server-sent events: `data: {json}` and an empty line.

The chunks of one stream differ in a few bytes. Their common bytes are encoded once per stream, and a chunk is these
bytes around the encoded choice: a busy server spends most of its time on such chunks, one for each token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mvllm.entrypoints.openai.common.errors import APIError, error_body
from mvllm.entrypoints.openai.common.json_response import encode_json
from mvllm.entrypoints.openai.common.usage import UsageCounter
from mvllm.entrypoints.openai.protocol import StreamOptions

DONE = b"data: [DONE]\n\n"


class ChunkEncoder:
    """Encodes the chunks of one stream.

    Args:
        fields: The fields before `choices`, the same in all chunks.
        usage: Counts the tokens of the stream.
        options: Of the request; they say which chunks have a `usage`.

    Attributes:
        continuous_usage: Whether every chunk has the usage so far.
        encode_delta: Encodes a chunk with text: `encode` or `encode_with_usage`.
        end_fields: Fields of the response, in the chunk that ends a choice.
    """

    def __init__(self, fields: dict[str, Any], usage: UsageCounter, options: StreamOptions | None) -> None:
        self._usage = usage
        self._includes_usage = options is not None and bool(options.include_usage)
        self.continuous_usage = self._includes_usage and options is not None and bool(options.continuous_usage_stats)
        self._before = b"data: " + encode_json(fields)[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if self._includes_usage else b"]}\n\n"
        self.encode_delta: Callable[[bytes], bytes] = self.encode_with_usage if self.continuous_usage else self.encode
        self.end_fields: dict[str, Any] = {}

    def encode_start_of_choice(self, choice: bytes, num_unsent: int, fields: dict[str, Any]) -> bytes:
        """A choice's first chunk, without text.

        Args:
            num_unsent: Completion tokens of later chunks that have been counted.
            fields: Further fields of the chunk.
        """
        chunk = self.encode_with_usage(choice, num_unsent) if self.continuous_usage else self.encode(choice)
        return _with_fields(chunk, fields)

    def encode_end_of_choice(self, choice: bytes) -> bytes:
        """The chunk with a choice's finish reason, with `end_fields`."""
        return _with_fields(self.encode_delta(choice), self.end_fields)

    def encode(self, choice: bytes) -> bytes:
        """A chunk with one choice, already encoded. Its usage is null, or missing if the request asks for none."""
        return self._before + choice + self._after

    def encode_with_usage(self, choice: bytes, num_unsent: int = 0) -> bytes:
        """A chunk with one choice, or with no choice if that is empty, and the usage so far."""
        return self._before + choice + b'],"usage":' + encode_json(self._usage.to_usage(num_unsent)) + b"}\n\n"

    def wrap(self, before: bytes, after: bytes) -> tuple[bytes, bytes]:
        """The bytes of a chunk before and after its text, if `before` and `after` are those of its choice."""
        return self._before + before, after + self._after

    def encode_end(self) -> bytes:
        """The end of the stream: a chunk with the usage, if the request asks for it, and `[DONE]`."""
        return (self.encode_with_usage(b"") if self._includes_usage else b"") + DONE


def _with_fields(chunk: bytes, fields: dict[str, Any]) -> bytes:
    return chunk.removesuffix(b"}\n\n") + b"," + encode_json(fields)[1:] + b"\n\n" if fields else chunk


def error_event(error: APIError) -> bytes:
    """An error in the middle of a stream, and the stream's end."""
    body = error_body(error.status, error.message, param=error.param, code=error.code)
    return b"data: " + body + b"\n\n" + DONE
