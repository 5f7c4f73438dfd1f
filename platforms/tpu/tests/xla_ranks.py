"""Two ranks as threads of one process, each with one of XLA's two CPU devices: what XlaCommunicator gives them.

    PJRT_DEVICE=CPU CPU_NUM_DEVICES=2 python platforms/tpu/tests/xla_ranks.py
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch_xla
import torch_xla.runtime as xr

from mvllm.plugin_api import GroupSpec
from mvllm_tpu.communicator import XlaCommunicator


def check(index: int) -> None:
    rank, device = xr.global_ordinal(), torch_xla.device()
    group = XlaCommunicator(GroupSpec("tp", (0, 1), rank, world_size=2), device, SimpleNamespace())
    mine = (torch.arange(6.0).view(2, 3) + 10 * rank).to(device)
    both = [torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3) + 10]
    found = {
        "all_reduce": (group.all_reduce(mine), both[0] + both[1]),
        "all_gather 0": (group.all_gather(mine, 0), torch.cat(both)),
        "all_gather -1": (group.all_gather(mine), torch.cat(both, dim=-1)),
        "reduce_scatter": (group.reduce_scatter(mine, 0), (both[0] + both[1])[rank : rank + 1]),
        "broadcast": (group.broadcast(mine.clone(), 1), both[1]),
        "all_to_all": (torch.stack(group.all_to_all([mine, mine + 100])), torch.stack(both) + 100 * rank),
    }
    gathered = group.gather(mine, 1, 0)
    assert (gathered is None) == (rank == 0)
    torch_xla.sync()
    for name, (got, wanted) in found.items():
        assert torch.equal(got.cpu(), wanted), (rank, name, got.cpu(), wanted)
    print(f"rank {rank}: {', '.join(found)}", flush=True)


if __name__ == "__main__":
    torch_xla.launch(check)
