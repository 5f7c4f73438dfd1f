"""Images in responses: the same prompt and text as of a chat completion."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import pytest
from PIL import Image

from tests.helpers.multimodal_zoo import make_checkpoint
from tests.helpers.server import SMALL, ServerProcess

pytestmark = pytest.mark.exhaustive


def test_a_response_takes_the_image(tmp_path: Path) -> None:
    model = make_checkpoint("llava", tmp_path / "model")
    settings = ("--served-model-name", "eyes", "--dtype", "float32", "--max-model-len", "512", "--platform", "cpu")
    file = io.BytesIO()
    Image.new("RGB", (40, 24), "red").save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    common = {"model": "eyes", "temperature": 0, "ignore_eos": True}
    items = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "what"}]
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what"}]
    with ServerProcess(tmp_path, str(model), "--port", "0", *settings, *SMALL) as server:
        with server.wait_ready().client() as client:
            ask = {**common, "input": [{"role": "user", "content": items}], "max_output_tokens": 6}
            response = client.post("/v1/responses", json=ask)
            chat = {**common, "messages": [{"role": "user", "content": parts}], "max_tokens": 6}
            expected = client.post("/v1/chat/completions", json=chat).json()
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["input_tokens"] == expected["usage"]["prompt_tokens"]
    assert response.json()["output"][-1]["content"][0]["text"] == expected["choices"][0]["message"]["content"]
