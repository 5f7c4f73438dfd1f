"""A device with late results: computed values are readable only from copies that the caller has waited for.

It derives from the fault-injection platform, so faults can be injected. Tensors are host tensors, but between the start
and the end of `execute_model`, a read of a tensor that is not a host buffer raises. Blocks that are copied to the host
are there when the copy is waited for. Workers log their steps to a file:

    0 began 3         rank 0, step 3: execute_model was called
    0 submitted 3     the model has run (an accelerator would run it later)
    0 launched 3      execute_model has returned
    0 waited 3        a copy of step 3 was waited for
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from mvllm.platform.tokens_on_device import keeps_sampled_tokens_on_device
from mvllm.plugin_api import (
    AttentionBackend,
    AttentionSpec,
    BlockTransfer,
    Capabilities,
    DeviceRuntime,
    EngineConfig,
    HostCopy,
    KVCache,
    ModelRunnerOutput,
    Platform,
    PlatformSpec,
    SchedulerOutput,
    WorkerContext,
)
from mvllm.worker.worker import Worker
from mvllm_example_device.block_copies import LateBlocks
from mvllm_example_device.faults import FaultPlan
from mvllm_fault_injection.platform import FaultyAttention, FaultyPlatform, FaultyRuntime
from tests.helpers.host_sync import ForbidHostReads, ForbidSynchronizingOps
from tests.helpers.late_plugin import LOG, SPEC


class LateCopy:
    """A copy whose values are readable only after `wait`; its source may change before that."""

    def __init__(self, tensor: torch.Tensor, runtime: LateRuntime) -> None:
        self._values = tensor.clone()
        self._runtime, self._step = runtime, runtime.step

    def wait(self) -> torch.Tensor:
        self._runtime.note("waited", self._step)
        self._runtime.host_storages.add(self._values.untyped_storage()._cdata)
        return self._values


class LateEvent:
    """An event that raises if it is waited for before it was recorded."""

    def __init__(self) -> None:
        self._is_recorded = False

    def record(self) -> None:
        self._is_recorded = True

    def wait(self) -> None:
        pass

    def synchronize(self) -> None:
        assert self._is_recorded


class LateRuntime(FaultyRuntime):
    """Runtime of the late device.

    Attributes:
        step: The step in progress.
        host_storages: Storages whose values may be read.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(FaultPlan.from_environment())
        self._rank = rank
        self._log = os.environ[LOG]
        self._kept: list[torch.Tensor] = []
        self.step = -1
        self.host_storages: set[int] = set()

    def note(self, event: str, step: int) -> None:
        with open(self._log, "a", encoding="utf-8") as file:
            file.write(f"{self._rank} {event} {step}\n")

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        buffer = torch.empty(shape, dtype=dtype)
        self._kept.append(buffer)  # keeps the storage alive, so that no other takes its address
        self.host_storages.add(buffer.untyped_storage()._cdata)
        return buffer

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        return host.clone()

    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        copy = LateCopy(tensor, self)
        self._kept.append(copy._values)
        return copy

    def event(self) -> LateEvent:
        return LateEvent()

    @contextmanager
    def guarded(self, step: int) -> Iterator[None]:
        """Context in which reads of device tensors raise."""
        self.step = step
        self.note("began", step)
        with (
            ForbidSynchronizingOps(),
            ForbidHostReads(lambda tensor: tensor.untyped_storage()._cdata in self.host_storages),
        ):
            yield
        self.note("launched", step)


class LateAttention(LateBlocks, FaultyAttention):
    """Attention with late exports, which the device makes: no value is read on the host."""

    def export_blocks(self, kv: KVCache, blocks: np.ndarray, out: np.ndarray) -> BlockTransfer | None:
        with torch._C.DisableTorchFunction():
            return super().export_blocks(kv, blocks, out)


class LatePlatform(FaultyPlatform):
    """The platform `late`."""

    @property
    def spec(self) -> PlatformSpec:
        return SPEC

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, async_copies=True, kv_transfer=True)

    def worker_class(self) -> str:
        return "tests.helpers.late_device:LateWorker"

    def init_device(self, ctx: WorkerContext) -> DeviceRuntime:
        super().init_device(ctx)
        return LateRuntime(ctx.rank)

    def attention_backend(self, spec: AttentionSpec) -> AttentionBackend:
        super().attention_backend(spec)
        return LateAttention(spec, self._plan)


class LateWorker(Worker):
    """The default worker, with a log of its steps."""

    def __init__(self, config: EngineConfig, platform: Platform, ctx: WorkerContext) -> None:
        super().__init__(config, platform, ctx)
        self._reads_later = keeps_sampled_tokens_on_device(config, platform.capabilities)

    def load_model(self) -> None:
        super().load_model()
        compute_logits = self.runner.loader.model.compute_logits

        def logged_forward(hidden: torch.Tensor) -> torch.Tensor:
            assert isinstance(self.runtime, LateRuntime)
            self.runtime.note("submitted", self.runtime.step)
            return compute_logits(hidden)

        self.runner.loader.model.compute_logits = logged_forward  # type: ignore[method-assign]

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        assert isinstance(self.runtime, LateRuntime)
        if not self._reads_later:  # the worker reads its tokens at the end of each step, as required
            return super().execute_model(plan)
        with self.runtime.guarded(plan.step):
            return super().execute_model(plan)

    def sample_tokens(self, step: int, mask_rows: list[int], token_masks: bytes) -> ModelRunnerOutput | None:
        assert isinstance(self.runtime, LateRuntime)
        if not self._reads_later:
            return super().sample_tokens(step, mask_rows, token_masks)
        with self.runtime.guarded(step):
            return super().sample_tokens(step, mask_rows, token_masks)
