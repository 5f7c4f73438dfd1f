"""`/v1/audio/transcriptions` and `/v1/audio/translations` give the greedy tokens of transformers for each window."""

from __future__ import annotations

import asyncio
import io
import wave
from typing import Any
from unittest.mock import patch

import httpx2
import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from mvllm.config.engine_args import EngineArgs
from mvllm.engine.async_llm import AsyncLLM
from mvllm.entrypoints.openai.common.chat_prompt_renderer import ChatPromptRenderer
from mvllm.entrypoints.openai.common.serving_context import ServingContext
from mvllm.entrypoints.openai.common.serving_models import OpenAIServingModels
from mvllm.entrypoints.openai.common.tokenizer_pool import TokenizerPool
from mvllm.entrypoints.openai.server.app import build_app
from mvllm.entrypoints.openai.server.http_metrics import HTTPMetrics
from mvllm.entrypoints.openai.server.server_state import ServerState
from mvllm.entrypoints.openai.server.settings import ServerSettings
from mvllm.multimodal import processor_client
from tests.helpers.audio_suite import SAMPLING_RATE, draw_sound
from tests.helpers.multimodal_suite import CLEAR, ProcessorHere
from tests.helpers.whisper import WhisperOracle, WhisperRequest, whisper_oracle

TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
Form = tuple[str, dict[str, Any], bytes | None]
"""Path, fields and file."""


def wav(samples: Any) -> bytes:
    """A WAV file of float samples [n] from -1 to 1, in 16 bits."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, SAMPLING_RATE, 0, "NONE", ""))
        file.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
    return buffer.getvalue()


async def _ask(folder: str, forms: list[Form]) -> list[httpx2.Response]:
    settings = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 2**24, "seed": 0}
    with patch.object(processor_client, "_make_pool", ProcessorHere):
        engine = AsyncLLM.from_engine_args(EngineArgs(model=folder, **settings, use_tqdm_on_load=False))
        try:
            pool = TokenizerPool(engine.tokenizer, engine.model_config.max_model_len)
            state = ServerState(60.0)
            state.set_ready(ServingContext(engine, pool, ChatPromptRenderer(engine, pool)))
            app = build_app(state, OpenAIServingModels(["m"], "m"), HTTPMetrics(CollectorRegistry()), ServerSettings())
            async with httpx2.AsyncClient(
                transport=httpx2.ASGITransport(app), base_url="http://x", timeout=300
            ) as client:
                return [
                    await client.post(path, data=fields, files=None if file is None else {"file": ("a.wav", file)})
                    for path, fields, file in forms
                ]
        finally:
            engine.shutdown()


def ask(folder: Any, forms: list[Form]) -> list[httpx2.Response]:
    """Sends forms to the HTTP application with an engine of a checkpoint."""
    return asyncio.run(_ask(str(folder), forms))


@torch.inference_mode()
def check_tokens(expected: WhisperOracle, part: Any, start: str, tokens: list[int]) -> None:
    """Asserts that these are the greedy tokens behind a prompt; the first one ends no text."""
    request = WhisperRequest(start, part)
    logits = expected.logits(request, [*expected.prompt_ids(request), *tokens[:-1]])[-len(tokens) :]
    logits[0, 1] = -torch.inf
    best = logits.topk(2, dim=-1)
    assert best.indices[:, 0].tolist() == tokens
    assert float((best.values[:, 0] - best.values[:, 1]).min()) > CLEAR


@pytest.mark.shows("tokens", family="whisper")
def test_each_window_is_a_segment_with_the_tokens_of_transformers() -> None:
    expected = whisper_oracle("whisper")
    samples = draw_sound(2.3, 5)
    file = wav(samples)
    heard = (np.clip(samples, -1, 1) * 32767).astype("<i2").astype(np.float32) / 32768
    parts = [heard[i * SAMPLING_RATE : (i + 1) * SAMPLING_RATE] for i in range(3)]
    limit = {"max_completion_tokens": "8"}
    plain = {**limit, "language": "en"}
    english = {**plain, "response_format": "verbose_json"}
    found, prompted, translated, detected, text, srt, vtt, short = ask(
        expected.folder,
        [
            (TRANSCRIPTIONS, english, file),
            (TRANSCRIPTIONS, {**english, "prompt": "words"}, file),
            (TRANSLATIONS, {**english, "timestamp_granularities[]": ["segment"]}, file),
            (TRANSCRIPTIONS, {**limit, "response_format": "verbose_json"}, file),
            *[(TRANSCRIPTIONS, {**plain, "response_format": each}, file) for each in ("text", "srt", "vtt")],
            (TRANSCRIPTIONS, plain, wav(samples[:4000])),
        ],
    )
    body = found.json()
    assert (body["task"], body["language"], body["duration"]) == ("transcribe", "en", 2.3)
    assert [(each["start"], each["end"]) for each in body["segments"]] == [(0, 1), (1, 2), (2, 2.3)]
    for part, segment in zip(parts, body["segments"], strict=True):
        check_tokens(expected, part, "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>", segment["tokens"])
        assert segment["text"] == expected.processor.tokenizer.decode(segment["tokens"], skip_special_tokens=True)
        assert segment["avg_logprob"] < 0
    start = "<|startofprev|> words<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
    check_tokens(expected, parts[0], start, prompted.json()["segments"][0]["tokens"])
    start = "<|startoftranscript|><|en|><|translate|><|notimestamps|>"
    check_tokens(expected, parts[1], start, translated.json()["segments"][1]["tokens"])
    assert translated.json()["task"] == "translate"

    request = WhisperRequest("<|startoftranscript|>", parts[0])
    with torch.inference_mode():
        logits = expected.logits(request, expected.prompt_ids(request))[-1]
    ids = {"en": 321, "de": 322}
    assert detected.json()["language"] == max(ids, key=lambda language: float(logits[ids[language]]))

    pieces = [each["text"].strip() for each in body["segments"]]
    assert text.text == body["text"] + "\n"
    assert text.headers["content-type"].startswith("text/plain")
    assert srt.text.split("\n\n")[1] == f"2\n00:00:01,000 --> 00:00:02,000\n{pieces[1]}"
    assert vtt.text.startswith(f"WEBVTT\n\n00:00:00.000 --> 00:00:01.000\n{pieces[0]}\n")
    assert vtt.headers["content-type"].startswith("text/vtt")
    assert set(short.json()) == {"text", "usage"}


@pytest.mark.exhaustive
def test_wrong_forms_are_refused() -> None:
    expected = whisper_oracle("whisper")
    file = wav(draw_sound(0.3, 1))
    cases = [
        ({}, None, "multipart/form-data"),
        ({"language": "xx"}, file, "language must be one of de, en"),
        ({"response_format": "docx"}, file, "response_format must be one of json"),
        ({"stream": "true"}, file, "stream is not supported"),
        ({"timestamp_granularities[]": ["word"]}, file, "times of words"),
        ({"temperature": "hot"}, file, "A field of the form is not acceptable"),
        ({}, b"no audio at all", "audio"),
    ]
    found = ask(expected.folder, [(TRANSCRIPTIONS, fields, content) for fields, content, _ in cases])
    for (_, _, words), response in zip(cases, found, strict=True):
        assert response.status_code == 400
        assert words in response.json()["error"]["message"]
