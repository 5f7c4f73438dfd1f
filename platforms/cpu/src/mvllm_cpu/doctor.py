"""Checks of the CPU platform for `mvllm doctor`."""

from __future__ import annotations

import os

from mvllm.plugin_api import Check, CheckStatus
from mvllm_cpu import host_resources, kernels, torch_build

LOW_MEMORY = 1 << 30
ISAS = "generic, avx2, avx512, avx512_bf16, amx_bf16, neon_bf16"
QUANTIZED_ISAS = "generic, avx2, avx2_vnni, avx512, avx512_vnni, avx512_bf16, amx_int8"


def checks() -> list[Check]:
    """Kernels, threads, memory and the build of torch, in this order."""
    return [_kernels(), _threads(), _memory(), _torch_build()]


def _kernels() -> Check:
    loaded = kernels.load()
    requested = os.environ.get("MVLLM_CPU_ISA")
    if loaded.library is not None and requested and requested not in (loaded.isa, loaded.quantized_isa):
        found = f"MVLLM_CPU_ISA={requested} cannot run here or does not exist; the kernels run with {loaded.isa}."
        return Check(
            "platform.cpu.kernels",
            CheckStatus.WARNING,
            found,
            f"Unset it or name one of: {QUANTIZED_ISAS}, amx_bf16, neon_bf16.",
        )
    if loaded.library is not None:
        found = f"Compiled kernels, running with {loaded.isa}"
        if loaded.quantized_isa != loaded.isa:
            found += f" and, for weights of small integers, {loaded.quantized_isa}"
        return Check("platform.cpu.kernels", CheckStatus.OK, f"{found}.")
    found = f"Attention runs in plain torch, which is slower: {loaded.reason}"
    return Check("platform.cpu.kernels", CheckStatus.WARNING, found, loaded.remedy)


def _threads() -> Check:
    cores, requested = len(host_resources.physical_cores()), host_resources.threads_asked_for()
    chosen = host_resources.describe_threads(host_resources.usable_threads())
    found = f"{host_resources.processor_name()}, threads that compute: {chosen}"
    if requested is not None and requested > cores:
        return Check(
            "platform.cpu.threads",
            CheckStatus.WARNING,
            f"{found}, which is more than the {cores} physical cores that this process may use.",
            f"Unset OMP_NUM_THREADS or set it to at most {cores}.",
        )
    return Check("platform.cpu.threads", CheckStatus.OK, f"{found}.")


def _memory() -> Check:
    total, free = host_resources.memory_total(), host_resources.memory_free()
    found = f"{free / 2**30:.1f} GiB free of {total / 2**30:.1f} GiB."
    if free < LOW_MEMORY:
        return Check(
            "platform.cpu.memory", CheckStatus.WARNING, found, "Stop other programs or raise the memory limit."
        )
    return Check("platform.cpu.memory", CheckStatus.OK, found)


def _torch_build() -> Check:
    build = torch_build.find_build()
    if build.is_for_accelerators:
        return Check("platform.cpu.torch_build", CheckStatus.WARNING, build.describe(), torch_build.remedy())
    return Check("platform.cpu.torch_build", CheckStatus.OK, build.describe())
