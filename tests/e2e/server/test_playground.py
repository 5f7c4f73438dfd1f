"""The page at `/` in a real browser. With WRITE_PICTURES in the environment, the picture in the docs is made anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers.browser import PROGRAM, Browser
from tests.helpers.server import ServerProcess

PICTURE = Path(__file__).parents[3] / "docs" / "playground.png"
WRITE = "WRITE_PICTURES"


@pytest.mark.exhaustive
@pytest.mark.skipif(PROGRAM is None, reason="not run: no Chromium")
def test_a_chat_with_the_model(server: ServerProcess) -> None:
    with Browser() as browser:
        browser.open(server.url + "/")
        browser.wait_for("document.querySelector('#phase')?.textContent === 'ready'")
        browser.wait_for("document.querySelector('#model').textContent === 'demo'")
        browser.evaluate("document.querySelector('#temperature').value = 0")
        for i, (question, answer) in enumerate((("What is the capital of France?", "Paris"), ("And of Italy?", "."))):
            browser.evaluate(f"document.querySelector('#text').value = {question!r}")
            browser.evaluate("document.querySelector('#form').requestSubmit()")
            browser.wait_for(f"document.querySelectorAll('main footer').length === {i + 1}")
            shown = browser.evaluate(
                "[...document.querySelectorAll('.message')].map(m => [m.className, m.textContent])"
            )
            assert [kind for kind, _ in shown] == ["message user", "message assistant"] * (i + 1)
            assert shown[-2][1] == question and answer in shown[-1][1]
        if WRITE in os.environ:
            PICTURE.write_bytes(browser.screenshot())
        assert browser.screenshot().startswith(b"\x89PNG")
        browser.evaluate("document.querySelector('#text').value = 'word '.repeat(9000)")
        browser.evaluate("document.querySelector('#form').requestSubmit()")
        browser.wait_for("document.querySelector('.error') !== null")
        assert "max_model_len" in browser.evaluate("document.querySelector('.error').textContent")
        browser.evaluate("document.querySelector('#reset').click()")
        assert browser.evaluate("document.querySelectorAll('.message').length") == 0
        assert all(url.startswith((server.url, "about:", "data:")) for url in browser.requested())
        assert [problem for problem in browser.problems() if "400" not in problem and "favicon" not in problem] == []
