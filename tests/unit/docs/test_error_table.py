"""The error table of docs/reference/executors.md has every error that a user can see, and no others."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EXECUTORS = [
    *(ROOT / "core" / "mvllm" / "executor").rglob("*.py"),
    *(ROOT / "plugins" / "ray-executor" / "src").rglob("*.py"),
]
SOURCES = [
    *EXECUTORS,
    *(ROOT / "core" / "mvllm" / "engine").rglob("*.py"),
    ROOT / "core" / "mvllm" / "messages" / "process_failure.py",
    ROOT / "core" / "mvllm" / "plugin_groups.py",
    *(ROOT / "platforms" / "cpu" / "src").rglob("*communicator.py"),
]
PAGE = (ROOT / "docs" / "reference" / "executors.md").read_text(encoding="utf-8")

INTERNAL_ERRORS = ("EOFError", "PipeProcessError")  # always handled: a closed connection, a reason code
HOLE = "\0"  # the source has a value where the page has "..."

NOT_FOR_USERS = (
    "is not contiguous; make it so before sending",
    "names open files, so it can only be sent to a child",
    "is still in use after the message was",
    "remote_readers and host go together",
    "has remote readers, so the process that created it has to write it",
    "was created without remote readers",
    "no process of this one to watch",
    "it takes 1 to",
    "was closed; nothing can be",
    "in the configuration cannot",
    "its token is wrong, or there is no message",
    "the other process announced",
    "module ... has no attribute",
    f"module {HOLE} has no attribute",
)
"""Errors of internal interfaces: no setting and no request of a user causes them, or they are only part of another
error."""


def _constant(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else HOLE for v in node.values)
    return None


def _without_docstrings(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Expr) and _constant(node.value) is not None):
            yield from ast.iter_child_nodes(node)


@functools.cache
def source_texts() -> list[str]:
    """Every text in the sources of executors, engine core and communicator, with a placeholder for each value."""
    texts = []
    for file in sorted(SOURCES):
        texts += [text for n in _without_docstrings(ast.parse(file.read_text("utf-8"))) if (text := _constant(n))]
    return texts


def error_texts() -> list[tuple[str, str]]:
    """The location of each error, and its text."""
    found = []
    for file in sorted(EXECUTORS):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("Error"):
                text = _constant(node.args[0]) if node.args else None
                if text is not None and node.func.id not in INTERNAL_ERRORS:
                    found.append((f"{file.relative_to(ROOT)}:{node.lineno}", text))
    return found


def table_texts() -> list[str]:
    """The code spans in the first column."""
    table = PAGE.partition("## Errors by their text")[2].partition("\n## ")[0]
    first = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")][2:]
    return [span for cell in first for span in re.findall(r"`([^`]+)`", cell)]


def is_part_of(span: str, text: str) -> bool:
    """Whether a source text, with values for its placeholders, can contain the text of the page."""
    pattern = ".*".join(re.escape(piece) for piece in re.split(r" ?\.\.\. ?", span))
    return re.search(pattern, text.replace(HOLE, "..."), re.DOTALL) is not None


SPANS = table_texts()


@pytest.mark.parametrize("span", SPANS)
def test_every_error_in_the_table_exists_in_the_sources(span: str) -> None:
    assert any(is_part_of(span, text) for text in source_texts()), "no executor says this"


def test_every_error_that_users_can_see_is_in_the_table() -> None:
    texts = error_texts()
    assert len(texts) > 30, "looked in the wrong place"
    missing = [
        f"{where}: {text.replace(HOLE, '...')}"
        for where, text in texts
        if re.search(r"[a-z]{3}", text.replace(HOLE, ""))  # not a text that consists of values alone
        and not any(part in text for part in NOT_FOR_USERS)
        and not any(is_part_of(span, text) for span in SPANS)
    ]
    assert not missing, "\n".join(missing)


def test_the_check_detects_unknown_texts() -> None:
    assert is_part_of("was not ready within ... s", f"{HOLE} was not ready within {HOLE} s; it is")
    assert is_part_of("of ... bytes claims", f"message of {HOLE} bytes claims {HOLE} frames")
    assert not is_part_of("was ready within", f"{HOLE} was not ready within {HOLE} s")
