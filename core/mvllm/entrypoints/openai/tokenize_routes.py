"""`POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`: token ids of a text or a conversation, text of token
ids, and the configuration of the tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.requests import Request

from mvllm.entrypoints.chat_template import read_tokenizer_config
from mvllm.entrypoints.openai.common.api_router import APIRouter
from mvllm.entrypoints.openai.common.streaming_response import cancel_on_disconnect
from mvllm.entrypoints.openai.protocol import DetokenizeRequest, TokenizeRequest
from mvllm.entrypoints.openai.response_types import DetokenizeResponse, TokenizeResponse, TokenizerInfo
from mvllm.entrypoints.openai.server.server_handle import APIServerHandle
from mvllm.errors import RequestError

MAX_DETOKENIZE_TOKENS = 1 << 20
"""Token ids of one request to `/detokenize`: parsing and checking more would block the event loop."""


class TokenizeRoutes:
    """The routes.

    Args:
        server: The API server.
    """

    def __init__(self, server: APIServerHandle) -> None:
        self._server = server

    def add_to(self, router: APIRouter) -> None:
        """Adds the routes to a router."""
        add = self._server.body_routes.add
        summary = "Token ids of a text or a conversation."
        add(router, "/tokenize", TokenizeRequest, self.tokenize, summary, response=TokenizeResponse)
        summary = "The text of token ids."
        add(router, "/detokenize", DetokenizeRequest, self.detokenize, summary, response=DetokenizeResponse)
        summary = "About the tokenizer."
        router.add_api_route("/tokenizer_info", self.tokenizer_info, summary=summary, response=TokenizerInfo)

    async def tokenize(self, request: Request) -> TokenizeResponse:
        """Token ids of a text or a conversation."""
        context, _, body = await self._server.body_routes.decode_for_model(request, TokenizeRequest)
        engine, pool = context.engine, context.tokenizer_pool
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("Give either prompt or messages.", parameter="prompt")
        ids: list[int]
        async with cancel_on_disconnect(request.receive):
            if body.prompt is None:
                ids = (await context.prompt_renderer.render(body))["prompt_token_ids"]
            else:
                ids = await pool.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
        names: list[str | None] | None = None
        if body.return_token_strs:  # in a thread: there may be many
            names = await pool.run(lambda: [engine.tokenizer.token_name(i) for i in ids])
        max_model_len = engine.model_config.max_model_len
        return {"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": names}

    async def tokenizer_info(self, request: Request) -> dict[str, Any]:
        """The configuration of the tokenizer, and the chat template that conversations are rendered with."""
        context = self._server.state.context
        folder = Path(context.engine.model_config.tokenizer or "")
        config, template = await context.tokenizer_pool.run(
            lambda: (read_tokenizer_config(folder), context.prompt_renderer.template_text())
        )
        config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        return {**config, "chat_template": template or None}

    async def detokenize(self, request: Request) -> DetokenizeResponse:
        """The text of token ids."""
        context, _, body = await self._server.body_routes.decode_for_model(request, DetokenizeRequest)
        engine, ids = context.engine, body.tokens
        if ids is None:
            raise RequestError("tokens is missing.", parameter="tokens")
        if len(ids) > MAX_DETOKENIZE_TOKENS:
            raise RequestError(
                f"tokens may have {MAX_DETOKENIZE_TOKENS} entries; found {len(ids)}. Send several requests.",
                parameter="tokens",
            )
        vocab_size = engine.model_config.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            raise RequestError(f"tokens must be token ids from 0 to {vocab_size - 1}.", parameter="tokens")
        text = await context.tokenizer_pool.run(lambda: engine.tokenizer.decode(ids, skip_special_tokens=False))
        return {"prompt": text}
