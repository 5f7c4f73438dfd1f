"""A platform whose workers have no device and record their calls."""

from __future__ import annotations

from mvllm.messages.scheduler_output import ModelRunnerOutput
from mvllm.platform.capabilities import Capabilities
from mvllm.platform.phases import current_phase
from mvllm.platform.spec import CONTRACT, Plan, PlatformSpec
from mvllm.platform.topology import LaunchTopology
from mvllm.platform.worker_protocol import KVCacheNeeds


class RecordingWorker:
    """A WorkerProtocol without a device that records each call and its phase."""

    def __init__(self, config, platform, ctx):
        self.calls = [("__init__", current_phase())]
        self.config, self.ctx = config, ctx
        platform.built.append(self)

    def _note(self, name):
        self.calls.append((name, current_phase()))

    def init_device(self):
        self._note("init_device")

    def load_model(self):
        self._note("load_model")

    def kv_cache_needs(self):
        self._note("kv_cache_needs")
        return KVCacheNeeds(8, (16,))

    def available_kv_bytes(self):
        self._note("available_kv_bytes")
        return 1000

    def allocate_kv_cache(self, num_blocks, block_size):
        self._note(("allocate_kv_cache", num_blocks, block_size))

    def warm_up(self):
        self._note("warm_up")

    def execute_model(self, plan):
        self._note("execute_model")
        return ModelRunnerOutput(step=plan.step)

    def check_health(self):
        raise RuntimeError("the device does not answer")

    def shutdown(self):
        self._note("shutdown")


class HalfAWorker:
    def __init__(self, config, platform, ctx):
        pass

    def init_device(self):
        pass


class FakePlatform:
    """The parts of a platform that executors and the worker wrapper need.

    Attributes:
        built: The workers created by it.
        phases: The phase of each call, by method.
    """

    capabilities = Capabilities(dtypes=("float32", "bfloat16"), kv_dtypes=("float32",))

    def __init__(self, worker="RecordingWorker", *, executors=("uni",), plan=None):
        self.worker = worker
        self.executors = executors
        self.answer = Plan() if plan is None else plan
        self.built = []
        self.phases = {}
        self.spec = PlatformSpec("acme", "Acme", CONTRACT, probe="x:y", factory="x:z")

    def worker_class(self):
        return f"{__name__}:{self.worker}"

    def topology(self, parallel):
        self.phases["topology"] = current_phase()
        return LaunchTopology(parallel.world_size, 1, self.executors)

    def plan(self, config):
        self.phases["plan"] = current_phase()
        return self.answer
