"""`POST /v1/audio/transcriptions` and `/v1/audio/translations`: the text of an audio file, with Whisper.

The audio is cut into windows of 30 seconds, which are requests of their own and run together. Each is a segment of the
response.

    audio      |------ 30 s ------|------ 30 s ------|-- 11 s --|
    prompts    <|startoftranscript|><|en|><|transcribe|><|notimestamps|>     for each
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from mvllm.config.generation_config import load_generation_config
from mvllm.config.hf_config import HFConfig
from mvllm.engine.frontend.outputs import RequestOutput
from mvllm.entrypoints.openai.audio.formats import MEDIA_TYPES, Segment, Transcription
from mvllm.entrypoints.openai.common.engine_requests import EngineRequests
from mvllm.entrypoints.openai.common.handler import RequestHandler
from mvllm.entrypoints.openai.common.serving_context import ServingContext
from mvllm.entrypoints.openai.protocol import TranscriptionRequest
from mvllm.errors import RequestError
from mvllm.messages.inputs import PromptType
from mvllm.messages.sampling_params import SamplingParams

TRANSCRIBE, TRANSLATE = "transcribe", "translate"
_START = "<|startoftranscript|>"
_PREVIOUS = "<|startofprev|>"
_NO_TIMESTAMPS = "<|notimestamps|>"
_LEAST_BIAS = -100.0


class TranscriptionHandler(RequestHandler):
    """Answers one request for the text of an audio.

    Args:
        context, model: As for RequestHandler.
        request: The fields of the form.
        audio: The file.
        task: `transcribe` or `translate` (into English).

    Raises:
        RequestError: A field is invalid, or the model is not Whisper.
    """

    def __init__(
        self, context: ServingContext, model: str, request: TranscriptionRequest, audio: bytes, task: str
    ) -> None:
        super().__init__(context, model, "transcription-", None)
        self._request, self._audio, self._task = request, audio, task
        self._language = ""
        self._duration = self._window = 0.0
        multimodal = self._engine.model_config.multimodal
        if multimodal is None or not multimodal.cross_attention or "audio" not in multimodal.modalities:
            raise RequestError(
                f"The model {self._engine.model_config.model} does not transcribe: this endpoint is for Whisper. Send "
                "audio to models that chat as parts of messages (input_audio).",
                parameter="model",
            )
        self.response_format = request.response_format or "json"
        if self.response_format not in MEDIA_TYPES:
            raise RequestError(
                f"response_format must be one of {', '.join(MEDIA_TYPES)}; found {ascii(self.response_format)[:40]}.",
                parameter="response_format",
            )
        if request.stream:
            raise RequestError("stream is not supported: a text is sent when it is complete.", parameter="stream")
        if request.timestamp_granularities and set(request.timestamp_granularities) != {"segment"}:
            raise RequestError(
                "timestamp_granularities must be ['segment']: times of words are not supported.",
                parameter="timestamp_granularities",
            )
        if request.language and self._languages and f"<|{request.language}|>" not in self._languages:
            known = ", ".join(token.strip("<|>") for token in sorted(self._languages))
            raise RequestError(
                f"language must be one of {known}; found {ascii(request.language)[:40]}.", parameter="language"
            )

    @cached_property
    def _generation(self) -> HFConfig:
        return load_generation_config(self._engine.model_config.path)

    @cached_property
    def _languages(self) -> dict[str, int]:
        """Token ids of languages by their tokens; none for models of English alone."""
        found = self._generation.get("lang_to_id", {})
        return found if isinstance(found, dict) else {}

    async def _build_engine_inputs(self) -> tuple[Sequence[PromptType], SamplingParams]:
        first = self._prompt(_START, 0)
        (item,) = await asyncio.wrap_future(self._submitted(first))
        lengths = item.features["audio_lengths"]
        num_samples, window, rate = np.frombuffer(lengths.data, np.int64).tolist()
        self._duration, self._window = num_samples / rate, window / rate
        self._language = self._request.language or "en"
        start = _START
        if self._languages:
            if not self._request.language:
                self._language = await self._detect_language(first)
            start += f"<|{self._language}|><|{self._task}|>"
        start += _NO_TIMESTAMPS
        if self._request.prompt:
            start = f"{_PREVIOUS} {self._request.prompt.strip()}{start}"
        count = max(1, math.ceil(num_samples / window))
        return [self._prompt(start, i) for i in range(count)], self._sampling_params()

    def _submitted(self, prompt: PromptType) -> Any:
        future = self._engine.input_processor.items.submit(prompt)
        assert future is not None, "the prompt has audio"
        return future

    def _prompt(self, text: str, window: int) -> PromptType:
        return {
            "prompt": text,
            "add_special_tokens": False,
            "multi_modal_data": {"audio": self._audio},
            "mm_processor_kwargs": {"audio_window": window},
        }

    def _sampling_params(self) -> SamplingParams:
        suppressed = self._generation.get("suppress_tokens", None) or []
        return SamplingParams(
            temperature=0.0 if self._request.temperature is None else self._request.temperature,
            seed=self._request.seed,
            max_tokens=self._request.max_completion_tokens,
            min_tokens=1,
            logprobs=0,
            logit_bias=dict.fromkeys(suppressed, _LEAST_BIAS) or None,
        )

    async def _detect_language(self, prompt: PromptType) -> str:
        """The most probable language of the first window."""
        ids = {token_id: token for token, token_id in self._languages.items()}
        params = SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=list(ids), detokenize=False)
        requests = await EngineRequests.start(self._engine, f"{self._id}-language", [prompt], params)
        try:
            (output,) = await requests.collect()
        finally:
            requests.close()
        return ids[output.outputs[0].token_ids[0]].strip("<|>")

    async def full_response(self) -> bytes:
        """The body of the response. See RequestHandler."""
        outputs = await self._engine_requests.collect()
        segments = [self._segment(i, output) for i, output in enumerate(outputs)]
        temperature = self._request.temperature or 0.0
        found = Transcription(self._task, self._language, self._duration, temperature, segments)
        return found.encode(self.response_format)

    def _segment(self, index: int, output: RequestOutput) -> Segment:
        (found,) = output.outputs
        start = index * self._window
        mean = (found.cumulative_logprob or 0.0) / max(1, len(found.token_ids))
        return Segment(start, min(start + self._window, self._duration), found.text, found.token_ids, mean)
