"""The config.json of EAGLE heads: the layouts of published checkpoints. This module needs no torch.

LlamaForCausalLMEagle3 ...   the keys of a Llama of one layer, `draft_vocab_size`, `eagle_config`
Eagle3Speculator ...         these keys in `transformer_layer_config`, the others beside it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mvllm.extension_api import ModelError
from mvllm.extension_api.proposers import HFConfig, ModelConfig

EAGLE3_ARCHITECTURES = (
    "Eagle3DraftModel",
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "LlamaForCausalLMEagle3",
    "PEagleDraftModel",
)
EAGLE_ARCHITECTURES = ("EagleLlamaForCausalLM", "LlamaForCausalLMEagle")

KEY = "mvllm_drafts"
"""The key of config.json under which HeadLayout is passed to workers."""

_MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")


@dataclass(frozen=True)
class HeadLayout:
    """What an EAGLE-3 head reads, and how.

    Attributes:
        layers: The layers of the served model before which it reads the residual stream; empty for the last hidden
            state.
        target_hidden_size: Size of each of these states.
        draft_vocab_size: Tokens that it predicts.
        norm_before_residual: The residual stream of its layer begins with the normalised state.
        norm_before_fc: The concatenated states are normalised before `fc` (`input_norm`).
        fc_norm: Each state is normalised before (`fc_norm.0`, ...).
        norm_output: What the next pass reads is normalised.
        mask_token_id: Token of positions whose token is not known; None for a head that is not for parallel drafts.
    """

    layers: tuple[int, ...]
    target_hidden_size: int
    draft_vocab_size: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    mask_token_id: int | None = None

    @classmethod
    def of_model(cls, config: ModelConfig) -> HeadLayout:
        """That of a config with `overrides`."""
        values: dict[str, Any] = config.hf_config.require(KEY, dict)
        return cls(**{**values, "layers": tuple(values["layers"])})


def default_layers(num_layers: int) -> tuple[int, ...]:
    """The layers that heads read which do not name them."""
    return tuple(sorted({2, num_layers // 2, num_layers - 3}))


def read_layout(config: HFConfig, target: ModelConfig) -> HeadLayout:
    """The layout of an EAGLE-3 head.

    Args:
        config: Its config.json.
        target: The served model.

    Raises:
        ModelError: A value is invalid, or does not fit the served model.
    """
    flat = HFConfig(flat_values(config), config.source)
    eagle = flat.get("eagle_config", {})
    settings = HFConfig({**flat.as_dict(), **(eagle if isinstance(eagle, dict) else {})}, config.source)
    target_size = settings.positive_int("target_hidden_size", target.hidden_size)
    if target_size != target.hidden_size:
        raise ModelError(
            f"{config.source}: the head reads hidden states of {target_size} elements (target_hidden_size), but those "
            f"of {target.model} have {target.hidden_size}. Use a head that was trained for this model."
        )
    layers: tuple[int, ...] = ()
    if settings.get("use_aux_hidden_state", True):
        listed = settings.get("eagle_aux_hidden_state_layer_ids", list(default_layers(target.num_layers)))
        if not _are_layers(listed, target.num_layers):
            raise ModelError(
                f"{config.source}: eagle_aux_hidden_state_layer_ids should be different layers of {target.model}, from "
                f"0 to {target.num_layers - 1}, found {listed!r:.60}. Use a head that was trained for this model."
            )
        layers = tuple(sorted(listed))
    vocab_size = flat.positive_int("vocab_size")
    draft_size = settings.positive_int("draft_vocab_size", vocab_size)
    if vocab_size != target.vocab_size or draft_size > target.vocab_size:
        raise ModelError(
            f"{config.source}: the head is for a vocabulary of {vocab_size} tokens and predicts {draft_size} of them, "
            f"but {target.model} has {target.vocab_size} tokens. Use a head that was trained for this model."
        )
    mask = _mask_token(settings)
    if mask is not None and not 0 <= mask < vocab_size:
        raise ModelError(f"{config.source}: the mask token {mask} is none of the {vocab_size} tokens.")
    return HeadLayout(
        layers,
        target_size,
        draft_size,
        bool(settings.get("norm_before_residual", _is_speculator(config))),
        bool(settings.get("norm_before_fc", False)),
        bool(settings.get("fc_norm", False)),
        bool(settings.get("norm_output", False)),
        mask,
    )


def overrides(config: HFConfig, layout: HeadLayout | None = None) -> dict[str, Any]:
    """Keys of config.json with which core reads the head as a Llama."""
    flat = flat_values(config)
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "tie_word_embeddings": False,
        "num_hidden_layers": flat.get("num_hidden_layers") or 1,
    }
    if _is_speculator(config):
        values = {**flat, **values}
    return values if layout is None else {**values, KEY: asdict(layout)}


def flat_values(config: HFConfig) -> dict[str, Any]:
    """The keys of config.json, with those of `transformer_layer_config` beside the others."""
    values, inner = config.as_dict(), config.get("transformer_layer_config", {})
    return {**(inner if isinstance(inner, dict) else {}), **values}


def _is_speculator(config: HFConfig) -> bool:
    return "transformer_layer_config" in config


def _are_layers(listed: object, num_layers: int) -> bool:
    return (
        isinstance(listed, list)
        and len(listed) > 0
        and all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each < num_layers for each in listed)
        and len(set(listed)) == len(listed)
    )


def _mask_token(settings: Mapping[str, Any] | HFConfig) -> int | None:
    for key in _MASK_TOKEN_KEYS:
        value = settings.get(key)
        if isinstance(value, str) and value.isdigit():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None
