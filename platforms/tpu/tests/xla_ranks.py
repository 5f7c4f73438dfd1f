"""Two ranks as threads of one process, each with one of XLA's two CPU devices: what XlaCommunicator gives them.

    PJRT_DEVICE=CPU CPU_NUM_DEVICES=2 python platforms/tpu/tests/xla_ranks.py
"""

from __future__ import annotations

import threading
from types import SimpleNamespace

import torch
import torch_xla
import torch_xla.runtime as xr

from mvllm.plugin_api import GroupSpec
from mvllm_tpu.communicator import XlaCommunicator


compiled = threading.Barrier(2)


def check(index: int) -> None:
    rank, device = xr.global_ordinal(), torch_xla.device()
    group = XlaCommunicator(GroupSpec("tp", (0, 1), rank, world_size=2), device, SimpleNamespace())
    mine = (torch.arange(6.0).view(2, 3) + 10 * rank).to(device)
    both = [torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3) + 10]
    cases = {
        "all_reduce": (lambda: group.all_reduce(mine), both[0] + both[1]),
        "all_gather 0": (lambda: group.all_gather(mine, 0), torch.cat(both)),
        "all_gather -1": (lambda: group.all_gather(mine), torch.cat(both, dim=-1)),
        "reduce_scatter": (lambda: group.reduce_scatter(mine, 0), (both[0] + both[1])[rank : rank + 1]),
        "broadcast": (lambda: group.broadcast(mine.clone(), 1), both[1]),
        "all_to_all": (lambda: torch.stack(group.all_to_all([mine, mine + 100])), torch.stack(both) + 100 * rank),
        "gather": (lambda: group.gather(mine, 1, 0), torch.cat(both) if rank else None),
    }
    for name, (collect, wanted) in cases.items():
        got = collect()
        # Ranks meet in one program: the first compiles it, the other finds it. With one collective in it: XLA's CPU
        # device starts independent ones in any order.
        if rank == 0:
            torch_xla.sync()
        compiled.wait()
        if rank == 1:
            torch_xla.sync()
        if wanted is None:
            assert got is None
        else:
            assert torch.equal(got.cpu(), wanted), (rank, name, got.cpu(), wanted)
    print(f"rank {rank}: {', '.join(cases)}", flush=True)


if __name__ == "__main__":
    torch_xla.launch(check)
