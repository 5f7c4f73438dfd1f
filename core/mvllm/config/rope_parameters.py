"""RopeParameters: a checkpoint's RoPE settings, in the new format (`rope_parameters`) or the old (`rope_scaling`).

`rope_scaling` takes precedence if a checkpoint has both, as in the reference implementation. Needs no torch: the
context length and the prefix-cache keys depend on these settings, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mvllm.config.families import find_model_type
from mvllm.config.hf_config import HFConfig
from mvllm.config.model import ModelConfig
from mvllm.errors import ModelError

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "ntk_alpha")
"""Supported RoPE scalings."""

_NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "ntk_alpha": ("alpha",),
}
_NUMBERS = (
    "rope_theta",
    "factor",
    "alpha",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "low_freq_factor",
    "high_freq_factor",
)
_DEFAULT_THETA = 10000.0
_READ_AS = {"hunyuan_v1_moe": "hunyuan_v1_dense"}
"""Families whose RoPE settings are those of another family."""
YARN_DEFAULTS: Mapping[str, Any] = {
    "rope_type": "yarn",
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""The common part of `ModelType.rope_defaults` in families with YaRN."""


def rope_settings(config: HFConfig) -> dict[str, Any]:
    """The settings in `config.json`: one flat object, or one per layer type; the family's defaults if there are none.

    Raises:
        ModelError: The key is not an object.
    """
    for key in ("rope_scaling", "rope_parameters"):
        settings = config.get(key)
        if settings is not None and not isinstance(settings, dict):
            raise ModelError(f"{config.source}: {key!r} should be a JSON object, found {settings!r}.")
        if settings:
            model_type = config.get("model_type")
            return _canonical_rope_settings(dict(settings), _READ_AS.get(str(model_type), model_type))
    return dict(find_model_type(config).rope_defaults)


def _canonical_rope_settings(settings: dict[str, Any], model_type: object) -> dict[str, Any]:
    """Renames LongRoPE's old names: `su`, and `yarn` in some Phi-3 checkpoints; `mrope` scales nothing.

    Hunyuan's `dynamic` with `alpha` becomes `ntk_alpha`: its base is larger for every length.
    """
    name = rope_type_of(settings)
    if name == "su" or (name == "yarn" and model_type == "phi3"):
        settings["rope_type"] = "longrope"
    if name == "mrope":
        settings["rope_type"] = "default"
    if name == "dynamic" and model_type == "hunyuan_v1_dense" and settings.get("alpha"):
        settings["rope_type"] = "ntk_alpha"
    return settings


def rope_type_of(settings: Mapping[str, Any]) -> Any:
    """The scaling type of flat settings, under its new or old key."""
    return settings.get("rope_type") or settings.get("type") or "default"


def prompt_cache_key(config: ModelConfig) -> Callable[[int], int]:
    """Function for prefix caching: prompt length to a key that is equal if cached keys have equal rotations.

    Returns:
        A function of the prompt's length in tokens. Two requests may share cached blocks only if it returns the same
        number; it is always 0 for models whose rotary embedding depends on positions only.
    """
    hf = config.hf_config
    if "rope_parameters" not in hf and "rope_scaling" not in hf:
        return lambda prompt_len: 0
    settings = rope_settings(hf)
    if not is_per_layer_type(settings):
        return RopeParameters.from_config(hf, config.head_size).cache_key
    ropes = [
        RopeParameters.from_config(hf, config.head_size, settings=of_type) for of_type in settings.values() if of_type
    ]
    return lambda prompt_len: max(rope.cache_key(prompt_len) for rope in ropes)


def is_per_layer_type(settings: Mapping[str, Any]) -> bool:
    """Whether `settings` has one object per layer type (null for types without settings)."""
    values = [value for value in settings.values() if value is not None]
    return bool(values) and all(isinstance(value, dict) for value in values)


@dataclass(frozen=True)
class RopeParameters:
    """RoPE settings of one model or layer type.

    Attributes:
        rope_type: One of ROPE_TYPES.
        theta: RoPE base (`rope_theta`).
        head_size: Elements per head.
        rotary_dim: Leading elements of a head that are rotated.
        max_position: `max_position_embeddings` of the checkpoint.
        original_max_position: Context length of the pretraining.
        values: All settings of the scaling in the checkpoint.
        source: The path of `config.json`, for error messages.
    """

    rope_type: str
    theta: float
    head_size: int
    rotary_dim: int
    max_position: int
    original_max_position: int
    values: Mapping[str, Any]
    source: str

    @property
    def native_len(self) -> int:
        """Length up to which the scaling does not depend on the sequence length."""
        return self.original_max_position if self.rope_type == "longrope" else self.max_position

    def depends_on_length(self, max_len: int) -> bool:
        """Whether rotations depend on the sequence length, for sequences of up to `max_len` tokens."""
        return self.rope_type in ("dynamic", "longrope") and max_len > self.native_len

    def cache_key(self, prompt_len: int) -> int:
        """Prefix-cache key: requests may share cached keys only if it is equal. 0 within the original context."""
        if not self.depends_on_length(prompt_len):
            return 0
        return 1 if self.rope_type == "longrope" else prompt_len

    @classmethod
    def from_config(
        cls,
        config: HFConfig,
        head_size: int,
        *,
        settings: Mapping[str, Any] | None = None,
        partial: float | None = None,
        theta: float = _DEFAULT_THETA,
    ) -> RopeParameters:
        """Reads the settings from a `config.json`.

        Args:
            config: The `config.json`.
            head_size: Elements per head.
            settings: Flat settings of one layer type; None for the model's settings.
            partial: Default of `partial_rotary_factor`. None for families that use this key only with a scaling: with
                the type `default` they rotate the whole head.
            theta: Default of `rope_theta`.

        Raises:
            ModelError: The type is unknown, or a setting is missing or invalid.
        """
        values = rope_settings(config) if settings is None else dict(settings)
        rope_type = _check_settings(values, config.source)
        max_position = config.positive_int("max_position_embeddings", 2048)
        original = values.get("original_max_position_embeddings")
        if "original_max_position_embeddings" in config:
            original = config.positive_number("original_max_position_embeddings", 0)
        rotates_whole_head = rope_type in ("proportional", "ntk_alpha") or (rope_type == "default" and partial is None)
        ratio = values.get("partial_rotary_factor") or config.positive_number("partial_rotary_factor", partial or 1.0)
        rotary_dim = head_size if rotates_whole_head else int(head_size * ratio)
        values["partial_rotary_factor"] = ratio
        if rotary_dim % 2 or not 0 < rotary_dim <= head_size:
            raise ModelError(
                f"{config.source}: rotary dimension must be even and in [2, head_size={head_size}], not {rotary_dim} "
                f"(partial_rotary_factor = {ratio}). Correct partial_rotary_factor."
            )
        parameters = cls(
            rope_type=rope_type,
            theta=float(values.get("rope_theta") or config.positive_number("rope_theta", theta)),
            head_size=head_size,
            rotary_dim=rotary_dim,
            max_position=max_position,
            original_max_position=int(original or max_position),
            values=values,
            source=config.source,
        )
        parameters._check_factor_lists()
        return parameters

    @classmethod
    def of(cls, config: HFConfig, head_size: int, **options: Any) -> RopeParameters:
        """Deprecated name of `from_config`."""
        return cls.from_config(config, head_size, **options)

    def _check_factor_lists(self) -> None:
        if self.rope_type == "longrope":
            for key in ("short_factor", "long_factor"):
                factors, length = self.values[key], self.rotary_dim // 2
                if not isinstance(factors, list) or len(factors) != length or not all(map(_is_positive, factors)):
                    raise ModelError(f"{self.source}: {key} should be a list of {length} numbers > 0.")


def _is_positive(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 < value < math.inf


def _check_settings(values: Mapping[str, Any], source: str) -> str:
    """Checks flat RoPE settings; returns their type.

    Args:
        source: Where they stand, for errors.
    """
    if any(isinstance(value, dict) for value in values.values()):
        raise ModelError(f"{source}: the RoPE settings should be one flat JSON object, found {values!r}.")
    rope_type = rope_type_of(values)
    if rope_type not in ROPE_TYPES:
        raise ModelError(
            f"{source}: the RoPE scaling {rope_type!r} is not supported. Supported: {', '.join(ROPE_TYPES)}."
        )
    missing = [key for key in _NEEDED.get(rope_type, ()) if values.get(key) is None]
    if missing:
        raise ModelError(f"{source}: RoPE scaling {rope_type!r} requires {', '.join(missing)}. Add them.")
    for key in _NUMBERS:
        number = values.get(key)
        if number is not None and not _is_positive(number):
            raise ModelError(f"{source}: {key} of the RoPE settings should be a number > 0, found {number!r}.")
    return rope_type
