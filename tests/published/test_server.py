"""A published model behind the OpenAI server: a JSON schema, and calls of functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.helpers.processes import assert_nothing_left, shared_memory_names
from tests.helpers.server import ServerProcess
from tests.published.conftest import SIZES, Published


class Person(BaseModel):
    name: str
    age: int
    hair: Literal["brown", "red"]


class Weather(BaseModel):
    city: str
    unit: Literal["celsius", "fahrenheit"]


class Clock(BaseModel):
    zone: str


FUNCTIONS = {"Weather": Weather, "Clock": Clock}
TOOLS = [openai.pydantic_function_tool(function) for function in FUNCTIONS.values()]


@pytest.fixture(scope="module")
def sdk(smollm2: Published, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    before = shared_memory_names()
    options = [word for name, value in SIZES.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    names = ("--port", "0", "--served-model-name", "smollm2")
    with ServerProcess(tmp_path_factory.mktemp("server"), str(smollm2.path), *names, *options) as server:
        server.wait_ready()
        with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
            yield sdk
    assert_nothing_left(server.tag, before)


def _ask(question: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 200}


def test_an_answer_follows_a_schema(sdk: OpenAI) -> None:
    ask = _ask("Alice is 31 years old and has red hair. Describe Alice as JSON with name, age and hair.")
    [choice] = sdk.chat.completions.parse(**ask, response_format=Person).choices
    assert choice.finish_reason == "stop"
    assert choice.message.parsed == Person(name="Alice", age=31, hair="red")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "Weather"}}])
def test_a_function_is_called(sdk: OpenAI, choice: Any) -> None:
    """The model's chat template shows it no functions, so which one it takes if it may choose is up to chance."""
    ask = _ask('Answer as JSON: {"city": "Paris", "unit": "celsius"}. What is the weather in Paris?')
    settings: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    [answer] = sdk.chat.completions.parse(**ask, **settings).choices
    [call] = answer.message.tool_calls or []
    arguments = call.function.parsed_arguments
    assert isinstance(arguments, FUNCTIONS[call.function.name])
    if choice != "required":
        assert isinstance(arguments, Weather) and arguments.city == "Paris"
