"""What somebody does with huggingface_hub's InferenceClient. Prints what came back as JSON."""

import asyncio
import json
import sys

from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError

URL, KEY = sys.argv[1], "a-key"
QUESTION = [{"role": "user", "content": "What is the capital of Italy?"}]
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "on": {"type": "boolean"}},
    "required": ["x", "on"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "point", "description": "Sets a point.", "parameters": POINT}}
ASK = {"model": "demo", "temperature": 0, "max_tokens": 600}
found = {}

client = InferenceClient(base_url=URL, api_key=KEY)
answer = client.chat_completion(QUESTION, **ASK)
found["chat"] = [answer.choices[0].message.content, answer.usage.completion_tokens > 3]
same = client.chat.completions.create(messages=QUESTION, **ASK)  # the spelling of the openai package
found["same"] = same.choices[0].message.content
pieces = list(client.chat_completion(QUESTION, stream=True, stream_options={"include_usage": True}, **ASK))
text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
found["stream"] = [text, pieces[-1].usage.completion_tokens > 3]
called = client.chat_completion(QUESTION, tools=[TOOL], tool_choice="required", **ASK)
call = called.choices[0].message.tool_calls[0]
found["call"] = [call.function.name, sorted(json.loads(call.function.arguments))]
form = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT, "strict": True}}
formed = client.chat_completion(QUESTION, response_format=form, **ASK)
found["form"] = sorted(json.loads(formed.choices[0].message.content))
scored = client.chat_completion(QUESTION, logprobs=True, top_logprobs=2, **{**ASK, "max_tokens": 3})
found["logprobs"] = [len(entry.top_logprobs) for entry in scored.choices[0].logprobs.content]


async def several():
    async with AsyncInferenceClient(base_url=URL, api_key=KEY) as other:
        answers = await asyncio.gather(*(other.chat_completion(QUESTION, **ASK) for _ in range(4)))
    return [answer.choices[0].message.content for answer in answers]


found["async"] = asyncio.run(several())
found["errors"] = []
for key, more in (("other", {}), (KEY, {"model": "nobody"}), (KEY, {"temperature": -1})):
    try:
        InferenceClient(base_url=URL, api_key=key).chat_completion(QUESTION, **{**ASK, **more})
        found["errors"].append("none")
    except HfHubHTTPError as e:
        found["errors"].append(e.response.status_code)
print(json.dumps(found))
