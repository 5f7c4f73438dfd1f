"""PoolerConfig: pooling defaults of a model, from its files and the user's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mvllm.config.hf_config import HFConfig
from mvllm.config.model import ModelConfig
from mvllm.config.sentence_transformers_config import (
    has_sentence_transformers_modules,
    read_sentence_transformers_modules,
)
from mvllm.errors import ConfigError, ModelError, RequestError
from mvllm.messages.pooling_params import Activation, PoolingParams, PoolingTask, PoolingType

_TYPE = "pooling_type"
_ACTIVATIONS = {
    "Identity": Activation.IDENTITY,
    "Sigmoid": Activation.SIGMOID,
    "Softmax": Activation.SOFTMAX,
    "Tanh": Activation.TANH,
}
"""Classes of `torch.nn` that models name as activation of their scores."""


def check_pooler_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Checks the setting pooler_config and returns it.

    Raises:
        ConfigError: A key or a value is not permitted.
    """
    allowed = ("pooling_type", "normalize", "dimensions", "use_activation")
    unknown = [name for name in settings if name not in allowed]
    if unknown:
        raise ConfigError(f"pooler_config permits the keys {', '.join(allowed)}, found {unknown[0]!r:.40}.")
    try:
        params = PoolingParams(**settings)
    except RequestError as e:
        raise ConfigError(f"pooler_config: {e}") from e
    if params.pooling_type is PoolingType.ALL:
        raise ConfigError("pooler_config: vectors of each token are for single requests to ask for.")
    return dict(settings)


@dataclass(frozen=True)
class PoolerConfig:
    """Pooling defaults and limits of a model.

    Attributes:
        pooling_type: Default pooling type. `all`: the model is for late interaction, and gives vectors of tokens only.
        normalize: Whether vectors are normalised to length 1 by default.
        max_dimensions: Components of an untruncated vector.
        dimensions: Permitted truncated sizes (Matryoshka); if empty, every size is permitted.
        default_dimensions: Default size; None for untruncated vectors.
        num_labels: Number of class scores; 0 if the model does not classify.
        activation: Activation of the scores.
        use_activation: Whether the activation is applied by default.
    """

    pooling_type: PoolingType
    normalize: bool
    max_dimensions: int
    dimensions: tuple[int, ...] = ()
    default_dimensions: int | None = None
    num_labels: int = 0
    activation: Activation = Activation.IDENTITY
    use_activation: bool = True

    @classmethod
    def from_model(cls, model: ModelConfig) -> PoolerConfig:
        """The pooling defaults of a model, from its folder, else the usual ones of its kind.

        Raises:
            ModelError: A file is invalid, or has a module that is not supported.
        """
        kind, hf, settings = model.kind, model.hf_config, PoolingParams(**model.pooler_config)
        pooling_type, normalize = PoolingType.CLS if kind.is_encoder else PoolingType.LAST, True
        if kind.token_vector_size:
            if settings.pooling_type is not None:
                raise ModelError(f"it gives a vector for each token, so pooler_config takes no {_TYPE}.")
            pooling_type = PoolingType.ALL
        elif has_sentence_transformers_modules(model.path) and not kind.num_labels:
            pooling_type, normalize = read_sentence_transformers_modules(model.path)
        sizes = hf.get("matryoshka_dimensions", [])
        if not isinstance(sizes, list) or not all(isinstance(size, int) and size > 0 for size in sizes):
            raise ModelError(f"{hf.source}: 'matryoshka_dimensions' should be a list of sizes, found {sizes!r}.")
        return cls(
            settings.pooling_type or pooling_type,
            normalize if settings.normalize is None else settings.normalize,
            _output_size(model),
            tuple(sizes),
            settings.dimensions,
            kind.num_labels,
            _activation(hf, kind.num_labels) if kind.num_labels else Activation.IDENTITY,
            settings.use_activation is not False,
        )

    @property
    def is_multi_vector(self) -> bool:
        """Whether the model gives a vector for each token, for late interaction."""
        return self.pooling_type is PoolingType.ALL

    def resolve_params(self, params: PoolingParams) -> PoolingParams:
        """`params` with all defaults filled in.

        Raises:
            RequestError: The model does not support them.
        """
        task = params.task or (PoolingTask.CLASSIFY if self.num_labels else PoolingTask.EMBED)
        if task is PoolingTask.CLASSIFY:
            return self._resolve_score_params(params)
        if self.num_labels:
            raise RequestError("The model classifies prompts: it gives no embeddings.", parameter="task")
        if params.use_activation is not None:
            raise RequestError("use_activation is for models that classify prompts.", parameter="use_activation")
        self._check_vectors_of_tokens(params)
        dimensions = self.default_dimensions if params.dimensions is None else params.dimensions
        if dimensions is not None:
            if dimensions > self.max_dimensions:
                raise RequestError(
                    f"dimensions is {dimensions}, but the model's vectors have {self.max_dimensions} components.",
                    parameter="dimensions",
                )
            allowed = (*self.dimensions, self.max_dimensions)
            if self.dimensions and dimensions not in allowed:
                raise RequestError(
                    f"dimensions is {dimensions}, but the model was trained for "
                    f"{', '.join(map(str, sorted(set(allowed))))}.",
                    parameter="dimensions",
                )
        return PoolingParams(
            pooling_type=params.pooling_type or self.pooling_type,
            normalize=self.normalize if params.normalize is None else params.normalize,
            dimensions=dimensions,
            task=task,
        )

    def _check_vectors_of_tokens(self, params: PoolingParams) -> None:
        """Refuses requests for one vector of a prompt, if the model is for late interaction."""
        wants_one = params.task is PoolingTask.EMBED and params.pooling_type is None
        if self.is_multi_vector and (wants_one or params.pooling_type not in (None, PoolingType.ALL)):
            raise RequestError(
                "The model gives a vector for each token, and none for a whole prompt: use LLM.encode, /pooling or "
                "/score, with pooling_type 'all' or none.",
                parameter="task" if wants_one else _TYPE,
            )

    def _resolve_score_params(self, params: PoolingParams) -> PoolingParams:
        if not self.num_labels:
            raise RequestError(
                "The model does not classify prompts: it has no head for that (...ForSequenceClassification).",
                parameter="task",
            )
        for name in ("normalize", "dimensions"):
            if getattr(params, name) is not None:
                raise RequestError(f"{name} is for embeddings, but the model classifies prompts.", parameter=name)
        if params.pooling_type not in (None, self.pooling_type):
            raise RequestError(
                f"pooling_type is {params.pooling_type}, but the model's head was trained for {self.pooling_type}.",
                parameter="pooling_type",
            )
        use = self.use_activation if params.use_activation is None else params.use_activation
        return PoolingParams(
            pooling_type=self.pooling_type,
            normalize=False,
            task=PoolingTask.CLASSIFY,
            activation=self.activation if use else Activation.IDENTITY,
            second_text_start=params.second_text_start,
        )


def _output_size(model: ModelConfig) -> int:
    """Components of the last hidden state, after an output projection if there is one."""
    if model.kind.token_vector_size:
        return model.kind.token_vector_size
    size = model.hf_config.get("word_embed_proj_dim", model.hidden_size)
    return size if isinstance(size, int) and size > 0 else model.hidden_size


def _activation(hf: HFConfig, num_labels: int) -> Activation:
    """The activation of the scores: the one that the config names, else the default of its `problem_type`.

    Raises:
        ModelError: The config names an unsupported activation.
    """
    section = hf.get("sentence_transformers")
    named = section.get("activation_fn") if isinstance(section, Mapping) else None
    named = named or hf.get("sbert_ce_default_activation_function")
    if named is not None:
        module, _, name = str(named).rpartition(".")
        if not module.startswith("torch.nn") or name not in _ACTIVATIONS:
            raise ModelError(
                f"{hf.source} names {named!r:.80} as activation of its scores. Supported: {', '.join(_ACTIVATIONS)} of "
                "torch.nn."
            )
        return _ACTIVATIONS[name]
    match hf.get("problem_type"):
        case "regression":
            return Activation.IDENTITY
        case "multi_label_classification":
            return Activation.SIGMOID
        case _:
            return Activation.SOFTMAX if num_labels > 1 else Activation.SIGMOID
