"""`/tokenize` and `/detokenize` do not block the event loop."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import httpx2
from prometheus_client import CollectorRegistry

from mvllm.entrypoints.openai.common.serving_context import ServingContext
from mvllm.entrypoints.openai.common.serving_models import OpenAIServingModels
from mvllm.entrypoints.openai.common.tokenizer_pool import TokenizerPool
from mvllm.entrypoints.openai.server.app import build_app
from mvllm.entrypoints.openai.server.http_metrics import HTTPMetrics
from mvllm.entrypoints.openai.server.server_state import ServerState
from mvllm.entrypoints.openai.server.settings import ServerSettings
from mvllm.entrypoints.openai.tokenize_routes import MAX_DETOKENIZE_TOKENS


class SlowTokenizer:
    """Records the thread of its lazy initialization."""

    loaded_by: str | None = None

    def token_name(self, token_id: int) -> str | None:
        self.loaded_by = threading.current_thread().name
        return str(token_id)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [1, 2]

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return "x"


def post(tokenizer: SlowTokenizer, path: str, body: dict[str, Any]) -> httpx2.Response:
    async def ask() -> httpx2.Response:
        state = ServerState(60.0)
        config = SimpleNamespace(max_model_len=16, vocab_size=4)
        pool = TokenizerPool(cast(Any, tokenizer), 16)
        engine = SimpleNamespace(tokenizer=tokenizer, model_config=config)
        state.set_ready(ServingContext(cast(Any, engine), pool, cast(Any, None)))
        metrics = HTTPMetrics(CollectorRegistry())
        app = build_app(state, OpenAIServingModels(["m"], "m"), metrics, ServerSettings())
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://x") as client:
            return await client.post(path, json=body)

    return asyncio.run(ask())


def test_token_strings_are_computed_in_a_thread() -> None:
    tokenizer = SlowTokenizer()
    answer = post(tokenizer, "/tokenize", {"prompt": "a b", "return_token_strs": True})
    assert answer.json()["token_strs"] == ["1", "2"]
    assert (tokenizer.loaded_by or "").startswith("text")


def test_the_number_of_token_ids_to_decode_is_limited() -> None:
    assert post(SlowTokenizer(), "/detokenize", {"tokens": [1] * 100}).json() == {"prompt": "x"}
    answer = post(SlowTokenizer(), "/detokenize", {"tokens": [1] * (MAX_DETOKENIZE_TOKENS + 1)})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tokens"
