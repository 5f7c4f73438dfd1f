#!/usr/bin/env python3
"""Draws docs/images/playground.png, the server's page with a short conversation, in a browser without a window.

.venv/bin/python ci/playground_picture.py       starts a server with the demo model, and writes the picture

It needs Chromium (Debian's package `chromium`), and is run by hand when the page has changed. It knows of the page that
it has one form with a text area, and that answers appear in its text.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "playground.png"
CONVERSATION = (("What is the capital of France?", "Paris"), ("And of Italy?", "Rome"))

SHOWN = "document.body.innerText"
ASK = """(text => {
    const area = document.querySelector('textarea');
    area.value = text;
    area.dispatchEvent(new Event('input', {bubbles: true}));
    area.form.requestSubmit();
})(%s)"""
STATISTICS = "/tokens, [^]*tokens.s/.test(document.body.innerText.split('%s').at(-1))"


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from tests.helpers.browser import PROGRAM, Browser
    from tests.helpers.server import SMALL, ServerProcess

    if PROGRAM is None:
        sys.exit("error: there is no Chromium\n  remedy: install Debian's package chromium, or Chrome")
    with tempfile.TemporaryDirectory() as folder:
        with ServerProcess(Path(folder), "demo", "--port", "0", *SMALL) as server, Browser() as browser:
            browser.open(f"{server.wait_ready().url}/")
            browser.wait_for("document.querySelector('textarea') !== null")
            browser.wait_for("document.body.textContent.includes('demo')")
            browser.evaluate("{ const field = document.querySelector('#temperature'); if (field) field.value = 0 }")
            for question, answer in CONVERSATION:
                browser.evaluate(ASK % json.dumps(question))
                browser.wait_for(f"{SHOWN}.includes({json.dumps(answer)})")
                browser.wait_for(STATISTICS % question)  # they appear when the answer is complete
            PICTURE.write_bytes(browser.screenshot())


if __name__ == "__main__":
    main()
