"""Offline batch: generate from a list of prompts in one call.

The engine schedules all prompts together (continuous batching) and returns the outputs in the order of the prompts.

    python docs/examples/offline_batch.py [--model PATH_OR_NAME]
"""

import argparse

from mvllm import LLM, SamplingParams

PROMPTS = ["Once upon a time", "The capital of France is", "The opposite of hot is", "7 plus 5 is"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate from a list of prompts.")
    parser.add_argument("--model", default="demo", help="model folder, hub name, or 'demo' (default)")
    args = parser.parse_args()

    # One SamplingParams for all prompts; a list gives each prompt its own.
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=32, seed=1)

    with LLM(args.model) as llm:  # the model's memory is freed at the end of the block
        outputs = llm.generate(PROMPTS, params)

    for output in outputs:
        completion = output.outputs[0]
        print(f"Prompt:    {output.prompt!r}")
        print(f"Generated: {completion.text!r}")
        print(f"           {len(completion.token_ids)} tokens, finish reason {completion.finish_reason!r}\n")


if __name__ == "__main__":
    main()
