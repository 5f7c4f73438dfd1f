#!/usr/bin/env python3
"""Writes the tables and draws the charts that show the figures of docs/explanation/performance.toml.

python3 ci/performance_charts.py     writes README.md, docs/explanation/performance.md and docs/images/performance-*.svg

Charts carry a background and colours for readers with a light and with a dark theme.
"""

from __future__ import annotations

import html
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "explanation" / "performance.toml"
IMAGES = ROOT / "docs" / "images"
PAGE = ROOT / "docs" / "explanation" / "performance.md"
README = ROOT / "README.md"
Row = dict[str, Any]

PEERS = {"vllm": "vLLM", "openvino": "OpenVINO", "llamacpp": "llama.cpp"}
CHART_OF_FILES = ("SmolLM2-135M-Instruct Q4_1", "Gemma 3 270M Q4_K_M", "model M, Q4_K_M")
STYLE = """<style>
  .back { fill: #ffffff } .text { fill: #1f2328 } .quiet { fill: #59636e } .line { stroke: #d1d9e0 }
  .bar { fill: #1f6feb } .one { stroke: #59636e }
  @media (prefers-color-scheme: dark) {
    .back { fill: #0d1117 } .text { fill: #f0f6fc } .quiet { fill: #9198a1 } .line { stroke: #3d444d }
    .bar { fill: #4493f8 } .one { stroke: #9198a1 }
  }
</style>"""


@dataclass(frozen=True)
class Bar:
    """A bar of a chart.

    Attributes:
        group: Title of the bars that stand together.
        label: What was run.
        ratio: How many times as fast as the other engine.
    """

    group: str
    label: str
    ratio: float


def read() -> dict[str, list[Row]]:
    """The figures."""
    return tomllib.loads(DATA.read_text(encoding="utf-8"))


def charts(data: dict[str, list[Row]]) -> dict[str, str]:
    """Every chart by the name of its file."""
    vllm = [
        Bar(row["precision"], row["workload"], row["vllm"] / row.get("same", row["mvllm"]))
        for row in data["engines"]
        if "vllm" in row
    ]
    llamacpp = [
        Bar(row["file"], row["workload"], row["llamacpp"] / row["mvllm"])
        for row in data["gguf"]
        if row["file"] in CHART_OF_FILES
    ]
    return {
        "performance-vllm.svg": draw("Speed beside vLLM 0.32.0 (CPU): 1 is as fast. Two cores, 162 M parameters", vllm),
        "performance-llamacpp.svg": draw("Speed beside llama.cpp, same GGUF file: 1 is as fast. Two cores", llamacpp),
    }


def draw(title: str, bars: Sequence[Bar]) -> str:
    """A chart of horizontal bars."""
    left, right, line = 260, 640, 24
    most = max(bar.ratio for bar in bars) * 1.05
    top, rows, group = 44, list[str](), ""

    def x(ratio: float) -> float:
        return left + (right - left) * ratio / most

    y = top
    for bar in bars:
        if bar.group != group:
            group = bar.group
            rows.append(f'<text class="text" x="12" y="{y + 15}" font-weight="600">{html.escape(group)}</text>')
            y += line
        rows.append(
            f'<text class="text" x="{left - 10}" y="{y + 15}" text-anchor="end">{html.escape(bar.label)}</text>'
        )
        width = x(bar.ratio) - left
        rows.append(f'<rect class="bar" x="{left}" y="{y + 3}" width="{width:.1f}" height="{line - 8}"/>')
        rows.append(f'<text class="text" x="{x(bar.ratio) + 6:.1f}" y="{y + 15}">{bar.ratio:.2f}</text>')
        y += line
    one = x(1)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 {y + 12}" width="700" font-size="13" '
            f'font-family="system-ui, sans-serif" role="img" aria-label="{html.escape(title)}">',
            STYLE,
            '<rect class="back" width="100%" height="100%"/>',
            f'<text class="text" x="12" y="24" font-size="14" font-weight="600">{html.escape(title)}</text>',
            *rows,
            f'<path class="one" d="M{one:.1f} {top - 8}V{y}" stroke-dasharray="3 3"/>',
            f'<path class="line" d="M{left} {top - 8}V{y}"/>',
            "</svg>\n",
        ]
    )


def tables(data: dict[str, list[Row]]) -> dict[str, str]:
    """Every generated table by its name in its page."""
    return {
        "engines": _table(
            ("workload", "precision", "mvllm", *PEERS.values(), "faster by"), map(_engine_row, data["engines"])
        ),
        "gguf": _table(
            ("file", "workload", "mvllm", "llama.cpp", "faster by", "of each pair"), _file_rows(data["gguf"])
        ),
        "serving": _table(
            ("seconds", "mvllm", "vLLM 0.32.0 (CPU)", "faster by"),
            [
                (f"{row['workload']}, {row['precision']}", f"{ours(row)}", f"{row['vllm']}", f"{times(row)}")
                for row in data["engines"]
                if "vllm" in row and row["workload"].startswith(("mixed", "32"))
            ],
        ),
    }


def ours(row: Row) -> float:
    """Our seconds with the weights that vLLM reads."""
    return float(row.get("same", row["mvllm"]))


def times(row: Row) -> str:
    """How many times as fast as vLLM."""
    return f"{row['vllm'] / ours(row):.2f}"


def _engine_row(row: Row) -> Iterable[str]:
    peers = [row[name] for name in PEERS if name in row]
    shown = f"{row['mvllm']:.3f}" + (f" / {row['same']:.3f}" if "same" in row else "")
    cells = (f"{row[name]:.3f}" if name in row else "" for name in PEERS)
    return (row["workload"], row["precision"], shown, *cells, f"{min(peers) / row['mvllm']:.2f}" if peers else "")


def _file_rows(rows: Sequence[Row]) -> Iterable[Iterable[str]]:
    before = ""
    for row in rows:
        file = row["file"] if row["file"] != before else ""
        before = row["file"]
        seconds = (f"{row[name]:.3f}" for name in ("mvllm", "llamacpp"))
        yield (file, row["workload"], *seconds, f"{row['llamacpp'] / row['mvllm']:.2f}", row["pairs"])


def _table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows))


def with_tables(page: str, data: dict[str, list[Row]]) -> str:
    """A page with those of the generated tables that it has places for."""
    for name, table in tables(data).items():
        begin, end = (re.escape(text) for text in (f"<!-- table: {name} -->\n", "\n<!-- end of table -->"))
        parts = re.split(f"({begin}).*?({end})", page, flags=re.DOTALL)
        if len(parts) == 4:
            page = parts[0] + parts[1] + table + parts[2] + parts[3]
    return page


def files() -> dict[Path, str]:
    """Everything that is generated: files and their content."""
    data = read()
    found = {page: with_tables(page.read_text(encoding="utf-8"), data) for page in (PAGE, README)}
    return {**found, **{IMAGES / name: text for name, text in charts(data).items()}}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
