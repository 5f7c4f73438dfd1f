"""Every command of the pages that users copy from is classified, names files that exist, and has options that exist."""

from __future__ import annotations

import argparse
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from mvllm.entrypoints.cli import main
from mvllm.entrypoints.cli.argument_parser import find_subcommand
from tests.unit.docs.every_part import needs_every_part
from tests.unit.docs.page_commands import (
    PAGES,
    PROGRAMS_ELSEWHERE,
    ROOT,
    ROWS,
    TESTED,
    Block,
    Command,
    _commands_of_block,
    all_commands,
    blocks_of,
    files_of,
    joined,
    row_of,
    without_comment,
)

INSTALL = "docs/how-to/install.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WRITTEN = {"app.yaml", "waivers.toml", "conformance.json", "constraints.txt"}
"""Files that commands name and the page explains, or that the commands before write."""
COMMANDS = all_commands()


def test_every_command_is_classified() -> None:
    unknown = [str(command) for command in COMMANDS if row_of(command) is None]
    assert unknown == [], "add a row to ROWS in tests/unit/docs/page_commands.py; output has the language `text`"


def test_there_are_commands_on_every_page() -> None:
    assert {command.page for command in COMMANDS} >= set(PAGES)


def test_rows_name_tests_that_exist_or_reasons() -> None:
    for row in ROWS:
        if row.what == TESTED:
            assert (ROOT / row.note).is_file(), row
        assert row.note or row.what != "not run", row


def test_no_command_installs_a_name_of_ours_from_an_index() -> None:
    for command in COMMANDS:
        if re.search(r"\b(install|add|download)\b", command.normal):
            text = re.sub(r"--reinstall-package \S+|^.*\binstall\b", "", command.normal)
            assert not re.search(r"(?:^|[\s\"'])mvllm(-\w+)*(?=[\s\"'\[=<>~]|$)", text), str(command)


def test_files_that_commands_name_exist() -> None:
    for command in COMMANDS:
        saved = set(files_of(command.page)) if command.page.endswith(".md") else set()
        for word in re.split(r"[\s=\"'{}]+", command.normal):
            word = word.removeprefix("./").partition("[")[0]
            is_ours = re.match(r"(docs|ci|core|platforms|plugins)/[\w./-]+$", word)
            is_file = re.match(r"[\w-]+\.(png|jpg|wav|py|yaml|toml|json|txt)$", word)
            if is_ours or (is_file and word not in saved | WRITTEN):
                assert (ROOT / word).exists(), f"{command}: {word}"


def test_every_program_of_a_page_is_saved_and_run_or_named() -> None:
    for page in PAGES:
        saved = set(files_of(page).values())
        rest = [block for block in blocks_of(page) if block.language == "python" and block.text not in saved]
        assert not rest or page in PROGRAMS_ELSEWHERE, (page, rest[0].line)
        for name in files_of(page):
            if "/" not in name:
                assert any(command.page == page and command.normal == f"python {name}" for command in COMMANDS), name
    assert all((ROOT / each).is_file() for each in PROGRAMS_ELSEWHERE.values() if each.startswith("tests/"))


@needs_every_part
@pytest.mark.parametrize("page", sorted({command.page for command in COMMANDS}))
def test_options_of_mvllm_exist(page: str) -> None:
    for command in COMMANDS:
        match = re.search(r"(?:^|&& |\bmvllm:\w+ )(?:mvllm )?([a-z][a-z-]*(?: .*)?)$", command.normal)
        if command.page == page and match and ("mvllm " in command.normal.split(" |")[0]):
            words = shlex.split(command.normal.split(" |")[0])
            if words[0] == "mvllm":
                name = next(word for word in words[1:] if not word.startswith("-"))
                assert options(words[1:]) <= known_options(words[1:], name), str(command)


def options(words: list[str]) -> set[str]:
    return {word.split("=")[0] for word in words if word.startswith("--")}


def known_options(words: list[str], name: str) -> set[str]:
    """The options of a command, or of its subcommand."""
    parser = main._make_parser(name, main.load_command(name), main.installed_commands())
    command: argparse.ArgumentParser = find_subcommand(parser, words)[0]
    return set(command._option_string_actions)


def test_images_contain_copies_of_the_engine() -> None:
    """uv installs the members of a workspace as links, unless it is told otherwise."""
    for path in sorted((ROOT / "docs" / "deploy").glob("*.Dockerfile")):
        text = path.read_text(encoding="utf-8")
        before = text[: text.index('".[parts]"')]
        assert "\nENV UV_NO_EDITABLE=1\n" in before, path.name
        assert "FROM" not in before[before.index("UV_NO_EDITABLE") :], path.name


class TestInstallPage:
    page = (ROOT / INSTALL).read_text(encoding="utf-8")

    def test_it_lists_every_part(self) -> None:
        section = self.page.partition("## Parts")[2].partition("\n## ")[0]
        listed = set(re.findall(r"^\| `(mvllm-[\w-]+)` \|", section, flags=re.MULTILINE))
        parts = {text.partition(">")[0] for text in PROJECT["optional-dependencies"]["parts"]}
        assert listed == parts | {"mvllm-ray"}

    def test_libraries_of_features_are_those_of_the_extras(self) -> None:
        section = self.page.partition("| libraries | for |")[2].partition("\n\n")[0]
        named = {word for cell in re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE) for word in cell.split()}
        extras = PROJECT["optional-dependencies"]
        texts = [text for name in ("completion", "multimodal", "otel") for text in extras[name]]
        assert named == {Requirement(text).name for text in texts} | {"mcp"}

    def test_the_line_of_pip_names_the_folder_of_every_part(self) -> None:
        [command] = [c for c in COMMANDS if c.page == INSTALL and re.match(r"pip install \. ", c.normal)]
        folders = {name for group in re.findall(r"\{([^}]*)\}", command.normal) for name in group.split(",")}
        projects = [tomllib.loads((ROOT / "plugins" / name / "pyproject.toml").read_text()) for name in folders]
        assert {project["project"]["name"] for project in projects} == {
            text.partition(">")[0] for text in PROJECT["optional-dependencies"]["parts"]
        }


class TestExtraction:
    def test_lines_continue_after_a_backslash_and_in_quotes(self) -> None:
        lines = ["# a comment", "curl x \\", "     -d '{", '"a": 1}\'', "", "mvllm doctor   # checks"]
        texts = [text for _, text in joined(list(enumerate(lines, 1)))]
        assert texts == ["curl x       -d '{\n\"a\": 1}'", "mvllm doctor   # checks"]
        assert Command("p", 1, texts[1]).normal == "mvllm doctor"

    def test_a_hash_in_a_word_or_in_quotes_is_no_comment(self) -> None:
        assert without_comment("a 'b # c' d#e # f") == "a 'b # c' d#e"

    def test_a_transcript_has_what_is_typed_and_what_is_printed(self) -> None:
        block = Block("", "$ mvllm chat demo\n> Who?\nMe.\n$ mvllm doctor\n0 broken\n", 5, "")
        first, second = _commands_of_block("p", block)
        assert (first.text, first.typed, first.shown, first.line) == ("mvllm chat demo", ("Who?",), ("Me.",), 5)
        assert (second.text, second.shown) == ("mvllm doctor", ("0 broken",))

    def test_a_command_that_nobody_knows_has_no_row(self) -> None:
        assert row_of(Command("p", 1, "mvllm frobnicate --now")) is None
        assert Path(INSTALL).name == "install.md"
