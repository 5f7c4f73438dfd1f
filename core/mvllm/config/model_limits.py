"""What a model demands of settings: parallel sizes that divide it, and steps that hold its prompts."""

from __future__ import annotations

from mvllm.config.model import ModelConfig
from mvllm.errors import ConfigError

DEFAULT_NUM_BATCHED_TOKENS = 2048


def token_budget(
    model: ModelConfig, max_num_batched_tokens: int | None, max_num_seqs: int, *, enable_chunked_prefill: bool
) -> int:
    """`max_num_batched_tokens`, given or derived; without chunked prefill it must hold the longest prompt.

    Raises:
        ConfigError: It does not.
    """
    chunks = enable_chunked_prefill and not model.kind.is_encoder
    needed = max_num_seqs if chunks else max(max_num_seqs, model.max_model_len)
    given = max_num_batched_tokens
    if given is None:
        return max(DEFAULT_NUM_BATCHED_TOKENS, needed)
    if given < needed:
        reason = "with an encoder" if model.kind.is_encoder else "without chunked prefill"
        remedy = "" if model.kind.is_encoder else ", or set enable_chunked_prefill=True"
        raise ConfigError(
            f"max_num_batched_tokens is {given}, but {reason} it must be at least max_model_len "
            f"({model.max_model_len}): a prompt is computed in one step. Raise the one, or lower the other{remedy}."
        )
    return given


def check_parallel_sizes(model: ModelConfig, tp: int, pp: int, whose: str = "the model's") -> None:
    """Checks that `tp` ranks can share the model's heads, and `pp` stages its layers.

    Args:
        whose: The model, in error messages.

    Raises:
        ConfigError: They cannot.
    """
    if model.num_heads % tp:
        raise ConfigError(
            f"tensor_parallel_size is {tp}, which does not divide {whose} {model.num_heads} attention heads. "
            "Choose a divisor of them."
        )
    if model.num_kv_heads % tp and tp % model.num_kv_heads:
        raise ConfigError(
            f"tensor_parallel_size is {tp}, which neither divides {whose} {model.num_kv_heads} key-value heads "
            "nor is a multiple of them. Choose another size."
        )
    if pp > model.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size is {pp}, but must be at most the number of layers ({model.num_layers})."
        )
