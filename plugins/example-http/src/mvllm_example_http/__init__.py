"""Example plugin of server routes: `mvllm serve MODEL --http-plugins answers`.

POST /plugins/answers/rank      {"question": "...", "answers": ["...", ...]}: the answers, the likeliest first
POST /plugins/answers/lines     {"question": "..."}: how the model goes on, a server-sent event for each line
GET  /plugins/answers/count     ?text=...: how many tokens that is
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypedDict

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mvllm.extension_api import HTTPServerHandle, RequestError, SamplingParams
from mvllm.extension_api.http import APIRouter, read_query

MAX_ANSWERS = 64


class RankRequest(msgspec.Struct):
    """Body of `rank`."""

    question: str
    answers: list[str]


class LinesRequest(msgspec.Struct):
    """Body of `lines`."""

    question: str
    max_tokens: int = 100


class CountQuery(msgspec.Struct):
    """Query of `count`."""

    text: str


class RankedAnswer(TypedDict):
    """An answer, with the log-probability of its tokens."""

    answer: str
    logprob: float
    num_tokens: int


class RankResponse(TypedDict):
    """The answers, the likeliest first."""

    model: str
    answers: list[RankedAnswer]


class Line(TypedDict):
    """An event of `lines`."""

    line: str


class TokenCount(TypedDict):
    """The response of `count`."""

    count: int


def make_router(server: HTTPServerHandle) -> APIRouter:
    """The routes: the object of the entry point in the group `mvllm.http`."""
    router = APIRouter(tags=["answers"])

    async def rank(request: Request) -> RankResponse:
        asked = await server.read(request, RankRequest)
        if not 0 < len(asked.answers) <= MAX_ANSWERS:
            raise RequestError(f"answers must be a list of 1 to {MAX_ANSWERS} texts.", parameter="answers")
        question = await server.tokenize(asked.question)
        answers = [await server.tokenize(answer, add_special_tokens=False) for answer in asked.answers]
        if not question or not all(answers):
            raise RequestError("The question and each of the answers must be a text.", parameter="answers")
        # The engine always generates a token; only the log-probabilities of the prompt's tokens are used.
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = await server.complete(request, [{"prompt_token_ids": question + ids} for ids in answers], params)
        ranked: list[RankedAnswer] = []
        for text, output in zip(asked.answers, outputs, strict=True):
            positions = (output.prompt_logprobs or [])[len(question) :]
            ids = output.prompt_token_ids[len(question) :]
            total = sum(position[i].logprob for i, position in zip(ids, positions, strict=True) if position)
            ranked.append({"answer": text, "logprob": total, "num_tokens": len(ids)})
        ranked.sort(key=lambda entry: -entry["logprob"])
        return {"model": server.model_name, "answers": ranked}

    async def lines(request: Request) -> Response:
        asked = await server.read(request, LinesRequest)
        params = SamplingParams(temperature=0, max_tokens=asked.max_tokens)
        return await server.stream(request, _lines(server, asked.question, params))

    async def count(request: Request) -> TokenCount:
        return {"count": len(await server.tokenize(read_query(request, CountQuery).text))}

    summary = "Which answers the model finds likeliest."
    router.add_api_route("/rank", rank, methods=["POST"], summary=summary, response=RankResponse)
    summary, streamed = "How the model goes on, line by line.", {"text/event-stream": Line}
    router.add_api_route("/lines", lines, methods=["POST"], summary=summary, response=streamed)
    router.add_api_route("/count", count, query=CountQuery, summary="How many tokens a text is.", response=TokenCount)
    return router


async def _lines(server: HTTPServerHandle, prompt: str, params: SamplingParams) -> AsyncGenerator[Line, None]:
    text = ""
    async with aclosing(server.generate({"prompt": prompt}, params)) as outputs:
        async for output in outputs:
            *whole, text = (text + output.outputs[0].text).split("\n")
            for line in whole:
                yield {"line": line}
    yield {"line": text}
