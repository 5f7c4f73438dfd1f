"""The HTTP application on a socket, with an engine core that generates scripted texts: streams arrive part by part."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from openai import OpenAI
from prometheus_client import CollectorRegistry

from mvllm.config.engine_args import EngineArgs
from mvllm.engine.async_llm import AsyncLLM
from mvllm.entrypoints.openai.common.chat_prompt_renderer import ChatPromptRenderer
from mvllm.entrypoints.openai.common.serving_context import ServingContext
from mvllm.entrypoints.openai.common.serving_models import OpenAIServingModels
from mvllm.entrypoints.openai.common.tokenizer_pool import TokenizerPool
from mvllm.entrypoints.openai.server.app import build_app
from mvllm.entrypoints.openai.server.http_metrics import HTTPMetrics
from mvllm.entrypoints.openai.server.server_state import ServerState
from mvllm.entrypoints.openai.server.settings import ServerSettings
from mvllm.messages.requests import EngineCoreRequest, FinishReason
from tests.unit.entrypoints.builders import TOKENIZER
from tests.unit.entrypoints.scripted_server import ScriptedCore

CONVERSATION_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] or '' }}{% for c in m['tool_calls'] or [] %}"
    "[{{ c['function']['name'] }} {{ c['function']['arguments'] | tojson }}]{% endfor %}|{% endfor %}"
    "{% for t in tools or [] %}{{ t['function']['name'] }} {% endfor %}"
)


class AnsweringCore(ScriptedCore):
    """An engine core that answers each prompt with the text that `answer` returns, with a pause before each token."""

    def __init__(self, config: Any, answer: Callable[[str], str]) -> None:
        super().__init__(config, "", FinishReason.STOP)
        self.answer = answer
        self.pause = 0.0

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        for request in requests:
            prompt = TOKENIZER.decode(request.prompt_token_ids)
            self.prompts.append(prompt)
            ids = TOKENIZER.encode(self.answer(prompt), add_special_tokens=False)
            self.loop.call_soon(self.write, request.request_id, ids)

    def write(self, request_id: str, ids: list[int]) -> None:
        if self.pause and ids:
            self.loop.call_later(self.pause, super().write, request_id, ids)
        else:
            super().write(request_id, ids)


class LiveServer:
    """A running application.

    Attributes:
        url: Its address.
        core: Its engine core.
    """

    def __init__(self, url: str, core: AnsweringCore) -> None:
        self.url = url
        self.core = core

    def sdk(self, key: str = "none", **settings: Any) -> OpenAI:
        """A client of OpenAI's SDK."""
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **settings)


@contextmanager
def live_server(folder: str, answer: Callable[[str], str], settings: ServerSettings) -> Iterator[LiveServer]:
    """Runs an application in a thread.

    Args:
        folder: Folder of the model.
        answer: Returns the model's text for a prompt.
    """
    core = AnsweringCore(EngineArgs.from_kwargs(model=folder).create_engine_config(), answer)
    started: list[uvicorn.Server] = []
    ready = threading.Event()

    async def run() -> None:
        engine = AsyncLLM(core.config, log_stats=False, client=core)  # type: ignore[arg-type]
        pool = TokenizerPool(engine.tokenizer, engine.model_config.max_model_len)
        state = ServerState(60)
        renderer = ChatPromptRenderer(engine, pool, tool_parser="hermes", reasoning_parser="qwen3")
        state.set_ready(ServingContext(engine, pool, renderer))
        app = build_app(state, OpenAIServingModels(["m"], "m"), HTTPMetrics(CollectorRegistry()), settings)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1))
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        started.append(server)
        ready.set()
        await serving
        await state.close()
        engine.shutdown()
        pool.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert ready.wait(30), "the application does not start"
    port = started[0].servers[0].sockets[0].getsockname()[1]
    try:
        yield LiveServer(f"http://127.0.0.1:{port}", core)
    finally:
        started[0].should_exit = True
        thread.join(120)
        assert not thread.is_alive()
