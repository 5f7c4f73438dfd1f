"""Speculative decoding: propose several tokens at once and verify them in one step of the model.

The n-gram method proposes the tokens that followed the last occurrence of the current n-gram. The output is the same as
without speculation; only the number of steps changes. For a draft model, pass
`speculative_config={"model": "small-model", "num_speculative_tokens": 4}`.

    python docs/examples/speculative_decoding.py [--model PATH_OR_NAME]
"""

import argparse

from mvllm import LLM, SamplingParams

FACT = "Paged attention cuts the cache into blocks of a fixed size, and a block table says where each block lies."
PROMPT = f"What is paged attention? {FACT} What is paged attention?"  # the answer repeats the prompt
SPECULATIVE_CONFIG = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare generation with and without speculative decoding.")
    parser.add_argument("--model", default="demo", help="model folder, hub name, or 'demo' (default)")
    args = parser.parse_args()

    texts = []
    for config in (None, SPECULATIVE_CONFIG):
        with LLM(args.model, speculative_config=config) as llm:
            [output] = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=48))
            texts.append(output.outputs[0].text)
            stats = llm.llm_engine.stats
        if config is not None and stats is not None:
            print(f"Draft tokens: {stats.num_draft_tokens}, accepted: {stats.num_accepted_tokens}")

    print(f"Generated: {texts[1]!r}")
    print(f"Same output without speculation: {texts[0] == texts[1]}")


if __name__ == "__main__":
    main()
