"""The whole HTTP application with an engine core that generates a given text."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

import httpx2
import uvicorn
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from mvllm.config.engine_args import EngineArgs
from mvllm.engine.async_llm import AsyncLLM
from mvllm.entrypoints.openai.common.chat_prompt_renderer import ChatPromptRenderer
from mvllm.entrypoints.openai.common.chat_template_renderer import ChatTemplateRenderer
from mvllm.entrypoints.openai.common.serving_context import ServingContext
from mvllm.entrypoints.openai.common.serving_models import OpenAIServingModels
from mvllm.entrypoints.openai.common.tokenizer_pool import TokenizerPool
from mvllm.entrypoints.openai.server.app import build_app
from mvllm.entrypoints.openai.server.connections import ConnectionTable
from mvllm.entrypoints.openai.server.http_metrics import HTTPMetrics
from mvllm.entrypoints.openai.server.http_protocol import LimitedHttpProtocol, uvicorn_settings
from mvllm.entrypoints.openai.server.server_state import ServerState
from mvllm.entrypoints.openai.server.settings import ServerSettings
from mvllm.messages.requests import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason, SchedulerStats
from tests.unit.entrypoints.builders import TOKENIZER

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% for c in m['tool_calls'] or [] %}"
    "{{ c['function']['arguments']['city'] }}{% endfor %}\n{% endfor %}"
    "{% for t in tools or [] %}{{ t['function']['name'] }} {% endfor %}"
)


class ScriptedCore:
    """An engine core that generates one text, token by token."""

    platform_summary, cache_summary, stats = "script", None, SchedulerStats()
    num_other_sequences = 0
    heartbeat_age, failure, core_pids = 0.0, None, ()

    def __init__(self, config: Any, text: str, reason: FinishReason) -> None:
        self.config, self.text, self.reason = config, text, reason
        self.tokenizer = TOKENIZER
        self.prompts: list[str] = []
        self.requests: list[EngineCoreRequest] = []

    def attach(self, loop: asyncio.AbstractEventLoop, on_outputs: Any, on_death: Any, on_sleep: Any) -> None:
        self.loop, self.on_outputs = loop, on_outputs

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        for request in requests:
            self.requests.append(request)
            self.prompts.append(self.tokenizer.decode(request.prompt_token_ids))
            ids = self.tokenizer.encode(self.text, add_special_tokens=False)
            self.loop.call_soon(self.write, request.request_id, ids)

    def write(self, request_id: str, ids: list[int]) -> None:
        if not ids:
            ids = [self.tokenizer.eos_token_id or 0] if self.reason is FinishReason.STOP else []
            self.send(EngineCoreOutput(request_id, ids, self.reason))
            return
        self.send(EngineCoreOutput(request_id, ids[:1]))
        self.loop.call_later(0, self.write, request_id, ids[1:])

    def send(self, output: EngineCoreOutput) -> None:
        self.on_outputs(EngineCoreOutputs(outputs=[output]))

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        pass

    def shutdown(self) -> None:
        pass


class Server:
    """An application whose model generates `text` for every request.

    Args:
        folder: Folder of the model.
        reason: Finish reason.
        parsers: Arguments of ChatPromptRenderer.

    Attributes:
        templates: Renders conversations in processes; None for this process.
    """

    def __init__(self, folder: str, text: str, reason: FinishReason = FinishReason.STOP, **parsers: Any) -> None:
        self.core = ScriptedCore(EngineArgs.from_kwargs(model=folder).create_engine_config(), text, reason)
        self.parsers = {"tool_parser": "hermes", "reasoning_parser": "qwen3", **parsers}
        self.settings = ServerSettings()
        self.force_include_usage = False
        self.templates: ChatTemplateRenderer | None = None

    def exchange(
        self,
        *requests: tuple[str, str, dict[str, Any] | None],
        keys: Sequence[str] = (),
        headers: Mapping[str, str] | None = None,
    ) -> list[httpx2.Response]:
        """Sends requests (method, path, body) one after the other, each with the API key at its index of `keys`, and
        all with the same other headers.

        In a path or a body, `{id}` is replaced by the id in the last response that had one.
        """

        async def run() -> list[httpx2.Response]:
            answers: list[httpx2.Response] = []
            async with (
                self._running_app() as app,
                httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://x") as client,
            ):
                last = ""
                for (method, path, body), key in itertools.zip_longest(requests, keys):
                    sent = {**(headers or {}), **({} if key is None else {"Authorization": f"Bearer {key}"})}
                    if body is not None:
                        body = {key: last if value == "{id}" else value for key, value in body.items()}
                    path = path.replace("{id}", last)
                    answers.append(await client.request(method, path, json=body, headers=sent))
                    if answers[-1].headers["content-type"] == "application/json":
                        last = answers[-1].json().get("id", last)
            return answers

        return asyncio.run(run())

    def send(self, *requests: Mapping[str, Any]) -> list[httpx2.Response]:
        """Sends requests one after the other, each with the arguments of `httpx2.AsyncClient.request`."""

        async def run() -> list[httpx2.Response]:
            async with (
                self._running_app() as app,
                httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://x") as client,
            ):
                return [await client.request(**{"method": "POST", **request}) for request in requests]

        return asyncio.run(run())

    def post_over_connection(self, body: dict[str, Any], path: str) -> bytes:
        """Sends a request over a connection to the server's HTTP protocol; returns the response's chunks, joined."""

        async def run() -> bytes:
            data = json.dumps(body).encode()
            headers = f"Host: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
            head = f"POST {path} HTTP/1.1\r\n{headers}\r\n\r\n"
            async with self._running_app() as app:
                config, table = uvicorn.Config(app, **uvicorn_settings()), ConnectionTable(2, 1)
                loop = asyncio.get_running_loop()
                listener = await loop.create_server(lambda: LimitedHttpProtocol(config, table, {}), "127.0.0.1", 0)
                reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
                writer.write(head.encode() + data)
                response = await reader.read()
                writer.close()
                listener.close()
            status, _, chunks = response.partition(b"\r\n\r\n")
            assert status.startswith(b"HTTP/1.1 200 OK"), response
            joined = b""
            while chunks:
                length, _, chunks = chunks.partition(b"\r\n")
                size = int(length, 16)
                assert chunks[size : size + 2] == b"\r\n"
                joined, chunks = joined + chunks[:size], chunks[size + 2 :]
            return joined

        return asyncio.run(run())

    @contextlib.asynccontextmanager
    async def _running_app(self) -> AsyncIterator[ASGIApp]:
        engine = AsyncLLM(self.core.config, log_stats=False, client=self.core)  # type: ignore[arg-type]
        tokenizer_pool = TokenizerPool(engine.tokenizer, engine.model_config.max_model_len, self.templates)
        state = ServerState(60)
        renderer = ChatPromptRenderer(engine, tokenizer_pool, **self.parsers)
        state.set_ready(ServingContext(engine, tokenizer_pool, renderer, self.force_include_usage))
        try:
            yield build_app(state, OpenAIServingModels(["m"], "m"), HTTPMetrics(CollectorRegistry()), self.settings)
        finally:
            engine.shutdown()
            tokenizer_pool.close()
            await state.close()

    def post(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> httpx2.Response:
        [answer] = self.exchange(("POST", path, body))
        return answer
