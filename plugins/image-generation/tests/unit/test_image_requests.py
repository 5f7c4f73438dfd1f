"""Limits of image requests: what the errors tell a caller to change."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mvllm import LLMEngine
from mvllm.errors import RequestError
from mvllm_image_generation import requests as image_requests
from mvllm_image_generation.image_params import ImageParams
from mvllm_image_generation.requests import ImageRequests
from tests.unit.engine.builders import make_config


def test_an_engine_of_text_has_the_methods_which_say_that_it_generates_text() -> None:
    engine = LLMEngine.__new__(LLMEngine)
    engine.config, engine._tokenizer = make_config(), None
    assert hasattr(engine, "decode_images")
    with pytest.raises(RequestError, match="generates text, not images"):
        engine.decode_images(b"", 1, 1)


@pytest.mark.parametrize(
    ("auto", "advice"),
    [(False, "with a larger max_model_len"), (True, "with more memory for the KV cache: max_model_len is auto")],
)
def test_an_image_that_does_not_fit_names_the_setting_that_helps(
    monkeypatch: pytest.MonkeyPatch, auto: bool, advice: str
) -> None:
    shape = SimpleNamespace(
        rows=24,
        columns=24,
        scale=1,
        names_size=False,
        guidance_scale=1.0,
        row_end_id=None,
        num_tokens=lambda r, c: r * c,
    )
    monkeypatch.setattr(image_requests, "image_format", lambda config: shape)
    requests = ImageRequests(make_config(max_model_len=600, max_model_len_is_auto=auto).model, None)
    with pytest.raises(RequestError, match=rf"prompt has 40 tokens .* or start the engine {advice}\."):
        requests.prompt({"prompt_token_ids": [5] * 40}, ImageParams())
    requests = ImageRequests(make_config(max_model_len=300, max_model_len_is_auto=auto).model, None)
    with pytest.raises(RequestError, match=rf"has 576 tokens, .* or start the engine {advice}\."):
        requests.sampling_params(ImageParams())
