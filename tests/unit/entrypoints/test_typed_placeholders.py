"""Texts of users that look like the placeholder of an item are cut, whatever the template makes of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from mvllm.config.multimodal import MultiModalConfig, MultiModalModel
from mvllm.engine.frontend.input_processor import InputProcessor
from mvllm.engine.tokenizer.folder_template import FolderTemplate
from mvllm.entrypoints.chat_template import render_chat
from mvllm.entrypoints.openai.common.chat_prompt_renderer import ChatPromptRenderer
from mvllm.entrypoints.openai.common.tokenizer_pool import TokenizerPool
from mvllm.entrypoints.openai.protocol import InputListRequest
from mvllm.entrypoints.typed_placeholders import TypedPlaceholders
from mvllm.errors import RequestError
from tests.unit.engine.builders import make_config
from tests.unit.engine.tokenizers import make_tokenizer

IMAGE = {"type": "image"}
PARTS = "{% for m in messages %}{% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}"
"""One part follows the other without anything between them."""


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def pieces(template: str, *parts: Any, placeholders: tuple[str, ...] = ("<image>",), **settings: Any) -> list[str]:
    """The pieces of a conversation of one message, to which a template adds the others of its keys."""
    typed = TypedPlaceholders(placeholders, 100)
    message = {"role": "user", "content": list(parts), **settings}
    tokenizer: Any = SimpleNamespace(template_renderer=FolderTemplate(template + "{% endfor %}", {}))
    given = {"image": placeholders[0]}
    rendered, cut_at = typed.cut_prompt(render_chat(tokenizer, typed.cut_messages([message]), placeholders=given))
    assert not re.search(r"\d{30}", rendered.replace(cut_at or "\0", ""))
    return rendered.split(cut_at) if cut_at else [rendered]


@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        ((IMAGE, text("a <image> b")), ["<image>a <", "image> b"]),
        ((text("<ima"), text("ge>"), IMAGE), ["<ima", "ge><image>"]),
        ((text("<im"), text("a"), text("ge>"), IMAGE), ["<im", "age><image>"]),
        ((text("2 <"), IMAGE, text("is 3 <i")), ["2 <<image>is 3 <i"]),  # as without cuts
    ],
)
def test_parts_of_a_message(parts: Any, wanted: list[str]) -> None:
    assert pieces(PARTS, *parts) == wanted


def test_a_placeholder_inside_of_another_one() -> None:
    video = "<|begin|><|video|><|end|>"
    assert pieces(PARTS, text(f"a {video}"), IMAGE, placeholders=(video, "<|video|>")) == [
        "a <",
        "|begin|><",
        "|video|><|end|><image>",
    ]


@pytest.mark.parametrize("filters", ["upper", "tojson(ensure_ascii=true)", "trim"])
def test_filters_of_templates(filters: str) -> None:
    found = pieces(
        "{% for m in messages %}{% for p in m.content %}{{ (p.text or '') | FILTER }}{% endfor %}".replace(
            "FILTER", filters
        ),
        IMAGE,
        text("a <image> b"),
    )
    assert len(found) == 2 and found[1].lower().startswith("image> b")


def test_a_template_that_shortens_texts_is_refused() -> None:
    with pytest.raises(RequestError, match=r"the chat template shortens this text\. Send it without <image>"):
        shortens = "{% for m in messages %}{% for p in m.content %}{{ (p.text or '')[:30] }}{% endfor %}"
        typed = TypedPlaceholders(["<image>"], 100)
        tokenizer: Any = SimpleNamespace(template_renderer=FolderTemplate(shortens + "{% endfor %}", {}))
        messages = typed.cut_messages([{"role": "user", "content": [IMAGE, text("a <image>")]}])
        typed.cut_prompt(render_chat(tokenizer, messages, placeholders={"image": "<image>"}))


@pytest.mark.parametrize(
    "arguments",
    [
        '{"x": "\\u003cimage\\u003e"}',
        {"x": "<image>"},
        {"<image>": 1},
        '{"\\u003cimage\\u003e": NaN, "y": 18446744073709551617}',
    ],
)
def test_arguments_of_tool_calls_are_cut_in_their_values_and_keys(arguments: Any) -> None:
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    template = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
    found = pieces(template, IMAGE, tool_calls=calls)
    assert len(found) == 2
    shown = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert "".join(found) == json.dumps(shown)


def test_what_has_none_is_left_as_it_is() -> None:
    typed = TypedPlaceholders(["<image>"], 100)
    calls = [{"function": {"name": "f", "arguments": '{"a":\t"\\u003cb"}'}}]
    messages = [{"role": "user", "content": [IMAGE, text("a <b>")]}, {"role": "assistant", "tool_calls": calls}]
    assert typed.cut_messages(messages) == messages
    assert typed.cut_prompt("<image>a <b>") == ("<image>a <b>", None)


def test_too_many_and_too_deep() -> None:
    with pytest.raises(RequestError, match="at least as many tokens"):
        TypedPlaceholders(["<image>"], 100).cut(["<image>" * 99, "<image>"])
    deep: Any = "<image>"
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(RequestError, match="nested too deeply"):
        TypedPlaceholders(["<image>"], 100).cut(deep)


def test_the_pieces_of_earlier_turns_stay() -> None:
    template = "{% for m in messages %}{{ m.role }}: {% for p in m.content %}{{ '<image>' if p.type == 'image' else "
    tokenizer: Any = SimpleNamespace(
        template_renderer=FolderTemplate(template + "p.text }}{% endfor %};{% endfor %}", {})
    )
    turns = [
        {"role": "user", "content": [text("2 <"), IMAGE, text("an <image>")]},
        {"role": "assistant", "content": [text("it is <")]},
        {"role": "user", "content": [text("<image> again")]},
    ]
    found = []
    for count in (1, 2, 3):
        typed = TypedPlaceholders(["<image>"], 100)
        places = typed.cut_messages(turns[:count])
        rendered, cut_at = typed.cut_prompt(render_chat(tokenizer, places, placeholders={"image": "<image>"}))
        found.append(rendered.split(cut_at))
    assert found[0] == ["user: 2 <<image>an <", "image>;"]
    assert found[1] == ["user: 2 <<image>an <", "image>;assistant: it is <;"]
    assert found[2] == ["user: 2 <<image>an <", "image>;assistant: it is <;user: <", "image> again;"]


def test_a_server_cuts_in_a_thread_and_takes_special_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    cut = TypedPlaceholders.cut

    def cut_and_tell(self: TypedPlaceholders, value: Any) -> Any:
        threads.append(threading.current_thread().name)
        return cut(self, value)

    async def told() -> dict[str, str]:
        return {"image": "<image>"}

    monkeypatch.setattr(TypedPlaceholders, "cut", cut_and_tell)
    template = PARTS + "{% endfor %}{# 'image' #}"
    tokenizer: Any = SimpleNamespace(
        template_renderer=FolderTemplate(template, {}), special_ids=(), token_text=lambda token_id: f"<{token_id}>"
    )
    takes = SimpleNamespace(multimodal=MultiModalModel(placeholders={"image": 7}), max_model_len=100)
    config = SimpleNamespace(model=takes, multimodal=MultiModalConfig())
    engine: Any = SimpleNamespace(tokenizer=tokenizer, config=config, model_config=takes, item_placeholders=told)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    content = [text("<image>"), image]
    request = InputListRequest(messages=[{"role": "user", "content": content}], add_special_tokens=True)
    with contextlib.closing(TokenizerPool(tokenizer, 100)) as pool:
        prompt: Any = asyncio.run(ChatPromptRenderer(engine, pool).render_for_pooling(request))
    assert threads and all(name.startswith("text") for name in threads)
    assert prompt["prompt"].split(prompt["cut_at"]) == ["<", "image><image>"]
    del prompt["multi_modal_data"]
    assert InputProcessor(make_config(), make_tokenizer()).process("r", prompt).prompt == "<image><image>"
