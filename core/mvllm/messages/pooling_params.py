"""How one prompt becomes numbers: which hidden states count, and what is done to their combination."""

from __future__ import annotations

import enum
from typing import TypeVar

import msgspec

from mvllm.errors import RequestError

_E = TypeVar("_E", bound=enum.StrEnum)


class PoolingType(enum.StrEnum):
    """Which of a prompt's last hidden states make its vector.

    `LAST` takes that of the last token, `CLS` that of the first, `MEAN` the mean over all, `MAX` the largest value of
    each component, `MEAN_SQRT_LEN` the sum over the square root of their number. `ALL` gives a vector of each token.
    """

    LAST = "last"
    CLS = "cls"
    MEAN = "mean"
    MAX = "max"
    MEAN_SQRT_LEN = "mean_sqrt_len"
    ALL = "all"

    @property
    def needs_every_position(self) -> bool:
        """Whether states count that a prompt found in the prefix cache would not have computed."""
        return self is not PoolingType.LAST


class PoolingTask(enum.StrEnum):
    """What is wanted of a prompt: its vector, or the scores that the model's head gives it."""

    EMBED = "embed"
    CLASSIFY = "classify"


class Activation(enum.StrEnum):
    """What makes scores of a head's results."""

    IDENTITY = "identity"
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"
    TANH = "tanh"


class PoolingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a caller asks of a prompt that nothing is to be generated from. None leaves a choice to the model.

    Attributes:
        pooling_type: `last`, `cls`, `mean`, `max`, `mean_sqrt_len` or `all`. By default what the model folder's
            `modules.json` names; where there is none, `cls` for encoders and `last` for others.
        normalize: Scale the vector to length 1. By default what `modules.json` says, and true where there is none.
        dimensions: Keep only the first so many components, before scaling; for models trained to allow that
            (matryoshka). By default all.
        use_activation: Turn the results of a classifier's head into probabilities (softmax, or what the model names).
            By default true.
        truncate_prompt_tokens: Cut a longer prompt to so many tokens, of which those that the tokenizer adds are kept;
            -1 for as many as the model takes. By default a prompt that is too long is refused.
        task: `embed` or `classify`; by default what the model is for.
        activation, second_text_start: Settled by the engine: what is done to the scores, and the position at which the
            second of two texts begins.
    """

    pooling_type: PoolingType | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    task: PoolingTask | None = None
    activation: Activation = Activation.IDENTITY
    second_text_start: int | None = None

    def __post_init__(self) -> None:
        self.pooling_type = _member(PoolingType, self.pooling_type, "pooling_type")
        self.task = _member(PoolingTask, self.task, "task")
        for name in ("normalize", "use_activation"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise RequestError(f"{name} must be true or false; found {value!r:.40}.", parameter=name)
        dimensions = self.dimensions
        if dimensions is not None and not (_is_int(dimensions) and dimensions >= 1):
            raise RequestError(f"dimensions must be at least 1; found {dimensions!r:.40}.", parameter="dimensions")
        self.activation = _member(Activation, self.activation, "activation") or Activation.IDENTITY
        start = self.second_text_start
        if start is not None and not (_is_int(start) and start >= 0):
            raise RequestError(
                f"second_text_start must be a position; found {start!r:.40}.", parameter="second_text_start"
            )
        limit = self.truncate_prompt_tokens
        if limit is not None and not (_is_int(limit) and (limit >= 1 or limit == -1)):
            raise RequestError(
                f"truncate_prompt_tokens must be at least 1, or -1 for max_model_len; found {limit!r:.40}.",
                parameter="truncate_prompt_tokens",
            )


def _member(kind: type[_E], value: _E | None, name: str) -> _E | None:
    if value is None:
        return None
    try:
        return kind(value)
    except ValueError:
        raise RequestError(f"{name} must be one of {', '.join(kind)}; found {value!r:.40}.", parameter=name) from None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
