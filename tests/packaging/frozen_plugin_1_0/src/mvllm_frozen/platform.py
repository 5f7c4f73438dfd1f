"""A platform that uses most of what contract 1.0 offers; its devices are the host."""

import resource
from contextlib import nullcontext

import torch

from mvllm.plugin_api import (
    Capabilities,
    Check,
    CheckStatus,
    ConfigChange,
    DeviceRuntime,
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
)
from mvllm_frozen.attention import IceAttention
from mvllm_frozen.plugin import mvllm_platform

logger = get_logger(__name__)


class IceCopy:
    def __init__(self, tensor):
        self.tensor = tensor

    def wait(self):
        return self.tensor


class IceRuntime(DeviceRuntime):
    def __init__(self, ctx):
        self.device = torch.device("cpu")
        self.ctx = ctx
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
        return IceCopy(tensor.clone())

    def event(self):
        return NullEvent()

    def stream(self):
        return nullcontext()

    def seed(self, seed):
        torch.manual_seed(seed)

    def health(self):
        if self.closed:
            raise PlatformError("The device was shut down.")

    def shutdown(self):
        self.closed = True


def ice_rms_norm(x, weight, eps):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


class IcePlatform(Platform):
    @property
    def spec(self):
        return mvllm_platform()

    @property
    def capabilities(self):
        return Capabilities(
            dtypes=("float32",),
            kv_dtypes=("float32",),
            max_head_size=256,
            static_shapes=False,
            unified_memory=True,
            collectives=frozenset({"all_reduce", "all_gather"}),
            prefix_caching=True,
            chunked_prefill=True,
            sliding_window=True,
        )

    def plan(self, config):
        require_phase(Phase.FRONTEND)
        if config.parallel.world_size > 2:
            reason = f"There are two devices, not {config.parallel.world_size}."
            return Refusals((Refusal("parallel.tensor_parallel_size", reason, "Ask for at most 2."),))
        return Plan(
            (
                ConfigChange("cache.block_size", 8, "the ice has cracks of eight"),
                ConfigChange("model.dtype", "float32", "ice is stiff"),
            )
        )

    def topology(self, parallel):
        require_phase(Phase.FRONTEND, Phase.ENGINE)
        return LaunchTopology(
            num_workers=parallel.world_size,
            devices_per_worker=1,
            executors=("uni", "mp"),
            env_per_worker=tuple({"ICE_DEVICE": str(i)} for i in range(parallel.world_size)),
            device_variable="ICE_VISIBLE",
        )

    def init_device(self, ctx):
        require_phase(Phase.WORKER)
        runtime = IceRuntime(ctx)
        runtime.seed(ctx.seed)
        logger.info("rank %d of %d", ctx.rank, ctx.world_size)
        return runtime

    def communicator(self, group, device):
        return TorchCommunicator(group, backend="gloo", device=device)

    def attention_backend(self, spec):
        if reasons := IceAttention.validate(spec):
            raise PlatformError("; ".join(reasons))
        return IceAttention(spec)

    def ops(self):
        return (
            OpProvider(
                op="rms_norm",
                name="ice-rms-norm",
                function=ice_rms_norm,
                supports=lambda case: [] if case.dtype == "float32" else [f"{case.dtype} melts"],
                priority=1,
            ),
        )

    def shapes(self):
        return ShapePolicy(tokens=tuple(2**i for i in range(14)))

    def doctor(self):
        return (Check("platform.frozen.temperature", CheckStatus.OK, "minus four"),)


def make_platform():
    return IcePlatform()
