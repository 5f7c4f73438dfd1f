"""A worker process without an engine: binds a device, runs the checks that its argument (JSON) names, reports each.

Every rank can compute the inputs of all ranks, so each checks its own results. Digests of the results let the parent
compare ranks bit by bit.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mvllm.extension_api.testing import (
    EngineArgs,
    Worker,
    choose_platform,
    enter_phase,
    fused_add_rms_norm,
    resolve_config,
    torch_dtype,
)
from mvllm.plugin_api import Communicator, DeviceRuntime, GroupSpec, Phase, Platform, WorkerContext
from mvllm_conformance.attention_cases import make_spec
from mvllm_conformance.rank_launcher import START_CALLS
from mvllm_conformance.subprocess_checks import print_answer

SHAPES = ((6, 8), (1, 4096), (3, 4, 12))
"""Shapes of the tensors; all have dimensions that are divisible by 4."""


@dataclass
class World:
    """The state that the checks of one rank share."""

    platform: Platform
    context: WorkerContext
    dtypes: list[str]
    folder: str = ""
    barrier_files: str = ""
    total: int = 0
    runtime: DeviceRuntime | None = None
    communicator: Communicator | None = None

    @property
    def device(self) -> DeviceRuntime:
        assert self.runtime is not None, "the check `bind` must run first"
        return self.runtime

    @property
    def group(self) -> Communicator:
        assert self.communicator is not None, "the check `join` must run first"
        return self.communicator

    def random_input(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The input of `rank`, on the host: small integers, whose sums are exact in every dtype."""
        count = 1
        for size in shape:
            count *= size
        return ((torch.arange(count) * (rank + 3) + rank) % 13 - 6).view(shape).to(dtype)

    def on_device(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.device.to_device(self.random_input(rank, shape, dtype).clone())

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.device.to_host(tensor).wait()


def bind(world: World) -> str:
    world.runtime = world.platform.init_device(world.context)
    world.runtime.health()
    tensor = world.runtime.to_device(torch.arange(7))
    return "" if world.host(tensor).tolist() == list(range(7)) else "values change on the way to the device and back"


def join(world: World) -> str:
    context = world.context
    if context.world_size > 1:
        ranks = tuple(range(context.world_size))
        spec = GroupSpec("tp", ranks, context.rank, context.init_method, context.world_size)
        world.communicator = world.platform.communicator(spec, world.device.device)
        found = (world.communicator.rank, world.communicator.world_size)
        if found != (context.rank, context.world_size):
            return f"the communicator has rank and world_size {found}, not {(context.rank, context.world_size)}"
    return ""


def _each(world: World, check: Callable[[World, tuple[int, ...], torch.dtype], list[str]], *more_dtypes: str) -> str:
    """Runs a check for all dtypes and shapes; returns the first problem.

    It continues after a problem, since the other ranks make every call and would wait for this rank.
    """
    problems = []
    for name in [*world.dtypes, *more_dtypes]:
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
        parts = [world.random_input(r, shape, dtype) for r in range(world.context.world_size)]
        expected = torch.stack(parts).sum(0).to(dtype)
        problem = _differs(found, expected, world)
        return [f"{problem}{_of_other_ranks(world.host(found), parts)}" if problem and found is not None else problem]

    exact, rounded, fused = _each(world, check), _rounding_agrees(world), _fused_norm_agrees(world)
    return exact or rounded or fused


def _of_other_ranks(found: torch.Tensor, parts: list[torch.Tensor]) -> str:
    """Which ranks' tensors a wrong sum has, if that explains it."""
    whole = torch.stack(parts).double()
    for rank, part in enumerate(whole):
        for text, sum_ in (
            (f"the sum without that of rank {rank}", whole.sum(0) - part),
            (f"the tensor of rank {rank} alone", part),
            (f"the sum with that of rank {rank} twice", whole.sum(0) + part),
        ):
            if found.shape == part.shape and torch.equal(found.double(), sum_):
                return f": {text}"
    return ""


def _fused_norm_agrees(world: World) -> str:
    """Compares `all_reduce_add_rms_norm` with its two operations, where the communicator has it."""
    problems = []
    for name in world.dtypes:
        dtype, count = torch_dtype(name), world.context.world_size
        for shape in ((1, 64), (5, 301)):
            parts = [world.random_input(r, shape, dtype) for r in range(count)]
            residual = world.random_input(count, shape, dtype)
            weight = world.random_input(count + 1, shape[-1:], dtype)
            arguments = [world.device.to_device(t.clone()) for t in (parts[world.context.rank], residual, weight)]
            found = world.group.all_reduce_add_rms_norm(arguments[0], arguments[1], arguments[2], 1e-5)
            if found is None:
                continue
            normed, total = fused_add_rms_norm(torch.stack(parts).sum(0).to(dtype), residual, weight, 1e-5)
            where = f"all_reduce_add_rms_norm, {name} {shape}"
            if problem := _differs(found[1], total, world):
                problems.append(f"{where}: the sum: {problem}")
            host = world.host(found[0])
            _digest.update(host.contiguous().view(torch.uint8).numpy().tobytes())
            allowed = 4 * torch.finfo(dtype).eps * normed.double().abs() + torch.finfo(dtype).eps
            if bool(((host.double() - normed.double()).abs() > allowed).any()):
                problems.append(f"{where}: the normalised sum is off by {float((host - normed).abs().max())}")
    return problems[0] if problems else ""


def _rounding_agrees(world: World) -> str:
    """Checks that inexact sums are close to the exact ones, and adds them to the digest."""
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
        parts = [world.random_input(r, shape, dtype) for r in range(world.context.world_size)]
        problems = []
        for dim in (-1, 0):
            found = world.group.all_gather(world.on_device(world.context.rank, shape, dtype), dim)
            problem = _differs(found, torch.cat(parts, dim), world)
            if problem and found.shape == torch.cat(parts, dim).shape:
                pieces = world.host(found).chunk(len(parts), dim)
                wrong = [str(r) for r, part in enumerate(parts) if not torch.equal(pieces[r], part)]
                problem += f"; wrong: the tensor of rank {', '.join(wrong)}"
            problems.append(problem)
        return problems

    return _each(world, check, "int32")


def reduce_scatter(world: World) -> str:
    def check(world: World, shape: tuple[int, ...], dtype: torch.dtype) -> list[str]:
        size, rank = world.context.world_size, world.context.rank
        total = torch.stack([world.random_input(r, shape, dtype) for r in range(size)]).sum(0).to(dtype)
        found = world.group.reduce_scatter(world.on_device(rank, shape, dtype), -1)
        return [_differs(found, total.chunk(size, -1)[rank].contiguous(), world)]

    return _each(world, check)


def broadcast(world: World) -> str:
    def check(world: World, shape: tuple[int, ...], dtype: torch.dtype) -> list[str]:
        problems = []
        for source in (0, world.context.world_size - 1):
            tensor = world.on_device(world.context.rank, shape, dtype)
            found = world.group.broadcast(tensor, source)
            expected = world.random_input(source, shape, dtype)
            problems += [_differs(found, expected, world), _differs(tensor, expected, world)]
        return problems

    return _each(world, check, "int32")


def send_recv(world: World) -> str:
    """Each rank sends to all others twice before any rank receives; the order must be kept."""

    def check(world: World, shape: tuple[int, ...], dtype: torch.dtype) -> list[str]:
        rank, others = world.context.rank, [r for r in range(world.context.world_size) if r != world.context.rank]
        for other in others:
            for turn in (0, 1):
                world.group.send(world.on_device(rank + 10 * turn, shape, dtype), other)
        problems = []
        for other in others:
            for turn in (0, 1):
                found = world.group.recv(shape, dtype, other)
                problems.append(_differs(found, world.random_input(other + 10 * turn, shape, dtype), world))
        return problems

    return _each(world, check, "uint8")


def gather(world: World) -> str:
    def check(world: World, shape: tuple[int, ...], dtype: torch.dtype) -> list[str]:
        size, rank = world.context.world_size, world.context.rank
        expected = torch.cat([world.random_input(r, shape, dtype) for r in range(size)], 0)
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
        return [_differs(found[r], world.random_input(r + 10 * rank, shape, dtype), world) for r in range(size)]

    return _each(world, check, "int32")


def barrier(world: World) -> str:
    """No rank passes the barrier before the slowest rank has reached it."""
    import time
    from pathlib import Path

    files = [Path(f"{world.barrier_files}{r}") for r in range(world.context.world_size)]
    for turn in range(2):
        if world.context.rank == turn % world.context.world_size:
            time.sleep(0.3)
        files[world.context.rank].write_text(str(turn))
        world.group.barrier()
        missing = [r for r, file in enumerate(files) if not file.exists() or int(file.read_text()) < turn]
        world.group.barrier()  # no rank writes its file before all have read it
        if missing:
            return f"rank {world.context.rank} passed before rank {missing[0]} had reached the barrier"
    return ""


def close(world: World) -> str:
    if world.communicator is not None:
        world.communicator.close()
        world.communicator.close()
    world.device.shutdown()
    world.device.shutdown()
    return ""


def place(world: World) -> str:
    host, count = world.random_input(1, (24, 48), torch.float32), world.context.num_devices
    for dim in (0, 1, None):
        placed = world.device.place(world.device.to_device(host.clone()), dim)
        if problem := _differs(placed, host, world):
            return f"place(tensor, {dim}) changes the tensor: {problem}"
        expected = [host] * count if dim is None else list(host.chunk(count, dim))
        parts = world.device.parts(placed)
        if len(parts) != count:
            return f"parts() of a tensor placed along {dim} gives {len(parts)} tensors for {count} devices"
        for device, (part, wanted) in enumerate(zip(parts, expected, strict=True)):
            if not torch.equal(part, wanted):
                shapes = f"a tensor of {tuple(part.shape)}, expected {tuple(wanted.shape)}"
                return f"place(tensor, {dim}) gives device {device} {shapes}, or other values"
    return ""


def cache(world: World) -> str:
    count, num_blocks = world.context.num_devices, 8
    spec = make_spec(num_heads=4 * count, num_kv_heads=2 * count, dtype=world.dtypes[0])
    layout = world.platform.attention_backend(spec).kv_layout()
    backend = world.platform.attention_backend(spec)
    made = backend.allocate(num_blocks, layout.block_sizes[0], world.device.device)
    tensors = [made] if isinstance(made, torch.Tensor) else list(made)
    bytes_of = [0] * count
    for tensor in tensors:
        for device, part in enumerate(world.device.parts(tensor)):
            bytes_of[device] += part.numel() * part.element_size()
    share = num_blocks * layout.block_sizes[0] * layout.bytes_per_token // count
    if max(bytes_of) > share or min(bytes_of) == 0:
        return f"kv_layout gives {share} bytes for each device; the cache takes {bytes_of} on them"
    sizes = spec.head_size + spec.value_size
    most = 1.5 * spec.num_kv_heads * (sizes + 4) * torch_dtype(spec.kv_dtype).itemsize  # scales, and some padding
    if layout.bytes_per_token > most:
        return f"a token takes {layout.bytes_per_token} bytes on all devices; on one device it takes about {most:.0f}"
    return ""


def total(world: World) -> str:
    world.total = world.device.memory().total
    return "" if world.total > 0 else "memory().total is 0"


def weights(world: World) -> str:
    """Core's worker loads a model; each device must have an equal share of the weights, within 25 %."""
    args = EngineArgs.from_kwargs(
        model=world.folder,
        platform=world.platform.spec.name,
        dtype=world.dtypes[0],
        skip_tokenizer_init=True,
        use_tqdm_on_load=False,
        tensor_parallel_size=world.context.num_devices,
    )
    config = resolve_config(args.create_engine_config(), world.platform)
    worker = Worker(config, world.platform, world.context)
    worker.init_device()
    worker.load_model()
    parameters = list(worker.runner.loader.model.parameters())
    whole = sum(p.numel() * p.element_size() for p in parameters)
    bytes_of = [0] * world.context.num_devices
    for parameter in parameters:
        for device, part in enumerate(worker.runtime.parts(parameter.data)):
            bytes_of[device] += part.numel() * part.element_size()
    worker.shutdown()
    equal_share = whole / world.context.num_devices
    if whole == 0:
        return ""  # the platform stores weights outside of parameters
    if max(bytes_of) > 1.25 * equal_share or min(bytes_of) < 0.75 * equal_share:
        return f"of {whole} bytes of weights the devices hold {bytes_of}; each should have about {equal_share:.0f}"
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
CHECKS: dict[str, Callable[[World], str]] = {"bind": bind, "join": join, **COLLECTIVES, "close": close}
MULTI_DEVICE_CHECKS = {"bind": bind, "place": place, "cache": cache, "total": total, "close": close, "weights": weights}
"""Checks of a worker that drives several devices."""

_digest = hashlib.sha256()


def main(settings: dict[str, Any]) -> int:
    """Runs the checks in the given order; stops if `bind` or `join` fails, since the other ranks would wait forever."""
    global _digest
    context = WorkerContext(
        rank=settings["rank"],
        local_rank=settings["rank"],
        world_size=settings["world_size"],
        local_world_size=settings["world_size"],
        in_engine_process=False,
        init_method=settings["init_method"],
        num_devices=settings["num_devices"],
    )
    world = World(
        choose_platform(settings["platform"], isolated=False).platform,
        context,
        settings["dtypes"],
        settings["checkpoint"],
        settings["barrier_files"],
    )
    for name in settings["checks"]:
        if name in COLLECTIVES and (name not in world.platform.capabilities.collectives or context.world_size == 1):
            continue
        _digest = hashlib.sha256()
        if name in START_CALLS:
            faulthandler.dump_traceback_later(settings["start_timeout"], exit=True)
        try:
            with enter_phase(Phase.WORKER):
                error = {**CHECKS, **MULTI_DEVICE_CHECKS}[name](world)
        except Exception as e:  # noqa: BLE001  (reported to the parent)
            error = f"{type(e).__name__}: {e}"
        faulthandler.cancel_dump_traceback_later()
        answer = {"did": name, "error": error, "digest": _digest.hexdigest()}
        if name == "total":
            answer["total"] = world.total
        if name == "bind" and world.runtime is not None:
            answer["device"] = str(world.runtime.device)
        print_answer(answer)
        if error and name in ("bind", "join"):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
