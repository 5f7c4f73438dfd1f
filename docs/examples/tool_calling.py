"""Tool calling: the model calls a function of this script, and its result goes back to the model.

Here `tool_choice` names the function: the server constrains the output to a call whose arguments conform to the
function's JSON schema, so any model can make it. With `tool_choice="auto"` the model decides; that needs a model
trained for tools. The demo model is not, so its last answer ignores the result.

    mvllm serve demo
    python docs/examples/tool_calling.py [--model NAME] [--url http://127.0.0.1:8000/v1]
"""

import argparse
import json

from openai import OpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo", "Tokyo"]}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


def get_weather(city: str, unit: str) -> dict[str, str]:
    """The function behind the tool. A real one would ask a weather service."""
    return {"city": city, "temperature": "21" if unit == "celsius" else "70", "unit": unit}


def main() -> None:
    parser = argparse.ArgumentParser(description="Have a model call a function.")
    parser.add_argument("--model", default="demo", help="name of the model on the server (default: demo)")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="base URL of the server's API")
    args = parser.parse_args()

    client = OpenAI(base_url=args.url, api_key="none")
    messages = [{"role": "user", "content": "What is the weather in Rome?"}]
    answer = client.chat.completions.create(
        model=args.model,
        messages=messages,
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        temperature=0,
    )
    message = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls:
        arguments = json.loads(call.function.arguments)
        result = get_weather(**arguments)
        print(f"Call:   {call.function.name}({arguments})")
        print(f"Result: {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})

    answer = client.chat.completions.create(model=args.model, messages=messages, temperature=0, max_tokens=32)
    print(f"Answer: {answer.choices[0].message.content}")


if __name__ == "__main__":
    main()
