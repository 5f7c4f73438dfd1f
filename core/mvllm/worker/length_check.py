"""Checks, before weights are read, that one sequence of the longest length can fit into memory at all.

The rotary tables of a model have a row per position, and a config may claim any number of positions. Without this
check they would be allocated long before the KV cache, whose size is known only after a profiling step, is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mvllm.errors import CacheError
from mvllm.layers.rotary import RotaryEmbedding
from mvllm.platform.runtime import MemoryInfo

if TYPE_CHECKING:
    from mvllm.models.causal_lm import CausalLM


def check_length(model: CausalLM, memory: MemoryInfo) -> None:
    """Compares a lower bound of what one sequence of `max_model_len` tokens needs with the memory of the device.

    Args:
        model: Built, without tables and caches.
        memory: Of the device.

    Raises:
        CacheError: The rotary tables are larger than the free memory, or they and the KV cache of one sequence are
            larger than the whole memory; says which length may fit.
    """
    length = model.config.max_model_len
    per_position = sum(m.table_bytes for m in model.modules() if isinstance(m, RotaryEmbedding)) // max(1, length)
    per_token, windowed = 0, 0
    for layer in model.attention_layers():
        window = layer.spec.sliding_window
        if window is None or window >= length:
            per_token += layer.backend.kv_layout().bytes_per_token
        else:
            windowed += layer.backend.kv_layout().bytes_per_token * window
    fits = min(
        memory.free // per_position if per_position else length,
        (memory.total - windowed) // (per_position + per_token) if per_position + per_token else length,
    )
    if model.config.max_model_len_is_auto and per_position * length <= memory.free:
        return  # the engine core lowers the length, but the tables stay
    if fits >= length:
        return
    tables = f" and {_gib(per_position * length)} of rotary tables" if per_position else ""
    advice = f"Set max_model_len to less than {fits}" if fits > 1 else "Set a smaller max_model_len"
    raise CacheError(
        f"max_model_len {length:,} needs at least {_gib(per_token * length + windowed)} of KV cache{tables} for one "
        f"sequence, but the device has {_gib(memory.total)}, of which {_gib(memory.free)} are free. {advice}; "
        f"the default is the context length in {model.config.hf_config.source}."
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB"
