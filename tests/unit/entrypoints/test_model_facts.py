"""What `/v1/models` says about the model besides its names, and the example messages of model cards."""

from __future__ import annotations

from pathlib import Path

import pytest

from mvllm.demo import demo_model_path, demo_vision_model_path
from mvllm.entrypoints.openai.common.model_facts import MODEL_CARD, read_examples
from tests.unit.entrypoints.builders import save_model_folder
from tests.unit.entrypoints.scripted_server import TEMPLATE, Server

PICTURE = "data:image/png;base64,AAAA"


def test_the_list_of_models_says_what_the_model_can_do(tmp_path: Path) -> None:
    folder = Path(save_model_folder(tmp_path, TEMPLATE))
    (folder / MODEL_CARD).write_text("---\nwidget:\n- text: Hello?\n- {text: It, src: 'data:image/png,x'}\n---\n")
    listed, one = Server(str(folder), "x").exchange(("GET", "/v1/models", None), ("GET", "/v1/models/m", None))
    [card] = listed.json()["data"]
    assert one.json() == card
    assert card["capabilities"] == ["chat", "completion", "tools", "reasoning"] and card["input_modalities"] == ["text"]
    assert card["example_messages"] == ["Hello?"]  # the model takes no picture


def test_a_model_without_a_chat_template_has_no_chat(tmp_path: Path) -> None:
    [answer] = Server(save_model_folder(tmp_path, None), "x").exchange(("GET", "/v1/models", None))
    [card] = answer.json()["data"]
    assert card["capabilities"] == ["completion"] and card["example_messages"] == []


def test_the_demo_models_have_examples_of_their_own() -> None:
    texts = read_examples(demo_model_path(), with_pictures=False)
    assert len(texts) >= 3 and all(isinstance(each, str) for each in texts)
    assert len(read_examples(demo_vision_model_path(), with_pictures=True)) >= 3
    assert read_examples(demo_vision_model_path(), with_pictures=False) == []


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        ("---\nwidget:\n- text: a\n- messages: [{role: user, content: b}]\n---\nText", ["a", "b"]),
        (
            f"---\nwidget:\n- {{text: c, src: '{PICTURE}'}}\n---",
            [[{"type": "image_url", "image_url": {"url": PICTURE}}, {"type": "text", "text": "c"}]],
        ),
        ("---\nwidget:\n- {text: c, src: 'http://elsewhere/x.png'}\n- text: [1]\n- 5\n- text: ''\n---", []),
        (f"---\nwidget:\n- text: {'x' * 1000}\n---", []),
        ("---\nwidget: {text: a}\n---", []),
        ("---\nwidget: [\n---", []),
        *(
            (f"---\nlicense: {value}\nwidget:\n- text: a\n---", [])
            for value in ("!!bool maybe", "!!timestamp soon", "!!int ''")
        ),
        ("---\n" + "[" * 2000 + "\n---", []),
        ("---\nwidget:\n- text: a\n", []),
        ("# Title\n---\nwidget:\n- text: a\n---", []),
        (b"\xff\xfe---", []),
        (None, []),
    ],
)
def test_examples_of_a_card(tmp_path: Path, card: str | bytes | None, expected: list[object]) -> None:
    if card is not None:
        (tmp_path / MODEL_CARD).write_bytes(card if isinstance(card, bytes) else card.encode())
    assert read_examples(tmp_path, with_pictures=True) == expected
