"""Executor for ranks that an external launcher (torchrun, Slurm) started; each rank runs a whole engine.

Every rank receives the same requests and schedules the same steps, and its worker computes its shard of each step.
Ranks exchange no scheduler outputs: these depend only on requests and settings. Values that may differ between ranks
(free memory, a randomly chosen seed) are exchanged at startup, and the settings are compared.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
from torch.distributed import PrefixStore, TCPStore, rendezvous  # type: ignore[attr-defined]

from mvllm.config.engine_config import EngineConfig, replace_field
from mvllm.errors import ConfigError
from mvllm.executor.interface import log_drawn_seed
from mvllm.executor.uniproc import InProcessExecutor
from mvllm.executor.worker_topology import devices_per_worker, launch_topology, with_workers_as_ranks
from mvllm.platform.interface import Platform
from mvllm.platform.topology import WorkerContext
from mvllm.platform.worker_protocol import KVCacheNeeds

_T = TypeVar("_T")

_LAUNCH_HINT = "Start it with torchrun --nproc-per-node=<ranks>, or set RANK, WORLD_SIZE, LOCAL_RANK and MASTER_*"


_serial = itertools.count()
"""Counts the engines of this process, so that ranks that build the same engines in the same order share keys."""


@dataclass(frozen=True)
class LaunchedRank:
    """Rank and world size of this process, from the environment variables that torchrun sets.

    Attributes:
        rank, world_size: RANK and WORLD_SIZE.
        local_rank, local_world_size: LOCAL_RANK and LOCAL_WORLD_SIZE, which is WORLD_SIZE where it is unset.
        host: MASTER_ADDR, the address of rank 0.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> LaunchedRank:
        """Reads the variables.

        Raises:
            ConfigError: Variables are missing, are not numbers, or contradict each other.
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if not env.get(name)]
        if missing:
            raise ConfigError(
                f"distributed_executor_backend='external_launcher' requires {', '.join(missing)}, which "
                f"{'is' if len(missing) == 1 else 'are'} not set. {_LAUNCH_HINT}."
            )
        rank, world_size, local_rank, _ = (
            _number(env, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", names[-1])
        )
        local_world_size = _number(env, "LOCAL_WORLD_SIZE") if env.get("LOCAL_WORLD_SIZE") else world_size
        if not (rank < world_size and local_rank < local_world_size <= world_size):
            raise ConfigError(
                f"The launcher's variables contradict each other: RANK={rank}, WORLD_SIZE={world_size}, "
                f"LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_world_size}. {_LAUNCH_HINT}."
            )
        return cls(rank, world_size, local_rank, local_world_size, env["MASTER_ADDR"])


def _number(env: Mapping[str, str], name: str) -> int:
    if not env[name].isascii() or not env[name].isdigit():
        raise ConfigError(f"{name} in the environment must be a whole number, found {env[name]!r}. {_LAUNCH_HINT}.")
    return int(env[name])


class ExecutorWithExternalLauncher(InProcessExecutor):
    """Executor that calls the worker of this rank directly. The engines of the other ranks run the same steps.

    Raises:
        ConfigError: The environment variables are invalid, or the number of ranks does not match the settings.
    """

    def __init__(self, config: EngineConfig, platform: Platform) -> None:
        launched = LaunchedRank.from_environment(os.environ)
        num_devices = devices_per_worker(config.parallel, launch_topology(config, platform).num_workers)
        parallel = with_workers_as_ranks(config.parallel, num_devices)
        if launched.world_size != parallel.world_size:
            devices = "" if num_devices == 1 else f", each of which drives {num_devices} devices"
            raise ConfigError(
                f"The launcher started {launched.world_size} ranks, but tensor_parallel_size "
                f"{config.parallel.tensor_parallel_size} × pipeline_parallel_size {parallel.pipeline_parallel_size} "
                f"makes {parallel.world_size}{devices}. Start {parallel.world_size}, or set sizes whose product is "
                f"{launched.world_size * num_devices}."
            )
        self._exchange = RankExchange(launched.rank, launched.world_size, launched.host)
        config = _with_common_seed(config, self._gather(_drawn_seed(config), int | None))
        if config.model.seed_is_random and launched.rank == 0:
            log_drawn_seed(config.model.seed)
        ctx = WorkerContext(
            rank=launched.rank,
            local_rank=launched.local_rank,
            world_size=launched.world_size,
            local_world_size=launched.local_world_size,
            seed=config.model.seed,
            init_method=self._exchange.init_method,
            every_rank_answers=True,
            num_devices=num_devices,
        )
        is_in_last_stage = launched.rank >= parallel.world_size - parallel.tensor_parallel_size
        super().__init__(config, platform, ctx, output_is_complete=is_in_last_stage)

    def start(self) -> None:
        """Compares the settings of all ranks, then loads the model.

        Raises:
            ConfigError: The ranks were started with different settings.
        """
        _check_equal_settings(self._gather(_settings(self._config), dict[str, str]))
        super().start()

    def kv_cache_needs(self) -> list[KVCacheNeeds]:
        """The KV cache needs of all ranks, so that every engine allocates the same number of blocks."""
        return self._gather(super().kv_cache_needs()[0], KVCacheNeeds)

    def available_kv_bytes(self) -> list[int]:
        """The bytes free for the KV cache on all ranks, so that every engine allocates the same number of blocks."""
        return self._gather(super().available_kv_bytes()[0], int)

    def _gather(self, value: _T, kind: Any) -> list[_T]:
        payloads = self._exchange.all_gather(msgspec.msgpack.encode(value))
        return [msgspec.msgpack.decode(payload, type=kind) for payload in payloads]


def _drawn_seed(config: EngineConfig) -> int | None:
    return config.model.seed if config.model.seed_is_random else None


def _with_common_seed(config: EngineConfig, drawn: list[int | None]) -> EngineConfig:
    """The configuration with the random seed of rank 0, if no rank was given a seed.

    Args:
        drawn: The randomly chosen seed of each rank; None for a rank that was given a seed.
    """
    if None in drawn:  # only some ranks were given a seed: `_check_equal_settings` raises
        return config
    return replace_field(config, "model.seed", drawn[0])


def _settings(config: EngineConfig) -> dict[str, str]:
    """The settings that scheduling and sampling depend on. Paths are left out: they may differ between machines."""
    model = config.model
    values: dict[str, object] = {
        "dtype": model.dtype,
        "seed": None if model.seed_is_random else model.seed,
        "max_model_len": "auto" if model.max_model_len_is_auto else model.max_model_len,
        "architecture": model.architecture,
        "num_layers": model.num_layers,
        "vocab_size": model.vocab_size,
        "load_format": config.load.load_format,
    }
    for section in (config.cache, config.scheduler, config.parallel):
        values |= dataclasses.asdict(section)
    del values["prefix_caching_seed"]  # block hashes are local to a rank
    return {name: repr(value) for name, value in values.items()}


def _check_equal_settings(by_rank: list[dict[str, str]]) -> None:
    for name, value in by_rank[0].items():
        others = {rank: settings.get(name) for rank, settings in enumerate(by_rank) if settings.get(name) != value}
        if others:
            rank, other = next(iter(others.items()))
            raise ConfigError(
                f"Every rank must be started with the same settings, but {name} is {value} on rank 0 and {other} on "
                f"rank {rank}. Start all ranks with the same value."
            )


class RankExchange:
    """All-gathers bytes between ranks before they have a communicator, through a TCP key-value store.

    It needs no device and no collective, and provides the rendezvous address of the communicators. It connects to the
    other ranks at the launcher's address (`MASTER_ADDR`, `MASTER_PORT`).

    Args:
        rank, world_size: As in the environment.
        host: The address of rank 0, as all ranks reach it.
        timeout: Seconds to wait for other ranks, each time.

    Attributes:
        init_method: A rendezvous address for the communicators of this engine.
    """

    def __init__(self, rank: int, world_size: int, host: str, timeout: float = 300.0) -> None:
        self._rank, self._world_size = rank, world_size
        self._round = itertools.count()
        limit = timedelta(seconds=timeout)
        shared, _, _ = next(rendezvous("env://", rank, world_size, timeout=limit))
        self._shared = shared = PrefixStore(f"mvllm/{next(_serial)}", shared)
        # The exchange uses the launcher's store, which outlives every rank. The communicators use a new store, because
        # torch's keys would collide with those of an earlier engine; it is not needed after the rendezvous.
        if rank == 0:
            # Torch's rendezvous opens the same port in this process again; both share one server.
            self._store = TCPStore(
                host, 0, None, is_master=True, timeout=limit, wait_for_workers=False, multi_tenant=True
            )
            shared.set("port", str(self._store.port))
        else:
            port = int(shared.get("port"))
            self._store = TCPStore(host, port, None, is_master=False, timeout=limit, wait_for_workers=False)
        self.init_method = f"tcp://{host}:{self._store.port}"

    def all_gather(self, payload: bytes) -> list[bytes]:
        """The payloads of all ranks, in rank order. All ranks call it the same number of times."""
        prefix = f"exchange/{next(self._round)}"
        self._shared.set(f"{prefix}/{self._rank}", payload)  # type: ignore[arg-type]  # bytes are accepted as well
        return [self._shared.get(f"{prefix}/{rank}") for rank in range(self._world_size)]
