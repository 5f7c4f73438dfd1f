"""The page at `/` in a real browser."""

from __future__ import annotations

import base64
import io
import json
import re
import wave
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from mvllm.entrypoints.openai.common.openapi import TAGS
from tests.helpers.browser import PROGRAM, Browser
from tests.helpers.multimodal_zoo import make_checkpoint
from tests.helpers.server import SMALL, ServerProcess

KEY = "page-key-0815"
READY = "document.querySelector('#phase')?.textContent === 'ready' && cards[0]?.capabilities !== undefined"
RELOADED = "document.readyState === 'complete' && typeof answering !== 'undefined' && " + READY
IDLE = "answering.size === 0"

pytestmark = [pytest.mark.exhaustive, pytest.mark.skipif(PROGRAM is None, reason="not run: no Chromium")]


@pytest.fixture
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


def set_size(browser: Browser, width: int, height: int) -> None:
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=True)


def ask(browser: Browser, text: str) -> None:
    """Types a message, sends it and waits for the answer."""
    browser.evaluate(f"$('text').value = {text!r}, $('form').requestSubmit()")
    browser.wait_for(IDLE)


def messages(browser: Browser) -> list[list[str]]:
    """Class and text of each message that the page shows."""
    text = "m.querySelector('.body').innerText.trim()"
    expression = f"[...document.querySelectorAll('.message')].map(m => [m.classList[1], {text}])"
    found: list[list[str]] = browser.evaluate(expression)
    return found


def titles(browser: Browser) -> list[str]:
    rows = "[...document.querySelectorAll('#list li')]"
    found: list[str] = browser.evaluate(f"{rows}.map(row => row.firstChild.textContent)")
    return found


def click(browser: Browser, text: str) -> None:
    """Clicks the last button with a text."""
    browser.evaluate(f"[...document.querySelectorAll('button')].findLast(b => b.textContent === {text!r}).click()")


def check_connections(browser: Browser, url: str, *, except_status: str = "") -> None:
    """Nothing was requested from elsewhere, and the console has no errors but responses with this status."""
    assert all(each.startswith((url, "about:", "data:")) for each in browser.requested())
    assert [each for each in browser.problems() if not except_status or except_status not in each] == []


def test_a_chat_with_the_model(server: ServerProcess, browser: Browser) -> None:
    browser.open(server.url + "/")
    browser.wait_for(READY)
    assert browser.evaluate("$('model').value") == "demo"
    assert browser.evaluate("[...$('model').options].map(o => o.value)") == ["demo", "little"]
    assert browser.evaluate("$('attach').hidden && $('record').hidden")  # the model takes text only
    assert browser.evaluate("document.querySelectorAll('#empty button').length") > 2
    browser.evaluate("$('temperature').value = 0, settingsChanged()")
    browser.evaluate("document.querySelector('#empty button').click()")
    browser.wait_for(IDLE)
    [[_, question], [_, answer]] = messages(browser)
    assert question == "What is the capital of Japan?" and "Tokyo" in answer
    ask(browser, "And of Italy?")
    assert [kind for kind, _ in messages(browser)] == ["user", "assistant"] * 2
    assert browser.screenshot().startswith(b"\x89PNG")
    ask(browser, "word " * 9000)
    assert "max_model_len" in browser.evaluate("document.querySelector('.error').textContent")
    ask(browser, "And of France?")  # the question without an answer is not sent again
    assert browser.evaluate("turns(conversation).length") == 6
    check_connections(browser, server.url, except_status="400")


def test_an_answer_can_be_stopped_and_generated_again_and_a_question_changed(
    server: ServerProcess, browser: Browser
) -> None:
    browser.open(server.url + "/")
    browser.wait_for(READY)
    browser.evaluate("$('text').value = 'Tell me a story about a fox named Nia.', $('form').requestSubmit()")
    browser.wait_for("conversation.messages[1]?.content.length > 5")
    assert browser.evaluate("$('send').textContent") == "Stop"
    browser.evaluate("$('form').requestSubmit()")
    browser.wait_for(IDLE)
    assert browser.evaluate("conversation.messages[1].stopped") and browser.evaluate("$('send').textContent") == "Send"
    stopped = messages(browser)[1][1]
    assert "stopped" in browser.evaluate("document.querySelector('.assistant footer').textContent")
    browser.evaluate("[...document.querySelectorAll('button')].find(b => b.textContent === 'Retry').click()")
    browser.wait_for(IDLE)
    [[_, question], [_, again]] = messages(browser)
    assert len(again) > len(stopped) and question.startswith("Tell me a story")
    browser.evaluate("navigator.clipboard.writeText = async text => { window.copied = text }")
    click(browser, "Copy")
    browser.wait_for("window.copied !== undefined")
    assert browser.evaluate("window.copied.trim()") == again
    click(browser, "Edit")
    assert messages(browser) == [] and browser.evaluate("$('text').value") == question
    ask(browser, "What does a cow say?")
    assert "moo" in messages(browser)[1][1]
    check_connections(browser, server.url)


def test_conversations_stay_over_a_reload_and_can_be_renamed_and_deleted(
    server: ServerProcess, browser: Browser
) -> None:
    browser.open(server.url + "/")
    browser.wait_for(READY)
    ask(browser, "What does a cow say?")
    browser.evaluate("$('new').click()")
    assert messages(browser) == []
    ask(browser, "What is 3 plus 4?")
    shown = messages(browser)
    assert titles(browser) == ["What is 3 plus 4?", "What does a cow say?"]
    browser.call("Page.reload")
    browser.wait_for(RELOADED)
    assert messages(browser) == shown
    click(browser, "Rename")  # the older one
    browser.evaluate("document.querySelector('#list input').value = 'Cows'")
    enter = "new KeyboardEvent('keydown', {key: 'Enter'})"
    browser.evaluate(f"document.querySelector('#list input').dispatchEvent({enter})")
    assert titles(browser) == ["What is 3 plus 4?", "Cows"]
    browser.evaluate("document.querySelector('#list li:last-child button').click()")
    assert messages(browser)[0][1] == "What does a cow say?"
    click(browser, "Delete")
    assert len(titles(browser)) == 2  # it asks once
    click(browser, "Sure?")
    assert titles(browser) == ["What is 3 plus 4?"] and messages(browser) == []
    assert browser.evaluate("Object.keys(localStorage).filter(name => name.startsWith(CONVERSATION)).length") == 1
    browser.evaluate("Storage.prototype.setItem = () => { throw new Error('full') }")  # it works without
    ask(browser, "What does a cow say?")
    assert "storage is full" in browser.evaluate("$('announcement').textContent") or len(messages(browser)) == 2
    check_connections(browser, server.url)


def test_an_answer_goes_on_while_another_conversation_is_shown(server: ServerProcess, browser: Browser) -> None:
    browser.open(server.url + "/")
    browser.wait_for(READY)
    browser.evaluate("$('text').value = 'Tell me a story about a fox named Nia.', $('form').requestSubmit()")
    browser.wait_for("conversation.messages[1]?.content.length > 5")
    browser.evaluate("$('new').click()")
    assert messages(browser) == [] and browser.evaluate("$('send').textContent") == "Send"
    browser.wait_for(IDLE)
    browser.evaluate("document.querySelector('#list li button').click()")
    assert len(messages(browser)[1][1]) > 100


def test_an_answer_is_broken_off_by_a_reload_and_can_be_generated_again(
    server: ServerProcess, browser: Browser
) -> None:
    browser.open(server.url + "/")
    browser.wait_for(READY)
    browser.evaluate("$('text').value = 'Tell me a story about a fox named Nia.', $('form').requestSubmit()")
    browser.wait_for("conversation.messages[1]?.content.length > 5")
    browser.call("Page.reload")
    browser.wait_for(RELOADED)
    assert len(messages(browser)[1][1]) > 5
    assert "broken off" in browser.evaluate("document.querySelector('.assistant').innerText")
    assert browser.evaluate("document.querySelector('.error')") is None
    browser.evaluate("$('max_tokens').value = 3")
    click(browser, "Retry")
    browser.wait_for(IDLE)
    assert "3 tokens" in browser.evaluate("document.querySelector('.assistant footer').innerText")
    assert "cut off at the limit" in browser.evaluate("document.querySelector('.assistant footer').innerText")


def test_two_tabs_share_a_conversation(server: ServerProcess, browser: Browser) -> None:
    browser.open(server.url + "/")
    browser.wait_for(READY)
    ask(browser, "What does a cow say?")
    first = browser.session
    browser.open_tab()
    browser.open(server.url + "/")
    browser.wait_for(READY)
    browser.evaluate("document.querySelector('#list li button').click()")
    ask(browser, "What is 3 plus 4?")
    browser.session = first
    browser.wait_for("document.querySelectorAll('.message').length === 4")
    ask(browser, "What does a dog say?")
    assert [text for kind, text in messages(browser) if kind == "user"][1] == "What is 3 plus 4?"
    assert browser.evaluate("storedConversations().map(each => each.messages.length)") == [6]


@pytest.mark.parametrize("getter", ["throw new DOMException('denied', 'SecurityError')", "return null"])
def test_the_page_works_where_the_browser_permits_no_storage(
    server: ServerProcess, browser: Browser, getter: str
) -> None:
    define = f"Object.defineProperty(window, name, {{get() {{ {getter} }}}})"
    script = f"for (const name of ['localStorage', 'sessionStorage']) {define}"
    browser.call("Page.addScriptToEvaluateOnNewDocument", source=script)
    browser.open(server.url + "/")
    browser.wait_for(READY)
    ask(browser, "What does a cow say?")
    assert "moo" in messages(browser)[1][1] and titles(browser) == ["What does a cow say?"]
    assert browser.evaluate("$('stored').textContent").startswith("Not stored")
    check_connections(browser, server.url)


def test_texts_of_models_users_and_errors_are_never_markup(server: ServerProcess, browser: Browser) -> None:
    browser.open(server.url + "/")
    browser.wait_for(READY)
    hostile = json.dumps('<img src="x" onerror="window.ran = 1"><svg onload="window.ran = 1">')
    browser.evaluate(f"window.hostile = {hostile}, cards[0].id = hostile, $('model').options[0].value = hostile")
    pieces = "yield {reasoning: hostile}; yield {content: hostile}; throw new ServerError(hostile)"
    browser.evaluate(f"streamChat = async function* () {{ {pieces} }}")
    ask(browser, json.loads(hostile))
    browser.evaluate("cards[0].capabilities = ['completion'], $('new').click()")
    assert "continues text" in browser.evaluate("$('empty').textContent")
    for capabilities, expected in ((["embedding"], "/v1/embeddings"), ([], "/classify")):
        browser.evaluate(f"cards[0].capabilities = {capabilities}, showConversation()")
        assert expected in browser.evaluate("$('empty').textContent") and browser.evaluate("$('text').disabled")
    browser.evaluate("document.querySelector('#list li button').click()")
    assert browser.evaluate("document.querySelector('.error').textContent === hostile")
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    assert browser.evaluate("window.ran") is None and browser.problems() == []


def test_a_text_can_be_pasted_that_programs_offer_as_a_picture_too(server: ServerProcess, browser: Browser) -> None:
    browser.open(server.url + "/")
    browser.wait_for(READY)
    browser.evaluate("window.data = new DataTransfer(), data.items.add(new File(['x'], 'x.png', {type: 'image/png'}))")
    paste = "$('text').dispatchEvent(new ClipboardEvent('paste', {clipboardData: data, cancelable: true}))"
    assert browser.evaluate(paste) is False  # the page takes the picture
    browser.evaluate("data.setData('text/plain', 'a cell')")
    assert browser.evaluate(paste) is True


def test_on_a_phone_the_header_is_one_line_and_the_form_two_rows_at_most(
    server: ServerProcess, browser: Browser
) -> None:
    set_size(browser, 390, 844)
    browser.open(server.url + "/")
    browser.wait_for(READY)
    height = "document.querySelector('{}').getBoundingClientRect().height"
    assert browser.evaluate(height.format("header")) < 60 and browser.evaluate(height.format("#form")) < 110
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    assert browser.evaluate("$('text').scrollWidth <= $('text').clientWidth")  # the placeholder is not cut
    ask(browser, "What does a cow say?")
    browser.evaluate("$('open-settings').click()")
    assert browser.evaluate(height.format("main")) > 600  # settings are above it
    browser.evaluate("$('settings-form').requestSubmit()")
    assert not browser.evaluate("$('settings').open")
    browser.evaluate("$('menu').click()")
    assert browser.evaluate("getComputedStyle($('side')).display") == "flex"
    browser.evaluate("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))")
    assert browser.evaluate("getComputedStyle($('side')).display") == "none"
    check_connections(browser, server.url)


def test_a_server_with_keys_and_a_model_that_takes_pictures(tmp_path: Path, browser: Browser) -> None:
    with ServerProcess(tmp_path, "demo-vision", "--port", "0", "--api-key", KEY, *SMALL) as server:
        server.wait_ready()
        browser.open(server.url + "/")
        browser.wait_for("document.querySelector('#key-dialog')?.open === true")
        assert browser.evaluate("$('key-text').textContent") == "This server needs an API key."
        for key, expected in (("wrong", "$('key-text').textContent.includes('does not accept')"), (KEY, READY)):
            browser.evaluate(f"$('key').value = {key!r}, $('key-form').requestSubmit()")
            browser.wait_for(expected)
        assert browser.evaluate("$('key-dialog').open") is False
        assert browser.evaluate("JSON.stringify(localStorage)").count(KEY) == 0
        assert not browser.evaluate("$('attach').hidden") and browser.evaluate("$('record').hidden")
        browser.evaluate("$('temperature').value = 0, settingsChanged()")
        browser.evaluate("document.querySelector('#empty button').click()")
        browser.wait_for(IDLE)
        assert "red circle" in messages(browser)[1][1]
        browser.call("Page.reload")  # the key and the picture stay
        browser.wait_for(RELOADED)
        assert browser.evaluate("document.querySelectorAll('.user img').length") == 1
        url = "conversation.messages[0].content[0].image_url.url.split(',')[1]"
        data = f"Uint8Array.from(atob({url}), c => c.charCodeAt(0))"
        browser.evaluate(f"window.picture = new File([{data}], 'a.png', {{type: 'image/png'}}), $('new').click()")
        browser.evaluate("attach([picture, picture])")
        browser.evaluate("document.querySelector('#attachments button').click()")  # removes one
        ask(browser, "What is in the picture?")
        assert "red circle" in messages(browser)[1][1]
        assert browser.evaluate("document.querySelectorAll('.user img').length") == 1
        check_connections(browser, server.url, except_status="401")


def test_a_recording_becomes_a_wav_file_for_models_that_take_audio(server: ServerProcess, browser: Browser) -> None:
    tone = io.BytesIO()
    with wave.open(tone, "wb") as file:
        file.setparams((2, 2, 8000, 0, "NONE", ""))
        file.writeframes(b"\x00\x40\x00\x40" * 4000)  # half a second, two channels
    data = f"Uint8Array.from(atob('{base64.b64encode(tone.getvalue()).decode()}'), c => c.charCodeAt(0))"
    browser.open(server.url + "/")
    browser.wait_for(READY)
    browser.evaluate("cards[0].input_modalities.push('audio'), showAbilities()")
    assert not browser.evaluate("$('record').hidden") and browser.evaluate("$('attach').hidden")
    browser.evaluate(f"toWav(new Blob([{data}])).then(file => attach([file]))")
    assert browser.evaluate("$('attachments').textContent") == "voice, 0.5 s"
    part = browser.evaluate("attachments[0]")
    assert part["type"] == "input_audio" and part["input_audio"]["format"] == "wav"
    with wave.open(io.BytesIO(base64.b64decode(part["input_audio"]["data"]))) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 16000)
        samples = array("h", file.readframes(file.getnframes()))
    assert len(samples) == pytest.approx(8000, abs=50) and samples[4000] == pytest.approx(0x4000, rel=0.05)


def test_a_message_is_spoken_into_the_microphone(tmp_path: Path, browser: Browser) -> None:
    model = make_checkpoint("qwen2_audio", tmp_path / "model")
    with ServerProcess(tmp_path, str(model), "--port", "0", "--max-num-seqs", "2") as server:
        browser.open(server.wait_ready().url + "/")
        browser.wait_for(READY)
        browser.evaluate(
            "$('max_tokens').value = 5, $('record').click(), $('record').click()"
        )  # the second has no effect
        browser.wait_for("$('record').textContent === 'End recording' && recorder.state === 'recording'")
        browser.evaluate("new Promise(done => setTimeout(done, 500)).then(() => $('record').click())")
        browser.wait_for("attachments.length === 1")
        assert re.fullmatch(r"voice, (?!0\.0)\d+\.\d s", spoken := browser.evaluate("$('attachments').textContent"))
        ask(browser, "What do you hear?")
        assert "5 tokens" in browser.evaluate("document.querySelector('.assistant footer').innerText")
        assert browser.evaluate("document.querySelector('.user .chip').textContent") == spoken
        check_connections(browser, server.url)


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
    '<div class="code"><div><span>python</span>'
    '<button class="quiet" type="button" aria-label="Copy the code">Copy</button></div>'
    '<pre><code>x = "&lt;script&gt;"</code></pre></div>'
    '<p>&lt;img src=x onerror="window.ran=1"&gt; [a](javascript:alert(1)) **open</p>'
)


def test_markdown_is_rendered_and_no_script_in_it_runs(server: ServerProcess) -> None:
    with Browser() as browser:
        browser.open(server.url + "/")
        browser.wait_for(READY)
        browser.evaluate(f"markdown({json.dumps(MARKDOWN)}, make('div', $('log'))), $('log').lastChild.id = 'drawn'")
        assert browser.evaluate("$('drawn').innerHTML") == DRAWN
        assert browser.evaluate("window.ran") is None
        for hostile in ("`a ", "*a", "**", "_a ", "- ", "> ", "```\n", "1. ", "- - "):  # none takes quadratic time
            expression = f"markdown({hostile!r}.repeat(10000), document.createElement('div'))"
            browser.evaluate(f"performance.mark('a'), {expression}")
            assert browser.evaluate("performance.now() - performance.getEntriesByName('a').at(-1).startTime") < 5000
        assert browser.problems() == []


def test_routes_can_be_tried_on_the_page_of_the_api(server: ServerProcess) -> None:
    with Browser() as browser:
        browser.open(server.url + "/docs")
        browser.wait_for("document.forms.length > 10")
        groups = browser.evaluate("[...document.querySelectorAll('h2')].map(h => h.textContent)")
        assert [name for name in groups if name in TAGS] == [name for name in TAGS if name != "plugins"]
        for path, answer in (("/v1/completions", "text_completion"), ("/v1/models", '"demo"'), ("/sleep", "admin")):
            browser.evaluate(f"form = [...document.forms].find(f => f.dataset.path === {path!r}), form.requestSubmit()")
            browser.wait_for(f"form.querySelector('pre')?.textContent.includes({answer!r})")
        assert all(url.startswith((server.url, "about:", "data:")) for url in browser.requested())
        assert [problem for problem in browser.problems() if "403" not in problem] == []
