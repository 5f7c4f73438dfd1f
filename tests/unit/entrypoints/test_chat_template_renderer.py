"""Rendering of chat templates, of models and of requests, within limits."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

import mvllm
from mvllm.engine.frontend.text_threads import LONG_TEXT_CHARS
from mvllm.engine.tokenizer.tokenizer import Tokenizer
from mvllm.entrypoints.chat_template import read_chat_template, read_special_tokens, render_chat
from mvllm.entrypoints.openai.common.chat_template_renderer import (
    LONG_BYTES,
    ChatTemplateRenderer,
)
from mvllm.entrypoints.openai.common.tokenizer_pool import TokenizerPool
from mvllm.errors import ModelError, RequestError

MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "ü\n"}], "name": None},
    {"role": "assistant", "content": "b"},
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}{{ m | tojson }}{{ effort }}{% endfor %}{{ tools | tojson }}"
    "{% if add_generation_prompt %}>{% endif %}{{ messages[-1].content }}{{ eos_token }}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    folder = Path(mvllm.__file__).parent / "demo" / "model"
    return Tokenizer(lambda: transformers.AutoTokenizer.from_pretrained(str(folder)))


def render(tokenizer: Tokenizer, template: str, seconds: float = 30.0, **more: Any) -> str:
    work = TokenizerPool(tokenizer, 100, template_seconds=seconds)
    return asyncio.run(work.render_with_request_template(MESSAGES, {"chat_template": template, **more}))


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"type": "function"}], "chat_template_kwargs": {"effort": [1.5, "x"]}},
        {"add_generation_prompt": False, "continue_final_message": True},
    ],
    ids=["open", "go-on"],
)
def test_request_templates_render_as_the_tokenizer_does(tokenizer: Tokenizer, more: dict[str, Any]) -> None:
    expected = render_chat(tokenizer, MESSAGES, chat_template=TEMPLATE, **more)
    assert render(tokenizer, TEMPLATE, **more) == expected


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ 7 ** (10 ** 9) }}", "took longer than 2 s"),
        ("{{ ('a' * 100000000000) | length }}", "more memory than the 512 MB"),
        ("{{ 'a' * 20000000 }}", "wrote 20000000 characters"),
        ("{{ raise_exception('no') }}", "refuses the conversation: no"),
    ],
)
def test_request_templates_that_exceed_limits_are_rejected(tokenizer: Tokenizer, template: str, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        render(tokenizer, template, 2.0)


class TestTheModelsOwnTemplate:
    """It is a program of the model's author: it has the same limits, and one process for all conversations."""

    LOOPS = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"

    def test_the_model_template_renders_as_the_tokenizer_does_within_limits(self, tokenizer: Tokenizer) -> None:
        renderer = ChatTemplateRenderer(1.0)
        work = TokenizerPool(tokenizer, 100, renderer)

        async def render_repeatedly() -> None:
            expected = render_chat(tokenizer, MESSAGES)
            assert await work.render(MESSAGES, {}) == expected
            first = renderer.pid
            assert await work.render(MESSAGES, {}) == expected and renderer.pid == first
            with pytest.raises(RequestError, match="more memory"):
                await work.render(MESSAGES, {"chat_template": "{{ 'a' * 100000000000 }}"})
            assert await work.render(MESSAGES, {}) == expected and renderer.pid != first
            kept = renderer.pid
            for template, says in (
                ("{{ raise_exception('no') }}", "refuses the conversation: no"),
                ("{{ 'a' * 20000000 }}", "wrote 20000000 characters"),
                ("{{ '\\ud800' }}", "not valid Unicode"),
                ("{{ raise_exception('\\ud800') }}", r"refuses the conversation: \?"),
            ):
                with pytest.raises(RequestError, match=says):
                    await work.render(MESSAGES, {"chat_template": template})
            large = {"tools": [{"type": "function", "maximum": 10**30}], "chat_template": "{{ tools[0].maximum }}"}
            assert await work.render(MESSAGES, large) == str(10**30)
            assert renderer.pid == kept, "nobody else waits for another process"
            for template, says in (
                (self.LOOPS, "took longer than 1 s"),
                ("\n{{ frob(1) }}", "failed in line 2: UndefinedError: 'frob' is undefined"),
                ("\n{{ 'x' | frob }}", "failed in line 2: TemplateAssertionError: No filter named 'frob'"),
            ):
                with pytest.raises(ModelError) as unusable:
                    await renderer.check(template, {}, "F")
                says = f"With three short messages, the chat template F {says}."
                assert str(unusable.value) == f"{says} Correct it, or give another with --chat-template."
            for template in (
                "{{ raise_exception('Tools only.') }}",
                "{{ frob.bar }}",
                "{{ messages[0].documents[0] }}",
            ):
                await renderer.check(template, {}, "F")  # other messages or variables may do

        try:
            asyncio.run(render_repeatedly())
        finally:
            renderer.close()
            work.close()
        assert renderer.pid is None

    def test_conversations_do_not_wait_for_long_ones(self, tokenizer: Tokenizer) -> None:
        """Long ones are as slow as they may be, and still in work when others have been answered."""
        renderer = ChatTemplateRenderer(60.0)
        template = "{% if messages[0].content | length > 1000 %}" + self.LOOPS + "{% endif %}{{ messages[0].content }}"
        long, settings = [{"role": "user", "content": "x" * LONG_BYTES}], {"chat_template": template}

        async def main() -> None:
            attack = [asyncio.create_task(renderer.render(long, settings, {})) for _ in range(3)]
            await asyncio.sleep(0)
            for _ in range(3):
                assert await renderer.render([{"role": "user", "content": "hi"}], settings, {}) == "hi"
            assert not any(task.done() for task in attack)
            for task in attack:
                task.cancel()

        try:
            asyncio.run(main())
        finally:
            renderer.close()

    def test_a_process_that_works_for_a_client_who_has_left_is_busy(self, tokenizer: Tokenizer) -> None:
        renderer = ChatTemplateRenderer(60.0)
        template = "{% if messages[0].content == 'slow' %}" + self.LOOPS + "{% endif %}{{ messages[0].content[:4] }}"

        async def render(text: str) -> str:
            return await renderer.render([{"role": "user", "content": text}], {"chat_template": template}, {})

        async def main() -> None:
            assert await render("x" * LONG_BYTES) == "xxxx"  # starts the second process
            slow = asyncio.create_task(render("slow"))
            await asyncio.sleep(0.1)
            slow.cancel()
            await asyncio.sleep(0)
            assert await asyncio.wait_for(render("hi"), 120) == "hi"

        try:
            asyncio.run(main())
        finally:
            renderer.close()

    def test_a_conversation_of_many_times_the_context_is_not_rendered(self, tokenizer: Tokenizer) -> None:
        renderer = ChatTemplateRenderer()
        work = TokenizerPool(tokenizer, 100, renderer)
        tools = [{"type": "function", "function": {"name": "f", "description": "x" * (5 << 20)}}]

        async def main() -> None:
            with pytest.raises(RequestError, match="bytes as JSON") as refused:
                await work.render(MESSAGES, {"tools": tools})
            assert refused.value.parameter == "messages"
            await work.check_num_chars(LONG_TEXT_CHARS)
            with pytest.raises(RequestError, match=r"1000000 characters.* at least \d+ tokens.*100"):
                await work.check_num_chars(1_000_000)

        try:
            asyncio.run(main())
            assert renderer.pid is None
        finally:
            renderer.close()
            work.close()

    def test_template_and_special_tokens_are_read_from_the_folder_without_transformers(self, tmp_path: Path) -> None:
        assert read_chat_template(tmp_path) is None and read_special_tokens(tmp_path) == {}
        settings = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "a"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        assert read_chat_template(tmp_path) == "a"
        assert read_special_tokens(tmp_path) == {"bos_token": "<s>", "eos_token": "</s>"}
        named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
        assert read_chat_template(tmp_path) == "d" and read_special_tokens(tmp_path) == {}
        (tmp_path / "chat_template.jinja").write_text("b")
        assert read_chat_template(tmp_path) == "b"


@pytest.mark.parametrize(
    ("loop", "text"),
    [
        ("{% for c in m['content'] %}{{ c['type'] }}={{ c['text'] }};{% endfor %}", "text=a\nü\n;text=b;"),
        ("{% for c in m.content %}{{ c.text }}{% endfor %}", "a\nü\nb"),
        (
            "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}?{% endfor %}{% endif %}",
            "a\nü\nb",
        ),
    ],
    ids=["loop", "loop over an attribute", "with a case for texts"],
)
def test_templates_that_loop_over_parts_get_a_text_as_one_part(tokenizer: Tokenizer, loop: str, text: str) -> None:
    template = "{% for m in messages %}" + loop + "{% endfor %}"
    assert render_chat(tokenizer, MESSAGES, chat_template=template, add_generation_prompt=False) == text
