"""Host time of penalties in a step: python tests/perf/penalties.py

Compares requests with a repetition penalty, the default of some models, with the same requests without one. Measured is
the CPU time of the host's part of a step: preparing and copying the sampling inputs to a device that is the host. The
work on logits is excluded. `host` is the path of devices whose tokens the host reads in each step, `device` the path of
devices that keep the sampled tokens.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mvllm.messages.sampling_params import SamplingParams
from mvllm.platform.staging_buffers import StagingBuffers
from mvllm.sampling.sampler import Sampler
from mvllm.sampling.sampling_state import SamplingState
from mvllm.sampling.token_history import TokenHistory

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.unit.worker.builders import HostRuntime


class TimedSampler(Sampler):
    """Records when the host's part is done and the work on logits begins."""

    planned = 0.0

    def _choose_tokens(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        TimedSampler.planned = TimedSampler.planned or time.process_time()
        return super()._choose_tokens(*args)


def measure(params: SamplingParams, args: argparse.Namespace, *, on_device: bool) -> float:
    """Median CPU seconds of the host's part of a step."""
    rng, runtime = np.random.default_rng(0), HostRuntime()
    state = make_state(args, runtime, on_device=on_device)
    history = TokenHistory(args.rows, args.tokens + args.steps + 1)
    for row in range(args.rows):
        history.set_row(row, rng.integers(0, args.vocab, args.tokens), args.tokens)
        state.set_row(row, params, eos_token_ids=[1], request_id=str(row), num_prompt_tokens=args.tokens)
    staging = StagingBuffers(runtime)
    sampler = TimedSampler(staging) if on_device else TimedSampler()
    rows, logits = np.arange(args.rows), torch.randn(args.rows, args.vocab)
    on_device_rows = torch.arange(args.rows, dtype=torch.int32)
    times = []
    for _ in range(args.steps):
        TimedSampler.planned, begun = 0.0, time.process_time()
        staging.begin_step()
        sampled = sampler.sample(logits, rows, state, history)
        counts = getattr(state, "device_counts", None)
        if counts is not None:
            counts.add(sampled.token_ids, on_device_rows)
        staging.end_step()
        history.append(rows, sampled.numpy())
        times.append(TimedSampler.planned - begun)
    return statistics.median(times)


def make_state(args: argparse.Namespace, runtime: HostRuntime, *, on_device: bool) -> SamplingState:
    """Sampling state, with counts on the device if requested."""
    try:
        from mvllm.sampling.penalties import DeviceTokenCounts
    except ImportError:  # an older version
        return SamplingState(args.rows, args.vocab, 0)
    counts = DeviceTokenCounts(runtime.empty, args.rows, args.vocab, args.tokens + args.steps) if on_device else None
    return SamplingState(args.rows, args.vocab, 0, device_counts=counts)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=500, help="Tokens of each prompt.")
    parser.add_argument("--vocab", type=int, default=4000)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    kinds = {
        "random": {"temperature": 1.0},
        "repetition": {"repetition_penalty": 1.1},
        "presence": {"presence_penalty": 0.5},
    }
    for on_device in (False, True):
        for name, settings in kinds.items():
            seconds = measure(SamplingParams(**settings), args, on_device=on_device)
            print(f"{'device' if on_device else 'host':>7} {name:>11} {seconds * 1e3:8.2f} ms/step")


if __name__ == "__main__":
    main()
