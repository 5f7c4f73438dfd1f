"""The tables of docs/user-guide.md, made from the declarations that they describe.

python -m tests.unit.docs.guide_tables      writes them into the page
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
from mvllm.entrypoints.cli.main import COMMANDS

PAGE = Path(__file__).parents[3] / "docs" / "user-guide.md"


def tables() -> dict[str, str]:
    """Every generated table by its name in the page."""
    return {
        "commands": _table(("command", "what it does"), ((f"`mvllm {c}`", text) for c, text in COMMANDS.items())),
        "sampling": _table(("parameter", "default", "permitted", "meaning"), _sampling_rows()),
        "engine": _table(("setting", "default", "permitted", "meaning"), _engine_rows()),
        "environment": _table(("variable", "meaning"), ((f"`{n}`", text) for n, text in KNOWN_VARIABLES.items())),
    }


def with_tables(page: str) -> str:
    """The page with its tables made anew."""
    for name, table in tables().items():
        begin, end = f"<!-- table: {name} -->\n", "\n<!-- end of table -->"
        pattern = re.compile(f"({re.escape(begin)}).*?({re.escape(end)})", re.DOTALL)
        assert len(pattern.findall(page)) == 1, f"the page has no place for the table {name!r}"
        page = pattern.sub(lambda match, table=table: match[1] + table + match[2], page)  # type: ignore[misc]
    return page


def permitted_values(name: str) -> str:
    """What the refusal of an impossible value says that a sampling parameter must be."""
    try:
        SamplingParams(**{name: object()})
    except RequestError as e:
        return str(e).partition(" must be ")[2].rpartition("; got ")[0]
    raise AssertionError(f"{name} accepts anything")


def _sampling_rows() -> Iterable[Sequence[str]]:
    texts = attribute_help(SamplingParams)
    for field in msgspec.structs.fields(SamplingParams):
        default = field.default.name if field.name == "output_kind" else field.default
        yield f"`{field.name}`", f"`{default}`", permitted_values(field.name), texts[field.name]


def _engine_rows() -> Iterable[Sequence[str]]:
    for setting in EngineArgs.options():
        names = " or ".join(f"`{name}`" for name in (setting.name, *setting.aliases))
        default = "(required)" if setting.name == "model" else f"`{setting.default!r}`"
        yield names, default, setting.permitted(), setting.help


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
