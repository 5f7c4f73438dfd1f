"""The asyncio client of several engine cores: data parallel replicas of the model, each with its own KV cache.

A single front end sends all requests, so it can count the load of each core itself. With several front ends, each one
receives the loads from the coordinator. Cores do not communicate with each other.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from mvllm.config.engine_config import EngineConfig, replace_field
from mvllm.config.rope_parameters import prompt_cache_key
from mvllm.engine.core.kv_cache_sizing import KVCacheSummary
from mvllm.engine.metrics.stats import sum_scheduler_stats
from mvllm.engine.process.async_mp_client import AsyncMPClient, OnDeath, OnOutputs, OnSleep, start_all
from mvllm.engine.process.coordinator_client import CoordinatorClient
from mvllm.engine.process.dp_load_balancer import DPLoadBalancer
from mvllm.engine.process.launched_core_connection import LaunchedCoreConnection
from mvllm.errors import EngineDeadError
from mvllm.kv_events.prefix_index import chunk_tokens
from mvllm.kv_events.routing_cost import EXPECTED_OUTPUT_TOKENS
from mvllm.messages.commands import EngineCommand
from mvllm.messages.coordinator_protocol import CoreLoad
from mvllm.messages.requests import EngineCoreOutputs, EngineCoreRequest, SchedulerStats
from mvllm.models.checkpoint_support import runs_natively
from mvllm.platform.choose import ChosenPlatform

R = TypeVar("R")


def replica_configs(config: EngineConfig) -> list[EngineConfig]:
    """The configuration of each replica, by rank."""
    size = config.parallel.data_parallel_size
    return [replace_field(config, "parallel.data_parallel_rank", rank) for rank in range(size)]


def replica_name(config: EngineConfig, rank: int) -> str:
    """The name of a replica's process."""
    return f"EngineCore_DP{rank}" if config.parallel.data_parallel_size > 1 else "EngineCore"


def start_replicas(
    config: EngineConfig, chosen: ChosenPlatform, during_start: Callable[[EngineConfig], None]
) -> DPLBAsyncMPClient:
    """Starts `data_parallel_size` engine cores for one front end.

    Args:
        config: The resolved configuration.
        chosen: The platform to run on.
        during_start: Called with the configuration while the cores' processes start.

    Raises:
        Exception: A core's own exception, if one cannot be started. Nothing stays behind.
    """
    configs = replica_configs(config)
    connections = [
        LaunchedCoreConnection(replica_name(config, rank), each, chosen.source.name)
        for rank, each in enumerate(configs)
    ]
    cores = [AsyncMPClient(each, connection, str(chosen)) for each, connection in zip(configs, connections)]
    start_all(cores, lambda: during_start(config), [connection.process for connection in connections])
    return DPLBAsyncMPClient(config, cores)


class DPLBAsyncMPClient:
    """Distributes requests over engine cores; has the interface of an AsyncMPClient.

    Args:
        config: The resolved configuration.
        cores: The clients of the cores, by rank; ready when `attach` is called.
        coordinator_client: Connects this front end with others of the same cores.

    Attributes:
        config, platform_summary: As for one core.
        stats: The last reported state of all cores' schedulers, summed.
    """

    def __init__(
        self, config: EngineConfig, cores: Sequence[AsyncMPClient], coordinator_client: CoordinatorClient | None = None
    ) -> None:
        self.config = config
        self.platform_summary = cores[0].platform_summary
        self.stats = SchedulerStats()
        self._cores = cores
        self._load_balancer = DPLoadBalancer(len(cores))
        self._position_key: Callable[[int], int] = lambda prompt_len: 0
        self._rank_by_request_id: dict[str, int] = {}  # of unfinished sequences
        self._coordinator_client = coordinator_client
        self._turns = itertools.count()
        self._on_outputs: OnOutputs = lambda outputs: None
        self._on_death: OnDeath = lambda error: None

    def attach(
        self,
        loop: asyncio.AbstractEventLoop,
        on_outputs: OnOutputs,
        on_death: OnDeath,
        on_sleep: OnSleep = lambda is_sleeping: None,
    ) -> None:
        """Starts to read updates of all cores in `loop`. The failure of one core ends the engine."""
        self._on_outputs, self._on_death = on_outputs, on_death
        if runs_natively(self.config.model):  # as the engine core does: requests with other keys share no blocks
            self._position_key = prompt_cache_key(self.config.model)
        summary = self.cache_summary
        is_caching = self.config.cache.enable_prefix_caching
        self._load_balancer.set_cache_size(chunk_tokens(summary.block_size), summary.num_tokens if is_caching else 0)
        for rank, core in enumerate(self._cores):
            core.attach(loop, functools.partial(self._handle_outputs, rank), self._handle_core_death)
        if self._coordinator_client is not None:
            self._coordinator_client.attach(loop, self._load_balancer, self._handle_core_loads, on_sleep)

    def shutdown(self) -> None:
        """Ends all cores. Idempotent."""
        if self._coordinator_client is not None:
            self._coordinator_client.close()
        for core in self._cores:
            core.shutdown()

    @property
    def cache_summary(self) -> KVCacheSummary:
        """The smallest KV cache of the cores, with the shortest longest sequence."""
        return min(
            (core.cache_summary for core in self._cores),
            key=lambda summary: (summary.max_model_len, summary.num_blocks),
        )

    @property
    def num_workers(self) -> int:
        """Workers of all cores."""
        return sum(core.num_workers for core in self._cores)

    @property
    def start_seconds(self) -> dict[str, float]:
        """Seconds per phase of the start, each of the core that took longest."""
        phases = self._cores[0].start_seconds
        return {phase: max(core.start_seconds[phase] for core in self._cores) for phase in phases}

    @property
    def core_pids(self) -> list[int]:
        """The process ids of the cores, by rank."""
        return [pid for core in self._cores for pid in core.core_pids]

    def describe_cores(self) -> list[str]:
        """See `AsyncLLM.describe_cores`."""
        return [text for core in self._cores for text in core.describe_cores()]

    @property
    def failure(self) -> EngineDeadError | None:
        """Why one of the cores can no longer be used, or None."""
        return next((failure for core in self._cores if (failure := core.failure) is not None), None)

    @property
    def heartbeat_age(self) -> float:
        """The largest of the cores' heartbeat ages."""
        return max(core.heartbeat_age for core in self._cores)

    @property
    def num_unfinished(self) -> list[int]:
        """Unfinished sequences of this front end, by core."""
        return list(self._load_balancer.loads)

    @property
    def num_other_sequences(self) -> int:
        """Unfinished sequences of other front ends."""
        return sum(self._load_balancer.loads_elsewhere)

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Queues the sequences of one request on the core that the load balancer chooses."""
        first = requests[0]
        prompt, most = first.prompt_token_ids, first.sampling_params.max_tokens
        rank = self._load_balancer.choose(
            prompt,
            first.cache_salt,
            len(requests),
            () if first.lora_request is None else first.lora_request.cache_keys,
            position_key=self._position_key(len(prompt)),
            items=[item.span for item in first.items],
            num_output_tokens=EXPECTED_OUTPUT_TOKENS if most is None else min(most, EXPECTED_OUTPUT_TOKENS),
            request_ids=[request.request_id for request in requests],
        )
        self._rank_by_request_id.update((request.request_id, rank) for request in requests)
        self._cores[rank].add_requests(requests)
        if self._coordinator_client is not None:
            self._coordinator_client.schedule_prefix_publish()

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Aborts sequences; unknown ids are ignored."""
        for request_id in request_ids:
            rank = self._rank_by_request_id.get(request_id)
            if rank is not None:
                self._remove_request(request_id)
                self._cores[rank].abort_requests([request_id])

    async def call(self, command: EngineCommand[R]) -> R:
        """The answer of all cores to a command, joined by it; or of one, in turn, if one suffices.

        Raises:
            Exception: What a core raised, after all have answered. If only some failed, its text says which.
        """
        if command.drops_prefixes:
            self._load_balancer.clear_prefixes()
        if command.uses_one_replica:
            return await self._cores[next(self._turns) % len(self._cores)].call(command)
        before = itertools.accumulate((core.num_workers for core in self._cores), initial=0)
        calls = [core.call(command.for_replica(workers)) for core, workers in zip(self._cores, before, strict=False)]
        answers: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
        if any(isinstance(answer, BaseException) for answer in answers):
            if (withdrawal := command.withdrawal) is not None:
                begun = zip(self._cores, answers, strict=True)
                undone = [core.call(withdrawal) for core, answer in begun if not isinstance(answer, BaseException)]
                await asyncio.gather(*undone, return_exceptions=True)
            _raise_failure(command, answers)
        return command.join(answers)

    async def broadcast_sleep(self, is_sleeping: bool) -> None:
        """Sends `sleep` or `wake_up` to all other front ends; returns when they have applied it."""
        if self._coordinator_client is not None:
            await self._coordinator_client.broadcast_sleep(is_sleeping)

    def _handle_outputs(self, rank: int, outputs: EngineCoreOutputs) -> None:
        for output in outputs.outputs:
            if output.finish_reason is not None and output.request_id in self._rank_by_request_id:
                self._remove_request(output.request_id)
        if outputs.cache_changes is not None:
            self._load_balancer.update_cache(rank, outputs.cache_changes)
        if outputs.stats is not None:
            stats = outputs.stats
            self._load_balancer.update_load(
                rank, stats.num_waiting_tokens, self._cores[rank].num_acknowledged_requests, stats.kv_cache_usage
            )
            self._update_stats(outputs)
        self._on_outputs(outputs)

    def _handle_core_loads(self, loads: Sequence[CoreLoad]) -> None:
        """Applies loads from the coordinator. Its own sequences this front end counts itself."""
        for load in loads:
            core = self._cores[load.rank]
            core.stats = stats = load.stats
            self._load_balancer.update_load(
                load.rank, stats.num_waiting_tokens, core.num_acknowledged_requests, stats.kv_cache_usage
            )
        outputs = EngineCoreOutputs()
        self._update_stats(outputs)
        self._on_outputs(outputs)

    def _update_stats(self, outputs: EngineCoreOutputs) -> None:
        self.stats = outputs.stats = sum_scheduler_stats((core.stats for core in self._cores), len(self._cores))

    def _handle_core_death(self, error: EngineDeadError) -> None:
        self.abort_requests(list(self._rank_by_request_id))  # the other cores need not finish them
        self._on_death(error)

    def _remove_request(self, request_id: str) -> None:
        self._load_balancer.finish_sequence(self._rank_by_request_id.pop(request_id), request_id)


def _raise_failure(command: EngineCommand[Any], results: Sequence[Any]) -> None:
    """Raises the first exception of the results. If other replicas have succeeded, its text says which failed."""
    failures = {rank: result for rank, result in enumerate(results) if isinstance(result, BaseException)}
    first = next(iter(failures.values()))
    if len(failures) == len(results) or isinstance(first, asyncio.CancelledError):
        raise first
    done = [rank for rank in range(len(results)) if rank not in failures]
    text = f"{command.name} failed on {_replicas(list(failures))} of {len(results)}"
    if command.leaves_difference:
        text += f" and was done on {_replicas(done)}, so that they differ until the call is repeated"
    error = copy.copy(first)
    error.args = (f"{text}: {first}", *first.args[1:])
    raise error from first


def _replicas(ranks: list[int]) -> str:
    return f"{'replica' if len(ranks) == 1 else 'replicas'} {', '.join(map(str, ranks))}"
