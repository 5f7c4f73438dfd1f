"""`--url`: `mvllm chat` and `mvllm complete` with a running OpenAI-compatible server instead of an engine.

Ctrl-C closes the connection of a response, which makes the server abort the request.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from mvllm.extension_api import ConfigError, MvllmError, RequestError, SamplingParams
from mvllm.extension_api.cli import EngineArgs, plain_reason
from mvllm.extension_api.openai_client import (
    API_KEY_VARIABLE,
    DONE,
    authorization_headers,
    error_message,
    error_text,
    event_data,
    first_model_id,
    join_url,
    split_lines,
)

if TYPE_CHECKING:
    import httpx2

    from mvllm.extension_api.terminal import ThroughputCounter

_SECONDS = 600.0


def add_url_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options for a running server."""
    group = parser.add_argument_group("server", "Instead of an engine in this process.")
    group.add_argument(
        "--url",
        metavar="URL",
        help="Send requests to this OpenAI-compatible server; --model is a name on it, by default the first it lists.",
    )
    group.add_argument(
        "--api-key", metavar="KEY", help=f"Key of the server. Default, and safer: the variable {API_KEY_VARIABLE}."
    )


class BrokenResponseError(MvllmError):
    """A streamed response that ended early."""


class RemoteModel:
    """A model behind an OpenAI-compatible server.

    Args:
        args: The parsed command line, with `url`. Its sampling parameters are sent with every request.

    Raises:
        ConfigError: The command line has options of an engine, too, or the server lists no model.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._url: str = args.url
        self._headers = {
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
            **authorization_headers(args.api_key),
        }
        self._sampling = _given_sampling(args)
        _refuse_engine_settings(args)
        self._model: str = getattr(args, "model", None) or self._first_model_name()

    @property
    def summary(self) -> str:
        """The model and the server, for display."""
        return f"model {self._model} at {self._url}"

    def print_chat(self, messages: list[dict[str, Any]], speed: ThroughputCounter) -> tuple[str, str | None]:
        """Prints the assistant's next message while it arrives; returns its text, and its error or None."""
        return self._stream_and_print("/v1/chat/completions", {"messages": messages}, speed)

    def print_completion(self, prompt: str, speed: ThroughputCounter) -> tuple[str, str | None]:
        """Prints the continuation of a text while it arrives; returns it, and the error that ended it or None."""
        return self._stream_and_print("/v1/completions", {"prompt": prompt}, speed)

    def _stream_and_print(self, path: str, body: dict[str, Any], speed: ThroughputCounter) -> tuple[str, str | None]:
        start, text, num_pieces, num_tokens, error = time.perf_counter(), "", 0, 0, None
        body = {**self._sampling, **body, "model": self._model, "stream": True}
        body["stream_options"] = {"include_usage": True}
        try:
            for event in self._events(path, body):
                if event.get("error"):
                    error = error_message(event)
                    break
                for choice in event.get("choices") or ():
                    delta = choice.get("delta") or {}
                    piece = choice.get("text") or delta.get("reasoning_content") or delta.get("content") or ""
                    num_pieces += bool(piece)
                    text += piece
                    print(piece, end="", flush=True)
                num_tokens = (event.get("usage") or {}).get("completion_tokens") or num_tokens
        except BrokenResponseError as e:
            error = str(e)
        finally:
            speed.seconds += time.perf_counter() - start
            speed.num_tokens += num_tokens or num_pieces
        print(flush=True)
        return text, error

    def _first_model_name(self) -> str:
        import httpx2

        with self._request("GET", "/v1/models") as response:
            try:
                return first_model_id(b"".join(response.iter_raw()))
            except (httpx2.HTTPError, ValueError, LookupError, TypeError) as e:
                raise ConfigError(f"{self._url} lists no model. Name one with --model.") from e

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed response.

        Raises:
            RequestError, MvllmError: As `_request`.
            BrokenResponseError: The stream ends early, or is not a stream of server-sent events.
        """
        import httpx2

        ended = False
        with self._request("POST", path, json.dumps(body)) as response:
            try:
                for line in split_lines(response.iter_raw()):
                    data = event_data(line)
                    ended = ended or data == DONE
                    if data and not ended:
                        yield json.loads(data)
            except (httpx2.HTTPError, ValueError) as e:
                raise BrokenResponseError(f"The response of {self._url} broke off: {type(e).__name__}: {e}") from e
        if not ended:
            raise BrokenResponseError(f"The response of {self._url} broke off.")

    @contextlib.contextmanager
    def _request(self, method: str, path: str, body: str | None = None) -> Iterator[httpx2.Response]:
        """Sends a request; yields the response, whose body has not been read.

        Raises:
            RequestError: The server rejects the request; the message has the server's reason.
            MvllmError: The server cannot be reached.
        """
        import httpx2

        from mvllm.extension_api.http_client import open_client

        url = join_url(self._url, path)
        try:
            parts = httpx2.URL(url)
        except httpx2.InvalidURL as e:
            raise ConfigError(f"--url is {self._url!r}: {e}.") from e
        if parts.scheme not in ("http", "https") or not parts.host:
            raise ConfigError(f"--url is {self._url!r}; it must be like http://localhost:8000.")
        with contextlib.ExitStack() as stack:
            client = stack.enter_context(open_client(_SECONDS))
            try:
                stream = client.stream(method, url, content=body and body.encode(), headers=self._headers)
                response = stack.enter_context(stream)
                if response.status_code != 200:
                    body_text = b"".join(response.iter_raw())
            except httpx2.HTTPError as e:
                raise MvllmError(
                    f"{self._url} does not answer: {plain_reason(e)}. Start a server there with `mvllm serve MODEL`, "
                    "or check --url."
                ) from e
            if response.status_code != 200:
                hint = " Give the key with --api-key or OPENAI_API_KEY." if response.status_code == 401 else ""
                raise RequestError(
                    f"{self._url} answers with status {response.status_code}: {error_text(body_text)}{hint}"
                )
            yield response


def _given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters of the command line, after the checks of SamplingParams."""
    names = {field.name for field in msgspec.structs.fields(SamplingParams)} - {"logits_processors"}
    given = {name: value for name, value in vars(args).items() if name in names}
    SamplingParams(**given)
    if args.default_max_tokens is not None:
        given.setdefault("max_tokens", args.default_max_tokens)
    return given


def _refuse_engine_settings(args: argparse.Namespace) -> None:
    names = {setting.name for setting in EngineArgs.options()} - {"model", "seed"}
    if given := sorted(names & vars(args).keys()):
        flag = f"--{given[0].replace('_', '-')}"
        raise ConfigError(f"{flag} is a setting of an engine in this process; leave it out with --url.")
