"""What somebody does with the anthropic package. Prints what came back as JSON."""

import asyncio
import json
import sys

import anthropic

URL, KEY = sys.argv[1].removesuffix("/v1"), "a-key"
QUESTION = [{"role": "user", "content": "What is the capital of Italy?"}]
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "on": {"type": "boolean"}},
    "required": ["x", "on"],
    "additionalProperties": False,
}
TOOL = {"name": "point", "description": "Sets a point.", "input_schema": POINT}
ASK = {"model": "demo", "max_tokens": 64, "messages": QUESTION, "extra_body": {"temperature": 0}}
found = {}

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
answer = client.messages.create(**ASK)
found["answer"] = [answer.content[0].text, answer.stop_reason, answer.usage.output_tokens > 3]
counted = client.messages.count_tokens(model="demo", messages=QUESTION)
found["count"] = counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
found["stop"] = client.messages.create(**{**ASK, "stop_sequences": ["Italy"]}).to_dict()["stop_sequence"]
found["cut"] = client.messages.create(**{**ASK, "max_tokens": 1}).stop_reason

with client.messages.stream(**ASK) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
found["stream"] = [text, final.content[0].text, final.stop_reason, final.usage.output_tokens > 3]

called = {**ASK, "max_tokens": 600, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "point"}}
use = client.messages.create(**called)
found["call"] = [use.content[0].name, sorted(use.content[0].input), use.stop_reason]
with client.messages.stream(**called) as stream:
    streamed = stream.get_final_message()
found["call, streamed"] = streamed.content[0].input == use.content[0].input
turns = [
    *QUESTION,
    {"role": "assistant", "content": use.content},
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": use.content[0].id, "content": [{"type": "text", "text": "done"}]},
            {"type": "text", "text": "Thanks.", "cache_control": {"type": "ephemeral"}},
        ],
    },
]
found["after the call"] = client.messages.create(**{**ASK, "messages": turns, "tools": [TOOL]}).role
beta = client.beta.messages.create(**ASK, betas=["context-1m-2025-08-07"], metadata={"user_id": "u"})
found["beta"] = beta.content[0].text
found["models"] = [[model.id, model.type] for model in client.models.list()]
found["model"] = client.models.retrieve("demo").id


async def several():
    bearer = anthropic.AsyncAnthropic(base_url=URL, auth_token=KEY, api_key=None, max_retries=0)
    answers = await asyncio.gather(*(bearer.messages.create(**ASK) for _ in range(4)))
    return [answer.content[0].text for answer in answers]


found["async"] = asyncio.run(several())

found["errors"] = []
wrong = anthropic.Anthropic(base_url=URL, api_key="other", max_retries=0)
for who, changes in ((client, {"extra_body": {"temperature": -1}}), (client, {"model": "nobody"}), (wrong, {})):
    try:
        who.messages.create(**{**ASK, **changes})
        found["errors"].append("none")
    except anthropic.APIStatusError as e:
        found["errors"].append([type(e).__name__, e.body["error"]["type"], bool(e.request_id)])

print(json.dumps(found))
