"""What somebody does with LangChain's ChatOpenAI. Prints what came back as JSON."""

import asyncio
import json
import sys
from typing import Literal

import openai
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

URL, KEY = sys.argv[1], "a-key"
QUESTION = "What is the capital of Italy?"
found = {}


class City(BaseModel):
    """A city."""

    kind: Literal["town", "village"]
    is_big: bool


@tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """How the weather is."""
    return f"It rains in {city}."


def model(**more):
    return ChatOpenAI(model="demo", base_url=URL, api_key=KEY, temperature=0, max_retries=0, **more)


answer = model().invoke(QUESTION)
found["invoke"] = [answer.content, answer.usage_metadata["output_tokens"], answer.response_metadata["finish_reason"]]
pieces = list(model(stream_usage=True).stream(QUESTION))
found["stream"] = ["".join(piece.content for piece in pieces), len(pieces) > 3]
found["usage"] = sum((piece.usage_metadata or {}).get("output_tokens", 0) for piece in pieces)
found["batch"] = [each.content for each in model().batch([QUESTION] * 4)]


async def several():
    streamed = [piece.content async for piece in model().astream(QUESTION)]
    return ["".join(streamed), (await model().ainvoke(QUESTION)).content]


found["async"] = asyncio.run(several())

for method in ("json_schema", "function_calling"):
    city = model(max_tokens=600).with_structured_output(City, method=method, strict=True).invoke(QUESTION)
    found[method] = type(city).__name__

with_tools = model(max_tokens=600).bind_tools([weather], tool_choice="any", parallel_tool_calls=False, strict=True)
called = with_tools.invoke(QUESTION)
[call] = called.tool_calls
result = weather.invoke(call)
found["call"] = [call["name"], sorted(call["args"]), isinstance(result, ToolMessage)]
streamed = None
for piece in with_tools.stream(QUESTION):
    streamed = piece if streamed is None else streamed + piece
found["call, streamed"] = [[each["name"], each["args"] == call["args"]] for each in streamed.tool_calls]
after = model(max_tokens=8).invoke([HumanMessage(QUESTION), called, result])
found["after the call"] = isinstance(after, AIMessage)

logprobs = model(max_tokens=3, logprobs=True, top_logprobs=2).invoke(QUESTION).response_metadata["logprobs"]
found["logprobs"] = [len(entry["top_logprobs"]) for entry in logprobs["content"]]

found["completion"] = OpenAI(model="demo", base_url=URL, api_key=KEY, temperature=0, max_tokens=2).invoke(
    "The capital of France is"
)
try:
    model(top_p=7).invoke(QUESTION)
    found["error"] = "none"
except Exception as e:
    found["error"] = isinstance(e, openai.BadRequestError)
print(json.dumps(found))
