"""Outputs that follow a choice, a regular expression, a JSON schema and a grammar."""

from enum import StrEnum

from pydantic import BaseModel

from mvllm import LLM, SamplingParams
from mvllm.sampling_params import StructuredOutputsParams


class CarType(StrEnum):
    sedan = "sedan"
    truck = "Truck"


class CarDescription(BaseModel):
    car_type: CarType


GRAMMAR = """
root ::= "SELECT " column " from " table
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
"""

CASES = {
    "Choice": (StructuredOutputsParams(choice=["Positive", "Negative"]), None),
    "Regex": (StructuredOutputsParams(regex=r"[a-z]{1,4}@[a-z]{1,4}\.com\n"), ["\n"]),
    "JSON": (StructuredOutputsParams(json=CarDescription.model_json_schema()), None),
    "Grammar": (StructuredOutputsParams(grammar=GRAMMAR), None),
}


def main():
    llm = LLM(model="demo", max_model_len=100)
    for title, (constraint, stop) in CASES.items():
        params = SamplingParams(structured_outputs=constraint, stop=stop, max_tokens=40)
        outputs = llm.generate(prompts="Classify this sentiment: it is wonderful!", sampling_params=params)
        print(f"Structured outputs by {title}: {outputs[0].outputs[0].text}")


if __name__ == "__main__":
    main()
