"""What somebody does with instructor. Prints what came back as JSON."""

import json
import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict

URL, KEY = sys.argv[1], "a-key"
ASK = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is the capital of Italy?"}],
    "temperature": 0,
    "max_tokens": 600,
}
found = {}


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")  # the demo model would add properties without end
    kind: Literal["town", "village"]
    is_big: bool


for mode in ("TOOLS", "JSON_SCHEMA", "TOOLS_STRICT"):
    client = instructor.from_openai(openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0), mode=instructor.Mode[mode])
    city, completion = client.chat.completions.create_with_completion(response_model=City, max_retries=0, **ASK)
    found[mode] = [type(city).__name__, completion.usage.completion_tokens > 3]
    if mode == "JSON_SCHEMA":
        partial = list(client.chat.completions.create_partial(response_model=City, max_retries=0, **ASK))
        found["partial"] = [partial[-1].model_dump() == city.model_dump(), len(partial) > 2]
try:
    client.chat.completions.create(response_model=City, max_retries=0, **{**ASK, "model": "nobody"})
    found["error"] = "none"
except Exception as e:
    found["error"] = "does not exist" in str(e)
print(json.dumps(found))
