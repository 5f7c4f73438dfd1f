"""Tables of pages in docs, generated from the declarations that they describe.

python -m tests.unit.docs.guide_tables      writes them into the pages
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from mvllm import RequestError, SamplingParams
from mvllm.config.engine_args import EngineArgs
from mvllm.config.env import KNOWN_VARIABLES
from mvllm.entrypoints.cli.arguments import attribute_help
from tests.unit.docs import hardware
from tests.unit.docs.every_part import documented_commands

DOCS = Path(__file__).parents[3] / "docs"
PAGES = {
    "commands": DOCS / "how-to" / "command-line.md",
    "sampling": DOCS / "reference" / "sampling-parameters.md",
    "engine": DOCS / "reference" / "engine-settings.md",
    "environment": DOCS / "reference" / "environment-variables.md",
    "hardware": DOCS.parent / "README.md",
    "hardware-features": DOCS / "reference" / "features.md",
}


def tables() -> dict[str, str]:
    """Every generated table by its name in its page."""
    return {
        "commands": _table(
            ("command", "what it does"), ((f"`mvllm {c}`", text) for c, text in documented_commands().items())
        ),
        "sampling": _table(("parameter", "default", "permitted", "meaning"), _sampling_rows()),
        "engine": _table(("setting", "default", "permitted", "meaning"), _engine_rows()),
        "environment": _table(("variable", "meaning"), ((f"`{n}`", text) for n, text in KNOWN_VARIABLES.items())),
        "hardware": hardware.table(to_root=""),
        "hardware-features": hardware.table(to_root="../../"),
    }


def with_table(page: str, name: str, table: str) -> str:
    """The page with the table of that name replaced."""
    begin, end = f"<!-- table: {name} -->\n", "\n<!-- end of table -->"
    pattern = re.compile(f"({re.escape(begin)}).*?({re.escape(end)})", re.DOTALL)
    assert len(pattern.findall(page)) == 1, f"the page has no place for the table {name!r}"
    return pattern.sub(lambda match: match[1] + table + match[2], page)


def permitted_values(name: str) -> str:
    """The permitted values of a sampling parameter, from its error message."""
    try:
        SamplingParams(**{name: object()})
    except RequestError as e:
        return str(e).partition(" must be ")[2].rpartition("; got ")[0]
    raise AssertionError(f"{name} accepts anything")


def _permits_none(name: str) -> bool:
    try:
        SamplingParams(**{name: None})
    except RequestError:
        return False
    return True


def _sampling_rows() -> Iterable[Sequence[str]]:
    texts = attribute_help(SamplingParams)
    for field in msgspec.structs.fields(SamplingParams):
        default = field.default.name if field.name == "output_kind" else field.default
        none = " or None" if _permits_none(field.name) else ""
        yield f"`{field.name}`", f"`{default}`", permitted_values(field.name) + none, texts[field.name]


def _engine_rows() -> Iterable[Sequence[str]]:
    for setting in EngineArgs.options():
        names = " or ".join(f"`{name}`" for name in (setting.name, *setting.aliases))
        default = "(required)" if setting.name == "model" else f"`{setting.default!r}`"
        yield names, default, setting.permitted() + (" or None" if setting.nullable else ""), setting.help


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


if __name__ == "__main__":
    for name, table in tables().items():
        page = PAGES[name]
        page.write_text(with_table(page.read_text(encoding="utf-8"), name, table), encoding="utf-8")
