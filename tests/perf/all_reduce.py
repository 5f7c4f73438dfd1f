"""Time of an all-reduce over the ranks of this machine, through shared memory and through sockets.

    python tests/perf/all_reduce.py [--ranks 2] [--seconds 1]

Prints the median and the 99th percentile per call, in microseconds, for hidden states of several sizes.
"""

from __future__ import annotations

import argparse
import os
import socket
import time

import numpy as np
import torch
import torch.multiprocessing as mp

from mvllm.plugin_api import Communicator, GroupSpec, TorchCommunicator
from mvllm_cpu.shared_memory_communicator import SharedMemoryCommunicator

SHAPES = ((1, 64), (1, 1024), (1, 4096), (16, 4096), (64, 4096), (512, 4096))
DTYPES = (torch.float32, torch.bfloat16)


def measure(comm: Communicator, shape: tuple[int, int], dtype: torch.dtype, seconds: float) -> np.ndarray:
    """Microseconds of each call on this rank. All ranks make the same number of calls."""
    tensor = torch.ones(shape, dtype=dtype)
    for _ in range(20):
        comm.all_reduce(tensor.zero_())
    begin = time.perf_counter()
    for _ in range(20):
        comm.all_reduce(tensor.zero_())
    once = (time.perf_counter() - begin) / 20
    count = comm.broadcast(torch.tensor([max(50, int(seconds / once))]))
    found = np.empty(int(count))
    for i in range(len(found)):
        begin = time.perf_counter()
        comm.all_reduce(tensor)
        found[i] = time.perf_counter() - begin
        tensor.zero_()
    return found * 1e6


def run(rank: int, world_size: int, address: str, seconds: float) -> None:
    """Runs the benchmark on one rank."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    spec = GroupSpec("tp", tuple(range(world_size)), rank, init_method=address)
    shared = SharedMemoryCommunicator(spec, device)
    sockets = TorchCommunicator(spec, backend="gloo", device=device)
    if rank == 0:
        print(f"{world_size} ranks, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; shared memory: ", end="")
        print(shared.uses_shared_memory)
        print(f"{'shape':>12} {'dtype':>9} | {'shared p50':>10} {'p99':>9} | {'sockets p50':>11} {'p99':>9}   [us]")
    for shape in SHAPES:
        for dtype in DTYPES:
            a, b = (measure(comm, shape, dtype, seconds) for comm in (shared, sockets))
            if rank == 0:
                name = f"{shape[0]}x{shape[1]}"
                print(
                    f"{name:>12} {str(dtype)[6:]:>9} | {np.median(a):10.1f} {np.percentile(a, 99):9.1f} | "
                    f"{np.median(b):11.1f} {np.percentile(b, 99):9.1f}",
                    flush=True,
                )
    sockets.close()
    shared.close()


def main() -> None:
    """Starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0)
    args = parser.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{s.getsockname()[1]}"
    mp.spawn(run, args=(args.ranks, address, args.seconds), nprocs=args.ranks)


if __name__ == "__main__":
    main()
