"""The demo vision model behind a server, as users send it pictures."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator

import openai
import pytest
from PIL import Image

from ci.demo_vision.pictures import Shape, draw
from mvllm.demo import demo_vision_model_path
from tests.helpers.processes import assert_nothing_left, shared_memory_names
from tests.helpers.server import SMALL, ServerProcess

CIRCLE, SQUARE = Shape("circle", "red"), Shape("square", "blue")


def test_it_is_small_and_knew_every_shape_after_training() -> None:
    folder = demo_vision_model_path()
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 10_000_000
    figures = json.loads((folder.parent / "vision_figures.json").read_text())
    assert figures["plain_pictures_exact"] == 1.0 and figures["heldout_exact"] > 0.6


def png(*shapes: Shape, side: int = 32) -> bytes:
    """A picture of shapes, enlarged to `side` pixels."""
    buffer = io.BytesIO()
    draw(shapes).resize((side, side), Image.Resampling.BICUBIC).save(buffer, "PNG")
    return buffer.getvalue()


def image_part(data: bytes) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(data).decode()}}


def text_part(text: str) -> dict[str, object]:
    return {"type": "text", "text": text}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    before = shared_memory_names()
    folder = tmp_path_factory.mktemp("vision")
    with ServerProcess(folder, "demo-vision", "--port", "0", *SMALL) as server:
        yield server.wait_ready()
    assert server.wait() == 0, server.log[-3000:]
    assert_nothing_left(server.tag, before)


def ask(server: ServerProcess, *parts: dict[str, object], **settings: object) -> str:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    messages = [{"role": "user", "content": list(parts)}]
    answer = client.chat.completions.create(
        model="demo-vision", messages=messages, temperature=0, max_completion_tokens=60, **settings
    )
    if not settings.get("stream"):
        return answer.choices[0].message.content
    return "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)


def test_the_model_names_a_shape(server: ServerProcess) -> None:
    assert ask(server, image_part(png(CIRCLE)), text_part("What is in the picture?")) == "A red circle."
    assert ask(server, image_part(png(SQUARE)), text_part("What do you see?")) == "A blue square."
    assert ask(server, image_part(png(CIRCLE, side=100)), text_part("Describe the image.")) == "A red circle."


def test_two_pictures_in_one_message_and_a_stream(server: ServerProcess) -> None:
    parts = image_part(png(CIRCLE)), image_part(png(SQUARE)), text_part("What is in the pictures?")
    said = ask(server, *parts, stream=True)
    assert said == "The first picture shows a red circle. The second picture shows a blue square."
    swapped = ask(server, parts[1], parts[0], parts[2])
    assert swapped == "The first picture shows a blue square. The second picture shows a red circle."


def test_text_without_a_picture(server: ServerProcess) -> None:
    assert "Paris" in ask(server, text_part("What is the capital of France?"))
