"""Tokens per step of sequences with a JSON schema beside free ones: python tests/perf/constrained_steps.py

Runs the demo model in this process with asynchronous scheduling, half of the sequences with a schema. Prints the tokens
per sequence and step of both kinds, the time of a step, and that of a step in which all sequences are free.
"""

from __future__ import annotations

import argparse
import statistics
import time

from mvllm import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {"type": "array", "minItems": 200, "items": {"type": "object", "properties": {"name": {"type": "string"}}}}
NUM_STEPS = 60


def measure(llm: LLM, num_sequences: int, num_constrained: int) -> tuple[float, float, float]:
    """Tokens per step of a constrained and of a free sequence, and the median milliseconds of a step."""
    engine = llm.llm_engine
    form = StructuredOutputsParams(json=SCHEMA)
    for i in range(num_sequences):
        params = SamplingParams(
            temperature=1.0,
            seed=i,
            max_tokens=10 * NUM_STEPS,
            ignore_eos=True,
            detokenize=False,
            structured_outputs=form if i < num_constrained else None,
        )
        engine.add_request(f"{'constrained' if i < num_constrained else 'free'} {i}", "Once upon a time", params)
    counts: dict[str, int] = {}

    def step() -> None:
        for output in engine.step():
            counts[output.request_id] = len(output.outputs[0].token_ids)

    while len(counts) < num_sequences or min(counts.values()) < 5:
        step()
    before, times = dict(counts), []
    for _ in range(NUM_STEPS):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    rates = {"constrained": [0.0], "free": [0.0]}
    for name, count in counts.items():
        rates[name.split()[0]].append((count - before[name]) / NUM_STEPS)
        engine.abort_request(name)
    while engine.has_unfinished_requests():
        engine.step()
    constrained, free = (statistics.fmean(rates[kind][1:] or [0.0]) for kind in ("constrained", "free"))
    return constrained, free, statistics.median(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 128, 256])
    args = parser.parse_args()
    most = max(args.sequences)
    with LLM("demo", async_scheduling=True, max_num_seqs=most, kv_cache_memory_bytes=1 << 29) as llm:
        print("sequences   tokens per step: constrained, free   ms per step   all free")
        for number in args.sequences:
            constrained, free, milliseconds = measure(llm, number, number // 2)
            _, _, plain = measure(llm, number, 0)
            print(f"{number:9}{constrained:31.3f}{free:7.3f}{milliseconds:14.2f}{plain:11.2f}", flush=True)


if __name__ == "__main__":
    main()
