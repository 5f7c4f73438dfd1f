"""The door for prompts that are to be made vectors of: as for those that are gone on with, but for the settings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import msgspec

from mvllm.config.pooler_config import PoolerConfig
from mvllm.engine.input_processor import InputProcessor, ProcessedRequest
from mvllm.errors import ModelError, RequestError
from mvllm.messages.inputs import PromptType
from mvllm.messages.lora import LoRARequest
from mvllm.messages.pooling_params import PoolingParams
from mvllm.messages.sampling_params import RequestOutputKind, SamplingParams


class PoolingInputProcessor(InputProcessor):
    """Checks and tokenizes prompts for PoolingParams. No room for a token to be generated is needed.

    Args:
        config, tokenizer: As InputProcessor.
    """

    num_generated = 0

    @cached_property
    def pooler(self) -> PoolerConfig:
        """What the model does where a request does not say.

        Raises:
            RequestError: Its folder describes something that is not known here.
        """
        try:
            return PoolerConfig.of(self._model)
        except ModelError as e:  # the model generates all the same
            raise RequestError(f"The model {self._model.model} gives no embeddings: {e}") from e

    def default_params(self) -> SamplingParams:
        """Of a request that generates nothing."""
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
    ) -> list[ProcessedRequest]:
        settled = [self._settle(each) for each in params]
        nothing: list[SamplingParams | None] = [None] * len(prompts)
        requests = super().process_batch(
            request_ids,
            prompts,
            nothing,
            priorities=priorities,
            arrival_time=arrival_time,
            lora_requests=lora_requests,
        )
        for request, each in zip(requests, settled, strict=True):
            request.core.pooling_params = each
            request.core.eos_token_ids = []
        return requests

    def _settle(self, params: SamplingParams | PoolingParams | None) -> PoolingParams:
        """`params` with every choice made."""
        if params is not None and not isinstance(params, PoolingParams):
            kind = type(params).__name__
            raise RequestError(
                f"pooling_params must be PoolingParams; found a value of type {kind}.", parameter="pooling_params"
            )
        # Checked anew: fields may have been set since.
        return self.pooler.settle(PoolingParams() if params is None else msgspec.structs.replace(params))

    def _check_params(self, params: SamplingParams | PoolingParams, part: object) -> SamplingParams:
        assert isinstance(params, SamplingParams)
        return params  # `default_params`: nothing in them is a caller's
