"""Messages with images become places for the chat template, and items in their order."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mvllm.config.multimodal import MultiModalConfig, MultiModalModel
from mvllm.engine.tokenizer.folder_template import FolderTemplate, read_folder_template
from mvllm.entrypoints.chat_items import content_prompt, num_rendered_chars, placeholder_texts, take_items
from mvllm.entrypoints.chat_template import render_chat
from mvllm.entrypoints.score_inputs import score_inputs
from mvllm.errors import RequestError

PARTS_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<img>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %};{% endfor %}"
)
TEXT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"


def config(*modalities: str) -> Any:
    takes = MultiModalModel(placeholders=dict.fromkeys(modalities, 7)) if modalities else None
    model = SimpleNamespace(multimodal=takes, model="m", architecture="M")
    return SimpleNamespace(model=model, multimodal=MultiModalConfig())


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def url(value: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": value}}


def sound(form: str) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": "AA==", "format": form}}


def render(messages: Any, template: str, placeholders: dict[str, str] | None = None) -> str:
    tokenizer: Any = SimpleNamespace(template_renderer=FolderTemplate(template, {}))
    return render_chat(tokenizer, messages, placeholders={"image": "<pad>"} if placeholders is None else placeholders)


def test_items_are_taken_in_their_order() -> None:
    messages = [user(url("a"), text("x"), url("b")), {"role": "assistant", "content": "y"}, user(text("z"), url("c"))]
    places, items = take_items(messages, config("image"))
    assert items == {"image": ["a", "b", "c"]}
    assert places[0]["content"] == [{"type": "image"}, text("x"), {"type": "image"}]
    assert places[1] is messages[1] and messages[0]["content"][0] == url("a")  # the argument is not modified
    assert render(places, PARTS_TEMPLATE) == "user: <img>x<img>;assistant: y;user: z<img>;"


def test_a_template_that_knows_no_parts_gets_placeholders() -> None:
    places, _ = take_items([user(text("x"), url("a"))], config("image"))
    assert render(places, TEXT_TEMPLATE) == "user: x\n<pad>;"


def test_no_text_stands_for_an_item_of_cross_attention() -> None:
    tokenizer: Any = SimpleNamespace(token_text=lambda token_id: f"<{token_id}>")
    found = config("audio")
    assert placeholder_texts(found, tokenizer) == {"audio": "<7>"}
    found.model.multimodal = MultiModalModel(placeholders={"audio": -1}, cross_attention=True)
    assert placeholder_texts(found, tokenizer) == {"audio": ""}


@pytest.mark.parametrize(
    ("part", "modality", "content"),
    [
        ({"type": "image_url", "image_url": "a"}, "image", "a"),
        ({"type": "input_image", "image_url": "a"}, "image", "a"),
        ({"type": "image_pil", "image_pil": b"pil"}, "image", b"pil"),
        ({"type": "image", "url": "a"}, "image", "a"),
        ({"type": "image", "image": b"x"}, "image", b"x"),
        ({"type": "video_url", "video_url": {"url": "v"}}, "video", "v"),
        ({"type": "audio_url", "audio_url": {"url": "s"}}, "audio", "s"),
        (sound("mp3"), "audio", "data:audio/mp3;base64,AA=="),
        (sound(";,"), "audio", "data:audio/wav;base64,AA=="),
    ],
)
def test_forms_of_parts(part: dict[str, Any], modality: str, content: Any) -> None:
    places, items = take_items([user(part)], config("image", "video", "audio"))
    assert items == {modality: [content]} and places[0]["content"] == [{"type": modality}]


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"type": "image"}, "without content"),
        ({"type": "image_url", "image_url": {}}, "without content"),
        ({"type": "image_url", "image_url": None}, "without content"),
        ({"type": "input_audio", "input_audio": {"data": 3}}, "without content"),
        ({"type": "audio_url", "audio_url": "a"}, "takes only text and image"),
    ],
)
def test_parts_that_are_refused(part: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestError, match=why):
        take_items([user(part)], config("image"))


def test_too_many_items_of_all_messages() -> None:
    with pytest.raises(RequestError, match="17 items"):
        take_items([user(url("a"))] * 17, config("image"))


def test_the_template_of_an_older_processor(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": PARTS_TEMPLATE}))
    found = read_folder_template(tmp_path, {"chat_template": TEXT_TEMPLATE}, {})
    assert found is not None and found.chat_template == PARTS_TEMPLATE
    (tmp_path / "chat_template.jinja").write_text(TEXT_TEMPLATE)
    found = read_folder_template(tmp_path, {}, {})
    assert found is not None and found.chat_template == TEXT_TEMPLATE


def test_models_for_text() -> None:
    messages = [user(text("x"), url("a"))]
    assert take_items(messages, config()) == (messages, {})
    for part in (url("a"), {"type": "image"}):
        with pytest.raises(RequestError, match="accepts only text parts"):
            render([user(text("x"), part)], PARTS_TEMPLATE, {})
    assert render([user(text("x"), text("y"))], PARTS_TEMPLATE, {}) == "user: x\ny;"


@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        ([text("a"), url("x"), text("b")], "a\n<pad>\nb"),
        ([url("x"), text("a <pad> b")], "a <pad> b"),
        ([url("x"), url("y"), text("a <pad> b")], "<pad>\n<pad>\na <pad> b"),  # the number of placeholders is wrong
        ([text("a"), text("b")], "a\nb"),
    ],
)
def test_a_content_without_message_is_a_prompt(parts: list[Any], wanted: str) -> None:
    found = content_prompt(parts, config("image"), lambda: {"image": "<pad>"}, "documents[0]")
    assert found["prompt"] == wanted
    assert found.get("multi_modal_data", {}).get("image", []) == [
        part["image_url"]["url"] for part in parts if "image_url" in part
    ]


def test_a_content_has_the_placeholder_of_the_processor() -> None:
    told = {"image": "<start_of_image>", "video": "<video>"}
    client = SimpleNamespace(placeholders=lambda: told)
    tokenizer = SimpleNamespace(token_text=lambda token_id: f"<{token_id}>")
    engine: Any = SimpleNamespace(config=config("image", "video"), tokenizer=tokenizer, item_client=client)
    [found] = score_inputs({"content": [url("x"), text("a <7>")]}, "queries", engine)
    assert found["prompt"] == "<start_of_image>\na <7>"
    engine.config.model.multimodal = MultiModalModel(
        placeholders={"image": 7, "video": 7}, written_as={"video": "<begin><video><end>"}
    )
    assert placeholder_texts(engine.config, tokenizer, told) == {  # type: ignore[arg-type]
        "image": "<start_of_image>",
        "video": "<begin><video><end>",
    }
    client.placeholders = None  # not asked without items
    assert score_inputs([{"content": [text("a")]}, "b"], "queries", engine) == [{"prompt": "a"}, "b"]


@pytest.mark.parametrize(
    ("parts", "takes", "message"),
    [
        ([], ("image",), r"documents\[0\]: content must be a list of parts"),
        ([{"type": "file"}], ("image",), r"documents\[0\]: a part of content is a text or an item; found 'file'"),
        ([{"type": "image_url"}], ("image",), r"documents\[0\] has a part of type 'image_url' without content"),
        ([url("x")], (), "takes only text"),
    ],
)
def test_a_content_that_is_no_prompt_is_refused(parts: list[Any], takes: tuple[str, ...], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        content_prompt(parts, config(*takes), lambda: {"image": "<pad>"}, "documents[0]")


def test_characters_that_every_template_writes() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "x" * 1000}}
    messages = [
        {"role": "system", "content": "abc"},
        {"role": "user", "content": [{"type": "text", "text": "de"}, image, "no part", {"type": "text"}]},
        {"role": "assistant", "content": "thoughts are left out"},
        {"role": "tool", "content": "f"},
        {"role": "user"},
        "no message",
    ]
    assert num_rendered_chars(messages) == 13
