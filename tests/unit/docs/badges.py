"""The badges of README.md, drawn from what the repository states: docs/images/badge-*.svg.

python -m tests.unit.docs.badges      writes them; that of conformance shows the last record of the CPU platform
"""

from __future__ import annotations

import tomllib
from collections import Counter

from mvllm.testing.report import draw_badge
from mvllm.version import __version__
from tests.unit.docs.platforms_page import ROOT, read_records

FOLDER = ROOT / "docs" / "images"
GREEN, BLUE, RED = "#1e8449", "#1f5fa8", "#c0392b"


def badges() -> dict[str, str]:
    """Every badge by the name of its file."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    record = read_records()["cpu"]
    counts = Counter(status for status, _ in record["clauses"].values())
    conformant = record["failed"] == 0 and not set(counts) - {"passed", "not claimed"}
    verdict = f"contract {record['plugin']['contract']}, {counts['passed']} clauses passed"
    shown = {
        "release": ("release", __version__, BLUE),
        "python": ("python", project["requires-python"].removeprefix(">=") + " or newer", BLUE),
        "license": ("license", project["license"], BLUE),
        "conformance-cpu": ("conformance", verdict, GREEN if conformant else RED),
    }
    return {f"badge-{name}.svg": draw_badge(*parts) for name, parts in shown.items()}


if __name__ == "__main__":
    for name, text in badges().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
