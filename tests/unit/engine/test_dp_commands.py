"""Commands to several replicas: all answer before an error is raised, which names those that failed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mvllm.config.engine_config import EngineConfig
from mvllm.engine.core.kv_cache_sizing import KVCacheSummary
from mvllm.engine.process.async_mp_client import AsyncMPClient
from mvllm.engine.process.dp_async_mp_client import DPLBAsyncMPClient
from mvllm.errors import PlatformError, RequestError
from mvllm.messages.commands import (
    CallModel,
    CallWorkers,
    EngineCommand,
    HasJoinedWeightTransfer,
    InitWeightTransfer,
    UpdateWeights,
    WeightInfo,
)
from mvllm.messages.weights import WeightSource, WeightTransferInfo, WeightUpdate


class Core:
    """Answers commands after some turns of the event loop."""

    platform_summary = ""
    num_workers = 2

    def __init__(self, answer: Any, turns: int = 0) -> None:
        self._answer, self._turns = answer, turns
        self.num_answered = 0
        self.calls: list[EngineCommand[Any]] = []

    async def call(self, command: EngineCommand[Any]) -> Any:
        self.calls.append(command)
        for _ in range(self._turns):
            await asyncio.sleep(0)
        self.num_answered += 1
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


UPDATE = UpdateWeights(WeightUpdate(source=WeightSource.FOLDER))


def call(*cores: Core, command: EngineCommand[Any] = UPDATE) -> Any:
    config = cast(EngineConfig, SimpleNamespace())
    client = DPLBAsyncMPClient(config, cast("list[AsyncMPClient]", list(cores)))
    return asyncio.run(client.call(command))


def test_the_failure_of_some_replicas_is_named_when_all_have_answered() -> None:
    cores = [Core(True, turns=3), Core(RequestError("no such tensor", parameter="names")), Core(True, turns=1)]
    with pytest.raises(RequestError, match=r"failed on replica 1 of 3 .* on replicas 0, 2.*no such tensor") as found:
        call(*cores)
    assert found.value.parameter == "names"
    assert [core.num_answered for core in cores] == [1, 1, 1], "none is still at work"


def test_an_error_of_all_replicas_is_raised_as_it_is() -> None:
    with pytest.raises(PlatformError) as found:
        call(Core(PlatformError("a")), Core(PlatformError("b")))
    assert str(found.value) == "a"


def test_flags_of_all_replicas_are_combined() -> None:
    assert call(Core(True), Core(True)) is True
    assert call(Core(True), Core(False)) is False


def test_lists_are_joined_and_an_unusable_replica_is_told() -> None:
    assert call(Core([1]), Core([2, 3]), command=CallWorkers("method", [], {})) == [1, 2, 3]
    broken = {"weight_version": 0, "is_updating": False, "failure": "why"}
    assert call(Core({**broken, "failure": None}), Core(broken), command=WeightInfo()) == broken


def test_one_replica_in_turn_calls_its_model() -> None:
    cores = Core(b"first"), Core(b"second")
    client = DPLBAsyncMPClient(cast(EngineConfig, SimpleNamespace()), cast("list[AsyncMPClient]", list(cores)))

    async def calls() -> list[bytes]:
        return [await client.call(CallModel("decode", [b""])) for _ in range(3)]

    assert asyncio.run(calls()) == [b"first", b"second", b"first"]


def test_a_replica_stops_waiting_for_a_trainer_if_another_one_refuses() -> None:
    cores = Core(None), Core(RequestError("still joining"))
    info = WeightTransferInfo(master_address="127.0.0.1", master_port=1, world_size=3)
    with pytest.raises(RequestError, match=r"failed on replica 1 of 2: still joining"):
        call(*cores, command=InitWeightTransfer(info))
    assert [cast(InitWeightTransfer, core.calls[0]).info.rank_offset for core in cores] == [1, 3], (
        "each has two workers"
    )
    assert cores[0].calls[1:] == [HasJoinedWeightTransfer(give_up=True)]
    assert len(cores[1].calls) == 1, "it may wait for another call"


def test_the_longest_sequence_is_that_of_the_replica_with_the_least_memory() -> None:
    summaries = [KVCacheSummary(num_blocks=n, block_size=16, total_bytes=0, max_model_len=16 * n) for n in (9, 4, 6)]
    cores = [SimpleNamespace(cache_summary=summary, platform_summary="") for summary in summaries]
    client = DPLBAsyncMPClient(cast(EngineConfig, SimpleNamespace()), cast("list[AsyncMPClient]", cores))
    assert client.cache_summary.max_model_len == 64
