"""The CUDA platform with the host as its device. Its plans, shapes, tables and decode graphs are the real ones.

of the platform    replaced by
device             the host's memory
CUDA graphs        graphs of torch operations (host_graphs.py of torch-gpu's tests)
Triton kernels     KERNELS: torch functions with the same signatures, which can be captured; a test puts them into
                   mvllm_torch_gpu.attention. Operations on states: those of the platform without kernels
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any, ClassVar

import torch
from platforms.cuda.tests.hosted_plugin import SPEC

from mvllm.ops.norm import rms_norm
from mvllm.ops.rotary import rotary_embedding
from mvllm.plugin_api import (
    Capabilities,
    DeviceRuntime,
    FinishedHostCopy,
    HostCopy,
    OpProvider,
    PlatformSpec,
    WorkerContext,
)
from mvllm_cpu.runtime import CPURuntime
from mvllm_cuda.platform import CUDAPlatform
from mvllm_torch_gpu.step_graphs import StepGraphBackend

MOST_TOKENS = 1 << 8
"""Maximum tokens of a sequence in a captured step. `paged_attention` below computes the full width of a table."""

HostGraphs = importlib.import_module("platforms.torch-gpu.tests.host_graphs").HostGraphs


class HostedRuntime(CPURuntime):
    """Runtime of the host whose transfers copy, like those of a device.

    Attributes:
        captured_in_warm_up: Number of graphs at the end of the warm-up.
    """

    captured_in_warm_up = 0

    def end_warm_up(self) -> None:
        HostedRuntime.captured_in_warm_up = sum(graphs.captures for graphs in HostedPlatform.graphs_made)

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        return host.clone()

    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        return FinishedHostCopy(tensor.clone())


class HostedPlatform(CUDAPlatform):
    """The CUDA platform on the host; see the module.

    Attributes:
        graphs_made: Graphs of all engines so far.
        provided: Its op providers in addition to those on states. Empty by default, because interpreted kernels are
            slow; tests may set it.
    """

    graphs_made: ClassVar[list[Any]] = []
    provided: ClassVar[tuple[OpProvider, ...]] = ()

    @property
    def spec(self) -> PlatformSpec:
        return SPEC

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(super().capabilities, unified_memory=True)

    def init_device(self, ctx: WorkerContext) -> DeviceRuntime:
        return HostedRuntime(ctx)

    def ops(self) -> tuple[OpProvider, ...]:
        return (*self.provided, *self.ops_without_kernels())

    def compiler(self) -> StepGraphBackend:
        graphs = HostGraphs()
        self.graphs_made.append(graphs)
        return StepGraphBackend(lambda: graphs, "host", table_tokens=MOST_TOKENS)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    visible_lens: torch.Tensor | None = None,
    **unused: Any,
) -> torch.Tensor:
    """mvllm_triton's function in torch operations that do not depend on values. For small steps only."""
    num_tokens = q.shape[0]
    num_kv_heads, block_size = k_cache.shape[2], k_cache.shape[1]
    token = torch.arange(num_tokens)
    request = torch.searchsorted(query_start_loc[1:], token.to(torch.int32), right=True)
    is_real, request = request < len(seq_lens), request.clamp(max=len(seq_lens) - 1)
    end = seq_lens[request]
    position = end - query_start_loc[request + 1] + token
    key_at = torch.arange(block_table.shape[1] * block_size)
    last = position if visible_lens is None else visible_lens - 1
    seen = (key_at <= last[:, None]) & is_real[:, None]
    if window is not None:
        seen = seen & (key_at > position[:, None] - window)
    blocks = torch.where(seen.unflatten(1, (-1, block_size)).any(2), block_table[request], 0)
    keys = k_cache[blocks].flatten(1, 2).float()
    values = v_cache[blocks].flatten(1, 2).float()
    grouped = q.float().unflatten(1, (num_kv_heads, -1))
    scores = torch.einsum("tkgd,tmkd->tkgm", grouped, keys) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~seen[:, None, None], -1e30)
    if sinks is not None:
        extra = sinks.float().view(1, num_kv_heads, -1, 1).expand(num_tokens, -1, -1, 1)
        scores = torch.cat([scores, extra], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : len(key_at)]
    weights = torch.where(seen[:, None, None], weights, 0.0)
    # Masked values may be NaN.
    values = torch.where(seen[:, :, None, None], values, 0.0)
    return torch.einsum("tkgm,tmkd->tkgd", weights, values).flatten(1, 2).to(q.dtype)


def mla_attention(q: torch.Tensor, cache: torch.Tensor, *tables: Any, value_size: int, **options: Any) -> torch.Tensor:
    """mvllm_triton's function in torch operations."""
    return paged_attention(q, cache, cache[..., :value_size], *tables, **options)


def reshape_and_cache_mla(
    latents: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor, **unused: Any
) -> None:
    """mvllm_triton's function in torch operations."""
    reshape_and_cache(latents, latents[..., :0], cache, cache[..., :0], slot_mapping)


def reshape_and_cache(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    **unused: Any,
) -> None:
    """mvllm_triton's function in torch operations, for caches with a float dtype."""
    for new, cache in ((k, k_cache), (v, v_cache)):
        slots = cache.flatten(0, 1)
        spare = torch.cat([slots, slots[:1]])  # tokens without a slot go to the last row
        place = torch.where(slot_mapping >= 0, slot_mapping, len(slots)).long()
        slots.copy_(spare.index_copy(0, place, new.to(cache.dtype))[:-1])


def rotary_embedding_and_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    index: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    interleaved: bool,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    **unused: Any,
) -> torch.Tensor:
    """mvllm_triton's function in torch operations."""
    if q_weight is not None and k_weight is not None:
        query, key = rms_norm(query, q_weight, eps), rms_norm(key, k_weight, eps)
    if interleaved:
        order = torch.arange(key.shape[2])
        order[: cos_sin.shape[1]] = order[: cos_sin.shape[1]].view(-1, 2).T.flatten()
        query, key = query[..., order], key[..., order]
    query, key = rotary_embedding(index, query, key, cos_sin)
    reshape_and_cache(key, value, k_cache, v_cache, slot_mapping)
    return query


KERNELS = {
    function.__name__: function
    for function in (
        paged_attention,
        mla_attention,
        reshape_and_cache,
        reshape_and_cache_mla,
        rotary_embedding_and_cache,
    )
}
