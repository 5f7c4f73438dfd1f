"""Images over both APIs: the same prompts as over core's."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from PIL import Image

from tests.helpers.multimodal_zoo import make_checkpoint
from tests.helpers.server import SMALL, ServerProcess

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    folder = tmp_path_factory.mktemp("images")
    model = make_checkpoint("llava", folder / "model")
    settings = ("--served-model-name", "eyes", "--dtype", "float32", "--max-model-len", "512", "--platform", "cpu")
    with ServerProcess(folder, str(model), "--port", "0", *settings, *SMALL) as server:
        with server.wait_ready().client() as client:
            yield client


def test_both_apis_take_the_image(client: httpx2.Client) -> None:
    file = io.BytesIO()
    Image.new("RGB", (40, 24), "red").save(file, "PNG")
    encoded = base64.b64encode(file.getvalue()).decode()
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}]
    prompt = [{"role": "user", "content": [*parts, {"type": "text", "text": "what"}]}]
    count = client.post("/tokenize", json={"messages": prompt}).json()["count"]
    source = {"type": "base64", "media_type": "image/png", "data": encoded}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "what"}]
    message: dict[str, Any] = {"model": "eyes", "messages": [{"role": "user", "content": blocks}]}
    answer = client.post("/v1/messages", json={**message, "max_tokens": 6, "temperature": 0, "ignore_eos": True})
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count
    assert client.post("/v1/messages/count_tokens", json=message).json()["input_tokens"] == count
    told = {"model": "eyes", "messages": [{"role": "user", "content": "what", "images": [encoded]}], "stream": False}
    ollama = client.post("/api/chat", json={**told, "options": {"num_predict": 6, "temperature": 0}})
    assert ollama.status_code == 200, ollama.text
    assert ollama.json()["prompt_eval_count"] == count
    assert "vision" in client.post("/api/show", json={"model": "eyes"}).json()["capabilities"]
