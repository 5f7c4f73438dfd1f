"""What somebody does with pydantic-ai, over both of its APIs. Prints what came back as JSON."""

import asyncio
import json
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

URL, KEY = sys.argv[1], "a-key"
QUESTION = "What is the capital of Italy?"
SETTINGS = {"temperature": 0, "max_tokens": 600}
found = {}


class City(BaseModel):
    """A city."""

    kind: Literal["town", "village"]
    is_big: bool


def model(api, key=KEY, name="demo"):
    if api == "anthropic":
        provider = AnthropicProvider(base_url=URL.removesuffix("/v1"), api_key=key)
        return AnthropicModel(name, provider=provider)
    return OpenAIChatModel(name, provider=OpenAIProvider(base_url=URL, api_key=key))


async def ask(api):
    agent = Agent(model(api), model_settings=SETTINGS)
    answer = await agent.run(QUESTION)
    async with agent.run_stream(QUESTION) as stream:
        streamed = await stream.get_output()
    again = await agent.run(QUESTION, message_history=answer.all_messages(), model_settings={"max_tokens": 4})
    by_tool = await Agent(model(api), output_type=ToolOutput(City), model_settings=SETTINGS).run(QUESTION)
    return [
        answer.output,
        streamed,
        answer.usage.output_tokens > 3,
        len(again.all_messages()),
        type(by_tool.output).__name__,
    ]


async def main():
    for api in ("openai", "anthropic"):
        found[api] = await ask(api)
    native = await Agent(model("openai"), output_type=NativeOutput(City), model_settings=SETTINGS).run(QUESTION)
    found["native"] = type(native.output).__name__
    found["errors"] = []
    for key, name in (("other", "demo"), (KEY, "nobody")):
        for api in ("openai", "anthropic"):
            try:
                await Agent(model(api, key, name)).run(QUESTION)
                found["errors"].append("none")
            except ModelHTTPError as e:
                found["errors"].append(e.status_code)


asyncio.run(main())
print(json.dumps(found))
