"""The models of a router: loads, least-recently-used unloads, drains, limits and failures, with fakes as servers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.requests import Request

from mvllm.config.engine_args import EngineArgs
from mvllm.entrypoints.openai.common.errors import APIError
from mvllm.entrypoints.openai.server.settings import ServerSettings
from mvllm.errors import CacheError, ModelError
from mvllm_router.model_entry import ModelEntry, parse_keep_alive
from mvllm_router.model_pool import ModelPool
from mvllm_router.pooled_model import ModelState, PooledModel, PoolLimits, check_pinned
from mvllm_router.router_routes import ModelRoutes


class FakeServer:
    """A server whose load and end take as long as the test wants."""

    def __init__(self, rig: Rig, name: str, on_death: Callable[[Exception], None]) -> None:
        self._rig = rig
        self.name = name
        self.die = on_death
        self.num_bytes = rig.bytes_of.get(name, 0)

    async def check(self) -> None:
        if self.name in self._rig.missing:
            raise ModelError("there are no such files")

    async def start(self) -> None:
        self._rig.events.append(f"load {self.name}")
        if (gate := self._rig.gates.get(self.name)) is not None:
            await gate.wait()
        failures = self._rig.failures.get(self.name, [])
        if failures and (error := failures.pop(0)) is not None:
            raise error
        self._rig.running.append(self.name)

    async def stop(self, *, abort: bool = False) -> None:
        await asyncio.sleep(0)
        if self.name in self._rig.running:
            self._rig.running.remove(self.name)
            self._rig.events.append(f"unload {self.name}")


class Rig:
    """A pool of models `a`, `b`, `c`, ... of fakes."""

    def __init__(self, names: str = "abc", limits: PoolLimits | None = None, **entries: dict[str, object]) -> None:
        self.events: list[str] = []
        self.running: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.failures: dict[str, list[Exception | None]] = {}
        self.bytes_of: dict[str, int] = {}
        self.missing: set[str] = set()
        self.servers: list[FakeServer] = []
        self.pool = ModelPool(limits or PoolLimits(max_loaded_models=2), self._make)
        for name in names:
            settings = ServerSettings()
            entry = ModelEntry(name, EngineArgs(model="demo"), settings, **entries.get(name, {}))  # type: ignore[arg-type]
            self.pool.add(PooledModel(entry))
        self.pool.start()

    def _make(self, entry: ModelEntry, on_death: Callable[[Exception], None]) -> FakeServer:
        self.servers.append(FakeServer(self, entry.name, on_death))
        return self.servers[-1]

    def __getitem__(self, name: str) -> PooledModel:
        found = self.pool.find(name)
        assert found is not None
        return found

    async def ask(self, name: str, until: Awaitable[object] | None = None, **options: object) -> None:
        """One request, which ends when `until` does."""
        async with self.pool.use(self[name], **options):  # type: ignore[arg-type]
            if until is not None:
                await until

    def begin(self, name: str) -> tuple[asyncio.Task[None], asyncio.Event]:
        """A request that runs until the event is set."""
        end = asyncio.Event()
        return asyncio.create_task(self.ask(name, end.wait())), end

    async def states(self, expected: str) -> None:
        """Waits until the states of all models, in order, are these: u(nloaded), L(oading), l(oaded), ..."""
        letters = {ModelState.UNLOADED: "u", ModelState.LOADING: "L", ModelState.LOADED: "l"}
        letters |= {ModelState.DRAINING: "d", ModelState.UNLOADING: "U"}
        found = ""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(60):
                while (found := "".join(letters[each.state] for each in self.pool.models.values())) != expected:
                    await asyncio.sleep(0.001)
        assert found == expected


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 120))


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


async def refused(requests: Iterable[Awaitable[object]]) -> list[APIError]:
    found = await asyncio.gather(*requests, return_exceptions=True)
    assert all(isinstance(each, APIError) for each in found), found
    return [each for each in found if isinstance(each, APIError)]


def test_concurrent_first_requests_load_a_model_once() -> None:
    async def test() -> None:
        rig = Rig()
        await asyncio.gather(*(rig.ask("a") for _ in range(20)))
        assert rig.events == ["load a"] and rig["a"].num_in_flight == 0

    run(test)


def test_the_least_recently_used_idle_model_makes_room() -> None:
    async def test() -> None:
        rig = Rig()
        for name in "abab":
            await rig.ask(name)
        await rig.ask("a")
        await rig.ask("c")
        assert rig.events == ["load a", "load b", "unload b", "load c"]
        assert sorted(rig.running) == ["a", "c"]

    run(test)


def test_a_busy_model_is_not_unloaded_while_another_is_idle() -> None:
    async def test() -> None:
        rig = Rig()
        old, end = rig.begin("a")  # the least recently used, but in use
        await rig.states("luu")
        await rig.ask("b")
        await rig.ask("c")
        assert rig.events == ["load a", "load b", "unload b", "load c"]
        end.set()
        await old

    run(test)


def test_a_busy_model_drains_before_it_is_unloaded_and_its_new_requests_wait_for_the_next_load() -> None:
    async def test() -> None:
        rig = Rig(limits=PoolLimits(max_loaded_models=1))
        running, end = rig.begin("a")
        await rig.states("luu")
        other = asyncio.create_task(rig.ask("b"))
        await rig.states("duu")
        later = asyncio.create_task(rig.ask("a"))
        await settle()
        assert rig.running == ["a"] and not later.done() and not running.done()
        end.set()
        await asyncio.gather(running, other, later)
        assert rig.events == ["load a", "unload a", "load b", "unload b", "load a"]

    run(test)


def test_a_drain_ends_when_nobody_waits_for_the_place_any_more() -> None:
    async def test() -> None:
        rig = Rig(limits=PoolLimits(max_loaded_models=1))
        running, end = rig.begin("a")
        await rig.states("luu")
        other = asyncio.create_task(rig.ask("b"))
        await rig.states("duu")
        later = asyncio.create_task(rig.ask("a"))
        await settle()
        other.cancel()
        await later  # served at once, while the first still runs
        assert rig.events == ["load a"] and not running.done()
        end.set()
        await running

    run(test)


def test_pinned_models_are_loaded_at_the_start_and_stay() -> None:
    async def test() -> None:
        rig = Rig(a={"is_pinned": True, "keep_alive": 0.0})
        await rig.states("luu")
        for name in "bcb":
            await rig.ask(name)
        assert rig.running == ["a", "b"] and rig.events.count("load a") == 1

    run(test)


def test_the_router_is_live_but_not_healthy_while_a_pinned_model_is_loaded() -> None:
    async def test() -> None:
        rig = Rig(a={"is_pinned": True})
        rig.gates["a"] = asyncio.Event()
        await rig.states("Luu")
        routes = ModelRoutes(rig.pool, cast(Any, None), cast(Any, None), lambda: b"", lambda: "ready")
        table = {path: endpoint for (method, path), endpoint in routes.table().items() if method == "GET"}

        async def statuses() -> list[int]:
            request = Request({"type": "http", "method": "GET", "headers": []})
            return [(await table[path](request)).status_code for path in ("/health", "/health/live", "/ping")]

        assert await statuses() == [503, 200, 200]
        rig.gates["a"].set()
        await rig.states("luu")
        assert await statuses() == [200, 200, 200]

    run(test)


def test_too_many_pinned_models_are_refused() -> None:
    entries = [ModelEntry(name, EngineArgs(model="demo"), ServerSettings(), is_pinned=name != "c") for name in "abc"]
    with pytest.raises(
        ValueError, match="2 models are pinned, so at least 3 have to be loaded at once, but the limit is 2"
    ):
        check_pinned(entries, PoolLimits(max_loaded_models=2))
    assert check_pinned(entries, PoolLimits(max_loaded_models=3)) == ["a", "b"]


def test_idle_models_are_unloaded_after_their_time_and_a_request_may_change_it() -> None:
    async def test() -> None:
        rig = Rig(a={"keep_alive": 0.05})
        await rig.ask("a")
        await rig.states("uuu")
        running, end = rig.begin("a")
        await asyncio.sleep(0.1)
        assert rig.running == ["a"]  # in use for longer than its time
        end.set()
        await running
        await rig.ask("a", keep_alive=None)
        assert rig.pool.seconds_until_expiry(rig["a"]) is None
        await asyncio.sleep(0.1)
        assert rig.running == ["a"]
        await rig.ask("b", keep_alive=0.0)
        await rig.states("luu")
        await rig.pool.load(rig["b"])  # as its entry says, not as the last request before it was unloaded
        assert rig.pool.seconds_until_expiry(rig["b"]) is None

    run(test)


def test_a_failed_load_fails_its_own_requests_only_and_is_not_repeated_at_once() -> None:
    async def test() -> None:
        rig = Rig()
        rig.failures["a"] = [ModelError("there is no file x\nand more")]
        await rig.ask("b")
        errors = await refused(rig.ask("a") for _ in range(3))
        assert {(error.status, error.code) for error in errors} == {(503, "model_load_failed")}
        assert errors[0].message == "The model `a` cannot be loaded: there is no file x"
        assert rig.running == ["b"] and rig["a"].failure_text == "there is no file x"
        await refused([rig.ask("a")])
        assert rig.events.count("load a") == 1  # refused from memory
        rig["a"]._retry_at = 0.0
        await rig.ask("a")
        assert rig.events.count("load a") == 2 and rig["a"].failure is None

    run(test)


def test_a_model_that_does_not_fit_into_the_memory_takes_the_place_of_another() -> None:
    async def test() -> None:
        rig = Rig(limits=PoolLimits(max_loaded_models=0))
        await rig.ask("a")
        await rig.ask("b")
        rig.failures["c"] = [CacheError("the KV cache does not fit"), None]
        await rig.ask("c")
        assert rig.events == ["load a", "load b", "load c", "unload a", "load c"]
        rig.failures["a"] = [CacheError("the KV cache does not fit")] * 5
        await refused([rig.ask("a")])
        assert rig.running == []  # it did not fit alone either

    run(test)


def test_a_model_that_cannot_be_loaded_takes_no_place() -> None:
    async def test() -> None:
        rig = Rig(limits=PoolLimits(max_loaded_models=1))
        await rig.ask("b")
        rig.missing.add("a")
        await refused([rig.ask("a")])
        assert rig.running == ["b"]

    run(test)


def test_models_share_the_memory_limit() -> None:
    async def test() -> None:
        limits = PoolLimits(max_loaded_models=0, max_loaded_bytes=100)
        rig = Rig("abcd", limits, a={"memory_bytes": 60}, b={"memory_bytes": 30}, c={"memory_bytes": 30})
        for name in "abc":
            await rig.ask(name)
        assert rig.running == ["b", "c"]
        rig.bytes_of["d"] = 50  # which only its load shows
        await rig.ask("d")
        await rig.states("uull")

    run(test)


def test_a_model_whose_server_dies_is_loaded_by_the_next_request() -> None:
    async def test() -> None:
        rig = Rig()
        await rig.ask("b")
        running, end = rig.begin("a")
        await rig.states("llu")
        rig.servers[-1].die(ModelError("killed"))
        await rig.ask("a")
        assert rig.events.count("load a") == 2 and rig.running == ["b", "a"]
        end.set()
        await running
        assert rig["a"].num_in_flight == 0

    run(test)


def test_requests_wait_within_limits_of_number_bytes_and_time() -> None:
    async def test() -> None:
        rig = Rig(limits=PoolLimits(max_waiting_requests=2, load_timeout=0.1))
        rig.gates["a"] = asyncio.Event()
        waiting = [asyncio.create_task(rig.ask("a")) for _ in range(2)]
        await settle()
        [error] = await refused([rig.ask("b")])
        assert error.status == 503 and error.retry_after and "2 requests wait" in error.message
        errors = await refused(waiting)
        assert all(each.status == 503 and each.retry_after and "loading" in each.message for each in errors)
        [error] = await refused([rig.ask("a", num_bytes=1 << 30)])
        assert error.status == 503
        rig.gates["a"].set()  # the load goes on without them
        await rig.states("luu")

    run(test)


def test_a_model_has_its_own_limit_of_requests() -> None:
    async def test() -> None:
        rig = Rig(a={"max_concurrent_requests": 1})
        running, end = rig.begin("a")
        await rig.states("luu")
        [error] = await refused([rig.ask("a")])
        assert (error.status, error.code, error.retry_after) == (429, "queue_full", 1)
        await rig.ask("b")
        end.set()
        await running
        await rig.ask("a")

    run(test)


def test_an_administrator_unloads_a_model_after_its_requests_and_a_pinned_one_stays_unloaded() -> None:
    async def test() -> None:
        rig = Rig(a={"is_pinned": True})
        await rig.states("luu")
        running, end = rig.begin("a")
        await settle()
        unload = asyncio.create_task(rig.pool.unload(rig["a"]))
        await rig.states("duu")
        end.set()
        await running
        assert await unload
        await settle()
        assert rig.running == [] and not await rig.pool.unload(rig["a"])
        await rig.ask("a")
        assert rig.running == ["a"]

    run(test)


def test_an_unload_during_a_load_follows_it_and_its_requests() -> None:
    async def test() -> None:
        rig = Rig()
        rig.gates["a"] = asyncio.Event()
        running, end = rig.begin("a")
        await rig.states("Luu")
        unloads = [asyncio.create_task(rig.pool.unload(rig["a"])) for _ in range(2)]
        await settle()
        rig.gates["a"].set()
        await rig.states("duu")
        end.set()
        await running
        assert await asyncio.gather(*unloads) == [True, True]
        await rig.states("uuu")
        rig.failures["a"] = [ModelError("damaged")]
        loading = asyncio.create_task(rig.pool.load(rig["a"]))
        await settle()
        assert not await rig.pool.unload(rig["a"])  # the load has failed
        await refused([loading])

    run(test)


def test_an_unload_that_is_cancelled_keeps_a_pinned_model_loaded() -> None:
    async def test() -> None:
        rig = Rig(a={"is_pinned": True})
        rig.gates["a"] = asyncio.Event()
        await rig.states("Luu")
        for opens in (True, False):
            running, end = rig.begin("a")
            await settle()
            unload = asyncio.create_task(rig.pool.unload(rig["a"]))
            await settle()
            unload.cancel()
            await settle()
            if opens:
                rig.gates["a"].set()
            await rig.states("luu")
            end.set()
            await running
        rig.servers[-1].die(ModelError("died"))
        await settle()
        await rig.states("luu")
        assert len(rig.servers) == 2

    run(test)


def test_a_request_that_is_cancelled_while_it_waits_leaves_nothing() -> None:
    async def test() -> None:
        rig = Rig()
        rig.gates["a"] = asyncio.Event()
        waiting = asyncio.create_task(rig.ask("a"))
        await rig.states("Luu")
        waiting.cancel()
        await settle()
        rig.gates["a"].set()
        await rig.states("luu")
        assert rig["a"].num_in_flight == 0 and rig["a"].num_waiting == 0

    run(test)


def test_closing_ends_loads_and_waiting_requests() -> None:
    async def test() -> None:
        rig = Rig()
        rig.gates["a"] = asyncio.Event()
        await rig.ask("b")
        waiting = asyncio.create_task(rig.ask("a"))
        await rig.states("Llu")
        await rig.pool.close()
        [error] = await refused([waiting])
        assert error.code == "shutting_down" and rig.running == []
        await refused([rig.ask("b")])

    run(test)


def test_random_requests_never_exceed_the_limit_and_never_lose_a_running_model() -> None:
    async def test() -> None:
        import random

        draw = random.Random(7)
        rig = Rig("abcde", PoolLimits(max_loaded_models=2), a={"keep_alive": 0.0}, b={"keep_alive": 0.002})
        problems: list[str] = []

        async def one() -> None:
            name = draw.choice("abcde")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(draw.choice([0.001, 0.01, 5.0])), rig.pool.use(rig[name]):
                    for _ in range(draw.randrange(4)):
                        if name not in rig.running or len(rig.running) > 2:
                            problems.append(f"{name}: {rig.running}")
                        await asyncio.sleep(draw.random() * 0.004)

        async def several() -> None:
            for _ in range(40):
                if draw.random() < 0.05:
                    await rig.pool.unload(rig[draw.choice("abcde")])
                await one()

        await asyncio.gather(*(several() for _ in range(8)))
        assert not problems
        assert all(each.num_in_flight == each.num_waiting == 0 for each in rig.pool.models.values())

    run(test)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(300, 300.0), ("5m", 300.0), ("1h30m", 5400.0), ("500ms", 0.5), (0, 0.0), ("0", 0.0), (-1, None), ("-1m", None)],
)
def test_times_to_keep_a_model_are_read_as_ollama_reads_them(value: object, seconds: float | None) -> None:
    assert parse_keep_alive(value) == seconds


@pytest.mark.parametrize("value", ["5 minutes", "", "m", True, [5], float("nan"), "nan"])
def test_other_times_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="must be seconds, or a duration"):
        parse_keep_alive(value)


def test_an_alias_names_the_model() -> None:
    rig_entry = ModelEntry(
        "a", EngineArgs(model="demo"), ServerSettings(lora_modules=(("tuned", "/x"),)), aliases=("x",)
    )
    pool = ModelPool(PoolLimits(), lambda *unused: SimpleNamespace())  # type: ignore[arg-type,return-value]
    pool.add(PooledModel(rig_entry))
    assert [pool.find(name) is not None for name in ("a", "x", "tuned", "y")] == [True, True, True, False]
