"""Structured output: constrain the text to a JSON schema, a regular expression or a list of choices.

Every step masks the tokens that would break the constraint, so the text conforms whenever the output ends by itself
(finish reason "stop").

    python docs/examples/structured_output.py [--model PATH_OR_NAME]
"""

import argparse
import json

from mvllm import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "animal": {"enum": ["cat", "dog", "turtle"]},
    },
    "required": ["name", "age", "animal"],
    "additionalProperties": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate text that conforms to a constraint.")
    parser.add_argument("--model", default="demo", help="model folder, hub name, or 'demo' (default)")
    args = parser.parse_args()

    def constrained(**constraint: object) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=100, structured_outputs=StructuredOutputsParams(**constraint))

    with LLM(args.model) as llm:
        prompts = ["The hero of the story:", "A date in 2026: ", "Is a trout a fish? Answer:"]
        as_json, as_date, as_choice = llm.generate(
            prompts,
            [  # one per prompt; requests with and without constraints share a batch
                constrained(json=SCHEMA, disable_any_whitespace=True),  # JSON on one line
                constrained(regex=r"2026-(0[1-9]|1[0-2])-(0[1-9]|[12]\d)"),
                constrained(choice=["yes", "no"]),
            ],
        )

    hero = json.loads(as_json.outputs[0].text)
    print(f"JSON schema: {hero['name']!r}, {hero['age']}, {hero['animal']!r}")
    print(f"Regex:       {as_date.outputs[0].text}")
    print(f"Choice:      {as_choice.outputs[0].text}")


if __name__ == "__main__":
    main()
