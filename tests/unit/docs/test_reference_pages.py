"""The generated reference pages agree with the code and contain every public name."""

from __future__ import annotations

import pytest

import mvllm
from tests.unit.docs import cli_page, metrics_page, python_api_page
from tests.unit.docs.every_part import documented_commands, needs_every_part


@pytest.mark.parametrize(
    "generator",
    [
        pytest.param(cli_page, marks=needs_every_part),
        metrics_page,
    ],
)
def test_a_generated_page_is_up_to_date(generator) -> None:
    assert generator.PAGE.read_text(encoding="utf-8") == generator.page(), f"run: python -m {generator.__name__}"


@needs_every_part
def test_the_pages_of_the_python_api_are_up_to_date() -> None:
    pages = python_api_page.pages()
    for path, text in pages.items():
        assert path.read_text(encoding="utf-8") == text, "run: python -m tests.unit.docs.python_api_page"
    assert {*(python_api_page.REFERENCE / "python").glob("*.md")} == pages.keys() - {python_api_page.PAGE}


def test_every_public_name_is_in_the_python_api() -> None:
    listed = [name for names in python_api_page.KINDS.values() for name in names]
    assert sorted([*listed, *python_api_page.ALIASES]) == sorted(set(mvllm.__all__) - {"__version__"})
    for alias, name in python_api_page.ALIASES.items():
        assert getattr(mvllm, alias) is getattr(mvllm, name)


def test_every_command_is_in_the_cli_reference() -> None:
    assert {name.split()[0] for name, _ in cli_page.all_commands()} == set(documented_commands())
