"""Similarity scores of pairs of texts or prompts with images, by a cross-encoder or by embeddings.

A classification model with one label (cross-encoder) reads both texts as one prompt. Any other model embeds each text,
and the score is the cosine similarity of the embeddings; a text in several pairs is embedded once. With a vector for
each token, the score is MaxSim (late interaction): for each token of the first prompt the largest dot product with a
token of the second one, summed up.

    score("q", ["a", "b"])     cross-encoder   [CLS] q [SEP] a [SEP]    [CLS] q [SEP] b [SEP]
                               embeddings      q, a, b;  q·a  q·b
                               of tokens       q1 q2, a1 a2 a3;  max(q1·a1, q1·a2, q1·a3) + max(q2·a1, q2·a2, q2·a3)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from mvllm.engine.frontend.pooling_input_processor import PoolingInputProcessor
from mvllm.engine.frontend.pooling_outputs import PoolingRequestOutput, ScoringOutput, ScoringRequestOutput
from mvllm.errors import RequestError
from mvllm.messages.inputs import EmbedsPrompt, PromptType, TextPrompt, TokensPrompt
from mvllm.messages.pooling_params import PoolingParams

ScoringInput = str | TextPrompt | TokensPrompt | EmbedsPrompt
"""A text, or a prompt dict."""

_BLOCK_ROWS = 1024
"""Tokens of the first prompt that are compared at once, which bounds the memory."""


@dataclass
class ScoringRequests:
    """The pooling requests that a list of scores needs.

    Attributes:
        prompts, params: The requests, for `add_requests` or `process_batch`.
        pairs: The indices of the two outputs that each score compares; None if each output is a score.
    """

    prompts: list[PromptType]
    params: list[PoolingParams]
    pairs: list[tuple[int, int]] | None

    @classmethod
    def from_inputs(
        cls,
        processor: PoolingInputProcessor,
        first: Sequence[ScoringInput],
        second: Sequence[ScoringInput],
        params: PoolingParams,
        names: tuple[str, str] = ("data_1", "data_2"),
    ) -> ScoringRequests:
        """The requests for pairs of inputs. Tokenizes the pairs for a cross-encoder.

        Args:
            processor: The input processor of the engine.
            first, second: Lists of the same length, or one input in `first`.
            params: Settings of all requests.
            names: The caller's names of `first` and `second`, for errors.

        Raises:
            RequestError: An input or setting is invalid, or the model has several scores per prompt.
        """
        for name, inputs in zip(names, (first, second), strict=True):
            if not inputs or not all(isinstance(each, str | dict) for each in inputs):
                raise RequestError(
                    f"{name} must be a text, a prompt dict such as {{'prompt': text}}, or a list of these.",
                    parameter=name,
                )
        if len(first) not in (1, len(second)):
            raise RequestError(
                f"{names[0]} has {len(first)} texts and {names[1]} has {len(second)}: give one text, or as many.",
                parameter=names[0],
            )
        if processor.num_labels > 1:
            raise RequestError(
                f"The model has {processor.num_labels} scores per prompt, but scoring needs a model with one. "
                "Use classification instead.",
                parameter="model",
            )
        if processor.num_labels == 1:
            texts = [_texts_only(name, inputs) for name, inputs in zip(names, (first, second), strict=True)]
            each = [
                processor.make_pair_prompt(texts[0][i % len(first)], text, params) for i, text in enumerate(texts[1])
            ]
            return cls([prompt for prompt, _ in each], [pair_params for _, pair_params in each], None)
        prompts: list[PromptType] = []
        places: dict[str | int, int] = {}
        for value in (*first, *second):
            if _key(value) not in places:
                places[_key(value)] = len(prompts)
                prompts.append(value)
        pairs = [(places[_key(first[i % len(first)])], places[_key(value)]) for i, value in enumerate(second)]
        embedding_params = msgspec.structs.replace(params, normalize=True)
        return cls(prompts, [embedding_params] * len(prompts), pairs)

    def outputs(self, answers: Sequence[PoolingRequestOutput]) -> list[ScoringRequestOutput]:
        """The scores, in the order of the pairs.

        Args:
            answers: The outputs of the requests, in their order.
        """
        if self.pairs is None:
            return [ScoringRequestOutput.from_base(answer) for answer in answers]
        found = []
        for a, b in self.pairs:
            one, other = answers[a], answers[b]
            failed = next((each for each in (one, other) if each.error is not None), None)
            found.append(
                ScoringRequestOutput(
                    other.request_id,
                    ScoringOutput(math.nan if failed else similarity(one.outputs.data, other.outputs.data)),
                    None,
                    one.prompt_token_ids + other.prompt_token_ids,
                    one.num_cached_tokens + other.num_cached_tokens,
                    error=None if failed is None else failed.error,
                    error_parameter=None if failed is None else failed.error_parameter,
                )
            )
        return found


def similarity(one: np.ndarray, other: np.ndarray) -> float:
    """The cosine similarity of two vectors, or MaxSim of the vectors of the tokens of two prompts.

    Args:
        one, other: float32 [size] both, or [tokens of each, size]; of length 1.
    """
    if one.ndim == 1:
        return float(np.dot(one.astype(np.float64), other.astype(np.float64)))
    blocks = (one[start : start + _BLOCK_ROWS] for start in range(0, len(one), _BLOCK_ROWS))
    return sum(float((block @ other.T).max(axis=1).sum(dtype=np.float64)) for block in blocks)


def _key(value: ScoringInput) -> str | int:
    """Equal for equal texts, and for the same prompt dict."""
    return value if isinstance(value, str) else id(value)


def _texts_only(name: str, inputs: Sequence[ScoringInput]) -> list[str]:
    """The inputs, all of which are texts.

    Raises:
        RequestError: One is not.
    """
    texts = [each for each in inputs if isinstance(each, str)]
    if len(texts) < len(inputs):
        raise RequestError(
            f"{name}: the model reads both texts of a pair as one prompt (a cross-encoder), so it takes texts only, "
            "without images.",
            parameter=name,
        )
    return texts
