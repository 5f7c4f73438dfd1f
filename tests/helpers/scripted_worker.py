"""A platform whose worker has no model and no torch: the arguments of its methods determine its behaviour.

`allocate_kv_cache(code, value)` runs an action that a test sends. The environment variable SCRIPTED_WORKER injects an
earlier failure: `fail-<rank>`, `hang-<rank>`, `hang-starting`, `hang-loading`, or `slow` for slow steps.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import time

from mvllm.executor.message_queue import MessageWriter
from mvllm.executor.rpc_messages import Reply
from mvllm.plugin_api import (
    Capabilities,
    EngineConfig,
    KVCacheNeeds,
    LaunchTopology,
    ModelRunnerOutput,
    ParallelConfig,
    Plan,
    Platform,
    PlatformSpec,
    ProbeResult,
    SchedulerOutput,
    WorkerContext,
    hookimpl,
)

SLEEP_MS, RAISE, EXIT, KILL, RAISE_ON_RANK, SLEEP_ON_RANK_0_MS, PRINT, SPAWN, TELL, FORGE_ON_RANK_1 = range(10)

SPEC = PlatformSpec(
    name="scripted",
    vendor="tests",
    contract=(1, 0),
    probe="tests.helpers.scripted_worker:probe",
    factory="tests.helpers.scripted_worker:ScriptedPlatform",
    probe_in_process=True,
)


@hookimpl
def mvllm_platform() -> PlatformSpec:
    return SPEC


def probe() -> ProbeResult:
    return ProbeResult("SCRIPTED_WORKER" in os.environ, "SCRIPTED_WORKER is set or not", remedy="set SCRIPTED_WORKER")


class ScriptedPlatform(Platform):
    spec = SPEC
    capabilities = Capabilities(dtypes=("float32",), kv_dtypes=("float32",))

    def plan(self, config: EngineConfig) -> Plan:
        return Plan()

    def topology(self, parallel: ParallelConfig) -> LaunchTopology:
        return LaunchTopology(
            num_workers=parallel.world_size,
            devices_per_worker=1,
            executors=("mp", "ray"),
            env_per_worker=tuple(
                {"SCRIPTED_WORKER_DEVICE": f"device-{rank}", "SCRIPTED_WORKER": os.environ["SCRIPTED_WORKER"]}
                for rank in range(parallel.world_size)
            ),
            ray_resource=os.environ.get("SCRIPTED_WORKER_RESOURCE", "CPU") or None,
            device_variable="SCRIPTED_WORKER_DEVICE",
        )

    def init_device(self, ctx):
        raise NotImplementedError

    def communicator(self, group, device):
        raise NotImplementedError

    def attention_backend(self, spec):
        raise NotImplementedError

    def worker_class(self) -> str:
        return "tests.helpers.scripted_worker:ScriptedWorker"


class ScriptedWorker:
    def __init__(self, config: EngineConfig, platform: Platform, ctx: WorkerContext) -> None:
        self.device = os.environ["SCRIPTED_WORKER_DEVICE"]  # must be set before anything is imported
        self.rank = ctx.rank
        if os.environ["SCRIPTED_WORKER"] == f"fail-{ctx.rank}":
            raise ValueError(f"no strings on rank {ctx.rank}")
        if os.environ["SCRIPTED_WORKER"] in (f"hang-{ctx.rank}", "hang-starting"):
            time.sleep(3600)

    def init_device(self) -> None:
        pass

    def load_model(self) -> None:
        if os.environ["SCRIPTED_WORKER"] == "hang-loading":
            time.sleep(3600)

    def kv_cache_needs(self) -> KVCacheNeeds:
        return KVCacheNeeds(bytes_per_token=1000 + self.rank, block_sizes=(16, 32))

    def available_kv_bytes(self) -> int:
        return os.getpid() if os.environ["SCRIPTED_WORKER"] != "odd" else "many"  # type: ignore[return-value]

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> None:
        code, value = num_blocks, block_size
        if code > FORGE_ON_RANK_1:
            return  # an engine that needs a cache
        if code == SLEEP_MS:
            time.sleep(value / 1e3)
        elif code == RAISE:
            raise KeyError(f"string {value} tore")
        elif code == EXIT:
            os._exit(value)
        elif code == KILL:
            os.kill(os.getpid(), signal.Signals(value))
        elif code == RAISE_ON_RANK:
            if self.rank == value:
                raise MemoryError(f"rank {value} is full")
        elif code == SLEEP_ON_RANK_0_MS:
            if self.rank == 0:
                time.sleep(value / 1e3)
        elif code == PRINT:
            print(f"scripted_worker on {self.device}\nsecond line", flush=True)
        elif code == SPAWN:
            multiprocessing.get_context("fork").Process(
                target=time.sleep, args=(3600,)
            ).start()  # a daemon process may not start children
        elif code == TELL:
            raise RuntimeError(f"{self.device} {os.environ.get('HF_SCRIPTED_WORKER_MARK')}")
        elif code == FORGE_ON_RANK_1 and self.rank == 1:
            forge_replies(rank=value)

    def warm_up(self) -> None:
        pass

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        pulled = os.environ["SCRIPTED_WORKER"] == "yes"
        if pulled and plan.step == 13:
            raise RuntimeError("unlucky")
        if pulled and plan.step == 99 and self.rank == 1:
            time.sleep(3600)
        if os.environ["SCRIPTED_WORKER"] == "slow":
            time.sleep(0.1)
        assert "torch" not in sys.modules
        if os.environ["SCRIPTED_WORKER"] == "count":  # returns the received arguments
            tokens = [sum(request.token_ids) for request in plan.new_requests]
            return ModelRunnerOutput(step=plan.step, sampled_token_ids=tokens)
        return ModelRunnerOutput(step=plan.step, sampled_token_ids=[self.rank] * max(1, len(plan.rows)))

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


def forge_replies(rank: int) -> None:
    """Sends replies to the first calls under another rank's name, bypassing this worker's loop."""
    [writer] = [thing for thing in gc.get_objects() if isinstance(thing, MessageWriter)]
    for request_id in range(1, 5):
        writer.enqueue(Reply(request_id, rank, b"\xc0"))
