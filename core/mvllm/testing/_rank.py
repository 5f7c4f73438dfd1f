"""One rank of a world: binds its device, then tries what its only argument (JSON) names, a line of answer each.

Every rank knows what every other rank brings, so each checks its own results; that ranks agree, bit for bit, is for the
caller to see from the digests.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mvllm.ops.dtypes import torch_dtype
from mvllm.platform.choose import choose_platform
from mvllm.platform.phases import Phase, enter_phase
from mvllm.plugin_api import Communicator, DeviceRuntime, GroupSpec, Platform, WorkerContext

SIGN = "@mvllm-rank "
SHAPES = ((6, 8), (1, 4096), (3, 4, 12))
"""Each has dimensions that 4 divides, small and large."""


@dataclass
class World:
    """What a trial has at hand."""

    platform: Platform
    context: WorkerContext
    dtypes: list[str]
    runtime: DeviceRuntime | None = None
    communicator: Communicator | None = None

    @property
    def device(self) -> DeviceRuntime:
        assert self.runtime is not None, "bind comes first"
        return self.runtime

    @property
    def group(self) -> Communicator:
        assert self.communicator is not None, "join comes first"
        return self.communicator

    def mine(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """What `rank` brings, on the host: small integers, so that sums are exact in every dtype."""
        count = 1
        for size in shape:
            count *= size
        return ((torch.arange(count) * (rank + 3) + rank) % 13 - 6).view(shape).to(dtype)

    def on_device(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.device.to_device(self.mine(rank, shape, dtype).clone())

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.device.to_host(tensor).wait()


def bind(world: World) -> str:
    world.runtime = world.platform.init_device(world.context)
    world.runtime.health()
    tensor = world.runtime.to_device(torch.arange(7))
    return "" if world.host(tensor).tolist() == list(range(7)) else "the device does not give back what it was given"


def join(world: World) -> str:
    context = world.context
    if context.world_size > 1:
        ranks = tuple(range(context.world_size))
        spec = GroupSpec("tp", ranks, context.rank, context.init_method, context.world_size)
        world.communicator = world.platform.communicator(spec, world.device.device)
        place = (world.communicator.rank, world.communicator.world_size)
        if place != (context.rank, context.world_size):
            return f"the communicator says rank and world_size {place}, not {(context.rank, context.world_size)}"
    return ""


def _each(world: World, check: Callable[[World, tuple[int, ...], torch.dtype], list[str]], *further: str) -> str:
    """The first problem. Goes on after one all the same: the other ranks make every call, and wait for this one."""
    problems = []
    for name in [*world.dtypes, *further]:
        for shape in SHAPES:
            found = check(world, shape, torch_dtype(name))
            problems += [f"{name} {shape}: {problem}" for problem in found if problem]
    return problems[0] if problems else ""


def _differs(found: torch.Tensor | None, expected: torch.Tensor, world: World) -> str:
    if found is None:
        return "found None instead of a tensor"
    if found.device.type != world.device.device.type:
        return f"the result is on {found.device}, not on the device"
    host = world.host(found)
    if host.shape != expected.shape or host.dtype != expected.dtype:
        return f"shape {tuple(host.shape)} and {host.dtype}, expected {tuple(expected.shape)} and {expected.dtype}"
    _digest.update(host.contiguous().view(torch.uint8).numpy().tobytes())
    return "" if torch.equal(host, expected) else f"wrong values, for instance {host.flatten()[:4].tolist()}"


def all_reduce(world: World) -> str:
    def check(world: World, shape: tuple[int, ...], dtype: torch.dtype) -> list[str]:
        found = world.group.all_reduce(world.on_device(world.context.rank, shape, dtype))
        expected = torch.stack([world.mine(r, shape, dtype) for r in range(world.context.world_size)]).sum(0).to(dtype)
        return [_differs(found, expected, world)]

    exact, rounded = _each(world, check), _rounding_agrees(world)
    return exact or rounded


def _rounding_agrees(world: World) -> str:
    """Sums that round: their bits go into the digest, and must be near the exact sum."""
    problem = ""
    for name in world.dtypes:
        dtype = torch_dtype(name)
        parts = [
            torch.randn(3, 301, generator=torch.Generator().manual_seed(r)).to(dtype)
            for r in range(world.context.world_size)
        ]
        found = world.host(world.group.all_reduce(world.device.to_device(parts[world.context.rank].clone())))
        _digest.update(found.contiguous().view(torch.uint8).numpy().tobytes())
        exact = torch.stack([part.double() for part in parts]).sum(0)
        allowed = 4 * torch.finfo(dtype).eps * torch.stack([part.double().abs() for part in parts]).sum(0)
        if bool(((found.double() - exact).abs() > allowed).any()):
            problem = f"{name}: a sum is off by {float((found.double() - exact).abs().max())}"
    return problem


def all_gather(world: World) -> str:
    def check(world: World, shape: tuple[int, ...], dtype: torch.dtype) -> list[str]:
        parts = [world.mine(r, shape, dtype) for r in range(world.context.world_size)]
        problems = []
        for dim in (-1, 0):
            found = world.group.all_gather(world.on_device(world.context.rank, shape, dtype), dim)
            problems.append(_differs(found, torch.cat(parts, dim), world))
        return problems

    return _each(world, check, "int32")


def reduce_scatter(world: World) -> str:
    def check(world: World, shape: tuple[int, ...], dtype: torch.dtype) -> list[str]:
        size, rank = world.context.world_size, world.context.rank
        total = torch.stack([world.mine(r, shape, dtype) for r in range(size)]).sum(0).to(dtype)
        found = world.group.reduce_scatter(world.on_device(rank, shape, dtype), -1)
        return [_differs(found, total.chunk(size, -1)[rank].contiguous(), world)]

    return _each(world, check)


def broadcast(world: World) -> str:
    def check(world: World, shape: tuple[int, ...], dtype: torch.dtype) -> list[str]:
        problems = []
        for source in (0, world.context.world_size - 1):
            tensor = world.on_device(world.context.rank, shape, dtype)
            found = world.group.broadcast(tensor, source)
            expected = world.mine(source, shape, dtype)
            problems += [_differs(found, expected, world), _differs(tensor, expected, world)]
        return problems

    return _each(world, check, "int32")


def send_recv(world: World) -> str:
    """Everyone sends to everyone before anyone receives, twice, and the order is kept."""

    def check(world: World, shape: tuple[int, ...], dtype: torch.dtype) -> list[str]:
        rank, others = world.context.rank, [r for r in range(world.context.world_size) if r != world.context.rank]
        for other in others:
            for turn in (0, 1):
                world.group.send(world.on_device(rank + 10 * turn, shape, dtype), other)
        problems = []
        for other in others:
            for turn in (0, 1):
                found = world.group.recv(shape, dtype, other)
                problems.append(_differs(found, world.mine(other + 10 * turn, shape, dtype), world))
        return problems

    return _each(world, check, "uint8")


def gather(world: World) -> str:
    def check(world: World, shape: tuple[int, ...], dtype: torch.dtype) -> list[str]:
        size, rank = world.context.world_size, world.context.rank
        expected = torch.cat([world.mine(r, shape, dtype) for r in range(size)], 0)
        problems = []
        for destination in (0, size - 1):
            found = world.group.gather(world.on_device(rank, shape, dtype), destination, 0)
            if rank == destination:
                problems.append(_differs(found, expected, world))
            elif found is not None:
                problems.append(f"to {destination}: rank {rank} got a tensor instead of None")
        return problems

    return _each(world, check, "int32")


def all_to_all(world: World) -> str:
    def check(world: World, shape: tuple[int, ...], dtype: torch.dtype) -> list[str]:
        size, rank = world.context.world_size, world.context.rank
        found = world.group.all_to_all([world.on_device(rank + 10 * to, shape, dtype) for to in range(size)])
        if len(found) != size:
            return [f"{len(found)} tensors for {size} ranks"]
        return [_differs(found[r], world.mine(r + 10 * rank, shape, dtype), world) for r in range(size)]

    return _each(world, check, "int32")


def barrier(world: World) -> str:
    """A rank that has passed the barrier knows that the others have reached it: nobody passes before the slowest."""
    import os
    import tempfile
    import time
    from pathlib import Path

    assert world.context.init_method is not None
    port = world.context.init_method.rpartition(":")[2]
    marks = [Path(tempfile.gettempdir()) / f"mvllm-barrier-{port}-{r}" for r in range(world.context.world_size)]
    try:
        for turn in range(2):
            if world.context.rank == turn % world.context.world_size:
                time.sleep(0.3)
            marks[world.context.rank].write_text(f"{os.getpid()} {turn}")
            world.group.barrier()
            missing = [
                r for r, mark in enumerate(marks) if not mark.exists() or int(mark.read_text().split()[1]) < turn
            ]
            world.group.barrier()  # nobody goes on, and writes or removes its mark, before all have looked
            if missing:
                return f"rank {world.context.rank} passed before rank {missing[0]} had come"
    finally:
        marks[world.context.rank].unlink(missing_ok=True)
    return ""


def close(world: World) -> str:
    if world.communicator is not None:
        world.communicator.close()
        world.communicator.close()
    world.device.shutdown()
    world.device.shutdown()
    return ""


COLLECTIVES: dict[str, Callable[[World], str]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "broadcast": broadcast,
    "send_recv": send_recv,
    "gather": gather,
    "all_to_all": all_to_all,
    "barrier": barrier,
}
TRIALS: dict[str, Callable[[World], str]] = {"bind": bind, "join": join, **COLLECTIVES, "close": close}

_digest = hashlib.sha256()


def main(order: dict[str, Any]) -> int:
    """Tries everything in the order given; stops after what went wrong, since the others would wait for ever."""
    global _digest
    context = WorkerContext(
        rank=order["rank"],
        local_rank=order["rank"],
        world_size=order["world_size"],
        local_world_size=order["world_size"],
        in_engine_process=False,
        init_method=order["init_method"],
    )
    world = World(choose_platform(order["platform"]).platform, context, order["dtypes"])
    for name in order["what"]:
        if name in COLLECTIVES and (name not in world.platform.capabilities.collectives or context.world_size == 1):
            continue
        _digest = hashlib.sha256()
        try:
            with enter_phase(Phase.WORKER):
                error = TRIALS[name](world)
        except Exception as e:  # noqa: BLE001  (told to whoever asked)
            error = f"{type(e).__name__}: {e}"
        answer = {"did": name, "error": error, "digest": _digest.hexdigest()}
        if name == "bind" and world.runtime is not None:
            answer["device"] = str(world.runtime.device)
        sys.stdout.write(f"\n{SIGN}{json.dumps(answer)}\n")
        sys.stdout.flush()
        if error and name in ("bind", "join"):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
