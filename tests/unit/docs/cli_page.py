"""docs/reference/cli.md: every command of `mvllm` with its options, defaults and help texts.

python -m tests.unit.docs.cli_page    writes the page from the argument parsers

An option that several commands have under the same heading is listed once, in a section of its own.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mvllm.config.engine_args import EngineArgs
from mvllm.entrypoints.cli.help import subcommands
from mvllm.entrypoints.cli.main import _make_parser, installed_commands, load_command
from tests.unit.docs.every_part import documented_commands

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "cli.md"
HEAD = """\
# Command-line reference

Every command with its options, generated from the argument parsers
(`python -m tests.unit.docs.cli_page`). [How to use the command line](../how-to/command-line.md)
explains `--config` files, short numbers and exit statuses.

`mvllm COMMAND --help` prints the same in the terminal, and `mvllm COMMAND --help=WORD` only the
options about a word.
"""
SHARED_HEAD = "## Options of several commands"
GENERAL = "general"
SHARED_BY = 3
"""Options that at least this many commands have go into the shared section."""
SETTING_DEFAULTS = {setting.name: setting.default for setting in EngineArgs.options()}


@dataclass(frozen=True)
class OptionRow:
    """One option as a row of the page."""

    group: str
    names: str
    default: str
    text: str

    def __str__(self) -> str:
        return f"| {self.names} | {self.default} | {self.text} |"


def page() -> str:
    """The complete page."""
    commands = dict(all_commands())
    rows = {name: list(option_rows(parser)) for name, parser in commands.items()}
    counts = Counter(row for found in rows.values() for row in found)
    shared = [row for row, count in counts.items() if count >= SHARED_BY and row.group != GENERAL]
    groups = dict.fromkeys(row.group for row in shared)
    parts = [HEAD]
    parts += [command_section(name, parser, rows[name], shared) for name, parser in commands.items()]
    parts.append(f"{SHARED_HEAD}\n")
    parts += [
        f"### {anchor_title(group)}\n\n{table([row for row in shared if row.group == group])}\n" for group in groups
    ]
    return "\n".join(parts)


def all_commands() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command that takes options, with its parser; subcommands replace their parent command."""
    for name in documented_commands():
        parser = subcommands(_make_parser(name, load_command(name), installed_commands()))[name]
        below = subcommands(parser)
        yield from ((f"{name} {each}", found) for each, found in below.items())
        if not below:
            yield name, parser


def option_rows(parser: argparse.ArgumentParser) -> Iterator[OptionRow]:
    """The options and arguments of one command, without --help."""
    for group in parser._action_groups:
        title = GENERAL if group.title in ("options", "positional arguments") else str(group.title)
        for action in group._group_actions:
            if action.help not in (argparse.SUPPRESS, None) and not isinstance(action, argparse._HelpAction):
                yield option_row(title, action, parser)


def option_row(title: str, action: argparse.Action, parser: argparse.ArgumentParser) -> OptionRow:
    text = " ".join(parser._get_formatter()._expand_help(action).split())
    text, found, default = re.sub(r" \(default: .*\)$", "", text).partition(" Default: ")
    if not found and isinstance(action, argparse.BooleanOptionalAction):
        value_if_absent = SETTING_DEFAULTS.get(action.dest) if action.default is argparse.SUPPRESS else action.default
        default = {True: "on", False: "off"}.get(value_if_absent, "")
    elif not found and action.default not in (None, False, argparse.SUPPRESS, [], ()):
        default = str(action.default)
    value = ""
    if action.nargs != 0 and not isinstance(action, argparse.BooleanOptionalAction):
        metavar = action.metavar if isinstance(action.metavar, str) else None
        value = metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper())
    if not action.option_strings:
        names = f"`{value}`"
    else:
        names = ", ".join(f"`{name} {value}`" if value else f"`{name}`" for name in action.option_strings)
    return OptionRow(title, cell(names), cell(default.removesuffix(".")), cell(text))


def command_section(name: str, parser: argparse.ArgumentParser, rows: list[OptionRow], shared: list[OptionRow]) -> str:
    """One command: its description, usage, own options, and links to shared ones."""
    lines = [f"## mvllm {name}", "", str(parser.description or ""), "", "```", str(parser.usage), "```", ""]
    own = [row for row in rows if row not in shared]
    for group in dict.fromkeys(row.group for row in own):
        if group != GENERAL:
            lines += [f"{group[0].upper()}{group[1:]}:", ""]
        lines += [table([row for row in own if row.group == group]), ""]
    links = []
    for group in dict.fromkeys(row.group for row in rows if row in shared):
        missing = [row.names for row in shared if row.group == group and row not in rows]
        without = f" (without {', '.join(missing)})" if missing else ""
        links.append(f"[{group}](#{anchor_title(group).lower().replace(':', '').replace(' ', '-')}){without}")
    if links:
        lines += [textwrap.fill(f"Shared options: {', '.join(links)}.", 100, break_on_hyphens=False), ""]
    return "\n".join(lines)


def anchor_title(group: str) -> str:
    return f"Shared options: {group}"


def table(rows: list[OptionRow]) -> str:
    return "\n".join(["| option | default | meaning |", "| --- | --- | --- |", *map(str, rows)])


def cell(text: str) -> str:
    """Text within a table; `<` outside of code would be parsed as HTML."""
    return re.sub(r"<(?=\w)(?![^`]*`)", "\\<", text.replace("|", "\\|"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
