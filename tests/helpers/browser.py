"""Headless Chromium, controlled through its debugging pipe (JSON messages that end with a zero byte)."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from typing import Any

from tests.helpers.processes import wait_until

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SECONDS = 120


class Browser:
    """A page in a separate browser process."""

    def __init__(self) -> None:
        assert PROGRAM
        self._profile = tempfile.TemporaryDirectory(prefix="browser-")
        read_commands, self._write = os.pipe()
        self._read, write_answers = os.pipe()

        def as_3_and_4() -> None:
            # The browser reads descriptor 3 and writes descriptor 4; neither may be overwritten before it is copied.
            first, second = os.dup(read_commands), os.dup(write_answers)
            os.dup2(first, 3)
            os.dup2(second, 4)

        self._process = subprocess.Popen(
            [PROGRAM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream",  # a microphone that beeps
             "--remote-debugging-pipe", f"--user-data-dir={self._profile.name}", "--window-size=1000,700"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=as_3_and_4,
        )  # fmt: skip
        os.close(read_commands)
        os.close(write_answers)
        self._ids = itertools.count(1)
        self._held = b""
        self.events: list[dict[str, Any]] = []
        self.session: str | None = None
        self.open_tab()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *unused: object) -> None:
        self._process.kill()
        self._process.wait(30)
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol; events received in the meantime are appended to `events`."""
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)
        raise AssertionError(f"no answer to {method}")

    def open_tab(self) -> None:
        """Opens an empty tab, in which all further calls take place; `session` selects one of several."""
        self.session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Returns when a JavaScript expression is true in the page."""
        wait_until(lambda: self.evaluate(expression), SECONDS, expression)

    def screenshot(self) -> bytes:
        """The page as a PNG image."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def problems(self) -> list[str]:
        """Exceptions of the page, and requests that the browser blocked."""
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.events if event.get("method") in kinds]

    def requested(self) -> set[str]:
        """All URLs that the page has requested."""
        kind = "Network.requestWillBeSent"
        return {event["params"]["request"]["url"] for event in self.events if event.get("method") == kind}

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            piece = os.read(self._read, 1 << 16)
            assert piece, "the browser has ended"
            self._held += piece
        message, _, self._held = self._held.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded
