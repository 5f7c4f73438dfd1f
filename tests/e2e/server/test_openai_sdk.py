"""The real OpenAI SDK with a real server: it returns the text of `LLM`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from mvllm import LLM, SamplingParams
from tests.helpers.server import ServerProcess

PROMPTS = ["Once upon a time", "The capital of France is", "A dog named", "Tell me a story about a fox"]
QUESTION = [{"role": "user", "content": "What is the capital of Italy?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
AS_SENT = {"temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True, "return_token_ids": True}}


class City(BaseModel):
    kind: Literal["town", "village"]
    is_big: bool


@pytest.fixture(scope="module")
def sdk(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", kv_cache_memory_bytes=64 << 20) as llm:
        yield llm


def test_greedy_completions_have_the_tokens_of_llm(sdk: OpenAI, llm: LLM) -> None:
    expected = [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    together = sdk.completions.create(model="demo", prompt=PROMPTS, **AS_SENT)
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in together.choices] == [each.text for each in expected]
    assert [choice.token_ids for choice in together.choices] == [each.token_ids for each in expected]  # type: ignore
    assert {choice.finish_reason for choice in together.choices} == {"length"}
    assert together.usage is not None and together.usage.completion_tokens == 4 * 24


def test_many_concurrent_streams_have_the_tokens_of_llm(server: ServerProcess, llm: LLM) -> None:
    prompts = [f"{PROMPTS[i % 4]} {i}" for i in range(24)]
    expected = [output.outputs[0] for output in llm.generate(prompts, GREEDY, use_tqdm=False)]

    async def one(sdk: AsyncOpenAI, prompt: str) -> tuple[str, list[int], str | None]:
        text, ids, reason = "", [], None
        async for chunk in await sdk.completions.create(model="demo", prompt=prompt, stream=True, **AS_SENT):
            text += chunk.choices[0].text
            ids += chunk.choices[0].token_ids
            assert reason is None
            reason = chunk.choices[0].finish_reason
        return text, ids, reason

    async def all_of_them() -> list[tuple[str, list[int], str | None]]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
            return await asyncio.gather(*(one(sdk, prompt) for prompt in prompts))

    assert asyncio.run(all_of_them()) == [(each.text, each.token_ids, "length") for each in expected]


def test_chat_has_the_text_of_llm_with_and_without_stream(sdk: OpenAI, llm: LLM) -> None:
    [expected] = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=None), use_tqdm=False)
    answer = sdk.chat.completions.create(model="demo", messages=QUESTION, temperature=0)  # type: ignore[call-overload]
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.outputs[0].text)
    assert choice.finish_reason == expected.outputs[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    chunks = list(
        sdk.chat.completions.create(  # type: ignore[call-overload]
            model="demo", messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert len({chunk.id for chunk in chunks}) == 1 and chunks[0].id.startswith("chatcmpl-")
    assert chunks[0].choices[0].delta.role == "assistant"
    *pieces, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == choice.message.content
    assert [chunk.choices[0].finish_reason for chunk in pieces] == [None] * (len(pieces) - 1) + ["stop"]
    assert last.choices == [] and last.usage.completion_tokens == answer.usage.completion_tokens
    assert all(chunk.usage is None for chunk in pieces)


def test_several_choices_and_seeds(sdk: OpenAI) -> None:
    ask = {"model": "demo", "prompt": "Once upon a time", "n": 3, "seed": 7, "temperature": 1.0, "max_tokens": 12}
    first, second = (sdk.completions.create(**ask) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert [choice.text for choice in second.choices] == texts and len(set(texts)) > 1
    streamed = ["", "", ""]
    for chunk in sdk.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts


def test_chat_logprobs(sdk: OpenAI) -> None:
    ask = {"model": "demo", "messages": QUESTION, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    answer = sdk.chat.completions.create(**ask)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        assert len(entry.top_logprobs) == 2 and entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert bytes(entry.bytes).decode(errors="replace") == entry.token
    text = b"".join(bytes(entry.bytes) for entry in content[:-1])  # the EOS token ends the answer
    assert text.decode() == answer.choices[0].message.content
    pieces = [chunk.choices[0].logprobs for chunk in sdk.chat.completions.create(**ask, stream=True)]
    assert [e for piece in pieces if piece is not None for e in piece.content] == content


def test_tool_calls_and_tool_answers(sdk: OpenAI) -> None:
    """Complete and streamed, assembled by the SDK; the tool call is sent back with the tool's answer."""
    ask: dict[str, Any] = {"model": "demo", "messages": QUESTION, "temperature": 0, "max_tokens": 600}
    tools = {"tools": [openai.pydantic_function_tool(City)], "tool_choice": "required", "parallel_tool_calls": False}
    answer = sdk.chat.completions.parse(**ask, **tools)
    [call] = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls" and isinstance(call.function.parsed_arguments, City)
    with sdk.chat.completions.stream(**ask, **tools) as stream:
        kinds = [event.type for event in stream]
        [streamed] = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments
    assert "tool_calls.function.arguments.done" in kinds and streamed.function.name == "City"
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [call.model_dump(exclude={"function": {"parsed_arguments"}})],
    }
    result = {"role": "tool", "tool_call_id": call.id, "content": "Rome"}
    turns = [*QUESTION, called, result, *QUESTION]
    after = sdk.chat.completions.create(**{**ask, "messages": turns, "max_tokens": 8})
    assert after.choices[0].finish_reason in ("stop", "length")
    assert after.usage.prompt_tokens > 2 * answer.usage.prompt_tokens


def test_the_async_sdk_parses_and_streams(server: ServerProcess, llm: LLM) -> None:
    [expected] = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=None), use_tqdm=False)
    ask: dict[str, Any] = {"model": "demo", "messages": QUESTION, "temperature": 0}

    async def run() -> tuple[object, str | None]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
            parsed = await sdk.chat.completions.parse(**ask, max_tokens=600, response_format=City)
            async with sdk.chat.completions.stream(**ask) as stream:
                async for _ in stream:
                    pass
                final = await stream.get_final_completion()
            return parsed.choices[0].message.parsed, final.choices[0].message.content

    city, text = asyncio.run(run())
    assert isinstance(city, City) and text == expected.outputs[0].text


@pytest.mark.parametrize(
    ("kind", "ask"),
    [
        (openai.NotFoundError, {"model": "nobody"}),
        (openai.BadRequestError, {"temperature": -1}),
        (openai.BadRequestError, {"prompt": [5, 100_000]}),
        (openai.BadRequestError, {"suffix": "the end"}),
        (openai.BadRequestError, {"logit_bias": {"1000000": 1.0}}),
        (openai.BadRequestError, {"extra_body": {"response_format": {"type": "made up"}}}),
    ],
)
def test_errors_are_the_exceptions_of_the_sdk(sdk: OpenAI, kind: type[openai.APIStatusError], ask: dict) -> None:
    with pytest.raises(kind) as caught:
        sdk.completions.create(**{"model": "demo", "prompt": "x", "max_tokens": 2, **ask})
    assert caught.value.param == next(iter(ask.get("extra_body", ask)))
    assert caught.value.type and caught.value.body["message"]  # type: ignore[index]


def test_a_stop_string_ends_a_stream_and_is_not_in_it(sdk: OpenAI) -> None:
    ask = {"model": "demo", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 60, "stop": ["."]}
    whole = sdk.completions.create(**ask).choices[0]
    chunks = list(sdk.completions.create(**ask, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    assert "." not in whole.text and whole.finish_reason == chunks[-1].choices[0].finish_reason == "stop"


def test_models(sdk: OpenAI, llm: LLM) -> None:
    assert [model.id for model in sdk.models.list()] == ["demo", "little"]
    assert sdk.models.retrieve("little").max_model_len == llm.llm_engine.model_config.max_model_len  # type: ignore
    assert sdk.completions.create(model="little", prompt="x", max_tokens=1).model == "little"
    with pytest.raises(openai.NotFoundError, match="`nobody` does not exist"):
        sdk.models.retrieve("nobody")
