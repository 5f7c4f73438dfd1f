"""Templates that come with requests: rendered as the server's own are, within limits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import transformers

import mvllm
from mvllm.engine.tokenizer import Tokenizer
from mvllm.entrypoints.chat_template import render_chat
from mvllm.entrypoints.openai.text_work import TextWork
from mvllm.errors import RequestError

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
    work = TextWork(tokenizer, 100, seconds)
    settings = {"chat_template": template, **more}
    return asyncio.run(work.run_foreign(MESSAGES, settings, dict(tokenizer.hf.special_tokens_map)))


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"type": "function"}], "chat_template_kwargs": {"effort": [1.5, "x"]}},
        {"add_generation_prompt": False, "continue_final_message": True},
    ],
    ids=["open", "go-on"],
)
def test_they_give_what_the_tokenizer_would(tokenizer: Tokenizer, more: dict[str, Any]) -> None:
    expected = render_chat(tokenizer, MESSAGES, chat_template=TEMPLATE, **more)
    assert render(tokenizer, TEMPLATE, **more) == expected


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ 7 ** (10 ** 9) }}", "took longer"),
        ("{{ ('a' * 100000000000) | length }}", "MemoryError"),
        ("{{ 'a' * 20000000 }}", "wrote 20000000 characters"),
        ("{{ raise_exception('no') }}", "TemplateError: no"),
    ],
)
def test_what_they_may_not(tokenizer: Tokenizer, template: str, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        render(tokenizer, template, 2.0)
