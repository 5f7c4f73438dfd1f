"""Input processor of pooling requests (embeddings, classification, scoring)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import msgspec

from mvllm.config.pooler_config import PoolerConfig
from mvllm.engine.frontend.input_processor import InputProcessor, ProcessedRequest
from mvllm.engine.frontend.prompt_items import PreparedItems, refuse_truncation
from mvllm.errors import ModelError, RequestError
from mvllm.messages.inputs import PromptType, TokensPrompt
from mvllm.messages.lora import LoRARequest
from mvllm.messages.pooling_params import PoolingParams
from mvllm.messages.sampling_params import RequestOutputKind, SamplingParams


class PoolingInputProcessor(InputProcessor):
    """Checks and tokenizes prompts with PoolingParams. A prompt may have `max_model_len` tokens.

    Args:
        config, tokenizer: As for InputProcessor.
    """

    num_reserved_tokens = 0

    @cached_property
    def pooler(self) -> PoolerConfig:
        """The model's pooling defaults.

        Raises:
            RequestError: The model folder configures a pooling type that is not supported.
        """
        try:
            return PoolerConfig.from_model(self._model)
        except ModelError as e:  # an error of the request: the model can still generate
            raise RequestError(f"The model {self._model.model} does not support pooling: {e}") from e

    def default_params(self) -> SamplingParams:
        """Placeholder sampling parameters for the scheduler; a pooling request samples nothing."""
        return SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)

    def process_batch(
        self,
        request_ids: Sequence[str],
        prompts: Sequence[PromptType],
        params: Sequence[SamplingParams | PoolingParams | None],
        *,
        priorities: Sequence[int] | None = None,
        arrival_time: float | None = None,
        lora_requests: Sequence[LoRARequest | None] | None = None,
        items: Sequence[PreparedItems] | None = None,
    ) -> list[ProcessedRequest]:
        resolved = [self._resolve_params(each) for each in params]
        prompts = [
            self._check_for_prompt(i, prompts, self._truncate_prompt, prompt, params[i])
            for i, prompt in enumerate(prompts)
        ]
        no_params: list[SamplingParams | None] = [None] * len(prompts)
        requests = super().process_batch(
            request_ids,
            prompts,
            no_params,
            priorities=priorities,
            arrival_time=arrival_time,
            lora_requests=lora_requests,
            items=items,
        )
        for request, each in zip(requests, resolved, strict=True):
            request.core.pooling_params = each
            request.core.eos_token_ids = []
        return requests

    def make_pair_prompt(self, first: str, second: str, params: PoolingParams) -> tuple[TokensPrompt, PoolingParams]:
        """The prompt with which a cross-encoder compares two texts, and its parameters.

        Raises:
            RequestError: A text is invalid.
        """
        for text in (first, second):
            self.check_text(text)
        assert self._tokenizer is not None
        ids, start = self._tokenizer.encode_truncated(first, second, max_tokens=self._truncation_limit(params))
        pair_params = msgspec.structs.replace(params, truncate_prompt_tokens=None, second_text_start=start)
        return TokensPrompt(prompt_token_ids=ids), pair_params

    def _truncation_limit(self, params: PoolingParams) -> int | None:
        """Tokens to which a prompt is truncated; None for no truncation."""
        limit, longest = params.truncate_prompt_tokens, self._model.max_model_len
        if limit is not None and limit > longest:
            raise RequestError(
                f"truncate_prompt_tokens must be at most {longest} (max_model_len), not {limit}.",
                parameter="truncate_prompt_tokens",
            )
        return longest if limit == -1 else limit

    def _truncate_prompt(self, prompt: PromptType, params: SamplingParams | PoolingParams | None) -> PromptType:
        """The prompt; truncated, as token ids, if `params` request that."""
        limit = self._truncation_limit(params) if isinstance(params, PoolingParams) else None
        if limit is None:
            return prompt
        parts: Any = {"prompt": prompt} if isinstance(prompt, str) else prompt
        if not isinstance(parts, Mapping):
            return _truncate_ids(prompt, limit)
        if parts.get("multi_modal_data") or parts.get("prompt_embeds") is not None:
            refuse_truncation()
        if (ids := parts.get("prompt_token_ids")) is not None:
            return cast(PromptType, {**parts, "prompt_token_ids": _truncate_ids(ids, limit)})
        if not isinstance(parts.get("prompt"), str):
            return prompt  # rejected later
        text = self.check_text(str(parts["prompt"]))
        assert self._tokenizer is not None
        ids, _ = self._tokenizer.encode_truncated(text, max_tokens=limit)
        return cast(PromptType, {**parts, "prompt_token_ids": ids})

    @property
    def num_labels(self) -> int:
        """Scores per prompt of a classification model; 0 for other models."""
        return self._model.kind.num_labels

    def _resolve_params(self, params: SamplingParams | PoolingParams | None) -> PoolingParams:
        """`params` with the model's defaults filled in."""
        if params is not None and not isinstance(params, PoolingParams):
            kind = type(params).__name__
            raise RequestError(
                f"pooling_params must be PoolingParams; found a value of type {kind}.", parameter="pooling_params"
            )
        # `replace` validates again: the caller may have changed fields.
        return self.pooler.resolve_params(PoolingParams() if params is None else msgspec.structs.replace(params))

    def _check_params(self, params: SamplingParams | PoolingParams) -> SamplingParams:
        assert isinstance(params, SamplingParams)
        return params  # these are `default_params`, not the caller's

    def _fit_params_to_prompt(self, params: SamplingParams, part: object, pair: object = None) -> SamplingParams:
        return params


def _truncate_ids(ids: Any, limit: int) -> Any:
    """The first `limit` token ids. Any other value is returned as it is, and rejected later."""
    return ids[:limit] if isinstance(ids, list | tuple | range) or getattr(ids, "ndim", None) == 1 else ids
