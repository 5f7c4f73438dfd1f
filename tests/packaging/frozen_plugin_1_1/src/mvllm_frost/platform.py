"""A platform that uses most of what contract 1.1 offers for torch tensors; its device is the host."""

import resource
from contextlib import nullcontext

import torch

from mvllm.plugin_api import (
    Capabilities,
    CaptureShapes,
    Check,
    CheckStatus,
    CompileBackend,
    ConfigChange,
    DeviceRuntime,
    GraphBackend,
    LaunchTopology,
    MemoryInfo,
    NullEvent,
    OpProvider,
    Phase,
    Plan,
    Platform,
    PlatformError,
    Refusal,
    Refusals,
    ShapePolicy,
    TorchCommunicator,
    get_logger,
    require_phase,
    static_state_ops,
)
from mvllm_frost.attention import FrostAttention, FrostStates
from mvllm_frost.plugin import mvllm_platform

logger = get_logger("mvllm.frost")


class FrostCopy:
    def __init__(self, tensor):
        self.tensor = tensor

    def wait(self):
        return self.tensor


class FrostRuntime(DeviceRuntime):
    def __init__(self, ctx):
        self.device = torch.device("cpu")
        self.closed = False

    def synchronize(self):
        require_phase(Phase.WORKER)

    def memory(self):
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return MemoryInfo(total=8 * 2**30, free=max(0, 8 * 2**30 - used), used_by_me=used, peak_by_me=used)

    def empty(self, shape, dtype):
        return torch.empty(shape, dtype=dtype)

    def host_buffer(self, shape, dtype):
        return torch.empty(shape, dtype=dtype)

    def to_device(self, host):
        return host.clone()

    def to_host(self, tensor):
        return FrostCopy(tensor.clone())

    def event(self):
        return NullEvent()

    def stream(self):
        return nullcontext()

    def seed(self, seed):
        torch.manual_seed(seed)

    def end_warm_up(self):
        logger.info("warmed up")

    def health(self):
        if self.closed:
            raise PlatformError("The device was shut down.")

    def shutdown(self):
        self.closed = True


class FrostGraphs(GraphBackend):
    def capture(self, step):
        step()
        return step

    def memory_bytes(self):
        return 0


class FrostCompiler(CompileBackend):
    """Runs what it is given, and counts."""

    def __init__(self):
        self.runs = 0

    def counted(self, function):
        def run(*args):
            self.runs += 1
            return function(*args)

        return run

    def compile(self, function, *, dynamic):
        return self.counted(function)

    def compile_head(self, function):
        return self.counted(function)

    def needs_warm_up(self):
        return False


def frost_rms_norm(x, weight, eps):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


class FrostPlatform(Platform):
    @property
    def spec(self):
        return mvllm_platform()

    @property
    def capabilities(self):
        return Capabilities(
            dtypes=("float32",),
            kv_dtypes=("float32",),
            max_head_size=256,
            graphs=True,
            compile=True,
            unified_memory=True,
            collectives=frozenset({"all_reduce", "all_gather"}),
            prefix_caching=True,
            chunked_prefill=True,
            sliding_window=True,
            lazy_kernels=True,
            state=True,
            kv_transfer=True,
        )

    def plan(self, config):
        require_phase(Phase.FRONTEND)
        refusals = [
            Refusal(field, f"{name} melts", "Use float32.")
            for field, name in (("model.dtype", config.model.dtype), ("cache.dtype", config.cache.dtype))
            if name not in ("auto", "float32")
        ]
        if refusals:
            return Refusals(tuple(refusals))
        return Plan((ConfigChange("cache.block_size", 8, "the frost has cracks of eight"),))

    def topology(self, parallel):
        require_phase(Phase.FRONTEND, Phase.ENGINE)
        return LaunchTopology(
            num_workers=parallel.world_size,
            devices_per_worker=1,
            executors=("uni", "mp", "ray"),
            ray_resource="FROST",
            device_variable="FROST_VISIBLE",
        )

    def init_device(self, ctx):
        require_phase(Phase.WORKER)
        return FrostRuntime(ctx)

    def communicator(self, group, device):
        return TorchCommunicator(group, backend="gloo", device=device)

    def attention_backend(self, spec):
        if reasons := FrostAttention.validate(spec):
            raise PlatformError("; ".join(reasons))
        return FrostAttention(spec)

    def state_backend(self, spec):
        return FrostStates(spec)

    def ops(self):
        return (
            OpProvider(
                op="rms_norm",
                name="frost-rms-norm",
                function=frost_rms_norm,
                supports=lambda case: [] if case.dtype == "float32" else [f"{case.dtype} melts"],
                priority=1,
            ),
            *static_state_ops(),
        )

    def graphs(self, device):
        return FrostGraphs()

    def compiler(self):
        return FrostCompiler()

    def shapes(self):
        return ShapePolicy(capture=CaptureShapes(decode=(1, 2, 4, 8), mixed=((16, 4),), max_tokens=16))

    def doctor(self):
        return (Check("platform.frost.temperature", CheckStatus.OK, "minus nine"),)


def make_platform():
    return FrostPlatform()
