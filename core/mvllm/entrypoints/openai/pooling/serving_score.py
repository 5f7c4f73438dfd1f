"""`POST /classify`, `/score` and `/rerank`: classes of inputs, similarity of pairs, documents sorted for a query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from mvllm.engine.frontend.pooling_outputs import PoolingRequestOutput
from mvllm.engine.frontend.scoring import ScoringInput, ScoringRequests
from mvllm.entrypoints.openai.common.json_response import encode_json
from mvllm.entrypoints.openai.common.serving_context import ServingContext
from mvllm.entrypoints.openai.pooling.serving_base import (
    BasePoolingHandler,
    InputListHandler,
    check_num_inputs,
    pooling_usage,
)
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


class ClassificationHandler(InputListHandler[ClassificationRequest]):
    """Answers one classification request."""

    id_prefix = "classify-"

    def __init__(self, context: ServingContext, model: str, request: ClassificationRequest) -> None:
        super().__init__(context, model, request.priority)
        self._request = request
        self._params = PoolingParams(
            use_activation=request.use_activation,
            truncate_prompt_tokens=request.truncate_prompt_tokens,
            task=PoolingTask.CLASSIFY,
        )

    def _encode_response(self, outputs: Sequence[PoolingRequestOutput]) -> bytes:
        names = self._engine.model_config.hf_config.get("id2label")
        names = names if isinstance(names, dict) else {}
        data = []
        for index, output in enumerate(outputs):
            scores = output.outputs.data
            best = int(scores.argmax())
            label = names.get(str(best))
            data.append(
                {
                    "index": index,
                    "label": label if isinstance(label, str) else f"LABEL_{best}",
                    "probs": scores.tolist(),
                    "num_classes": len(scores),
                }
            )
        return self._encode_list(data, outputs)


ScoreInputs = Sequence[str | dict[str, Any]]
"""Texts, and objects with `content`."""


class _TextPairHandler(BasePoolingHandler):
    """Answers a request that compares texts, or contents with images.

    Args:
        context, model: As for RequestHandler.
        request: The body of the HTTP request.
        first, second: The inputs of the pairs.
        names: Their fields in the request, for errors.
    """

    def __init__(
        self,
        context: ServingContext,
        model: str,
        request: TextPairRequest,
        first: ScoreInputs,
        second: ScoreInputs,
        names: tuple[str, str],
    ) -> None:
        super().__init__(context, model, request.priority)
        self._first = check_num_inputs(first, names[0])
        self._second = check_num_inputs(second, names[1])
        self._names = names
        self.field = names[1]
        self._settings = PoolingParams(
            use_activation=request.use_activation, truncate_prompt_tokens=request.truncate_prompt_tokens
        )
        self._cache_salt = request.cache_salt
        self._scoring: ScoringRequests | None = None

    async def _build_engine_inputs(self) -> tuple[Sequence[PromptType], Sequence[PoolingParams]]:
        engine, names = self._engine, self._names

        def build() -> ScoringRequests:
            first, second = score_inputs(self._first, names[0], engine), score_inputs(self._second, names[1], engine)
            second = [self._truncated(each) for each in second]
            return ScoringRequests.from_inputs(engine.pooling_input_processor, first, second, self._settings, names)

        if engine.config.model.multimodal is not None and any(map(has_item, (*self._first, *self._second))):
            await engine.item_placeholders()  # may wait for the model's processor: not in the threads for texts
        scoring = self._scoring = await self._context.tokenizer_pool.run(build)
        if self._cache_salt is None:
            return scoring.prompts, scoring.params
        return [_with_salt(prompt, self._cache_salt) for prompt in scoring.prompts], scoring.params

    def _truncated(self, value: ScoringInput) -> ScoringInput:
        """An input of the second side as it is compared."""
        return value

    def _scores(self, outputs: Sequence[PoolingRequestOutput]) -> list[float]:
        assert self._scoring is not None, "start() comes first"
        return [output.outputs.score for output in self._scoring.outputs(outputs)]


class ScoreHandler(_TextPairHandler):
    """Answers one score request: the similarity of each pair of texts."""

    id_prefix = "score-"

    def __init__(self, context: ServingContext, model: str, request: ScoreRequest) -> None:
        first, first_name = _exactly_one_of(request, "text_1", "queries")
        second, second_name = _exactly_one_of(request, "text_2", "documents")
        names = first_name, second_name
        super().__init__(context, model, request, first, second, names)

    def _encode_response(self, outputs: Sequence[PoolingRequestOutput]) -> bytes:
        data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(self._scores(outputs))]
        return self._encode_list(data, outputs)


class RerankHandler(_TextPairHandler):
    """Answers one rerank request: documents sorted by their relevance for a query."""

    id_prefix = "rerank-"

    def __init__(self, context: ServingContext, model: str, request: RerankRequest) -> None:
        if request.query is None:
            raise RequestError("query is missing.", parameter="query")
        if not request.documents:
            raise RequestError("documents is missing or empty.", parameter="documents")
        if request.top_n is not None and request.top_n < 0:
            raise RequestError("top_n must be at least 1, or 0 for all.", parameter="top_n")
        documents = [_as_input(each, "documents") for each in request.documents]
        query = _as_input(request.query, "query")
        super().__init__(context, model, request, [query], documents, ("query", "documents"))
        self._top_n = request.top_n or len(documents)
        self._max_tokens = request.max_tokens_per_doc
        if self._max_tokens is not None and self._max_tokens < 1:
            raise RequestError("max_tokens_per_doc must be at least 1.", parameter="max_tokens_per_doc")
        self._return_documents = request.return_documents is not False

    def _truncated(self, value: ScoringInput) -> ScoringInput:
        if self._max_tokens is None:
            return value
        if not isinstance(value, str):
            raise RequestError(
                "max_tokens_per_doc is for documents that are texts; leave it out.", parameter="max_tokens_per_doc"
            )
        tokenizer = self._engine.tokenizer
        ids = tokenizer.encode(self._engine.pooling_input_processor.check_text(value), add_special_tokens=False)
        return value if len(ids) <= self._max_tokens else tokenizer.decode(ids[: self._max_tokens])

    def _encode_response(self, outputs: Sequence[PoolingRequestOutput]) -> bytes:
        scores = self._scores(outputs)
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[: self._top_n]  # the sort is stable
        results = [self._result(i, scores[i]) for i in best]
        return encode_json({"id": self._id, "model": self._model, "usage": pooling_usage(outputs), "results": results})

    def _result(self, index: int, score: float) -> dict[str, Any]:
        given = self._second[index]
        document = {"text": given} if isinstance(given, str) else {"multi_modal": given["content"]}
        returned = {"document": document} if self._return_documents else {}
        return {"index": index, **returned, "relevance_score": score}


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
