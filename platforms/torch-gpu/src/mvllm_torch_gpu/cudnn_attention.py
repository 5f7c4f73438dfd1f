"""Attention of long prompts by cuDNN, which torch contains.

cuDNN reads dense tensors. So the blocks of a prompt are gathered first, which takes a few percent of the time of the
attention itself. Decodes of the same step use the Triton kernels, and so do prompts for which there is no memory: the
profile run does not gather, because its cache has one block.

Torch's function masks causally from the upper left corner only, and prepares an execution plan for every new shape. So
a prompt is computed in two parts that are merged by their log-sum-exps, and sizes are rounded up:

    keys     0 ......................... base ................ length ... base + size
    prompt   | not masked: base keys     | causal: size x size            |
                                         | recomputed | new tokens | zeros |

`base` is the largest multiple of CONTEXT_STEP tokens before the new ones. Rows between `base` and the first new token
have arbitrary queries, and their results are dropped.

Torch declares to cuDNN that addresses and strides are multiples of ALIGNMENT bytes, and does not check it: a query that
is not aligned is copied. Torch's function is called for many rows only; with one row cuDNN 9.19 to 9.25 returns wrong
results on some devices (pytorch/pytorch#193893).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from mvllm.plugin_api import AttentionSpec, BatchLayout, get_logger
from mvllm_torch_gpu.attention_library import UNSUPPORTED, AttentionLibrary
from mvllm_torch_gpu.message_text import first_line
from mvllm_torch_gpu.out_of_memory import is_out_of_memory
from mvllm_torch_gpu.paged_metadata import PagedMetadata
from mvllm_triton.attention import paged_attention
from mvllm_triton.merge_attn_states import merge_attn_states

logger = get_logger("mvllm.torch_gpu.cudnn_attention")

_warned: set[str] = set()  # reasons of cuDNN that the log has, one line each

LEAST_TOKENS = 2048
"""Tokens of the shortest prompt: shorter ones are not worth the gathering."""
CONTEXT_STEP = 1024
ROW_STEP = 512
"""A new shape takes about 70 ms once, so there are few of them."""

GATHERED_BYTES = 1 << 30
"""Memory limit for the gathered keys and values of one prompt."""

ALIGNMENT = 16
"""Bytes of which the addresses and strides of tensors are multiples."""

FIRST_DEVICE = (9, 0)
"""Compute capability from which cuDNN's kernels are faster than portable ones."""


@dataclass(frozen=True)
class Prompt:
    """New tokens of one request.

    Attributes:
        request: Row of the block table.
        first: Index of its first token in the step.
        num_tokens: New tokens.
        length: Tokens of the sequence, the new ones included.
    """

    request: int
    first: int
    num_tokens: int
    length: int

    @property
    def base(self) -> int:
        """Keys before the part that is masked causally."""
        return (self.length - self.num_tokens) // CONTEXT_STEP * CONTEXT_STEP

    @property
    def size(self) -> int:
        """Rows and columns of that part."""
        return -(-(self.length - self.base) // ROW_STEP) * ROW_STEP


@dataclass(frozen=True)
class PromptStep:
    """A step: the decodes come first.

    Attributes:
        num_decodes: Requests of one token each.
        prompts: The others.
        num_tokens: Tokens of the step without padding.
    """

    num_decodes: int
    prompts: tuple[Prompt, ...]
    num_tokens: int


class CudnnAttention(AttentionLibrary):
    """Attention of prompts of at least LEAST_TOKENS tokens."""

    name = "cudnn"
    module_name = "torch"

    def __init__(self, module: ModuleType, spec: AttentionSpec) -> None:
        super().__init__(module, spec)
        self._refused: set[tuple[int, int]] = set()  # sizes (base, size) that cuDNN does not compute

    @classmethod
    def refusals(cls, module: ModuleType, spec: AttentionSpec) -> list[str]:
        reasons = super().refusals(module, spec)
        if not has_cudnn(module):
            reasons.append(f"{cls.name} needs a device of compute capability {FIRST_DEVICE[0]}.{FIRST_DEVICE[1]}")
        if spec.head_size > 128 or spec.head_size % 8:
            reasons.append(f"{cls.name} is used for head sizes up to 128 in multiples of 8, not {spec.head_size}")
        if spec.sliding_window is not None or spec.soft_cap is not None:
            reasons.append(f"{cls.name} has no sliding window and no soft cap")
        return reasons

    def takes(self, metadata: PagedMetadata) -> bool:
        return (
            not metadata.capture and metadata.max_query_len >= LEAST_TOKENS and CONTEXT_STEP % metadata.block_size == 0
        )

    def plan(self, batch: BatchLayout, device: torch.device) -> Any:
        real = int(np.count_nonzero(batch.seq_lens))  # padding comes last
        starts, lengths = batch.query_start_loc[: real + 1], batch.seq_lens[:real]
        counts = np.diff(starts)
        longer = np.flatnonzero(counts > 1)
        decodes = int(longer[0]) if len(longer) else real
        spec = self.spec
        row_bytes = 2 * spec.num_kv_heads * spec.head_size * 2
        # int, because the product of int32 numbers may overflow.
        gathered_bytes = int(lengths[decodes:].max(initial=0)) * row_bytes
        if counts[decodes:].min(initial=LEAST_TOKENS) < LEAST_TOKENS or gathered_bytes > GATHERED_BYTES:
            return UNSUPPORTED
        prompts = tuple(
            Prompt(row, int(starts[row]), int(counts[row]), int(lengths[row])) for row in range(decodes, real)
        )
        return PromptStep(decodes, prompts, int(starts[real]))

    def run(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, metadata: PagedMetadata, plan: PromptStep
    ) -> torch.Tensor:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        out[plan.num_tokens :] = 0.0
        if decodes := plan.num_decodes:
            paged_attention(
                query[:decodes],
                keys,
                values,
                metadata.block_table[:decodes],
                metadata.query_start_loc[: decodes + 1],
                metadata.seq_lens[:decodes],
                scale=self.spec.scale,
                max_query_len=1,
                max_seq_len=metadata.max_seq_len,
                out=out[:decodes],
            )
        for prompt in plan.prompts:
            tokens = slice(prompt.first, prompt.first + prompt.num_tokens)
            table, is_done = metadata.block_table[prompt.request], (prompt.base, prompt.size) not in self._refused
            try:
                if is_done:
                    self._run_prompt(query[tokens], keys, values, table, prompt, out[tokens])
            except RuntimeError as e:
                if is_out_of_memory(e):
                    logger.debug("The memory does not suffice for cuDNN and a sequence of %d tokens.", prompt.length)
                elif is_refusal(e):
                    self._refused.add((prompt.base, prompt.size))
                    self._warn_once(prompt, first_line(e))
                else:
                    raise
                is_done = False
            if not is_done:  # after the except clause, which refers to the gathered tensors
                self._run_prompt_in_place(query[tokens], keys, values, metadata, prompt, out[tokens])
        return out

    def _warn_once(self, prompt: Prompt, reason: str) -> None:
        if reason not in _warned:
            _warned.add(reason)
            logger.warning(
                "cuDNN refuses a prompt of %d tokens in a sequence of %d, and the Triton kernels compute it: %s",
                prompt.num_tokens,
                prompt.length,
                reason,
            )

    def _run_prompt_in_place(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        metadata: PagedMetadata,
        prompt: Prompt,
        out: torch.Tensor,
    ) -> None:
        """As `_run_prompt`, by the Triton kernels."""
        row = slice(prompt.request, prompt.request + 1)
        starts = metadata.query_start_loc[prompt.request : prompt.request + 2] - prompt.first
        paged_attention(
            query,
            keys,
            values,
            metadata.block_table[row],
            starts,
            metadata.seq_lens[row],
            scale=self.spec.scale,
            max_query_len=prompt.num_tokens,
            max_seq_len=prompt.length,
            out=out,
        )

    def _run_prompt(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        table: torch.Tensor,
        prompt: Prompt,
        out: torch.Tensor,
    ) -> None:
        """Attention of one prompt's new tokens: `query` and `out` [num_tokens, heads, size], `table` [pages]."""
        block_size, scale = keys.shape[1], self.spec.scale
        base, size = prompt.base, prompt.size
        before = prompt.length - prompt.num_tokens - base
        rows = query
        if size != prompt.num_tokens or not is_aligned(query):
            rows = query.new_zeros((size, *query.shape[1:]))
            rows[before : before + prompt.num_tokens] = query
        first, last = base // block_size, -(-prompt.length // block_size)
        own = [_gathered(part, table[first:last], prompt.length - base, size) for part in (keys, values)]
        found, sums = dense_attention(rows, own[0], own[1], scale=scale, causal=True)
        new = slice(before, before + prompt.num_tokens)
        if not base:
            out.copy_(found[new])
            return
        earlier = [_gathered(part, table[:first], base, base) for part in (keys, values)]
        found_earlier, sums_earlier = dense_attention(rows, earlier[0], earlier[1], scale=scale, causal=False)
        merge_attn_states(out, found[new], sums[:, new], found_earlier[new], sums_earlier[:, new])


def is_aligned(query: torch.Tensor) -> bool:
    """Whether the address and the strides of a query [rows, heads, size] are multiples of ALIGNMENT bytes."""
    places = query.data_ptr(), *(stride * query.itemsize for stride in query.stride()[:-1])
    return query.stride(-1) == 1 and not any(place % ALIGNMENT for place in places)


def is_refusal(error: RuntimeError) -> bool:
    """Whether cuDNN has refused a call, and computed nothing: it has no kernel for these sizes, or none that loads."""
    return "cudnn" in str(error).lower()


def has_cudnn(module: ModuleType) -> bool:
    """Whether `module`, which is torch, has cuDNN for the current device."""
    if module.version.cuda is None or not module.backends.cudnn.is_available():
        return False
    return bool(module.cuda.is_available() and module.cuda.get_device_capability() >= FIRST_DEVICE)


def dense_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one sequence by cuDNN.

    Args:
        query: [rows, heads, size].
        key, value: [columns, kv_heads, size].
        scale: Factor on query-key products.
        causal: Row i sees columns up to i; otherwise all.

    Returns:
        The result [rows, heads, size], and the natural logarithms of the sums of exponentials, float32 [heads, rows].
    """
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *(x.transpose(0, 1).unsqueeze(0) for x in (query, key, value)), None, True, 0.0, causal, scale=scale
    )
    # With TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1 torch returns the logarithms of the heads of a row one after the other.
    sums = found[1].reshape(query.shape[1], query.shape[0]).contiguous()
    return found[0].squeeze(0).transpose(0, 1), sums


def _gathered(cache: torch.Tensor, blocks: torch.Tensor, num_tokens: int, size: int) -> torch.Tensor:
    """The first `num_tokens` tokens of `blocks`, [size, kv_heads, head_size]; zeros after them.

    The rest of the last block has values of earlier requests. If they are not finite, a weight of 0 does not remove
    them from a sum.
    """
    num_slots = len(blocks) * cache.shape[1]
    gathered = cache.new_empty((max(size, num_slots), *cache.shape[2:]))
    whole = gathered[:num_slots].view(len(blocks), *cache.shape[1:])
    torch.index_select(cache, 0, blocks, out=whole)
    gathered[num_tokens:] = 0.0
    return gathered[:size]
