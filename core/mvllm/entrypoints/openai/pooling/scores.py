"""`POST /classify`, `/score` and `/rerank`: classes of inputs, similarity of pairs, documents sorted for a query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from mvllm.engine.async_llm import AsyncLLM
from mvllm.engine.frontend.pooling_outputs import PoolingRequestOutput
from mvllm.engine.frontend.scoring import ScoringInput, ScoringRequests
from mvllm.entrypoints.openai.common.serving_context import ServingContext
from mvllm.entrypoints.openai.pooling.inputs import InputList, PoolingRequestHandler, check_num_inputs
from mvllm.entrypoints.openai.protocol import (
    ClassificationRequest,
    ContentParts,
    Document,
    RerankRequest,
    ScoreRequest,
    TextPairRequest,
)
from mvllm.entrypoints.score_inputs import has_item, score_inputs
from mvllm.errors import RequestError
from mvllm.messages.inputs import PromptType
from mvllm.messages.pooling_params import PoolingParams, PoolingTask


def classification_handler(
    context: ServingContext, model: str, request: ClassificationRequest
) -> PoolingRequestHandler:
    """The handler of one classification request.

    Raises:
        RequestError: A setting is not valid.
    """
    params = PoolingParams(
        use_activation=request.use_activation,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        task=PoolingTask.CLASSIFY,
    )
    found = context.engine.model_config.hf_config.get("id2label")
    names = found if isinstance(found, dict) else {}

    def encode(handler: PoolingRequestHandler, outputs: Sequence[PoolingRequestOutput]) -> bytes:
        entries = [_class_entry(index, output, names) for index, output in enumerate(outputs)]
        return handler.encode_list(entries, outputs)

    return PoolingRequestHandler(context, model, "classify-", request.priority, InputList(request, params), encode)


def score_handler(context: ServingContext, model: str, request: ScoreRequest) -> PoolingRequestHandler:
    """The handler of one score request: the similarity of each pair of texts.

    Raises:
        RequestError: A setting is not valid.
    """
    first, first_name = _exactly_one_of(request, "text_1", "queries")
    second, second_name = _exactly_one_of(request, "text_2", "documents")
    pairs = TextPairs(request, first, second, (first_name, second_name))

    def encode(handler: PoolingRequestHandler, outputs: Sequence[PoolingRequestOutput]) -> bytes:
        data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(pairs.scores(outputs))]
        return handler.encode_list(data, outputs)

    return PoolingRequestHandler(context, model, "score-", request.priority, pairs, encode)


def rerank_handler(context: ServingContext, model: str, request: RerankRequest) -> PoolingRequestHandler:
    """The handler of one rerank request: documents sorted by their relevance for a query.

    Raises:
        RequestError: A setting is not valid.
    """
    if request.query is None:
        raise RequestError("query is missing.", parameter="query")
    if not request.documents:
        raise RequestError("documents is missing or empty.", parameter="documents")
    if request.top_n is not None and request.top_n < 0:
        raise RequestError("top_n must be at least 1, or 0 for all.", parameter="top_n")
    documents = [_as_input(each, "documents") for each in request.documents]
    query = _as_input(request.query, "query")
    max_tokens = request.max_tokens_per_doc
    pairs = TextPairs(request, [query], documents, ("query", "documents"), max_second_tokens=max_tokens)
    if max_tokens is not None and max_tokens < 1:
        raise RequestError("max_tokens_per_doc must be at least 1.", parameter="max_tokens_per_doc")
    num_results = request.top_n or len(documents)
    returns_documents = request.return_documents is not False

    def encode(handler: PoolingRequestHandler, outputs: Sequence[PoolingRequestOutput]) -> bytes:
        scores = pairs.scores(outputs)
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[:num_results]  # the sort is stable
        results = [
            {
                "index": i,
                **({"document": _shown_document(documents[i])} if returns_documents else {}),
                "relevance_score": scores[i],
            }
            for i in best
        ]
        return handler.encode_results(results, outputs)

    return PoolingRequestHandler(context, model, "rerank-", request.priority, pairs, encode)


ScoreInputs = Sequence[str | dict[str, Any]]
"""Texts, and objects with `content`."""


class TextPairs:
    """Texts that are compared, or contents with images. They are PoolingInputs.

    Args:
        request: The body of the HTTP request.
        first, second: The inputs of the pairs.
        names: Their fields in the request, for errors.
        max_second_tokens: Of longer texts of the second side, the first tokens are compared; None for all.
    """

    def __init__(
        self,
        request: TextPairRequest,
        first: ScoreInputs,
        second: ScoreInputs,
        names: tuple[str, str],
        max_second_tokens: int | None = None,
    ) -> None:
        self._first = check_num_inputs(first, names[0])
        self._second = check_num_inputs(second, names[1])
        self._names = names
        self.field = names[1]
        self._settings = PoolingParams(
            use_activation=request.use_activation, truncate_prompt_tokens=request.truncate_prompt_tokens
        )
        self._cache_salt = request.cache_salt
        self._max_second_tokens = max_second_tokens
        self._scoring: ScoringRequests | None = None

    async def build(self, context: ServingContext) -> tuple[Sequence[PromptType], Sequence[PoolingParams]]:
        """See PoolingInputs."""
        engine, names = context.engine, self._names

        def build() -> ScoringRequests:
            first, second = score_inputs(self._first, names[0], engine), score_inputs(self._second, names[1], engine)
            if self._max_second_tokens is not None:
                second = [_truncated(each, self._max_second_tokens, engine) for each in second]
            return ScoringRequests.from_inputs(engine.pooling_input_processor, first, second, self._settings, names)

        if engine.config.model.multimodal is not None and any(map(has_item, (*self._first, *self._second))):
            await engine.item_placeholders()  # may wait for the model's processor: not in the threads for texts
        scoring = self._scoring = await context.tokenizer_pool.run(build)
        if self._cache_salt is None:
            return scoring.prompts, scoring.params
        return [_with_salt(prompt, self._cache_salt) for prompt in scoring.prompts], scoring.params

    def scores(self, outputs: Sequence[PoolingRequestOutput]) -> list[float]:
        """The score of each pair, from the outputs of its prompts."""
        assert self._scoring is not None, "build() comes first"
        return [output.outputs.score for output in self._scoring.outputs(outputs)]


def _truncated(value: ScoringInput, max_tokens: int, engine: AsyncLLM) -> ScoringInput:
    """A document's first tokens.

    Raises:
        RequestError: It is no text.
    """
    if not isinstance(value, str):
        raise RequestError(
            "max_tokens_per_doc is for documents that are texts; leave it out.", parameter="max_tokens_per_doc"
        )
    ids = engine.tokenizer.encode(engine.pooling_input_processor.check_text(value), add_special_tokens=False)
    return value if len(ids) <= max_tokens else engine.tokenizer.decode(ids[:max_tokens])


def _shown_document(given: str | dict[str, Any]) -> dict[str, Any]:
    return {"text": given} if isinstance(given, str) else {"multi_modal": given["content"]}


def _class_entry(index: int, output: PoolingRequestOutput, names: Mapping[str, Any]) -> dict[str, Any]:
    """The most probable class of an input, with the probabilities of all.

    Args:
        names: Names of classes by their number.
    """
    scores = output.outputs.data
    best = int(scores.argmax())
    label = names.get(str(best))
    return {
        "index": index,
        "label": label if isinstance(label, str) else f"LABEL_{best}",
        "probs": scores.tolist(),
        "num_classes": len(scores),
    }


def _with_salt(prompt: PromptType, salt: str) -> PromptType:
    parts: Any = {"prompt": prompt} if isinstance(prompt, str) else prompt
    return cast(PromptType, {**parts, "cache_salt": salt})


def _as_input(value: str | ContentParts | Document, field: str) -> str | dict[str, Any]:
    """A text, or an object with `content`.

    Raises:
        RequestError: A document has neither or both.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, ContentParts):
        return {"content": value.content}
    if (value.text is None) == (value.content is None):
        raise RequestError(f"{field}: a document has either text or content.", parameter=field)
    return {"content": value.content} if value.text is None else value.text


def _exactly_one_of(request: ScoreRequest, name: str, other: str) -> tuple[ScoreInputs, str]:
    """The inputs of a field with two names, and the name that the request uses.

    Raises:
        RequestError: The request has neither or both.
    """
    given = [each for each in (name, other) if getattr(request, each) is not None]
    if len(given) != 1:
        raise RequestError(f"Give either {name} or {other}.", parameter=name)
    found: str | ContentParts | list[str | ContentParts] = getattr(request, given[0])
    if isinstance(found, list) and not found:
        raise RequestError(f"{given[0]} is an empty list.", parameter=given[0])
    return [_as_input(each, given[0]) for each in (found if isinstance(found, list) else [found])], given[0]
