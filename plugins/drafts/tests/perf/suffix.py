"""Cost of suffix decoding: microseconds of processor time per row and step, with histories of 2,000 and 32,000 tokens.

    python plugins/drafts/tests/perf/suffix.py [--steps 300]

A step appends one token of a text to the index and searches the index of the request and that of 1,000,000 tokens of
other requests. Three texts: random tokens (nothing matches), lines that repeat with changes (code that is edited), and
one token (every position matches). The first column is the time in which the history is indexed, once per request.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from mvllm_drafts.suffix_index import DraftLimits, SuffixIndex
from mvllm_drafts.suffix_proposer import RecentOutputs

LIMITS = DraftLimits(max_tokens=24, max_depth=24, factor=1.0, min_probability=0.1)


def random_text(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, size=size).astype(np.int32)


def edited_lines(size: int, seed: int = 0) -> np.ndarray:
    """Lines of 12 tokens from 200 kinds, with one token in 50 changed; the last tokens of each line are the same."""
    rng = np.random.default_rng(seed)
    lines = np.random.default_rng(0).integers(0, 2_000, size=(200, 12))
    lines[:, -2:] = 7, 9
    text = lines[np.arange(size // 12 + 1) % 200].flatten()[:size]
    changed = rng.random(size) < 0.02
    text[changed] = rng.integers(0, 2_000, size=int(changed.sum()))
    return text.astype(np.int32)


def one_token(size: int, seed: int = 0) -> np.ndarray:
    return np.full(size, 5, dtype=np.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    print(f"{'text':>14} {'tokens':>7} {'index, ms':>10} {'step, µs: median':>17} {'99 %':>6} {'draft':>6} {'KiB':>6}")
    for make in (random_text, edited_lines, one_token):
        others = RecentOutputs(10_000, 1 << 20)
        for seed in range(1, 101):
            others.add(make(10_000, seed))
        for size in (2_000, 32_000):
            text = make(size + steps)
            index = SuffixIndex(1 << 17, can_copy_itself=True)
            begin = time.thread_time()
            index.extend(text[:size])
            first = time.thread_time() - begin
            times, lengths = [], []
            for position in range(size, size + steps):
                begin = time.thread_time()
                index.extend(text[position : position + 1])
                last = text[position - 23 : position + 1]
                drafts = [each.search(last, LIMITS) for each in (index, others.index)]
                times.append(time.thread_time() - begin)
                lengths.append(max(len(draft.token_ids) for draft in drafts))
            microseconds = sorted(1e6 * each for each in times)
            median, high = statistics.median(microseconds), microseconds[int(0.99 * len(microseconds))]
            print(
                f"{make.__name__:>14} {size:>7} {1e3 * first:>10.1f} {median:>17.1f} {high:>6.0f} "
                f"{statistics.mean(lengths):>6.1f} {index.num_bytes / 1024:>6.0f}"
            )


if __name__ == "__main__":
    main()
