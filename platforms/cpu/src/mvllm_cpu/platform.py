"""The CPU platform, for hosts without an accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mvllm.plugin_api import (
    AttentionBackend,
    AttentionSpec,
    Capabilities,
    Check,
    Communicator,
    CompileBackend,
    ConfigChange,
    DeviceRuntime,
    EngineConfig,
    GroupSpec,
    LaunchTopology,
    OpProvider,
    ParallelConfig,
    Plan,
    Platform,
    PlatformError,
    PlatformSpec,
    Refusal,
    Refusals,
    WorkerContext,
    get_logger,
)
from mvllm_cpu import host_resources, kernels, torch_build, worker_environment
from mvllm_cpu.plugin import SPEC

if TYPE_CHECKING:
    import torch

logger = get_logger("mvllm.cpu.platform")

DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = (*DTYPES, "int8", "float8_e4m3fn")
HOST_MEMORY_SHARE = 0.5
"""Default `memory_utilization`: other programs use the host's memory as well."""

CAPABILITIES = Capabilities(
    dtypes=DTYPES,
    kv_dtypes=KV_DTYPES,
    compile=True,
    unified_memory=True,
    scaled_memory_profile=True,
    fork_safe=True,
    collectives=frozenset(
        {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "send_recv", "gather", "all_to_all", "barrier"}
    ),
    prefix_caching=True,
    chunked_prefill=True,
    sliding_window=True,
    soft_cap=True,
    sinks=True,
    mla=True,
    batch_invariant=True,
    state=True,
    sparse_attention=True,
    kv_transfer=True,
    non_causal_spans=True,
    drafts_by_default=True,
)


def make_platform() -> Platform:
    """The factory that the plugin's PlatformSpec names."""
    return CPUPlatform()


class CPUPlatform(Platform):
    """Workers on the host's processor."""

    @property
    def spec(self) -> PlatformSpec:
        return SPEC

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES

    def plan(self, config: EngineConfig) -> Plan | Refusals:
        if config.batch_invariant and (absent := kernels.find_absent()) is not None:
            reason = f"it needs the compiled kernels of this platform: {absent.reason}"
            return Refusals((Refusal("batch_invariant", reason, absent.remedy or "Leave batch_invariant out."),))
        changes = []
        if config.cache.memory_utilization is None:
            reason = "the host's memory also serves everything else on this machine; set it yourself to take more"
            changes.append(ConfigChange("cache.memory_utilization", HOST_MEMORY_SHARE, reason))
        torch_build.warn_once()
        return Plan(tuple(changes))

    def topology(self, parallel: ParallelConfig) -> LaunchTopology:
        num_workers = parallel.world_size
        across = ("mp", "ray", "external_launcher")
        first, total = parallel.data_parallel_rank * num_workers, parallel.data_parallel_size * num_workers
        shares = [host_resources.core_share(first + rank, total) for rank in range(num_workers)]
        return LaunchTopology(
            num_workers=num_workers,
            devices_per_worker=1,
            executors=("uni", *across) if num_workers == 1 else across,
            env_per_worker=tuple(worker_environment.worker_variables_for_threads(share.threads) for share in shares),
        )

    def init_device(self, ctx: WorkerContext) -> DeviceRuntime:
        from mvllm_cpu.runtime import CPURuntime

        return CPURuntime(ctx)

    def communicator(self, group: GroupSpec, device: torch.device) -> Communicator:
        from mvllm_cpu.shared_memory_communicator import SharedMemoryCommunicator

        return SharedMemoryCommunicator(group, device)

    def attention_backend(self, spec: AttentionSpec) -> AttentionBackend:
        from mvllm.plugin_api import ReferenceAttention
        from mvllm_cpu.paged_attention import PagedAttention
        from mvllm_cpu.sparse_attention import IndexerAttention, SelectedAttention

        loaded = kernels.load()
        if spec.batch_invariant and loaded.library is None:
            raise PlatformError(
                f"batch_invariant needs the compiled kernels of the CPU platform: {loaded.reason} {loaded.remedy or ''}"
            )
        backend: type[AttentionBackend] = PagedAttention
        if loaded.library is None:
            backend = ReferenceAttention
        elif spec.index_topk is not None:
            backend = IndexerAttention if spec.indexer else SelectedAttention
        problems = list(dict.fromkeys([*PagedAttention.validate(spec), *backend.validate(spec)]))
        if problems:
            raise PlatformError(f"The CPU platform has no attention for this model: {'; '.join(problems)}.")
        if loaded.library is None:
            logger.warning("Attention runs in plain torch, which is slower: %s %s", loaded.reason, loaded.remedy or "")
        return backend(spec)

    def ops(self) -> Sequence[OpProvider]:
        from mvllm_cpu import onednn_linear
        from mvllm_cpu.activation_ops import ActivationOps
        from mvllm_cpu.block_quantized_linear import BlockQuantizedLinear
        from mvllm_cpu.encoder_attention import EncoderAttention
        from mvllm_cpu.linear import Linear
        from mvllm_cpu.moe import Moe
        from mvllm_cpu.ops import KernelOps
        from mvllm_cpu.quantized_linear import QuantizedLinear
        from mvllm_cpu.quantized_moe import QuantizedMoe
        from mvllm_cpu.state_ops import StateOps

        loaded = kernels.load()
        if loaded.library is None:
            return onednn_linear.providers()
        compiled = (*KernelOps(loaded.library).providers(), *Linear(loaded.library, loaded.isa).providers())
        integers = (*QuantizedLinear(loaded.library).providers(), *BlockQuantizedLinear(loaded.library).providers())
        experts = (*Moe(loaded.library).providers(), *QuantizedMoe(loaded.library).providers())
        others = (*ActivationOps(loaded.library).providers(), *StateOps(loaded.library).providers())
        encoders = EncoderAttention(loaded.library).providers()
        return (*compiled, *integers, *experts, *others, *encoders, *onednn_linear.providers())

    def compiler(self) -> CompileBackend:
        from mvllm_cpu.replay import Replay

        return Replay(kernels.load().library)

    def doctor(self) -> Sequence[Check]:
        from mvllm_cpu import doctor

        return doctor.checks()
