"""The HTTP client of `mvllm bench serve`: sends requests to an OpenAI-compatible server and times the responses.

It usually shares the machine with the server and reads hundreds of streams at once, so the work per chunk is small:
find the end of the line, decode a few fields, record the time at which it was received.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import msgspec

from mvllm.extension_api import ConfigError, MvllmError
from mvllm.extension_api.http_connection import ConnectionLostError
from mvllm.extension_api.openai_client import (
    DONE,
    error_message,
    error_text,
    event_data,
    first_model_id,
    join_url,
    shorten,
)
from mvllm_bench.datasets import SampleRequest
from mvllm_bench.metrics import RequestResult
from mvllm_bench.server_connections import ServerConnections

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
"""Endpoint types and their paths."""

_HEADERS = {"Content-Type": "application/json", "Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "mvllm"}


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class StreamError(MvllmError):
    """A response is an error, or a stream is incomplete."""


_FAILURES = (ConnectionLostError, OSError, StreamError, msgspec.DecodeError, ValueError)


@dataclass(frozen=True)
class ServerEndpoint:
    """The server of a benchmark, and the fields that all requests share.

    Attributes:
        base_url: URL without the endpoint's path.
        endpoint: The path.
        model: Name of the model on the server.
        chat: Whether the endpoint takes messages instead of a prompt.
        ignore_eos: Generate until the output has its full length.
        extra_body: Additional fields of the body; they override the client's.
        headers: Headers of every request.
        timeout: Seconds for a whole request.
        verify: Check the server's certificate.
    """

    base_url: str
    endpoint: str
    model: str
    chat: bool = False
    ignore_eos: bool = False
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 6 * 3600
    verify: bool = True

    @property
    def url(self) -> str:
        return join_url(self.base_url, self.endpoint)

    def body(self, sample: SampleRequest) -> bytes:
        """The JSON body of a request."""
        body: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        if self.chat:
            body |= {"messages": [{"role": "user", "content": _content(sample)}]}
            body["max_completion_tokens"] = sample.output_len
        else:
            body |= {"prompt": sample.prompt, "max_tokens": sample.output_len}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return msgspec.json.encode(body | dict(self.extra_body))


def _content(sample: SampleRequest) -> str | list[dict[str, Any]]:
    """The content of the one message of a request."""
    if not sample.images:
        return sample.prompt
    pictures = [{"type": "image_url", "image_url": {"url": url}} for url in sample.images]
    return [*pictures, {"type": "text", "text": sample.prompt}]


class BenchmarkClient:
    """HTTP connections to a server; an asynchronous context manager, for one event loop."""

    def __init__(self, target: ServerEndpoint) -> None:
        self._target = target

    async def __aenter__(self) -> BenchmarkClient:
        target = self._target
        self._http = ServerConnections(target.base_url, {**_HEADERS, **target.headers}, verify=target.verify)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    async def first_model(self) -> str:
        """The first model that the server lists.

        Raises:
            ConfigError: It lists none.
        """
        url = join_url(self._target.base_url, "/v1/models")
        try:
            async with asyncio.timeout(self._target.timeout):
                _, body = await self._http.request("GET", url)
            return first_model_id(body)
        except (*_FAILURES, LookupError, TypeError) as e:
            raise ConfigError(f"Cannot get a model name from {url}: {_describe(e)}. Set --model.") from e

    async def send(self, sample: SampleRequest) -> RequestResult:
        """Sends a request and reads its response to the end. Errors are stored in the result."""
        body = self._target.body(sample)
        recorder = _StreamRecorder(RequestResult(start=time.perf_counter()))
        try:
            async with asyncio.timeout(self._target.timeout):
                status, text = await self._http.request("POST", self._target.url, body, recorder.read)
            if status != 200:
                raise StreamError(f"HTTP status {status}: {error_text(text)}")
            recorder.close()
        except _FAILURES as e:
            recorder.result.error = _describe(e)
            recorder.result.latency = time.perf_counter() - recorder.result.start
        return recorder.result


class _StreamRecorder:
    """Records the chunks of a stream and their times in a RequestResult."""

    def __init__(self, result: RequestResult) -> None:
        self.result = result
        self.ended = False
        self._rest = b""
        self._texts: list[str] = []
        self._last_text_time: float | None = None
        self._first_choice_time: float | None = None
        self._last_choice_time: float | None = None

    def read(self, data: bytes) -> None:
        """Records the chunks in new bytes of the stream, which have been received now.

        Raises:
            StreamError, msgspec.DecodeError: A chunk is an error, or no chunk.
        """
        now = time.perf_counter()
        *lines, self._rest = (self._rest + data).split(b"\n") if self._rest else data.split(b"\n")
        for line in lines:
            if not (found := event_data(line)):
                continue
            if found == DONE:
                self.ended = True
            else:
                self.record(_decode_chunk(found), now)

    def record(self, chunk: _Chunk, now: float) -> None:
        """Records a chunk that was received at time `now`.

        Raises:
            StreamError: The chunk is an error.
        """
        if chunk.error is not None:
            raise StreamError(f"error in the stream: {error_message(chunk.error)}")
        if chunk.usage is not None:
            self.result.prompt_tokens = chunk.usage.prompt_tokens
            self.result.output_tokens = chunk.usage.completion_tokens
        if not chunk.choices:
            return
        self._last_choice_time = now
        if self._first_choice_time is None:
            self._first_choice_time = now
        choice = chunk.choices[0]
        if choice.finish_reason is not None:
            self.ended = True
        text = _text_of(choice)
        if text is None:
            return
        if self._last_text_time is None:
            self.result.ttft = now - self.result.start
        else:
            self.result.itl.append(now - self._last_text_time)
        self._last_text_time = now
        self._texts.append(text)

    def close(self) -> None:
        """Computes the totals after the end of the stream.

        Raises:
            StreamError: The stream was incomplete.
        """
        if self._first_choice_time is None or self._last_choice_time is None:
            raise StreamError("the stream ended without a response")
        if not self.ended:
            raise StreamError("the stream ended in the middle of the response")
        if self._last_text_time is None:  # tokens without text, such as special ones
            self.result.ttft = self._first_choice_time - self.result.start
        self.result.latency = self._last_choice_time - self.result.start
        self.result.text = "".join(self._texts)


def _text_of(choice: _Choice) -> str | None:
    """The text of a chunk; None for chunks without text, such as the first and the last of a stream."""
    if choice.delta is None:
        return choice.text or None
    delta = choice.delta
    return delta.content or delta.reasoning_content or delta.reasoning or ("" if delta.tool_calls else None)


def _describe(error: BaseException) -> str:
    if isinstance(error, (StreamError, ConnectionLostError)):
        return str(error)
    if isinstance(error, asyncio.TimeoutError):
        return f"no complete response within the timeout ({type(error).__name__})"
    return shorten(f"{type(error).__name__}: {error}")
