"""EXAONE 4: norms after each block and on queries and keys; windows, and no positional encoding on layers without one.

Models without windows have RoPE on every layer.
"""

from __future__ import annotations

from collections.abc import Callable

from mvllm.config.model import ModelConfig
from mvllm.errors import ModelError
from mvllm.models.layer_windows import layer_windows
from mvllm.models.llama import LlamaForCausalLM, LlamaOptions
from mvllm.models.olmo2 import POST_NORMS


class Exaone4ForCausalLM(LlamaForCausalLM):
    """`Exaone4ForCausalLM` of Hugging Face checkpoints."""

    @classmethod
    def options(cls, config: ModelConfig) -> LlamaOptions:
        """No biases. In models with windows, the layers without one are NoPE layers."""
        windows: tuple[int | None, ...] = ()
        nope: frozenset[int] = frozenset()
        if config.sliding_window is not None:
            windows = layer_windows(config, _is_full(config))
            nope = frozenset(layer for layer, window in enumerate(windows) if window is None)
        return LlamaOptions(
            windows=windows,
            qk_norm=True,
            norms=POST_NORMS,
            eps=config.hf_config.positive_number("rms_norm_eps", 1e-5),
            nope_layers=nope,
        )


def _is_full(config: ModelConfig) -> Callable[[int], bool]:
    """Which layers have no window, by `sliding_window_pattern`: a period, or letters L (window) and G (none).

    Raises:
        ModelError: It is neither.
    """
    hf = config.hf_config
    pattern = hf.get("sliding_window_pattern", 4)
    if not isinstance(pattern, str):
        period = hf.positive_int("sliding_window_pattern", 4)
        return lambda layer: (layer + 1) % period == 0
    if not pattern or not {*pattern} <= {"L", "G"}:
        raise ModelError(
            f"{hf.source}: sliding_window_pattern should be a number of layers or a text such as 'LLLG', "
            f"found {pattern!r}."
        )
    return lambda layer: layer == config.num_layers - 1 or pattern[layer % len(pattern)] == "G"
