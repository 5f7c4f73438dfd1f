"""Workers in Ray actors on a cluster of two nodes, both on this machine: tokens, queues, deaths, choice, refusals.

The first node, which the tests are on, has one core and two made-up devices that Ray numbers; the second has one core.
So two workers that each request a core are on different nodes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mvllm import LLM, SamplingParams
from mvllm.config.engine_args import EngineArgs
from mvllm.config.engine_config import EngineConfig, replace_field
from mvllm.errors import ConfigError, EngineDeadError, PlatformError, WorkerDiedError, WorkerError, WorkerStuckError
from mvllm.executor.factory import make_executor
from mvllm.executor.message_queue.message_reader import LocalSource
from mvllm.executor.message_queue.tcp_transport import RemoteSource
from mvllm.executor.multiproc import MultiprocExecutor
from mvllm.messages.scheduler_output import SchedulerOutput
from mvllm.platform.choose import choose_platform
from mvllm_ray.executor import RayDistributedExecutor
from tests.helpers import parity
from tests.helpers.changed_weights import changed_copy, tensors_of
from tests.helpers.model_zoo import make_checkpoint
from tests.helpers.plugins import prepend, scripted_platform_path
from tests.helpers.processes import assert_no_new_shared_memory, shared_memory_names, stop_process, wait_until
from tests.helpers.scripted_worker import RAISE, SLEEP_MS, TELL

TIGHT = {"max_num_seqs": 8, "max_num_batched_tokens": 32}
"""A small budget cuts prompts into chunks."""
NUM_BLOCKS = 24
"""Enough for two sequences of the maximum length, so that eight are preempted."""
DEVICE = "GPU"
"""A resource that Ray numbers, without checking that the devices exist."""


@dataclass
class TwoNodes:
    """The cluster. The second node may be removed and added again."""

    cluster: Any
    second: Any

    def restore(self) -> None:
        self.second = self.cluster.add_node(num_cpus=1)
        wait_until(lambda: ray.cluster_resources().get("CPU") == 2, 120, "the second node is back")


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_worker_niceness": "0",  # Ray's 15 would give actors almost no time beside the tests of other workers
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),  # of every process that Ray starts
    }
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        cluster = _started()
        try:
            nodes = TwoNodes(cluster, cluster.add_node(num_cpus=1))
            ray.init(address=cluster.address, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
            yield nodes
        finally:
            ray.shutdown()
            cluster.shutdown()
            signal.signal(signal.SIGTERM, handler)


def _started() -> Cluster:
    for _ in range(3):  # Ray gives its own processes a fixed time to start, which a busy machine may not keep
        cluster = Cluster(shutdown_at_exit=True)
        try:
            cluster.add_node(num_cpus=1, num_gpus=2, include_dashboard=False)
        except Exception as e:
            failure = e
            cluster.shutdown()
        else:
            return cluster
    raise failure


@pytest.fixture(autouse=True)
def nothing_left(nodes: TwoNodes) -> Iterator[None]:
    """Checks that no actor, reserved resource or shared memory is left."""
    before = shared_memory_names()
    yield
    wait_until(lambda: not _workers_alive(), 120, "no actor is left")
    wait_until(lambda: ray.available_resources().get("CPU") == 2, 120, "nothing of the cluster is claimed")
    assert_no_new_shared_memory(before)


def _workers_alive() -> list[psutil.Process]:
    """The actors among the descendants of this process, which has started the nodes."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE and "ray::mvllm" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def executor_of(llm: LLM) -> Any:
    return llm.llm_engine._client._core._executor  # type: ignore[attr-defined]


# --- a whole engine


# The sharding of a family does not depend on the executor; test_multiproc_parity tests every family.
FURTHER = [pytest.param(n, marks=pytest.mark.exhaustive) for n in ("mistral-window", "qwen2", "qwen3", "opt", "gpt2")]


@pytest.mark.parametrize("name", ["llama-gqa", *FURTHER])
def test_ranks_on_two_nodes_give_the_tokens_of_transformers(name: str) -> None:
    expected = parity.oracle(name)
    settings = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray", **TIGHT}
    with parity.engine(expected.folder, kv_cache_memory_bytes=_bytes_of_blocks(expected.folder), **settings) as llm:
        executor = executor_of(llm)
        assert isinstance(executor, RayDistributedExecutor)
        assert len({worker.node_id for worker in executor.workers}) == 2
        parity.check(expected, parity.generate(llm, expected.prompts))
        longest = max(range(len(expected.prompts)), key=lambda i: len(expected.prompts[i]))
        for _ in range(2):
            (output,) = parity.generate(llm, [expected.prompts[longest]])
            parity.check(expected, [output], [longest])
        assert output.num_cached_tokens is not None and output.num_cached_tokens > 0
        stats = llm.llm_engine.stats
        # A request whose layers all have windows may never need more than it was given when it began.
        assert stats is not None and (stats.num_preemptions > 0 or name == "mistral-window")


def _bytes_of_blocks(folder: Path) -> int:
    """The bytes of NUM_BLOCKS blocks on one of two ranks, in float32."""
    config = json.loads((folder / "config.json").read_text())
    heads = config.get("num_attention_heads") or config["n_head"]
    hidden = config.get("hidden_size") or config["n_embd"]
    layers = config.get("num_hidden_layers") or config["n_layer"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_size = config.get("head_dim") or hidden // heads
    return NUM_BLOCKS * parity.BLOCK_SIZE * 2 * layers * -(-kv_heads // 2) * head_size * 4


@pytest.mark.exhaustive
def test_weights_are_updated_on_both_nodes(tmp_path: Path) -> None:
    old = make_checkpoint("llama-gqa", tmp_path / "old")
    new = changed_copy(old, tmp_path / "new")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)

    def tokens(llm: LLM) -> list[int]:
        return llm.generate({"prompt_token_ids": [5, 6, 7, 8] * 6}, params, use_tqdm=False)[0].outputs[0].token_ids

    with parity.engine(new) as llm:
        expected = tokens(llm)
    with parity.engine(old, tensor_parallel_size=2, distributed_executor_backend="ray") as llm:
        before = tokens(llm)
        assert before != expected
        llm.update_weights(path=new)
        assert tokens(llm) == expected
        llm.update_weights(path=old)
        assert tokens(llm) == before
        llm.update_weights(tensors=tensors_of(new))  # shared memory: both nodes are on this machine
        assert tokens(llm) == expected


@pytest.mark.exhaustive
def test_inside_a_placement_group_ray_is_chosen_and_each_rank_gets_a_bundle() -> None:
    expected = parity.oracle("llama-gqa")
    group = ray.util.placement_group([{"CPU": 1}, {"CPU": 1}], "STRICT_SPREAD")
    try:
        assert group.wait(60)
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
        task = ray.remote(_run_in_a_task).options(num_cpus=0, scheduling_strategy=strategy)
        kind, node_ids, tokens = ray.get(task.remote(str(expected.folder), expected.prompts[5]), timeout=120)
    finally:
        ray.util.remove_placement_group(group)
    assert kind == "RayDistributedExecutor"
    assert len(set(node_ids)) == 2
    assert tokens == expected.tokens[5]


def _run_in_a_task(folder: str, prompt: list[int]) -> tuple[str, list[str], list[int]]:
    with parity.engine(Path(folder), tensor_parallel_size=2) as llm:
        (output,) = parity.generate(llm, [prompt])
        executor = executor_of(llm)
        return (
            type(executor).__name__,
            [worker.node_id for worker in executor.workers],
            list(output.outputs[0].token_ids),
        )


REPLICAS = """
import asyncio, json, os, sys
import ray
from tests.helpers.async_engine import async_engine, last, params

given = json.loads(sys.argv[1])

async def answers(llm):
    options = params(max_tokens=given["max_tokens"], detokenize=False)
    streams = [last(llm.generate(prompt, options)) for prompt in given["prompts"]]
    return [output.outputs[0].token_ids for output in await asyncio.gather(*streams)]

if given["group"]:
    os.environ["RAY_MVLLM_PLACEMENT_GROUP"] = given["group"]
settings = {"data_parallel_size": 2, "distributed_executor_backend": "ray", **given["settings"]}
with async_engine(given["folder"], **settings) as llm:
    ray.init(log_to_driver=False, logging_level="ERROR")
    actors = [actor for actor in ray._private.state.actors().values() if actor["State"] == "ALIVE"]
    nodes = [actor["Address"]["NodeID"] for actor in actors if actor["ActorClassName"].endswith("RayWorker")]
    print(json.dumps({"nodes": nodes, "tokens": asyncio.run(answers(llm))}))
    ray.shutdown()
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("settings", "in_a_group"),
    [({}, False), ({"enable_expert_parallel": True}, True)],
    ids=["plain", "expert parallel, in a placement group"],
)
def test_replicas_of_a_mixture_of_experts_on_two_nodes_give_the_tokens_of_one_engine(
    nodes: TwoNodes, tmp_path: Path, settings: dict[str, bool], in_a_group: bool
) -> None:
    """Experts are not divided over replicas: the keyword of expert parallelism has no effect but a warning."""
    folder = make_checkpoint("qwen3moe", tmp_path / "model")
    prompts = parity.prompts_of("qwen3moe")
    with parity.engine(folder) as llm:
        expected = [list(output.outputs[0].token_ids) for output in parity.generate(llm, prompts)]
    given = {"folder": str(folder), "prompts": prompts, "max_tokens": parity.NUM_TOKENS, "settings": settings}
    with ExitStack() as stack:
        if in_a_group:
            group = ray.util.placement_group([{"CPU": 1}, {"CPU": 1}], "STRICT_SPREAD")
            stack.callback(ray.util.remove_placement_group, group)
            assert group.wait(60)
        given["group"] = group.id.hex() if in_a_group else ""
        run = subprocess.run(
            [sys.executable, "-c", REPLICAS, json.dumps(given)],
            env={**os.environ, "RAY_ADDRESS": nodes.cluster.address},
            capture_output=True,
            text=True,
            timeout=180,
        )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert len(found["nodes"]) == len(set(found["nodes"])) == 2
    assert found["tokens"] == expected
    warning = "enable_expert_parallel=True has no effect. Each expert is split over the ranks of tensor parallelism"
    assert (warning in run.stderr) == bool(settings)


def test_a_node_lost_during_a_request_ends_the_engine_with_an_error_that_names_its_rank(nodes: TwoNodes) -> None:
    expected = parity.oracle("llama-gqa")
    with parity.engine(expected.folder, tensor_parallel_size=2, distributed_executor_backend="ray") as llm:
        worker = executor_of(llm).workers[1]
        params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True, detokenize=False)
        llm.llm_engine.add_request("0", {"prompt_token_ids": expected.prompts[5]}, params)
        for _ in range(5):
            llm.llm_engine.step()
        nodes.cluster.remove_node(nodes.second)
        try:
            with pytest.raises(EngineDeadError) as caught:
                while True:
                    llm.llm_engine.step()
        finally:
            nodes.restore()
    message = str(caught.value)
    wait_until(lambda: not psutil.pid_exists(worker.pid), 120, "the lost node's worker is gone")
    assert f"Worker_TP1 (rank 1, pid {worker.pid} on node {worker.node_ip}) was lost" in message
    assert "execute_model of step" in message or "idle" in message
    assert isinstance(caught.value.__cause__, WorkerDiedError)


# --- calls and failures, with workers that have no model


MakeExecutor = Callable[..., RayDistributedExecutor]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nodes: TwoNodes) -> Iterator[MakeExecutor]:
    prepend(monkeypatch, scripted_platform_path(tmp_path / "scripted_worker"))
    monkeypatch.setenv("SCRIPTED_WORKER", "yes")
    with ExitStack() as stack:

        def build(num_workers: int = 2, **fields: object) -> RayDistributedExecutor:
            executor = make_executor(config(num_workers, **fields), choose_platform("scripted").platform)
            assert isinstance(executor, RayDistributedExecutor)
            stack.callback(executor.shutdown)
            return executor

        yield build


def config(num_workers: int, **fields: object) -> EngineConfig:
    config = EngineArgs.from_kwargs(model="demo").create_engine_config()
    settings = {"tensor_parallel_size": num_workers, "distributed_executor_backend": "ray", **fields}
    for name, value in settings.items():
        config = replace_field(config, f"parallel.{name}", value)
    return config


def sources(executor: RayDistributedExecutor) -> list[type]:
    return [type(reader.source) for reader in executor._replies._readers]


def test_ranks_on_the_engines_node_use_the_ring_and_others_the_network(make: MakeExecutor) -> None:
    executor = make()
    mine = ray.get_runtime_context().get_node_id()
    assert executor.workers[0].node_id == mine and executor.workers[1].node_id != mine
    assert sources(executor) == [LocalSource, RemoteSource]
    assert executor.worker_pids == executor.collective_rpc("available_kv_bytes")
    futures = [executor.execute_model(SchedulerOutput(step=step)) for step in range(5)]
    assert [future.result().step for future in futures] == [0, 1, 2, 3, 4]


def test_workers_get_the_devices_that_ray_assigned_and_the_environment_of_the_engine(
    make: MakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRIPTED_WORKER_RESOURCE", DEVICE)
    monkeypatch.setenv("HF_SCRIPTED_WORKER_MARK", "from the engine")
    executor = make()
    assert sources(executor) == [LocalSource, LocalSource]  # both devices are on the engine's node
    for rank in range(2):
        with pytest.raises(PlatformError, match="RuntimeError: 0,1 from the engine"):
            executor.collective_rpc("allocate_kv_cache", (TELL, 0), ranks=[rank])


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_a_worker_killed_in_a_call_or_idle_is_named_with_its_node_and_what_it_did(
    make: MakeExecutor, rank: int
) -> None:
    executor = make()
    worker = executor.workers[rank]
    who = rf"Worker_TP{rank} \(rank {rank}, pid {worker.pid} on node {worker.node_ip}\) was lost"
    call = executor.collective_rpc("allocate_kv_cache", (SLEEP_MS, 60_000), non_block=True)
    threading.Timer(0.3, os.kill, (worker.pid, signal.SIGKILL)).start()
    with pytest.raises(WorkerDiedError, match=f"{who} during allocate_kv_cache") as caught:
        call.result()
    assert (caught.value.rank, caught.value.pid) == (rank, worker.pid)

    executor = make()
    worker = executor.workers[rank]
    failures: list[Exception] = []
    executor.on_failure(failures.append)
    os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: failures, 120, "the callback is called without a waiting call")
    with pytest.raises(WorkerDiedError, match=rf"Worker_TP{rank} .*while it was idle"):
        executor.collective_rpc("check_health")


def test_an_error_keeps_its_traceback_and_a_step_that_raises_ends_the_executor(make: MakeExecutor) -> None:
    executor = make()
    with pytest.raises(PlatformError, match="KeyError: 'string 7 tore'") as caught:
        executor.collective_rpc("allocate_kv_cache", (RAISE, 7), ranks=[1])
    assert "scripted_worker.py" in str(caught.value.__cause__)
    with pytest.raises(WorkerError, match="execute_model of step 13: RuntimeError: unlucky"):
        executor.execute_model(SchedulerOutput(step=13)).result()
    with pytest.raises(WorkerError, match="unlucky"):
        executor.execute_model(SchedulerOutput(step=14))


def test_a_step_that_hangs_on_another_node_fails_with_the_stack_of_the_rank(make: MakeExecutor) -> None:
    executor = make(step_timeout=2.0)
    executor.execute_model(SchedulerOutput(step=99)).result()  # rank 0 answers, rank 1 hangs
    stop_process(executor.worker_pids[0])
    with pytest.raises(WorkerStuckError, match=r"Worker_TP1 \(rank 1.*step 99(?s:.*)in execute_model"):
        executor.execute_model(SchedulerOutput(step=100)).result()


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_a_worker_that_cannot_be_built_raises_its_own_error(
    make: MakeExecutor, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.setenv("SCRIPTED_WORKER", f"fail-{rank}")
    with pytest.raises(PlatformError, match=rf"Worker_TP{rank} \(rank {rank}.*ValueError: no strings on rank {rank}"):
        make()


def test_shutdown_may_be_repeated_and_takes_little_time(make: MakeExecutor) -> None:
    executor = make()
    pids = executor.worker_pids
    pending = executor.collective_rpc("allocate_kv_cache", (SLEEP_MS, 600_000), non_block=True)
    time.sleep(0.6)
    for _ in range(2):
        executor.shutdown()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), 120, "the actors are gone")
    assert ray.is_initialized()  # initialized by the caller
    with pytest.raises(EngineDeadError, match="shut down"):
        pending.result()


DRIVER = """
import sys, time
from mvllm.executor.factory import make_executor
from mvllm.platform.choose import choose_platform
from tests.engine.test_ray_executor import config
from tests.helpers.scripted_worker import SLEEP_MS
executor = make_executor(config(2), choose_platform("scripted").platform)
executor.collective_rpc("allocate_kv_cache", (SLEEP_MS, 600_000), ranks=[int(sys.argv[1])], non_block=True)
print(*executor.worker_pids, flush=True)
time.sleep(600)
"""


def test_killing_the_driver_leaves_no_actor_whether_busy_or_not(
    make: MakeExecutor, nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", nodes.cluster.address)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path or os.getcwd() for path in sys.path))
    with subprocess.Popen([sys.executable, "-c", DRIVER, "1"], stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout is not None
            pids = [int(pid) for pid in driver.stdout.readline().split()]
            assert len(pids) == 2 and all(psutil.pid_exists(pid) for pid in pids)
        finally:
            driver.kill()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), 120, "the actors are gone")


VISITOR = """
import ray
from mvllm.errors import EngineDeadError
from mvllm.executor.factory import make_executor
from mvllm.platform.choose import choose_platform
from tests.engine.test_ray_executor import config
for leaves_first in (False, True):
    executor = make_executor(config(2), choose_platform("scripted").platform)
    failures = []
    executor.on_failure(failures.append)
    executor.collective_rpc("check_health")
    assert ray.is_initialized()
    if leaves_first:
        ray.shutdown()
        try:
            while True:
                executor.collective_rpc("check_health")
        except Exception as e:
            print(type(e).__name__, e)
        assert not ray.is_initialized()
    executor.shutdown()
    assert not ray.is_initialized()
print("done")
"""


@pytest.mark.exhaustive
def test_a_cluster_that_the_engine_joined_is_left_at_its_end_and_leaving_it_early_is_an_error(
    make: MakeExecutor, nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", nodes.cluster.address)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path or os.getcwd() for path in sys.path))
    run = subprocess.run([sys.executable, "-c", VISITOR], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "done" in run.stdout
    assert "ray.shutdown() was called" in run.stdout or "Worker_TP" in run.stdout


# --- choice and errors


def test_more_workers_than_devices_choose_ray_if_there_is_a_cluster(
    monkeypatch: pytest.MonkeyPatch, nodes: TwoNodes
) -> None:
    for kind in (RayDistributedExecutor, MultiprocExecutor):  # the choice alone: no worker is started
        monkeypatch.setattr(kind, "__init__", lambda self, config, platform: None)
    executor = make_executor(config(2, distributed_executor_backend=None), choose_platform("cpu").platform)
    assert isinstance(executor, RayDistributedExecutor)  # the host is one device
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    executor = make_executor(config(2, distributed_executor_backend=None), choose_platform("cpu").platform)
    assert isinstance(executor, MultiprocExecutor)


def test_a_cluster_that_is_too_small_is_refused_with_a_remedy(make: MakeExecutor) -> None:
    with pytest.raises(ConfigError, match=r"3 workers need 3 of Ray's resource 'CPU'.*has 2.*tensor_parallel_size"):
        make(3)


def test_a_platform_that_names_no_resource_is_refused_with_the_entry_point(
    make: MakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRIPTED_WORKER_RESOURCE", "")
    with pytest.raises(ConfigError, match=r"device of the platform 'scripted'.* entry point of mvllm_ray\.resources"):
        make()


def test_without_ray_the_error_says_how_to_install_it() -> None:
    program = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == "ray" or name.startswith("ray."):
            raise ModuleNotFoundError("No module named 'ray'", name="ray")
sys.meta_path.insert(0, Blocker())
from mvllm import LLM
LLM("demo", tensor_parallel_size=2, distributed_executor_backend="ray")
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1
    assert "ConfigError: distributed_executor_backend 'ray' was asked for" in run.stderr
    assert "pip install 'ray>=" in run.stderr
