"""Chat templates are rendered as by transformers, and the tokenizer of transformers is not created for it."""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from mvllm.engine.tokenizer.folder_template import FolderTemplate, read_folder_template
from mvllm.engine.tokenizer.jinja_template import render_template
from mvllm.entrypoints.chat_template import render_chat
from mvllm.errors import RequestError
from tests.unit.entrypoints.parsers.test_chat_templates import LLAMA, MISTRAL, QWEN

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "  Be brief: <b> & 'x' \u00e9\u4e2d \n"},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning": "think\n",
        "tool_calls": [{"id": "abcdefghi", "function": {"name": "f", "arguments": {"\u00e9": [1, 2.5, None, True]}}}],
    },
    {"role": "tool", "content": "sun", "tool_call_id": "abcdefghi"},
    {"role": "assistant", "content": " Sunny. "},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "a": ["<", 1]}}}]
TEMPLATES = {
    "qwen": QWEN,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "blocks": "  {% if true %}\n  a\n{% endif %}\n{# note #}\n{{ bos_token }}\n   {%- for m in messages %}\n "
    "{{ m.role }}\n{% if loop.index == 2 %}{% break %}{% else %}{% continue %}{% endif %}{% endfor %}",
    "functions": "{{ dict(a=1) }}{{ dict.fromkeys('ab') }}{% set ns = namespace(self=1, x=2) %}{% set ns.x = 3 %}"
    "{{ ns.x }}{{ ns.self }}{{ messages | tojson(indent=2, sort_keys=true) }}{{ tools | tojson(ensure_ascii=true) }}"
    "{{ [1, 2] | tojson(separators=(',', ':')) }}{{ strftime_now('%Y') }}{{ documents }}{{ undefined_name }}",
    "reasoning": "{% for m in messages %}{{ m.thinking }}|{{ m.reasoning_content }}|{{ m.reasoning }};{% endfor %}",
    "generation": "{% for m in messages %}{% set x = m.role %}{% generation %}{{ m.content }}{% set x = 1 %}"
    "{% endgeneration %}{{ x }}{% endfor %}",
    "an error": "{{ raise_exception('No tools, please.') }}",
    "a wrong template": "{% for m in %}",
    "an attribute of a type": "{{ dict.__class__ }}{{ ''.__class__.__mro__ }}",
    "a private attribute": "{% set ns = namespace(_x=1) %}",
    "a private attribute later": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "a change of a message": "{{ messages.append(1) }}",
    "an operation on nothing": "{{ messages[0].nothing.more }}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
def test_texts_and_errors_are_those_of_transformers(template: str, tools: list[dict[str, Any]] | None) -> None:
    variables = {"bos_token": "<s>", "eos_token": "</s>", "tools": tools, "add_generation_prompt": True, "number": 7}

    def outcome(render: Any) -> tuple[str, str]:
        try:
            return "text", render()
        except Exception as e:
            return type(e).__name__, "" if "underscore" in str(e) else str(e)

    expected = outcome(lambda: render_jinja_template(conversations=[CHAT], chat_template=template, **variables)[0][0])
    assert outcome(lambda: render_template(template, CHAT, variables)) == expected


class Color(str, enum.Enum):  # noqa: UP042  (a subclass of str)
    RED = "red"


def test_what_is_rare_is_left_to_transformers() -> None:
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ color }}"
    tokenizer: Any = SimpleNamespace(template_renderer=FolderTemplate(template, {}))
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    given = {"add_generation_prompt": False, "chat_template_kwargs": {"color": Color.RED}}
    assert render_chat(tokenizer, chat, **given) == "[a][b]red"
    assert render_chat(tokenizer, chat, continue_final_message=True, add_generation_prompt=False) == "[a][b"
    with pytest.raises(RequestError, match="has no chat template"):
        render_chat(SimpleNamespace(template_renderer=FolderTemplate(None, {})), chat)  # type: ignore[arg-type]


def test_several_templates_are_left_to_transformers(tmp_path: Any) -> None:
    def read(settings: dict[str, Any]) -> str | None:
        found = read_folder_template(tmp_path, settings, {})
        return "transformers" if found is None else found.chat_template

    assert read({}) is None
    assert (read({"chat_template": "a"}), read({"chat_template": [{"name": "default"}]})) == ("a", "transformers")
    (tmp_path / "chat_template.jinja").write_text("b")
    assert read({"chat_template": "a"}) == "b"
    (tmp_path / "additional_chat_templates").mkdir()
    assert read({"chat_template": "a"}) == "transformers"
