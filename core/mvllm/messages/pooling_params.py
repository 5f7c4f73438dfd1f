"""PoolingParams: the settings of a request for an embedding or for classification scores."""

from __future__ import annotations

import enum
from typing import TypeVar

import msgspec

from mvllm.errors import RequestError
from mvllm.messages.named_parameters import NamedParameters

_E = TypeVar("_E", bound=enum.StrEnum)


class PoolingType(enum.StrEnum):
    """How the last hidden states of a prompt are pooled into one vector.

    `LAST` takes the state of the last token, `CLS` of the first, `MEAN` the mean, `MAX` the maximum of each component,
    `MEAN_SQRT_LEN` the sum divided by the square root of the length. `ALL` returns one vector per token.
    """

    LAST = "last"
    CLS = "cls"
    MEAN = "mean"
    MAX = "max"
    MEAN_SQRT_LEN = "mean_sqrt_len"
    ALL = "all"

    @property
    def needs_every_position(self) -> bool:
        """Whether the hidden states of all tokens are needed, so that the prefix cache cannot be used."""
        return self is not PoolingType.LAST


class PoolingTask(enum.StrEnum):
    """The result of a pooling request: an embedding, or the scores of the model's classification head."""

    EMBED = "embed"
    CLASSIFY = "classify"


class Activation(enum.StrEnum):
    """The function applied to the outputs of a classification head."""

    IDENTITY = "identity"
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"
    TANH = "tanh"


class PoolingParams(msgspec.Struct, kw_only=True, omit_defaults=True, metaclass=NamedParameters):
    """Settings of a pooling request. None takes the model's default.

    Attributes:
        pooling_type: `last`, `cls`, `mean`, `max`, `mean_sqrt_len` or `all`. By default the one in the model folder's
            `modules.json`; without that file, `cls` for encoders and `last` for other models.
        normalize: Scale the vector to length 1. By default as `modules.json` says, and true without that file.
        dimensions: Keep the first components only, this many, before normalization; for models that were trained for
            it (matryoshka). By default all.
        use_activation: Turn the outputs of a classification head into probabilities (softmax, or the function that the
            model names). By default true.
        truncate_prompt_tokens: Truncate a longer prompt to this many tokens, including those that the tokenizer adds;
            -1 for as many as the model allows. By default a prompt that is too long is an error.
        task: `embed` or `classify`; by default the model's task.
        activation, second_text_start: Set by the engine: the function applied to the scores, and the position at which
            the second of two texts starts.
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
