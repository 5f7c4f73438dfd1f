"""EngineCore with an executor without a device: start-up order, steps in flight, failures, shutdown."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import msgspec
import pytest

from mvllm.config.engine_config import CacheConfig, ParallelConfig, SchedulerConfig
from mvllm.engine.core import engine_core as core_module
from mvllm.engine.core.engine_core import EngineCore
from mvllm.engine.process import inproc_client
from mvllm.errors import CacheError, ConfigError, EngineDeadError, RequestError
from mvllm.executor.interface import Executor
from mvllm.messages.commands import COMMANDS, CallModel, CheckHealth, EngineCommand, ResetPrefixCache
from mvllm.messages.requests import EngineCoreRequest, FinishReason
from mvllm.messages.sampling_params import SamplingParams, StructuredOutputsParams
from mvllm.messages.scheduler_output import ModelRunnerOutput
from mvllm.platform.worker_protocol import KVCacheNeeds
from tests.unit.engine.builders import make_config
from tests.unit.worker.fake_platform import FakePlatform

BYTES_PER_BLOCK = 16 * 8


class CountingExecutor(Executor):
    """Returns the step number for each sampling row; records the calls."""

    def __init__(self, config, platform):
        super().__init__(config, platform)
        self.calls = []
        self.plans = []
        self.results_asked = 0
        self.fail_at = {}
        self.known = {}
        self.state_bytes = 0
        self.arguments = {}

    def collective_rpc(self, method, args=(), *, timeout=None, ranks=None, non_block=False):
        self.calls.append(method)
        self.arguments[method] = args
        if method in self.fail_at:
            raise self.fail_at[method]
        needs = KVCacheNeeds(8, (16,), state_bytes=self.state_bytes)
        answers = {"kv_cache_needs": needs, "available_kv_bytes": 20 * BYTES_PER_BLOCK}
        return [answers.get(method)]

    def execute_model(self, plan):
        self.plans.append(plan)
        future = Future()
        if plan.step in self.fail_at:
            future.set_exception(self.fail_at[plan.step])
            return future
        for row in plan.freed_rows:
            self.known.pop(row, None)
        for request in plan.new_requests:
            self.known[request.row] = [request.num_computed_tokens, len(request.token_ids)]
        sampled = []
        for row, count in zip(plan.rows, plan.num_scheduled_tokens, strict=True):
            state = self.known[row]
            state[0] += count
            done = state[0] == state[1]
            state[1] += done
            sampled.append(plan.step if done else -1)
        future.set_result(ModelRunnerOutput(step=plan.step, sampled_token_ids=sampled))
        return future

    def shutdown(self):
        self.calls.append("shutdown")


@pytest.fixture
def make_core(monkeypatch):
    executors = []

    def make(*, fail_at=None, async_scheduling=False, prefix_caching=True, num_stages=1, state_bytes=0, **cache):
        def make_executor(config, platform):
            executors.append(CountingExecutor(config, platform))
            executors[-1].fail_at = fail_at or {}
            executors[-1].state_bytes = state_bytes
            return executors[-1]

        monkeypatch.setattr(core_module, "make_executor", make_executor)
        config = replace(
            make_config(max_model_len=64),
            cache=CacheConfig(memory_utilization=0.9, **cache),
            scheduler=SchedulerConfig(max_num_seqs=4, async_scheduling=async_scheduling),
            parallel=ParallelConfig(pipeline_parallel_size=num_stages),
        )
        make.executors = executors
        platform = FakePlatform()
        platform.capabilities = replace(platform.capabilities, prefix_caching=prefix_caching)
        return EngineCore(config, platform)

    return make


def request(name="a", prompt_len=3, max_tokens=4):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return EngineCoreRequest(request_id=name, prompt_token_ids=list(range(prompt_len)), sampling_params=params)


def run(core):
    """Steps until no requests are left; returns the tokens and the finish reason of each request."""
    tokens, reasons = {}, {}
    while core.has_requests():
        for output in core.step().outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            reasons[output.request_id] = output.finish_reason
    return tokens, reasons


class TestStart:
    def test_weights_come_before_sizing_and_sizing_before_the_cache(self, make_core):
        core = make_core()
        [executor] = make_core.executors
        assert executor.calls == [
            "init_device",
            "load_model",
            "kv_cache_needs",
            "available_kv_bytes",
            "allocate_kv_cache",
            "warm_up",
        ]
        assert core.cache_summary.num_blocks == 20
        assert set(core.start_seconds) == {"start workers", "load model", "size KV cache", "allocate KV cache"}

    def test_state_slots_are_allocated_with_the_blocks(self, make_core):
        core = make_core(state_bytes=BYTES_PER_BLOCK, state_snapshot_interval=16)
        [executor] = make_core.executors
        summary = core.cache_summary
        assert (summary.num_blocks, summary.num_state_slots) == (14, 4 + 2)
        assert executor.calls[-3:] == ["allocate_states", "allocate_kv_cache", "warm_up"]
        assert executor.arguments["allocate_states"] == (summary.num_state_slots,)
        assert executor.arguments["allocate_kv_cache"] == (summary.num_blocks, 16)
        core.add_request(request("a", prompt_len=40))
        core.add_request(request("b", prompt_len=40))
        tokens, _ = run(core)
        assert {name: len(found) for name, found in tokens.items()} == {"a": 4, "b": 4}
        assert executor.plans[0].read_slots == [-1] and len(executor.plans[0].write_slots) == 1
        assert core.make_stats().prefix_cache_hits == 32  # the second one waited for the first

    def test_explicit_bytes_need_no_profiling(self, make_core):
        core = make_core(kv_cache_memory_bytes=5 * BYTES_PER_BLOCK)
        assert "available_kv_bytes" not in make_core.executors[0].calls
        assert core.cache_summary.num_blocks == 5

    def test_an_unsupported_block_size_is_refused_before_profiling(self, make_core):
        with pytest.raises(CacheError, match="block_size 7"):
            make_core(block_size=7)
        assert "available_kv_bytes" not in make_core.executors[0].calls

    @pytest.mark.parametrize("method", ["init_device", "load_model", "available_kv_bytes", "allocate_kv_cache"])
    def test_a_startup_failure_shuts_the_workers_down(self, make_core, method):
        with pytest.raises(OSError, match="gone"):
            make_core(fail_at={method: OSError("gone")})
        assert make_core.executors[0].calls[-1] == "shutdown"

    def test_the_size_is_printed(self, make_core, caplog):
        with caplog.at_level("INFO", logger="mvllm"):
            make_core()
        assert "320 tokens (20 blocks of 16" in caplog.text
        assert "5.0 concurrent requests of 64 tokens" in caplog.text


class TestSteps:
    @pytest.mark.parametrize("async_scheduling", [False, True])
    def test_a_request_gets_its_tokens_and_its_finish_reason(self, make_core, async_scheduling):
        core = make_core(async_scheduling=async_scheduling)
        core.add_request(request(max_tokens=4))
        tokens, reasons = run(core)
        assert tokens == {"a": [0, 1, 2, 3]}
        assert reasons == {"a": FinishReason.LENGTH}
        core.scheduler.check_integrity()
        assert core.scheduler.make_stats().kv_cache_usage == 0

    def test_with_asynchronous_scheduling_a_step_is_started_before_the_last_is_collected(self, make_core):
        core = make_core(async_scheduling=True)
        core.add_request(request(max_tokens=9))
        core.step()
        assert len(make_core.executors[0].plans) == 2
        sync = make_core()
        sync.add_request(request(max_tokens=9))
        sync.step()
        assert len(make_core.executors[1].plans) == 1

    @pytest.mark.parametrize("async_scheduling", [False, True])
    @pytest.mark.parametrize("num_stages", [2, 3])
    def test_a_pipeline_has_one_step_in_flight_per_stage(self, make_core, num_stages, async_scheduling):
        core = make_core(num_stages=num_stages, async_scheduling=async_scheduling)
        names = "abcd"[: num_stages * (4 // num_stages)]
        for name in names:
            core.add_request(request(name, max_tokens=3))
        core.step()  # one step holds all prompts
        core.step()
        _, *plans = make_core.executors[0].plans
        assert len(plans) == num_stages
        rows = [row for plan in plans for row in plan.rows]
        assert sorted(rows) == list(range(len(names))), "each request is in one of the steps under way"
        run(core)
        core.scheduler.check_integrity()

    @pytest.mark.parametrize(("num_stages", "async_scheduling"), [(1, True), (3, False)])
    def test_an_empty_step_is_not_launched_while_another_is_in_flight(self, make_core, num_stages, async_scheduling):
        core = make_core(num_stages=num_stages, async_scheduling=async_scheduling)
        core.add_request(request(max_tokens=5))
        tokens, _ = run(core)
        plans = make_core.executors[0].plans
        assert tokens == {"a": [0, 1, 2, 3, 4]}
        assert [plan.step for plan in plans] == list(range(5)) and all(plan.rows for plan in plans)

    def test_a_request_whose_grammar_cannot_be_submitted_is_not_left_waiting(self, make_core, monkeypatch):
        core = make_core()

        def fail(*args):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(core._grammars, "submit", fail)
        asked = request()
        asked.sampling_params.structured_outputs = StructuredOutputsParams(regex="a+")
        with pytest.raises(RuntimeError, match="new thread"):
            core.add_request(asked)
        assert not core.has_requests()

    def test_a_row_freed_between_steps_is_in_the_next_plan(self, make_core):
        core = make_core(async_scheduling=True)
        core.add_request(request("a", max_tokens=2))
        core.step()  # plans 0 and 1
        assert len(make_core.executors[0].plans) == 2
        core.abort_requests(["a"])
        core.step()  # no request is left; collects plan 1
        assert len(make_core.executors[0].plans) == 2
        core.add_request(request("b", max_tokens=2))
        run(core)
        plan = make_core.executors[0].plans[2]
        assert plan.freed_rows == [0] and [new.request_id for new in plan.new_requests] == ["b"]
        core.scheduler.check_integrity()

    def test_without_requests_a_step_calls_no_worker(self, make_core):
        core = make_core()
        assert core.step().outputs == []
        assert make_core.executors[0].plans == []

    @pytest.mark.parametrize("async_scheduling", [False, True])
    def test_an_aborted_request_has_no_further_output(self, make_core, async_scheduling):
        core = make_core(async_scheduling=async_scheduling)
        core.add_request(request("a"))
        core.add_request(request("b"))
        core.step()
        core.abort_requests(["a", "unknown"])
        tokens, _ = run(core)
        assert set(tokens) == {"b"}
        core.scheduler.check_integrity()

    def test_a_prefix_stays_cached_until_the_cache_is_reset(self, make_core):
        core = make_core()

        def cached(name):
            core.add_request(request(name, prompt_len=40, max_tokens=1))
            return core.step().outputs[0].num_cached_tokens

        assert cached("a") == 0
        assert cached("b") == 32
        assert core.reset_prefix_cache()
        assert cached("c") == 0

    @pytest.mark.parametrize(("claimed", "kept"), [(True, "group"), (False, None)])
    def test_siblings_share_blocks_only_if_attention_supports_a_cached_prefix(self, make_core, claimed, kept):
        core = make_core(prefix_caching=claimed)
        given = []
        core.scheduler.add_request = given.append
        core.add_request(msgspec.structs.replace(request(), sibling_group="group"))
        assert given[0].sibling_group == kept


class TestFailure:
    def test_a_failed_step_stops_the_engine_and_keeps_the_cause(self, make_core):
        cause = RuntimeError("the device is lost")
        core = make_core(fail_at={1: cause})
        core.add_request(request())
        core.step()
        with pytest.raises(EngineDeadError, match="Step 1 failed: RuntimeError: the device is lost") as caught:
            core.step()
        assert caught.value.__cause__ is cause
        with pytest.raises(EngineDeadError, match="after an earlier error") as caught:
            core.step()
        assert caught.value.__cause__ is cause

    def test_shutdown_ends_the_workers(self, make_core):
        core = make_core()
        core.shutdown()
        assert make_core.executors[0].calls[-1] == "shutdown"

    def test_check_health_calls_the_workers(self, make_core):
        core = make_core(fail_at={"check_health": RuntimeError("no answer")})
        with pytest.raises(RuntimeError, match="no answer"):
            core.check_health()

    def test_every_command_is_answered(self, make_core):
        core = make_core()
        assert core.call(ResetPrefixCache()) is True
        assert core.call(CheckHealth()) is None
        assert make_core.executors[0].calls[-1] == "check_health"
        assert set(core._answers._methods) == set(COMMANDS.values())

        class Dance(EngineCommand[None], tag="dance", frozen=True, array_like=True):
            pass

        with pytest.raises(ConfigError, match=r"no answer to .*Dance.*; it answers .*check_health"):
            core.call(Dance())


def test_several_replicas_are_refused():
    config = make_config()
    config = replace(config, parallel=replace(config.parallel, data_parallel_size=2))
    chosen = type("Chosen", (), {"platform": FakePlatform()})()
    with pytest.raises(ConfigError, match=r"data_parallel_size is 2.*there is one engine"):
        inproc_client.make_client(config, chosen)


def test_a_method_of_the_model_that_returns_nothing_is_not_blamed_on_the_launcher(make_core):
    core = make_core()
    with pytest.raises(RequestError, match=r"'measure' returned nothing on any rank\.$"):
        core.call(CallModel("measure", [1]))
    assert make_core.executors[0].arguments["call_model"] == ("measure", [1])
