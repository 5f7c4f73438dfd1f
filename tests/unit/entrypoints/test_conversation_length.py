"""Conversations that cannot fit into the model's context are refused before they are rendered."""

from __future__ import annotations

from typing import Any

import pytest

from mvllm.entrypoints.openai.common.tokenizer_pool import TokenizerPool
from tests.unit.entrypoints.builders import save_model_folder
from tests.unit.entrypoints.scripted_server import TEMPLATE, Server

LONG = "many words " * 100_000
HI = {"role": "user", "content": "hi"}
MESSAGES = [HI, {"role": "assistant", "content": "yes"}, {"role": "user", "content": LONG}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": LONG}]}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/tokenize": {"messages": PARTS},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model_folder(tmp_path_factory.mktemp("model"), TEMPLATE)


@pytest.mark.parametrize("path", BODIES)
def test_a_text_that_cannot_fit_is_not_rendered(folder: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def render(*unused: object) -> str:
        raise AssertionError("it was rendered")

    monkeypatch.setattr(TokenizerPool, "render", render)
    answer = Server(folder, "x").post(BODIES[path], path)
    assert answer.status_code == 400 and "1100" in answer.text and "max_model_len" in answer.text


def test_thoughts_that_the_template_leaves_out_may_be_long(folder: str) -> None:
    template = "{% for m in messages %}{{ m['content'].split('</think>')[-1] }}{% endfor %}"
    own = {"role": "assistant", "content": f"<think>{LONG}</think>yes"}
    server = Server(folder, "x", chat_template=template)
    assert server.post({"messages": [HI, own, HI]}).status_code == 200
    assert server.core.prompts == ["hiyeshi"]
