"""Op providers of the compiled kernels: each operation is one call, where torch needs several passes over the data.

They round to the compute dtype where the references do, so results equal the references' up to the order of sums.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from mvllm.plugin_api import OpCase, OpProvider
from mvllm_cpu import workspace
from mvllm_cpu.paged_attention import DTYPE_CODES, DTYPES
from mvllm_cpu.recording import Kernel

PROVIDER = "mvllm_cpu"


def supports(case: OpCase) -> list[str]:
    """Reasons why the kernels do not take a case."""
    if case.dtype not in DTYPES:
        return [f"dtype {case.dtype} has no kernel (there are kernels for {', '.join(DTYPES)})"]
    return []


def only_batch_invariant(case: OpCase) -> list[str]:
    """Reasons why a kernel that serves `batch_invariant` only does not take a case."""
    return supports(case) if case.batch_invariant else ["it is used with batch_invariant only"]


class KernelOps:
    """The operations, bound to the opened library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, length, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        norm = (pointer, length, length, length, pointer, pointer, pointer, length, length, number, ctypes.c_float)
        self._rms_norm = Kernel(library, "mvllm_cpu_rms_norm", norm)
        act = (pointer, length, pointer, length, length, number)
        self._silu_and_mul = Kernel(library, "mvllm_cpu_silu_and_mul", act)
        self._gelu_tanh_and_mul = Kernel(library, "mvllm_cpu_gelu_tanh_and_mul", act)
        heads = (pointer, length, length, number)
        rotary = (pointer, number, pointer, number, *heads, *heads, length, number)
        self._rotary = Kernel(library, "mvllm_cpu_rotary_embedding", rotary)
        largest = (pointer, length, pointer, pointer, length, length, number)
        self._argmax = Kernel(library, "mvllm_cpu_argmax", largest)
        sums = (pointer, length, pointer, length, length, number)
        self._logsumexp = Kernel(library, "mvllm_cpu_logsumexp", sums)
        draws = (pointer, length, *(pointer,) * 8, length, length, length)
        self._filtered_draw = Kernel(library, "mvllm_cpu_filtered_draw", draws)
        lookup = (pointer, number, pointer, length, pointer, length, length, length, length)
        self._embedding = Kernel(library, "mvllm_cpu_embedding", lookup)

    def providers(self) -> Sequence[OpProvider]:
        """One per operation."""
        functions = (
            self.argmax,
            self.logsumexp,
            self.embedding,
            self.rms_norm,
            self.fused_add_rms_norm,
            self.silu_and_mul,
            self.gelu_tanh_and_mul,
            self.rotary_embedding,
        )
        return [
            *(OpProvider(f.__name__, PROVIDER, f, supports, batch_invariant=True) for f in functions),
            OpProvider("filtered_draw", PROVIDER, self.filtered_draw, only_batch_invariant, batch_invariant=True),
        ]

    def argmax(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest element of each row, and its index."""
        x = rows_of(x)
        values, ids = torch.empty(x.shape[:1], dtype=x.dtype), torch.empty(x.shape[:1], dtype=torch.int64)
        self._argmax(
            x.data_ptr(),
            x.stride(0),
            values.data_ptr(),
            ids.data_ptr(),
            x.shape[0],
            x.shape[1],
            DTYPE_CODES[x.dtype],
        )
        return values, ids

    def logsumexp(self, logits: torch.Tensor) -> torch.Tensor:
        """The logarithm of the sum of the exponentials of each row, float32."""
        x = rows_of(logits)
        sums = torch.empty(x.shape[:1], dtype=torch.float32)
        self._logsumexp(
            x.data_ptr(),
            x.stride(0),
            sums.data_ptr(),
            x.shape[0],
            x.shape[1],
            DTYPE_CODES[x.dtype],
        )
        return sums

    def filtered_draw(
        self,
        logits: torch.Tensor,
        peaks: torch.Tensor,
        inv_temperature: torch.Tensor,
        min_p_gap: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        coarse: torch.Tensor,
        fine: torch.Tensor,
        block_size: int,
    ) -> torch.Tensor:
        """Draws one token per row after min_p, top_k and top_p filtering."""
        x = rows_of(logits)
        out = torch.empty(x.shape[:1], dtype=torch.int64)
        given = (peaks, inv_temperature, min_p_gap, top_k, top_p, coarse, fine)
        settings = [setting.contiguous() for setting in given]
        self._filtered_draw(
            x.data_ptr(),
            x.stride(0),
            *(setting.data_ptr() for setting in settings),
            out.data_ptr(),
            x.shape[0],
            x.shape[1],
            block_size,
        )
        return out

    def embedding(self, ids: torch.Tensor, weight: torch.Tensor, first: int | None = None) -> torch.Tensor:
        """Rows of a table; zeros for ids outside of it (other vocabulary shards)."""
        ids, weight = listed(ids), rows_of(weight)
        size = weight.element_size()
        out = workspace.empty((*ids.shape, weight.shape[1]), weight.dtype)
        self._embedding(
            ids.data_ptr(),
            ids.dtype == torch.int64,
            weight.data_ptr(),
            weight.stride(0) * size,
            out.data_ptr(),
            ids.numel(),
            weight.shape[1] * size,
            first or 0,
            weight.shape[0],
        )
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x divided by its root mean square, times weight."""
        size = x.shape[-1]
        rows, heads, head_stride = x, 1, 0
        if x.dim() == 3 and x.stride(2) == 1:  # a strided view of heads
            heads, head_stride = x.shape[1], x.stride(1)
        else:
            rows = rows_of(x)
        out = workspace.empty(x.shape, x.dtype)
        self._rms_norm(
            rows.data_ptr(),
            rows.stride(0),
            heads,
            head_stride,
            None,
            weight.data_ptr(),
            out.data_ptr(),
            x.numel() // size,
            size,
            DTYPE_CODES[x.dtype],
            eps,
        )
        return out

    def fused_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds x to the residual stream, in place, and normalizes the sum."""
        if not residual.is_contiguous():
            residual = residual.contiguous()
        x = rows_of(x)
        out = workspace.empty(residual.shape, residual.dtype)
        self._rms_norm(
            x.data_ptr(),
            x.stride(0),
            1,
            0,
            residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            x.shape[1],
            DTYPE_CODES[x.dtype],
            eps,
        )
        return out, residual

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """silu of the first half times the second half."""
        return self._gate_and_mul(self._silu_and_mul, x)

    def gelu_tanh_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """gelu_tanh of the first half times the second half."""
        return self._gate_and_mul(self._gelu_tanh_and_mul, x)

    def _gate_and_mul(self, kernel: Kernel, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[-1] // 2
        rows = rows_of(x)
        out = workspace.empty((*x.shape[:-1], size), x.dtype)
        kernel(rows.data_ptr(), rows.stride(0), out.data_ptr(), rows.shape[0], size, DTYPE_CODES[x.dtype])
        return out

    def rotary_embedding(
        self, index: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotates queries and keys in place."""
        if not index.is_contiguous():
            index = index.contiguous()
        if query.stride(-1) != 1:
            query = query.contiguous()
        if key.stride(-1) != 1:
            key = key.contiguous()
        self._rotary(
            index.data_ptr(),
            index.dtype == torch.int64,
            cos_sin.data_ptr(),
            cos_sin.shape[1],
            query.data_ptr(),
            query.stride(0),
            query.stride(1),
            query.shape[1],
            key.data_ptr(),
            key.stride(0),
            key.stride(1),
            key.shape[1],
            query.shape[0],
            DTYPE_CODES[query.dtype],
        )
        return query, key


def listed(ids: torch.Tensor) -> torch.Tensor:
    """The ids in the format of the kernels: contiguous int32 or int64."""
    if ids.dtype not in (torch.int32, torch.int64):
        ids = ids.long()
    return ids if ids.is_contiguous() else ids.contiguous()


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """`x` as [rows, size]; not copied if the elements of each row are contiguous."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()
