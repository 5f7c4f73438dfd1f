"""What somebody does with litellm. Prints what came back as JSON."""

import asyncio
import json
import sys

import litellm

URL, KEY = sys.argv[1], "a-key"
QUESTION = [{"role": "user", "content": "What is the capital of Italy?"}]
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "on": {"type": "boolean"}},
    "required": ["x", "on"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "point", "parameters": POINT}}
found = {}


def ask(provider, **more):
    where = {"model": f"{provider}/demo", "api_base": URL, "api_key": KEY, "temperature": 0, "num_retries": 0}
    return {**where, "messages": QUESTION, **more}


for provider in ("openai", "hosted_vllm"):
    answer = litellm.completion(**ask(provider))
    found[provider] = [answer.choices[0].message.content, answer.choices[0].finish_reason, answer.usage.total_tokens]
    pieces = list(litellm.completion(**ask(provider), stream=True, stream_options={"include_usage": True}))
    found[f"{provider}, streamed"] = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)

called = litellm.completion(
    **ask("openai", tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=600)
)
[call] = called.choices[0].message.tool_calls
found["call"] = [call.function.name, sorted(json.loads(call.function.arguments)), called.choices[0].finish_reason]

form = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT, "strict": True}}
formed = litellm.completion(**ask("openai", response_format=form, max_tokens=600))
found["form"] = sorted(json.loads(formed.choices[0].message.content))

text = litellm.text_completion(
    model="text-completion-openai/demo", prompt="The capital of France is", max_tokens=2, temperature=0,
    api_base=URL, api_key=KEY,
)  # fmt: skip
found["text"] = text.choices[0].text


async def several():
    answers = await asyncio.gather(*(litellm.acompletion(**ask("openai")) for _ in range(8)))
    return [answer.choices[0].message.content for answer in answers]


found["at once"] = asyncio.run(several())

found["errors"] = []
for wrong in ({"temperature": -1}, {"model": "openai/nobody"}, {"api_key": "other"}):
    try:
        litellm.completion(**{**ask("openai"), **wrong})
        found["errors"].append("none")
    except Exception as e:
        found["errors"].append(type(e).__name__)

print(json.dumps(found))
