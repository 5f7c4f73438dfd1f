"""What somebody does with the newest OpenAI SDK that its own requirements allow. Prints what came back as JSON."""

import asyncio
import json
import sys
from typing import Literal

import openai
from pydantic import BaseModel

URL, KEY = sys.argv[1], "a-key"
ASK = {"model": "demo", "messages": [{"role": "user", "content": "What is the capital of Italy?"}], "temperature": 0}
found = {}


class City(BaseModel):
    kind: Literal["town", "village"]
    is_big: bool


sdk = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)
found["answer"] = sdk.chat.completions.create(**ASK).choices[0].message.content
found["models"] = [model.id for model in sdk.models.list()]
with sdk.chat.completions.stream(**ASK) as stream:
    kinds = {event.type for event in stream}
    found["stream"] = [stream.get_final_completion().choices[0].message.content, "content.delta" in kinds]
parsed = sdk.chat.completions.parse(**ASK, max_tokens=600, response_format=City).choices[0].message.parsed
found["parse"] = type(parsed).__name__

tools = {"tools": [openai.pydantic_function_tool(City)], "max_tokens": 600, "parallel_tool_calls": False}
for choice in ("required", {"type": "function", "function": {"name": "City"}}):
    answer = sdk.chat.completions.parse(**ASK, **tools, tool_choice=choice).choices[0]
    [call] = answer.message.tool_calls
    found.setdefault("calls", []).append([type(call.function.parsed_arguments).__name__, answer.finish_reason])
with sdk.chat.completions.stream(**ASK, **tools, tool_choice="required") as stream:
    for _ in stream:
        pass
    [streamed] = stream.get_final_completion().choices[0].message.tool_calls
found["call, streamed"] = streamed.function.name == "City" and sorted(json.loads(streamed.function.arguments)) == [
    "is_big",
    "kind",
]
message = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
result = {"role": "tool", "tool_call_id": call.id, "content": "Rome"}
turns = [*ASK["messages"], message, result]
found["after the call"] = (
    sdk.chat.completions.create(**{**ASK, "messages": turns}, max_tokens=8).choices[0].message.role
)


async def several():
    async with openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0) as sdk:
        chunks = await sdk.chat.completions.create(**ASK, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
        parsed = await sdk.chat.completions.parse(**ASK, max_tokens=600, response_format=City)
        async with sdk.chat.completions.stream(**ASK) as stream:
            async for _ in stream:
                pass
            final = (await stream.get_final_completion()).choices[0].message.content
        return [text, type(parsed.choices[0].message.parsed).__name__, final]


found["async"] = asyncio.run(several())
found["errors"] = []
for key, more in (("other", {}), (KEY, {"model": "nobody"}), (KEY, {"temperature": -1})):
    try:
        openai.OpenAI(base_url=URL, api_key=key, max_retries=0).chat.completions.create(**{**ASK, **more})
    except openai.APIStatusError as e:
        found["errors"].append([type(e).__name__, e.type])
print(json.dumps(found))
