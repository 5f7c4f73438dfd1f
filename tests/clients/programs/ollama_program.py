"""What somebody does with the ollama package. Prints what came back as JSON."""

import asyncio
import json
import sys

import ollama

URL, KEY = sys.argv[1].removesuffix("/v1"), "a-key"
QUESTION = [{"role": "user", "content": "What is the capital of Italy?"}]
OPTIONS = {"temperature": 0, "num_predict": 64, "num_ctx": 2048}
FORM = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
found = {}


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: The city.
    """
    return "sunny"


headers = {"Authorization": f"Bearer {KEY}"}
client = ollama.Client(host=URL, headers=headers)
answer = client.chat("demo", messages=QUESTION, options=OPTIONS)
found["chat"] = [answer.message.content, answer.done_reason, answer.eval_count > 3, answer.eval_duration > 0]
parts = list(client.chat("demo:latest", messages=QUESTION, options=OPTIONS, stream=True))
found["stream"] = ["".join(part.message.content for part in parts), parts[-1].done, parts[-1].prompt_eval_count > 3]
made = client.generate("demo", "The capital of France is", raw=True, options={**OPTIONS, "num_predict": 2})
found["raw"] = [made.response, made.done_reason]
asked = client.generate("demo", QUESTION[0]["content"], options=OPTIONS, keep_alive="5m")
found["generate"] = asked.response
pieces = client.generate("demo", QUESTION[0]["content"], options=OPTIONS, stream=True)
found["generate, streamed"] = "".join(piece.response for piece in pieces)
formed = client.chat("demo", messages=QUESTION, format=FORM, options={**OPTIONS, "num_predict": 200})
found["form"] = sorted(json.loads(formed.message.content))
shown = client.chat("demo", messages=QUESTION, tools=[weather], options=OPTIONS)
turns = [
    *QUESTION,
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "x"}}}]},
    {"role": "tool", "tool_name": "weather", "content": "sunny"},
]
found["after the call"] = [shown.message.role, client.chat("demo", messages=turns, tools=[weather]).message.role]
found["loaded"] = client.generate("demo").done_reason
found["models"] = [model.model for model in client.list().models]
found["running"] = [model.model for model in client.ps().models]
found["show"] = client.show("demo").capabilities
found["embed"] = [len(vector) > 8 for vector in client.embed("demo", ["a", "b"]).embeddings]


async def several():
    other = ollama.AsyncClient(host=URL, headers=headers)
    answers = await asyncio.gather(*(other.chat("demo", messages=QUESTION, options=OPTIONS) for _ in range(4)))
    return [answer.message.content for answer in answers]


found["async"] = asyncio.run(several())

found["errors"] = []
wrong = ollama.Client(host=URL, headers={"Authorization": "Bearer other"})
for who, model, options in ((client, "demo", {"temperature": -1}), (client, "nobody", {}), (wrong, "demo", {})):
    try:
        who.chat(model, messages=QUESTION, options=options)
        found["errors"].append("none")
    except ollama.ResponseError as e:
        found["errors"].append([e.status_code, isinstance(e.error, str)])

print(json.dumps(found))
