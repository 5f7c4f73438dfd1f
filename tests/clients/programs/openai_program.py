"""What somebody does with the openai package. Prints what came back as JSON."""

import asyncio
import json
import sys
from typing import Literal

import openai
from pydantic import BaseModel

URL, KEY, BUSY_KEY = sys.argv[1], "a-key", "busy-key"
ASK = {"model": "demo", "messages": [{"role": "user", "content": "What is the capital of Italy?"}], "temperature": 0}
found = {}


class City(BaseModel):
    kind: Literal["town", "village"]
    is_big: bool


sdk = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)
answer = sdk.chat.completions.create(**ASK)
found["answer"] = answer.choices[0].message.content
found["models"] = [model.id for model in sdk.models.list()]
with sdk.chat.completions.stream(**ASK) as stream:
    kinds = {event.type for event in stream}
    found["stream"] = [stream.get_final_completion().choices[0].message.content, "content.delta" in kinds]
chunks = list(sdk.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}, logprobs=True))
found["usage, streamed"] = chunks[-1].usage == answer.usage and chunks[-1].choices == []
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
result = {"role": "tool", "tool_call_id": call.id, "content": "Rome"}
turns = [{"role": "developer", "content": "Be brief."}, *ASK["messages"], answer.message.to_dict(), result]
found["after the call"] = (
    sdk.chat.completions.create(**{**ASK, "messages": turns}, max_tokens=8).choices[0].message.role
)
text = sdk.completions.create(model="demo", prompt=["The capital of France is"] * 2, max_tokens=2, temperature=0)
found["completions"] = [choice.text for choice in text.choices]
vectors = sdk.embeddings.create(model="demo", input=["a", "b"]).data  # asks for base64, and decodes it
found["embeddings"] = [len(vector.embedding) > 8 and isinstance(vector.embedding[0], float) for vector in vectors]
response = sdk.responses.create(model="demo", input=ASK["messages"][0]["content"], temperature=0, store=False)
found["responses"] = [response.output_text, response.status]


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


async def retried():
    """Two requests at once with a key that may have one: the other is refused, and tried again."""
    async with openai.AsyncOpenAI(base_url=URL, api_key=BUSY_KEY, max_retries=5) as sdk:
        ask = {**ASK, "max_tokens": 400, "extra_body": {"ignore_eos": True}}
        answers = await asyncio.gather(*(sdk.chat.completions.with_raw_response.create(**ask) for _ in range(2)))
        texts = {answer.parse().choices[0].message.content for answer in answers}
        return [len(texts), sum(answer.retries_taken for answer in answers) > 0]


found["async"] = asyncio.run(several())
found["retries"] = asyncio.run(retried())
found["errors"] = []
for key, more in (("other", {}), (KEY, {"model": "nobody"}), (KEY, {"temperature": -1})):
    try:
        openai.OpenAI(base_url=URL, api_key=key, max_retries=0).chat.completions.create(**{**ASK, **more})
    except openai.APIStatusError as e:
        found["errors"].append([type(e).__name__, e.type])
print(json.dumps(found))
