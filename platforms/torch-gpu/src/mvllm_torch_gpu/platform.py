"""TorchGpuPlatform: the part of a platform that is the same for every device with a torch module like `torch.cuda`.

A vendor's package derives from `TorchGpuPlatform` and adds what torch does not provide: the installed and the visible
devices, memory of other processes, and texts for its users.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from mvllm.plugin_api import (
    AttentionBackend,
    AttentionSpec,
    Capabilities,
    Communicator,
    CompileBackend,
    ConfigChange,
    EngineConfig,
    GroupSpec,
    LaunchTopology,
    OpProvider,
    ParallelConfig,
    Plan,
    Platform,
    PlatformError,
    Refusals,
    ShapePolicy,
    StateBackend,
    StateSpec,
    get_logger,
    install_command,
)
from mvllm_torch_gpu.device_module import CUDA, DeviceModule
from mvllm_torch_gpu.settings import Settings

if TYPE_CHECKING:
    import torch

logger = get_logger("mvllm.torch_gpu.platform")

DTYPES = ("bfloat16", "float16", "float32")
KV_DTYPES = (*DTYPES, "float8_e4m3fn", "int8")
COLLECTIVES = frozenset(
    {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "send_recv", "gather", "all_to_all", "barrier"}
)


class TorchGpuPlatform(Platform):
    """Platform whose workers have one device each.

    Attributes:
        title: Name of the platform, for messages.
        settings: The platform's own environment variables.
        device_variable: The variable that limits a process to some devices.
        module: Torch's module for such devices.
    """

    title: ClassVar[str]
    settings: ClassVar[Settings]
    device_variable: ClassVar[str]
    module: ClassVar[DeviceModule] = CUDA

    @property
    @abstractmethod
    def uses_host_memory(self) -> bool:
        """Whether the devices use the host's memory. Opens no device."""

    @property
    def float8(self) -> str:
        """Torch's name of the float8 format in which caches and weights are stored."""
        return "float8_e4m3fn"

    @property
    def multiplies_float8(self) -> bool:
        """Whether all devices multiply in that format. Opens no device."""
        return False

    @property
    def tokens_of_large_step(self) -> int:
        """Tokens of a step with prompts from which on more tokens do not make the devices faster. Opens no device."""
        return 0

    def worker_variables(self) -> Mapping[str, str]:
        """Environment variables of every worker."""
        return {}

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            dtypes=DTYPES,
            kv_dtypes=KV_DTYPES,
            graphs=True,
            compile=True,
            pinned_memory=True,
            async_copies=True,
            fork_safe=True,
            unified_memory=self.uses_host_memory,
            collectives=COLLECTIVES,
            prefix_caching=True,
            chunked_prefill=True,
            sliding_window=True,
            soft_cap=True,
            sinks=True,
            mla=True,
            state=True,
            lazy_kernels=True,
            kv_transfer=True,
            non_causal_spans=True,
            weight_offloading=True,
        )

    def plan(self, config: EngineConfig) -> Plan | Refusals:
        (
            self.settings.compile_mode(),
            self.settings.custom_all_reduce(),
            self.settings.attention(),
            self.settings.linear(),
        )  # invalid values raise here, not in a worker
        scheduler, wanted = config.scheduler, self.tokens_of_large_step
        if not scheduler.max_num_batched_tokens_is_default or wanted <= scheduler.max_num_batched_tokens:
            return Plan()
        reason = f"the devices compute steps of {wanted} tokens fastest; set it yourself for shorter or longer steps"
        return Plan((ConfigChange("scheduler.max_num_batched_tokens", wanted, reason),))

    def topology(self, parallel: ParallelConfig) -> LaunchTopology:
        num_workers = parallel.world_size
        across = ("mp", "ray", "external_launcher")
        return LaunchTopology(
            num_workers=num_workers,
            devices_per_worker=1,
            executors=("uni", *across) if num_workers == 1 else across,
            env_per_worker=(self.worker_variables(),) * num_workers,
            device_variable=self.device_variable,
        )

    def communicator(self, group: GroupSpec, device: torch.device) -> Communicator:
        from mvllm_torch_gpu.communicator import NcclCommunicator

        check = None if self.settings.custom_all_reduce_is_named() else self.unlinked_devices
        return NcclCommunicator(
            group, device, custom_all_reduce=self.settings.custom_all_reduce(), unlinked_devices=check
        )

    def unlinked_devices(self, device: int, others: Sequence[int]) -> str | None:
        """Why direct all-reduce would be slower than the library's on these devices; None if it is not known to be.

        Args:
            device: This rank's device, by its index.
            others: The devices of the other ranks.
        """
        return None

    def attention_backend(self, spec: AttentionSpec) -> AttentionBackend:
        none = f"The {self.title} platform has no attention for this model"
        try:
            from mvllm_torch_gpu.attention import TritonAttention
        except ImportError as e:
            found, problems = self._without_kernels(spec)
            if found is None:
                raise PlatformError(f"{none}: {'; '.join(problems)}.") from e
            logger.warning(
                "Attention runs in plain torch, which is many times slower: its kernels cannot be imported (%s). Run: "
                "%s",
                e,
                install_command("mvllm-triton-kernels", reinstall=True),
            )
            return found
        problems = TritonAttention.validate(spec)
        if not problems:
            return self._fastest_attention(spec)
        found, _ = self._without_kernels(spec)
        if found is None:
            raise PlatformError(f"{none}: {'; '.join(problems)}.")
        logger.warning("Attention runs in plain torch, which is many times slower: %s.", "; ".join(problems))
        return found

    def attention_without_kernels(self) -> Sequence[type[AttentionBackend]]:
        """Backends in plain torch for specs without a kernel; the first one that supports a spec is used."""
        from mvllm.plugin_api import ReferenceAttention

        return (ReferenceAttention,)

    def _without_kernels(self, spec: AttentionSpec) -> tuple[AttentionBackend | None, list[str]]:
        """The first such backend that supports a spec, or None and the reasons of all."""
        problems: list[str] = []
        for backend in self.attention_without_kernels():
            found = backend.validate(spec)
            if not found:
                return backend(spec), []
            problems += found
        return None, list(dict.fromkeys(problems))

    def _fastest_attention(self, spec: AttentionSpec) -> AttentionBackend:
        """Backend over the Triton kernels, which support the layer, and the installed libraries that support it.

        Raises:
            PlatformError: The user has selected a library that does not support the layer.
        """
        from mvllm_torch_gpu.attention import TritonAttention
        from mvllm_torch_gpu.attention_libraries import LIBRARIES, libraries_for
        from mvllm_torch_gpu.autotuned_attention import TRITON, AutotunedAttention

        asked = self.settings.attention()
        if asked == TRITON:
            return TritonAttention(spec, float8=self.float8)
        forced = asked in {library.name for library in LIBRARIES}
        found, reasons = libraries_for(spec, (asked,) if forced else tuple(library.name for library in LIBRARIES))
        if forced and not found:
            variable = f"{self.settings.prefix}_ATTENTION"
            raise PlatformError(f"{variable}={asked}: {'; '.join(reasons)}. Unset {variable}, or set it to {TRITON}.")
        if not found:
            return TritonAttention(spec, float8=self.float8)
        return AutotunedAttention(spec, found, forced=forced, float8=self.float8)

    def state_backend(self, spec: StateSpec) -> StateBackend:
        from mvllm_torch_gpu.block_copies import CopiedStates

        return CopiedStates(spec)

    def ops(self) -> Sequence[OpProvider]:
        try:
            from mvllm_torch_gpu.ops import providers
        except ImportError as e:
            logger.warning("Operations run in plain torch: their kernels cannot be imported (%s).", e)
            return self.ops_without_kernels()
        return providers(
            self.float8,
            multiplies_float8=self.multiplies_float8,
            linear=self.settings.linear(),
            module=self.module,
        )

    def ops_without_kernels(self) -> Sequence[OpProvider]:
        """Operations in plain torch for steps that are captured, in place of references that read lengths."""
        from mvllm.plugin_api import static_state_ops

        return static_state_ops()

    def compiler(self) -> CompileBackend | None:
        from mvllm_torch_gpu.compiler import make_compiler

        return make_compiler(self.settings.compile_mode(), self.module)

    def shapes(self) -> ShapePolicy:
        from mvllm_torch_gpu import shapes

        return shapes.policy()
