"""The page at `/` in a real browser. If the variable WRITE_PICTURES is set, the test renews the picture in the docs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mvllm.entrypoints.openai.common.openapi import TAGS
from tests.helpers.browser import PROGRAM, Browser
from tests.helpers.server import ServerProcess

PICTURE = Path(__file__).parents[3] / "docs" / "images" / "playground.png"
WRITE = "WRITE_PICTURES"


@pytest.mark.exhaustive
@pytest.mark.skipif(PROGRAM is None, reason="not run: no Chromium")
def test_a_chat_with_the_model(server: ServerProcess) -> None:
    with Browser() as browser:
        browser.open(server.url + "/")
        browser.wait_for("document.querySelector('#phase')?.textContent === 'ready'")
        browser.wait_for("document.querySelector('#model').value === 'demo'")
        assert browser.evaluate("[...document.querySelectorAll('#model option')].map(o => o.value)") == [
            "demo",
            "little",
        ]
        browser.evaluate("document.querySelector('#temperature').value = 0")
        assert browser.evaluate("document.querySelectorAll('#empty button').length") > 2
        browser.evaluate("document.querySelector('#empty button').click()")  # asks for the capital of France
        browser.wait_for("document.querySelectorAll('main footer').length === 1")
        assert "Paris" in browser.evaluate("document.querySelector('.assistant').textContent")
        browser.evaluate("document.querySelector('#reset').click()")
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
            browser.evaluate("document.querySelector('details').open = true")
            PICTURE.write_bytes(browser.screenshot())
        assert browser.screenshot().startswith(b"\x89PNG")
        browser.evaluate("document.querySelector('#text').value = 'word '.repeat(9000)")
        browser.evaluate("document.querySelector('#form').requestSubmit()")
        browser.wait_for("document.querySelector('.error') !== null")
        assert "max_model_len" in browser.evaluate("document.querySelector('.error').textContent")
        browser.evaluate("document.querySelector('#reset').click()")
        assert browser.evaluate("document.querySelectorAll('.message').length") == 0
        assert all(url.startswith((server.url, "about:", "data:")) for url in browser.requested())
        assert [problem for problem in browser.problems() if "400" not in problem] == []


MARKDOWN = """# Title
Some **bold**, *it _in_ it*, `code <b>`, a_b_c and 2 * 3 * 4.

- one
  1. inner
- two

```python
x = "<script>"
```
<img src=x onerror="window.ran=1"> [a](javascript:alert(1)) **open
"""
DRAWN = (
    "<h1>Title</h1>"
    "<p>Some <strong>bold</strong>, <em>it <em>in</em> it</em>, <code>code &lt;b&gt;</code>, a_b_c and 2 * 3 * 4.</p>"
    '<ul><li>one<ol start="1"><li>inner</li></ol></li><li>two</li></ul>'
    '<div class="code"><div><span>python</span><button class="quiet" type="button">Copy</button></div>'
    '<pre><code>x = "&lt;script&gt;"</code></pre></div>'
    '<p>&lt;img src=x onerror="window.ran=1"&gt; [a](javascript:alert(1)) **open</p>'
)


@pytest.mark.exhaustive
@pytest.mark.skipif(PROGRAM is None, reason="not run: no Chromium")
def test_markdown_is_rendered_and_no_script_in_it_runs(server: ServerProcess) -> None:
    with Browser() as browser:
        browser.open(server.url + "/")
        browser.wait_for("document.querySelector('#phase')?.textContent === 'ready'")
        browser.evaluate(f"markdown({json.dumps(MARKDOWN)}, show('assistant', ''))")
        assert browser.evaluate("document.querySelector('.assistant').innerHTML") == DRAWN
        assert browser.evaluate("window.ran") is None
        for hostile in ("`a ", "*a", "**", "_a ", "- ", "> ", "```\n", "1. ", "- - "):  # none takes quadratic time
            expression = f"markdown({hostile!r}.repeat(10000), document.createElement('div'))"
            browser.evaluate(f"performance.mark('a'), {expression}")
            assert browser.evaluate("performance.now() - performance.getEntriesByName('a').at(-1).startTime") < 5000
        assert browser.problems() == []


@pytest.mark.exhaustive
@pytest.mark.skipif(PROGRAM is None, reason="not run: no Chromium")
def test_routes_can_be_tried_on_the_page_of_the_api(server: ServerProcess) -> None:
    with Browser() as browser:
        browser.open(server.url + "/docs")
        browser.wait_for("document.forms.length > 10")
        groups = browser.evaluate("[...document.querySelectorAll('h2')].map(h => h.textContent)")
        assert groups == [name for name in TAGS if name != "plugins"]
        for path, answer in (("/v1/completions", "text_completion"), ("/v1/models", '"demo"'), ("/sleep", "admin")):
            browser.evaluate(f"form = [...document.forms].find(f => f.dataset.path === {path!r}), form.requestSubmit()")
            browser.wait_for(f"form.querySelector('pre')?.textContent.includes({answer!r})")
        assert all(url.startswith((server.url, "about:", "data:")) for url in browser.requested())
        assert [problem for problem in browser.problems() if "403" not in problem] == []
