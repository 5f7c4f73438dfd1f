"""What a model demands of settings: parallel sizes that divide it, and steps that hold its prompts."""

from __future__ import annotations

from collections.abc import Iterator

from mvllm.config.model import ModelConfig
from mvllm.config.model_implementations import runs_natively
from mvllm.errors import ConfigError

DEFAULT_NUM_BATCHED_TOKENS = 2048

_LISTS_OF_LAYERS = ("layers_block_type", "layer_types", "hybrid_override_pattern")
_STATES = frozenset({"linear_attention", "mamba", "conv", "M"})
_MLPS, _EXPERTS = frozenset({"mlp", "-"}), frozenset({"moe", "E"})
"""Names of kinds of layers in these lists."""
_STATE_HEADS = {
    "linear_num_key_heads": "key heads of its gated delta layers",
    "linear_num_heads": "heads of its delta attention",
    "linear_attn_config.num_heads": "heads of its delta attention",
    "mamba_n_heads": "Mamba heads",
    "mamba_num_heads": "Mamba heads",
}
_STATE_GROUPS = ("mamba_n_groups", "n_groups")
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SHARED_EXPERTS = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
_OTHER_MLPS = ("block_ff_dim", "block_auto_adjust_ff_dim", "is_encoder_decoder")
"""Keys of models whose MLPs have another width than `intermediate_size`."""


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
    shared = [(model.num_heads, f"{model.num_heads} attention heads")]
    copied = [(model.num_kv_heads, f"{model.num_kv_heads} key-value heads")]
    if runs_natively(model.architecture, model.model_impl):
        shared += [*_state_heads(model), *_widths(model)]
        groups = next((model.hf_config.get(key) for key in _STATE_GROUPS if key in model.hf_config), None)
        if isinstance(groups, int) and _may_have(model, _STATES):
            copied.append((groups, f"{groups} groups of Mamba heads"))
    for size, what in shared:
        if size % tp:
            return f"does not divide {{}} {what}"
    for size, what in copied:
        if size % tp and tp % size:
            return f"neither divides {{}} {what} nor is a multiple of them"
    return None


def _state_heads(model: ModelConfig) -> Iterator[tuple[int, str]]:
    """What ranks share of layers with a state: its number, and what it is."""
    if not _may_have(model, _STATES):
        return
    hf = model.hf_config
    settings = hf.get("linear_attn_config")
    nested = settings.get("num_heads") if isinstance(settings, dict) else None
    values = {**hf.as_dict(), "linear_attn_config.num_heads": nested}
    for key, what in _STATE_HEADS.items():
        if isinstance(heads := values.get(key), int):
            yield heads, f"{heads} {what}"
    if "conv_L_cache" in hf:
        yield model.hidden_size, f"hidden_size of {model.hidden_size}, the channels of its short convolutions"


def _widths(model: ModelConfig) -> Iterator[tuple[int, str]]:
    """The widths of MLPs and experts, which ranks share, where it is certain that layers have them.

    Loading the weights reports what this does not find.
    """
    hf = model.hf_config
    keys = {"shared_intermediate_size": "shared MLPs"}
    if any(hf.get(key) for key in _NUM_EXPERTS):
        if (hf.get("first_k_dense_replace") or 0) < model.num_layers and _may_have(model, _EXPERTS):
            own = "moe_intermediate_size" in hf or not hf.get("num_local_experts")
            keys["moe_intermediate_size" if own else "intermediate_size"] = "experts"
            keys |= dict.fromkeys(_SHARED_EXPERTS, "shared experts")
    elif not any(key in hf for key in (*_NUM_EXPERTS, *_OTHER_MLPS)) and _may_have(model, _MLPS):
        keys["intermediate_size" if "intermediate_size" in hf else "ffn_dim"] = "MLPs"
    for key, what in keys.items():
        if isinstance(size := hf.get(key), int):
            yield size, f"{key} of {size}, the width of its {what}"


def _may_have(model: ModelConfig, kinds: frozenset[str]) -> bool:
    """Whether layers of these kinds may be there. Only Nemotron-H lists MLPs and experts as layers of their own."""
    hf = model.hf_config
    listed = next((hf.get(key) for key in _LISTS_OF_LAYERS if key in hf), None)
    if not isinstance(listed, list | str) or (kinds is not _STATES and "mamba_num_heads" not in hf):
        return True
    return any(kind in listed for kind in kinds)


def _any_of(sizes: list[str]) -> str:
    return sizes[0] if len(sizes) == 1 else f"{', '.join(sizes[:-1])} or {sizes[-1]}"
