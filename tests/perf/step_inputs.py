"""Time to build a step's inputs: python tests/perf/step_inputs.py

The input batch has 1,024 rows of 2,048 blocks each (32,768 tokens in blocks of 16), of which a step uses a few, each
with one new token after a sequence of some length. Prints CPU time per step and the peak of the memory that Python and
NumPy allocated for it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np

from mvllm.messages.scheduler_output import SchedulerOutput
from mvllm.platform.shapes import ShapePolicy
from mvllm.sampling.sampling_state import SamplingState
from mvllm.worker.input_batch import InputBatch
from mvllm.worker.step_inputs import StepInputBuilder

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.unit.worker.builders import HostRuntime

BLOCK_SIZE = 16


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=2048)
    parser.add_argument("--scheduled", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    table = InputBatch(args.rows, args.blocks * BLOCK_SIZE, BLOCK_SIZE, SamplingState(args.rows, 1000, 0))
    limits = {"max_tokens": max(2048, args.rows), "max_rows": args.rows}
    builder = StepInputBuilder(table, block_size=BLOCK_SIZE, runtime=HostRuntime(), shapes=ShapePolicy(), **limits)
    print(f"{args.rows} rows of {args.blocks} blocks: a table of {table.block_table.nbytes / 2**20:.1f} MiB")
    print(f"{'rows in step':>12} {'tokens':>8} {'us/step':>9} {'peak KiB':>9}")
    for num_rows in args.scheduled:
        rows = np.linspace(0, args.rows - 1, num_rows).astype(int).tolist()
        plan = SchedulerOutput(
            step=0, rows=rows, num_scheduled_tokens=[1] * num_rows, total_num_scheduled_tokens=num_rows
        )
        for length in (args.blocks * BLOCK_SIZE // 32, args.blocks * BLOCK_SIZE):
            table.history.num_tokens[:] = length
            table.num_computed[:] = length - 1
            tracemalloc.start()
            builder.build(plan)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            times = []
            for _ in range(args.steps):
                begun = time.process_time()
                builder.build(plan)
                times.append(time.process_time() - begun)
            print(f"{num_rows:>12} {length:>8} {statistics.median(times) * 1e6:>9.1f} {peak / 1024:>9.1f}")


if __name__ == "__main__":
    main()
