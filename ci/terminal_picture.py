#!/usr/bin/env python3
"""Draws docs/images/terminal.svg, the picture in README.md: commands and their output.

python3 ci/terminal_picture.py      runs the commands in .venv and writes the picture
"""

from __future__ import annotations

import html
import os
import subprocess
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "terminal.svg"
COMMANDS = (
    'mvllm generate demo --prompt "Once upon a time" --prompt "The opposite of hot is" --max-tokens 48 --seed 1',
    'echo "What is the capital of Italy?" | mvllm chat demo',
)
COLUMNS = 88
CHARACTER_WIDTH, LINE_HEIGHT, MARGIN, TITLE_BAR = 8.4, 19, 18, 30
PROMPT, TEXT, BACKGROUND, BAR = "#7ee787", "#e6edf3", "#0d1117", "#21262d"


def run(command: str) -> list[str]:
    """The output of a command without log lines, wrapped to the picture's width."""
    path = os.pathsep.join((str(ROOT / ".venv" / "bin"), os.environ["PATH"]))
    environment = {**os.environ, "PATH": path, "MVLLM_LOGGING_LEVEL": "WARNING"}
    ran = subprocess.run(["sh", "-c", f"{command} 2>&1"], env=environment, capture_output=True, text=True, check=True)
    return [part for line in ran.stdout.strip().splitlines() for part in textwrap.wrap(line, COLUMNS) or [""]]


def draw(lines: list[tuple[str, str]]) -> str:
    """An SVG of a terminal window with lines of (color, text)."""
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
    lines: list[tuple[str, str]] = []
    for command in COMMANDS:
        shown = textwrap.wrap(command, COLUMNS - 4, break_on_hyphens=False)
        lines += [
            (PROMPT, ("$ " if i == 0 else "    ") + part + (" \\" if part is not shown[-1] else ""))
            for i, part in enumerate(shown)
        ]
        lines += [*((TEXT, line) for line in run(command)), (TEXT, "")]
    PICTURE.write_text(draw(lines[:-1]), encoding="utf-8")


if __name__ == "__main__":
    main()
