"""docs/how-to/coming-from-other-engines.md: commands, options, modules and variables of mvllm in its tables exist."""

from __future__ import annotations

import argparse
import importlib
import re

import pytest

from mvllm.config.env import KNOWN_VARIABLES
from mvllm.entrypoints.cli.argument_parser import find_subcommand
from mvllm.entrypoints.cli.main import COMMANDS, PART_COMMANDS, _make_parser, load_command
from mvllm.installable import installable_parts
from tests.unit.docs.guide_tables import DOCS

PAGE = (DOCS / "how-to" / "coming-from-other-engines.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and line.count("|") == 3
]
OURS = [name for row in ROWS for name in re.findall(r"`([^`]+)`", row[1])]


def options_of(command: str) -> set[str]:
    parser: argparse.ArgumentParser = find_subcommand(_make_parser(command, load_command(command)), [command])[0]
    return {text for action in parser._actions if action.help != argparse.SUPPRESS for text in action.option_strings}


def test_the_tables_have_rows() -> None:
    assert len(ROWS) > 50


@pytest.mark.parametrize("command", sorted({name.split()[1] for name in OURS if name.startswith("mvllm ")}))
def test_a_command_exists(command: str) -> None:
    assert command in {*COMMANDS, *installable_parts()}.union(*PART_COMMANDS.values())


def test_options_exist() -> None:
    known = options_of("serve") | options_of("generate") | {"--system"}  # of `mvllm run`, which is another package's
    named = {option for name in OURS for option in re.findall(r"--[\w-]+", name) if not name.startswith("mvllm ")}
    assert named and not named - known


def test_modules_and_variables_exist() -> None:
    modules = {name for name in OURS if re.fullmatch(r"mvllm(\.\w+)*", name)}
    assert len(modules) > 8
    for name in modules:
        importlib.import_module(name)
    assert {name for name in OURS if name.startswith("MVLLM_")} <= KNOWN_VARIABLES.keys()
