"""Similarity scores of pairs of texts, by a cross-encoder or by embeddings.

A classification model with one label (cross-encoder) reads both texts as one prompt. Any other model embeds each text,
and the score is the cosine similarity of the embeddings; a text in several pairs is embedded once.

    score("q", ["a", "b"])     cross-encoder   [CLS] q [SEP] a [SEP]    [CLS] q [SEP] b [SEP]
                               embeddings      q, a, b;  q·a  q·b
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from mvllm.engine.frontend.pooling_input_processor import PoolingInputProcessor
from mvllm.engine.frontend.pooling_outputs import PoolingRequestOutput, ScoringOutput, ScoringRequestOutput
from mvllm.errors import RequestError
from mvllm.messages.inputs import PromptType
from mvllm.messages.pooling_params import PoolingParams


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
    def from_texts(
        cls,
        processor: PoolingInputProcessor,
        first: Sequence[str],
        second: Sequence[str],
        params: PoolingParams,
        names: tuple[str, str] = ("data_1", "data_2"),
    ) -> ScoringRequests:
        """The requests for pairs of texts. Tokenizes the pairs for a cross-encoder.

        Args:
            processor: The input processor of the engine.
            first, second: Lists of the same length, or one text in `first`.
            params: Settings of all requests.
            names: The caller's names of `first` and `second`, for errors.

        Raises:
            RequestError: A text or setting is invalid, or the model has several scores per prompt.
        """
        for name, texts in zip(names, (first, second), strict=True):
            if not texts or not all(isinstance(text, str) for text in texts):
                raise RequestError(f"{name} must be a text or a list of texts.", parameter=name)
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
            each = [processor.make_pair_prompt(first[i % len(first)], text, params) for i, text in enumerate(second)]
            return cls([prompt for prompt, _ in each], [pair_params for _, pair_params in each], None)
        embedding_params = msgspec.structs.replace(params, normalize=True)
        places = {text: i for i, text in enumerate(dict.fromkeys((*first, *second)))}
        pairs = [(places[first[i % len(first)]], places[text]) for i, text in enumerate(second)]
        return cls(list(places), [embedding_params] * len(places), pairs)

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
            cosine = float(np.dot(one.outputs.data.astype(np.float64), other.outputs.data.astype(np.float64)))
            found.append(
                ScoringRequestOutput(
                    other.request_id,
                    ScoringOutput(cosine),
                    None,
                    one.prompt_token_ids + other.prompt_token_ids,
                    one.num_cached_tokens + other.num_cached_tokens,
                )
            )
        return found
