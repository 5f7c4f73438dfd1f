"""ImageParams: the settings of `generate_images`."""

from __future__ import annotations

from typing import Any

import msgspec

from mvllm.extension_api.parameters import FIELD_CHECKS, Check, boolean, integer, reject

MAX_SIDE = 1 << 14
"""Pixels of the longest side of an image."""


class ImageParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Settings of the images of one prompt. The bounds of fields that SamplingParams also has are the same.

    Attributes:
        guidance_scale: Strength of classifier-free guidance, see `SamplingParams.guidance_scale`; 1 switches it off.
            None takes the family's: 5 for Janus, 3 for Emu3.
        n: Number of images.
        temperature, top_k, top_p: How codes are sampled. Temperature 0 takes the most probable code.
        seed: Makes the images reproducible. Image i > 0 of a prompt has the seed `(seed + i) % 2**63`. -1 is no seed.
        max_tokens: Tokens to generate at most. With fewer than an image has, there are codes but no pixels.
        height, width: Size in pixels, for models that let choose it (Emu3). None takes the model's size.
        negative_prompt: Text of the unconditional prompt, formatted like the prompt, or token ids, used as they are.
            None takes the model's: the prompt with its text replaced by padding (Janus), or an empty text (Emu3).
        logprobs: Return log-probabilities of the codes. 0 means True, as for texts.
        decode: Decode the codes to pixels.

    Raises:
        RequestError: A value has the wrong type or lies outside its range.
    """

    guidance_scale: float | None = None
    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    height: int | None = None
    width: int | None = None
    negative_prompt: str | list[int] | None = None
    logprobs: bool | int | None = None
    decode: bool = True

    def __post_init__(self) -> None:
        for name, default, check in _CHECKS:
            value = getattr(self, name)
            if value is not default:
                setattr(self, name, check(name, value))
        if (self.height is None) != (self.width is None):
            name = "width" if self.width is None else "height"
            reject(name, None, "given together with the other side of the image")

    @property
    def returns_logprobs(self) -> bool:
        """Whether log-probabilities are returned."""
        return self.logprobs is not None and self.logprobs is not False


def _logprobs(name: str, value: Any) -> bool | int | None:
    if value is None or isinstance(value, bool) or (type(value) is int and value == 0):
        return value
    return bool(reject(name, value, "True, False, 0 or None"))


def _negative_prompt(name: str, value: Any) -> str | list[int] | None:
    if isinstance(value, str) and not value:  # it is not empty when it is formatted
        return value
    checked: str | list[int] | None = FIELD_CHECKS[name](name, value)
    return checked


_OWN_CHECKS: dict[str, Check] = {
    "height": integer(1, MAX_SIDE, optional=True),
    "width": integer(1, MAX_SIDE, optional=True),
    "negative_prompt": _negative_prompt,
    "logprobs": _logprobs,
    "decode": boolean,
}
_CHECKS = tuple(
    (field.name, field.default, _OWN_CHECKS.get(field.name) or FIELD_CHECKS[field.name])
    for field in msgspec.structs.fields(ImageParams)
)
