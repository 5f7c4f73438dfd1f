#!/usr/bin/env python3
"""Draws the terminals in README.md: commands and their output.

.venv/bin/python ci/terminal_picture.py     runs the commands in .venv, and writes docs/images/terminal.svg

The conversation is with SmolLM2 135M, which `python3 ci/dev.py test --published` fetches (tests/helpers/published.py).
"""

from __future__ import annotations

import html
import os
import pty
import re
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "terminal.svg"
COMMAND = 'mvllm generate demo --prompt "Once upon a time" --max-tokens 48 --seed 1'
CHAT = "mvllm chat {file} --temperature 0 --dtype float32"
QUESTIONS = (
    "What is the capital of France?",
    "What can I see there in one day? Answer in one sentence.",
)
COLUMNS = 88
CHARACTER_WIDTH, LINE_HEIGHT, MARGIN, TITLE_BAR = 8.4, 19, 18, 30
PROMPT, TEXT, BACKGROUND, BAR = "#7ee787", "#e6edf3", "#0d1117", "#21262d"
Lines = list[tuple[str, str]]
"""Lines of the picture, with their colours."""


def environment() -> dict[str, str]:
    """Variables of the commands: those of .venv, and no log lines."""
    path = os.pathsep.join((str(ROOT / ".venv" / "bin"), os.environ["PATH"]))
    return {**os.environ, "PATH": path, "MVLLM_LOGGING_LEVEL": "WARNING", "TERM": "dumb", "COLUMNS": "1000"}


def wrapped(text: str) -> Lines:
    """Lines of output."""
    return [(TEXT, part) for line in text.strip().splitlines() for part in textwrap.wrap(line, COLUMNS) or [""]]


def typed(command: str) -> Lines:
    """The lines of a command behind the shell's prompt."""
    shown = textwrap.wrap(command, COLUMNS - 4, break_on_hyphens=False)
    return [
        (PROMPT, ("$ " if i == 0 else "    ") + part + (" \\" if part is not shown[-1] else ""))
        for i, part in enumerate(shown)
    ]


def run(command: str) -> Lines:
    """A command and its output."""
    ran = subprocess.run(["sh", "-c", f"{command} 2>&1"], env=environment(), capture_output=True, text=True, check=True)
    return [*typed(command), *wrapped(ran.stdout)]


def converse(command: str, questions: tuple[str, ...], folder: Path) -> Lines:
    """A command that asks for lines with the prompt "> ": what a user sees of it in a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command.split(), cwd=folder, env=environment(), stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL
    )
    os.close(theirs)
    lines = typed(command)

    def output() -> str:
        """What the command writes until it asks for a line."""
        seen = b""
        while not seen.replace(b"\r", b"").endswith(b"\n> "):
            seen += os.read(ours, 4096)
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", seen.decode()).removesuffix("> ")

    output()  # which platform it runs on, and its commands
    for question in questions:
        os.write(ours, question.encode() + b"\n")
        lines += [(PROMPT, f"> {question}"), *wrapped(output().partition(question)[2])]
    process.terminate()
    process.wait(60)
    os.close(ours)
    return lines


def draw(lines: Lines) -> str:
    """An SVG of a terminal window."""
    width, height = COLUMNS * CHARACTER_WIDTH + 2 * MARGIN, TITLE_BAR + len(lines) * LINE_HEIGHT + 2 * MARGIN
    rows = [
        f'<text x="{MARGIN}" y="{TITLE_BAR + MARGIN + (i + 0.7) * LINE_HEIGHT:.1f}" fill="{color}" '
        f'xml:space="preserve">{html.escape(text)}</text>'
        for i, (color, text) in enumerate(lines)
        if text
    ]
    dots = [
        f'<circle cx="{20 + 18 * i}" cy="15" r="5.5" fill="{c}"/>' for i, c in enumerate(("#f85149", "#d29922", PROMPT))
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}">',
            f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>',
            f'<rect width="100%" height="{TITLE_BAR}" rx="8" fill="{BAR}"/>',
            *dots,
            '<g font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="14">',
            *rows,
            "</g>\n</svg>\n",
        ]
    )


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from tests.helpers.published import MISSING, find_published

    model = find_published("smollm2")
    if model is None:
        sys.exit(f"error: {MISSING}")
    lines = [*run(COMMAND), (TEXT, ""), *converse(CHAT.format(file=model.name), QUESTIONS, model.parent)]
    PICTURE.write_text(draw(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
