"""Attention by FlashAttention: version 2 from the package `flash_attn`, version 3 through torch's `varlen_attn`.

Both read the block table and the lengths on the device, so that captured steps may contain them.

    flash_attn    blocks are multiples of 256 tokens
    varlen_attn   blocks of any size; torch dispatches block tables to FlashAttention 3 alone, which needs the module
                  `flash_attn_interface` and devices of compute capability 9.0
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch

from mvllm.plugin_api import AttentionSpec, get_logger
from mvllm_torch_gpu.attention_library import AttentionLibrary, parameters, without_padding
from mvllm_torch_gpu.paged_metadata import PagedMetadata

logger = get_logger("mvllm.torch_gpu.flash_attention")

FA3, FA3_CAPABILITY = "FA3", 9


class FlashAttention(AttentionLibrary):
    """The package `flash_attn`."""

    name = module_name = "flash_attn"

    @classmethod
    def refusals(cls, module: ModuleType, spec: AttentionSpec) -> list[str]:
        reasons = super().refusals(module, spec) + _unsupported_head_size(cls.name, spec)
        needed = {"block_table", "window_size"} | ({"softcap"} if spec.soft_cap is not None else set())
        for function in ("flash_attn_varlen_func", "flash_attn_with_kvcache"):
            lacking = needed - parameters(getattr(module, function, None))
            if lacking:
                reasons.append(f"the installed {cls.name} has no {', '.join(sorted(lacking))} in {function}")
        return reasons

    def takes(self, metadata: PagedMetadata) -> bool:
        return self.accepts_block_size(metadata.block_size)

    def accepts_block_size(self, block_size: int) -> bool:
        return block_size % 256 == 0

    def run(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, metadata: PagedMetadata, plan: Any
    ) -> torch.Tensor:
        spec, starts = self.spec, metadata.query_start_loc
        options: dict[str, Any] = {
            "softmax_scale": spec.scale,
            "causal": True,
            "window_size": (-1, -1) if spec.sliding_window is None else (spec.sliding_window - 1, 0),
            "block_table": metadata.block_table,
        }
        if spec.soft_cap is not None:
            options["softcap"] = spec.soft_cap
        if metadata.is_decode(len(query)):
            found = self.module.flash_attn_with_kvcache(
                query.unsqueeze(1), keys, values, cache_seqlens=metadata.seq_lens, **options
            ).squeeze(1)
            return without_padding(found, metadata.seq_lens > 0)
        key_starts = torch.nn.functional.pad(metadata.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        found = self.module.flash_attn_varlen_func(
            query, keys, values, starts, key_starts, metadata.max_query_len, metadata.max_seq_len, **options
        )
        return without_padding(found, _is_real(query, starts))


class VarlenAttention(AttentionLibrary):
    """Torch's `varlen_attn`, where it dispatches to FlashAttention 3."""

    name = "varlen_attn"
    module_name = "torch.nn.attention.varlen"

    @classmethod
    def refusals(cls, module: ModuleType, spec: AttentionSpec) -> list[str]:
        reasons = super().refusals(module, spec) + _unsupported_head_size(cls.name, spec)
        needed = {"block_table", "seqused_k", "enable_gqa", "scale", "window_size"}
        lacking = needed - parameters(getattr(module, "varlen_attn", None))
        if lacking:
            reasons.append(f"torch {torch.__version__} has no {', '.join(sorted(lacking))} in varlen_attn")
        if spec.soft_cap is not None:
            reasons.append(f"{cls.name} has no soft cap")
        if not reasons and (problem := activate_fa3()) is not None:
            reasons.append(problem)
        return reasons

    def takes(self, metadata: PagedMetadata) -> bool:
        return True

    def run(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, metadata: PagedMetadata, plan: Any
    ) -> torch.Tensor:
        spec, starts = self.spec, metadata.query_start_loc
        found: torch.Tensor = self.module.varlen_attn(
            query,
            keys,
            values,
            starts,
            None,  # FlashAttention 3 takes the keys' lengths from seqused_k if there is a block table
            metadata.max_query_len,
            metadata.max_seq_len,
            scale=spec.scale,
            window_size=(-1 if spec.sliding_window is None else spec.sliding_window - 1, 0),  # (left, right): causal
            enable_gqa=spec.num_heads != spec.num_kv_heads,
            seqused_k=metadata.seq_lens,
            block_table=metadata.block_table,
        )
        return without_padding(found, _is_real(query, starts))


def activate_fa3() -> str | None:
    """Makes torch dispatch flash attention to version 3 in this process; why that is not possible, or None.

    Torch activates no other version on its own. The setting also holds for torch's scaled_dot_product_attention.
    """
    from torch.nn import attention

    # HIP reports the version of gfx942 as capability 9.4.
    is_cuda = torch.version.cuda is not None and torch.cuda.is_available()
    if not is_cuda or torch.cuda.get_device_capability()[0] != FA3_CAPABILITY:
        return f"FlashAttention 3 needs a CUDA device of compute capability {FA3_CAPABILITY}.0"
    if FA3 not in attention.list_flash_attention_impls():
        return f"torch {torch.__version__} does not know FlashAttention 3"
    if attention.current_flash_attention_impl() == FA3:
        return None
    try:
        importlib.import_module("flash_attn_interface")
        attention.activate_flash_attention_impl(FA3)
    except (ImportError, OSError, RuntimeError) as e:
        return (
            "torch dispatches varlen_attn to FlashAttention 2, which has no block tables, because FlashAttention 3 "
            f"(module flash_attn_interface) cannot be used: {str(e).partition(chr(10))[0]}"
        )
    return None


def _unsupported_head_size(name: str, spec: AttentionSpec) -> list[str]:
    if spec.head_size > 256 or spec.head_size % 8:
        return [f"{name} supports head sizes up to 256 in multiples of 8, not {spec.head_size}"]
    return []


def _is_real(query: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(query), device=query.device) < starts[-1]
