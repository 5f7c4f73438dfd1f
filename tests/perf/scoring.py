"""Cost of scoring: python tests/perf/scoring.py

Times `prompt_logprobs=0` (the log-probability of each given token) against a plain prefill of the same prompts, which
computes logits of the last position alone. Prints both, and their ratio; it should be at most 1.3. The head is a fifth
of the arithmetic of the 162 M model, and less of larger ones.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from perf_models import checkpoint

from mvllm import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare scoring with a plain prefill.")
    parser.add_argument("--model", default=None, help="model folder; by default a 162 M model with random weights")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--length", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    folder = args.model or str(checkpoint("small"))
    rng = random.Random(1)
    params = {
        "prefill": SamplingParams(max_tokens=1, temperature=0, detokenize=False, ignore_eos=True),
        "scoring": SamplingParams(max_tokens=1, temperature=0, detokenize=False, ignore_eos=True, prompt_logprobs=0),
    }
    seconds: dict[str, list[float]] = {name: [] for name in params}
    with LLM(
        folder,
        dtype=args.dtype,
        skip_tokenizer_init=args.model is None,
        max_model_len=args.length + 16,
        enable_prefix_caching=False,
    ) as llm:
        prompts = [
            {"prompt_token_ids": [rng.randrange(10, 2000) for _ in range(args.length)]} for _ in range(args.prompts)
        ]
        for round_ in range(args.rounds + 1):
            for name, each in params.items():
                start = time.perf_counter()
                llm.generate(prompts, each, use_tqdm=False)
                if round_:  # the first warms up
                    seconds[name].append(time.perf_counter() - start)
    num_tokens = args.prompts * args.length
    best = {name: min(measured) for name, measured in seconds.items()}
    for name, measured in seconds.items():
        print(
            f"{name:8} {best[name]:8.3f} s   median {statistics.median(measured):8.3f} s   "
            f"{num_tokens / best[name]:9.0f} tokens/s"
        )
    print(f"ratio    {best['scoring'] / best['prefill']:8.3f}")


if __name__ == "__main__":
    main()
