"""SpeculativeConfig: the settings of speculative decoding.

The setting `speculative_config` is a JSON object whose keys depend on the method:

    {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    {"model": "folder or hub name of a small model", "num_speculative_tokens": 4}
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mvllm.config.model import ModelConfig
from mvllm.errors import ConfigError

NGRAM, DRAFT_MODEL = "ngram", "draft_model"
_NGRAM_MODELS = ("ngram", "[ngram]")
_TRAINED_HEADS = ("eagle", "medusa", "mlp_speculator", "mtp", "dflash")

MAX_SPECULATIVE_TOKENS = 64
_LONGEST_NGRAM = 64
BuildModel = Callable[[str, str | None, str | None], ModelConfig]
_LARGEST_DIFFERENCE = 1024
"""Models of one tokenizer may pad their vocabularies to different sizes."""


@dataclass(frozen=True)
class SpeculativeConfig:
    """Method and number of draft tokens.

    Attributes:
        method: `ngram` finds the last tokens earlier in the sequence, `draft_model` runs a smaller model.
        num_speculative_tokens: Most draft tokens of a sequence per step.
        prompt_lookup_min, prompt_lookup_max: For `ngram`: shortest and longest n-gram that is matched.
        model: The draft model, for `draft_model`.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    model: ModelConfig | None = None

    @property
    def num_lookahead_tokens(self) -> int:
        """KV cache slots after those of a step that drafting needs for each sequence."""
        return 0 if self.model is None else self.num_speculative_tokens


def read_speculative_config(
    settings: Mapping[str, Any], build_model: BuildModel, target: ModelConfig
) -> SpeculativeConfig:
    """Checks the settings and reads the draft model's config, if there is one.

    Args:
        settings: The JSON object.
        build_model: Builds the config of a draft model from its folder or name, its revision and its quantization.
        target: The target model.

    Raises:
        ConfigError: A setting is unknown, missing, out of range, or of another method; or the models do not fit
            together.
        ModelError: The draft model cannot be found or is not usable.
    """
    if not target.kind.generates:
        raise ConfigError("speculative_config is set, but the model generates no tokens. Leave it out.")
    if settings.get("model") in _NGRAM_MODELS:  # vLLM's earlier name of the method
        settings = {"method": NGRAM} | {key: value for key, value in settings.items() if key != "model"}
    method = settings.get("method", DRAFT_MODEL if "model" in settings else NGRAM)
    keys = {
        NGRAM: ("prompt_lookup_min", "prompt_lookup_max"),
        DRAFT_MODEL: ("model", "revision", "quantization"),
    }
    if not isinstance(method, str) or method not in keys:
        raise ConfigError(_unsupported(method, tuple(keys)))
    allowed = ("method", "num_speculative_tokens", *keys[method])
    if unknown := [name for name in settings if name not in allowed]:
        raise ConfigError(
            f"speculative_config has the key {unknown[0]!r:.40}, which the method {method!r} does not have."
            f"{_nearest(unknown[0], allowed)} Its keys: {', '.join(allowed)}."
        )
    if "num_speculative_tokens" not in settings:
        raise ConfigError(
            "speculative_config: num_speculative_tokens is missing. Set the number of draft tokens, for instance 4."
        )
    count = _integer(settings, "num_speculative_tokens", 1, 1, MAX_SPECULATIVE_TOKENS)
    if method == NGRAM:
        return _ngram_config(settings, count)
    return _draft_model_config(settings, count, build_model, target)


def _unsupported(method: object, methods: Sequence[str]) -> str:
    """Why a method cannot be used, and which can."""
    name = method if isinstance(method, str) else ""
    if name.startswith(_TRAINED_HEADS) or name.endswith("_mtp"):
        reason = "is not supported: it drafts with heads that are trained for the model, which are not loaded."
    else:
        reason = "does not exist." + _nearest(name, methods)
    return (
        f"speculative_config: the method {method!r:.40} {reason} There are 'ngram', which proposes what followed the "
        "same tokens earlier in the text, and 'draft_model', a smaller model with the same tokenizer: "
        '{"model": NAME, "num_speculative_tokens": 4}.'
    )


def _nearest(word: object, known: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(str(word), known, n=1, cutoff=0.75)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""


def _ngram_config(settings: Mapping[str, Any], count: int) -> SpeculativeConfig:
    longest = _integer(settings, "prompt_lookup_max", 4, 1, _LONGEST_NGRAM)
    shortest = _integer(settings, "prompt_lookup_min", min(2, longest), 1, _LONGEST_NGRAM)
    if shortest > longest:
        raise ConfigError(
            f"speculative_config: prompt_lookup_min is {shortest}, which is more than prompt_lookup_max "
            f"({longest}). Lower the one or raise the other."
        )
    return SpeculativeConfig(NGRAM, count, shortest, longest)


def _draft_model_config(
    settings: Mapping[str, Any], count: int, build_model: BuildModel, target: ModelConfig
) -> SpeculativeConfig:
    names = {name: settings.get(name) for name in ("model", "revision", "quantization")}
    for name, value in names.items():
        if not (isinstance(value, str) or (value is None and name != "model")):
            raise ConfigError(f"speculative_config: {name} must be a text, found {value!r:.40}.")
    draft = build_model(str(names["model"]), names["revision"], names["quantization"])
    if not draft.kind.generates:
        raise ConfigError(f"speculative_config: {draft.model} generates no tokens, so it cannot be a draft model.")
    if abs(draft.vocab_size - target.vocab_size) > _LARGEST_DIFFERENCE:
        raise ConfigError(
            f"speculative_config: the draft model's vocabulary has {draft.vocab_size} tokens, the model's "
            f"{target.vocab_size}. Both must have the same tokenizer."
        )
    # Its rotary tables need no more rows than the target has positions.
    return SpeculativeConfig(
        DRAFT_MODEL, count, model=replace(draft, max_model_len=min(draft.max_model_len, target.max_model_len))
    )


def _integer(settings: Mapping[str, Any], name: str, default: int, least: int, most: int) -> int:
    value = settings.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"speculative_config: {name} must be an integer from {least} to {most}, found {value!r:.40}.")
    return value
