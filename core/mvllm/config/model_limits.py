"""What a model demands of settings: parallel sizes that divide it, and steps that hold its prompts."""

from __future__ import annotations

from mvllm.config.model import ModelConfig
from mvllm.config.model_implementations import runs_natively
from mvllm.errors import ConfigError

DEFAULT_NUM_BATCHED_TOKENS = 2048

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_OTHER_MLPS = ("block_ff_dim", "layers_block_type", "hybrid_override_pattern", "is_encoder_decoder")
"""Keys of models whose MLPs have another width than `intermediate_size`, or that may have none."""


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
    if (problem := _problem_with_ranks(model, tp)) is not None:
        fitting = [str(size) for size in range(1, tp) if _problem_with_ranks(model, size) is None]
        raise ConfigError(f"tensor_parallel_size is {tp}, which {problem.format(whose)}. Choose {_any_of(fitting)}.")
    if pp > model.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size is {pp}, but must be at most the number of layers ({model.num_layers})."
        )


def _problem_with_ranks(model: ModelConfig, tp: int) -> str | None:
    """Why `tp` ranks cannot share a model, with `{}` for whose it is; None if they can, as far as its config tells."""
    if model.num_heads % tp:
        return f"does not divide {{}} {model.num_heads} attention heads"
    if model.num_kv_heads % tp and tp % model.num_kv_heads:
        return f"neither divides {{}} {model.num_kv_heads} key-value heads nor is a multiple of them"
    key = _key_of_mlp_size(model)
    size = None if key is None else model.hf_config.get(key)
    if isinstance(size, int) and size % tp:
        return f"does not divide {{}} {key} of {size}, the width of its MLPs"
    return None


def _key_of_mlp_size(model: ModelConfig) -> str | None:
    """The key of config.json for the width of MLPs, or of experts, that ranks share; None where it is not certain.

    Loading the weights reports what this does not find.
    """
    hf = model.hf_config
    if not runs_natively(model.architecture, model.model_impl) or any(key in hf for key in _OTHER_MLPS):
        return None
    if any(key in hf for key in _EXPERTS):
        return "moe_intermediate_size" if "moe_intermediate_size" in hf else None
    return next((key for key in ("intermediate_size", "ffn_dim") if key in hf), None)


def _any_of(sizes: list[str]) -> str:
    return sizes[0] if len(sizes) == 1 else f"{', '.join(sizes[:-1])} or {sizes[-1]}"
