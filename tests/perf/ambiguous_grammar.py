"""Latency of other requests while the n sequences of one request follow an ambiguous grammar.

    python tests/perf/ambiguous_grammar.py [--n 128] [--seconds 60]

Runs the demo model in this process. First a request for 20 tokens runs alone, then such requests run one at a time next
to the sequences. Prints for each request its latency, the CPU time of the engine core's thread, and the length of the
longest sequence.
"""

from __future__ import annotations

import argparse
import time

from mvllm import LLM, RequestOutput, SamplingParams, StructuredOutputsParams

AMBIGUOUS = 'start: s\ns: s s | "a" |'
PROMPT = "Once upon a time"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    with LLM("demo", max_num_seqs=args.n + 8) as llm:
        engine = llm.llm_engine
        progress: dict[str, RequestOutput] = {}

        def step() -> None:
            progress.update({output.request_id: output for output in engine.step()})

        def run_request(name: str) -> None:
            started, cpu = time.perf_counter(), time.thread_time()
            engine.add_request(name, PROMPT, SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0))
            while name not in progress or not progress[name].finished:
                step()
            took, cpu = time.perf_counter() - started, time.thread_time() - cpu
            far = [len(sequence.token_ids) for sequence in progress["ambiguous"].outputs] if len(progress) > 2 else [0]
            print(f"{name:14} {took:7.3f} s, {cpu:7.3f} s of processor time; the longest has {max(far)} tokens")

        run_request("warm-up")
        run_request("alone")
        form = StructuredOutputsParams(grammar=AMBIGUOUS)
        many = SamplingParams(n=args.n, max_tokens=900, min_tokens=900, seed=1, structured_outputs=form)
        engine.add_request("ambiguous", PROMPT, many)
        while "ambiguous" not in progress:
            step()
        started, number = time.monotonic(), 0
        while not progress["ambiguous"].finished and time.monotonic() < started + args.seconds:
            number += 1
            run_request(f"beside {number}")
            for _ in range(20):
                step()
        print(f"the sequences: {progress['ambiguous'].outputs[0].error or 'not ended'}")


if __name__ == "__main__":
    main()
