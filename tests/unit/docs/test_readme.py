"""README.md: short, for four readers; badges are up to date, and a release fills in the source address."""

from __future__ import annotations

import re

import pytest

from ci.source_address import MARK, with_address
from tests.unit.docs.every_part import documented_commands, needs_every_part
from tests.unit.docs.hardware import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
READERS = ("You have a laptop", "You serve models", "You make hardware", "You train with reinforcement learning")


def sections() -> dict[str, str]:
    return {part.partition("\n")[0]: part for part in README.split("\n## ")[1:]}


def test_it_fits_two_screens_and_has_a_section_for_each_reader() -> None:
    assert len(README.splitlines()) <= 112
    assert [title for title in sections() if title in READERS] == list(READERS)


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_gets_a_command_a_figure_and_a_link(reader: str) -> None:
    text = sections()[reader]
    assert re.search(r"^```\n(mvllm|pip|python)", text, re.MULTILINE)
    assert re.search(r"\[[^\]]+\]\(docs/", text)
    assert re.search(r"^\[?!\[|\| --- \||\*\*0 patched", text, re.MULTILINE)


def test_the_cost_of_ports_is_that_of_its_page() -> None:
    page = (ROOT / "docs" / "explanation" / "porting-cost.md").read_text("utf-8")
    ours, published = (
        page.partition(f"<!-- table: {name} -->")[2].partition("<!-- end")[0] for name in ("ours", "published")
    )
    assert {line.rstrip(" |").rpartition("|")[2].strip() for line in ours.splitlines()[3:] if line} == {"0"}
    most = max(int(n) for n in re.findall(r"\| (?:about )?(\d+)(?: \([^|]*)? \|$", published, re.MULTILINE))
    assert "**0 patched attributes**" in README and f"the largest plugin of vLLM has {most} " in README


def test_a_clone_has_its_two_commands() -> None:
    assert {"python3 ci/dev.py run", "python3 ci/dev.py test"} <= set(re.findall(r"python3 ci/dev\.py \w+", README))


def test_pictures_are_files_of_the_repository() -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    assert len(pictures) > 6 and [name for name in pictures if not (ROOT / name).is_file()] == []


@needs_every_part
def test_badges_are_up_to_date() -> None:
    from tests.unit.docs.badges import FOLDER, badges

    found = badges()
    assert set(found) == {path.name for path in FOLDER.glob("badge-*.svg")}
    for name, text in found.items():
        assert (FOLDER / name).read_text("utf-8") == text, "run: python -m tests.unit.docs.badges"


def test_no_address_is_invented_and_a_release_fills_its_own() -> None:
    assert README.count(MARK) == 1 and "https://github.com" not in README
    assert with_address(README, "", "0.9.0") == README
    filled = with_address(README, "https://example.org/group/mvllm/", "0.9.0")
    assert "Source: <https://example.org/group/mvllm>." in filled
    assert "(https://example.org/group/mvllm/raw/v0.9.0/docs/images/terminal.svg)" in filled
    assert "(https://example.org/group/mvllm/blob/v0.9.0/docs/how-to/install.md)" in filled
    assert not re.search(r"\]\((?!https://)", filled)
    with pytest.raises(ValueError, match="MVLLM_SOURCE_URL"):
        with_address(README, "example.org", "0.9.0")


@needs_every_part
def test_the_changes_of_the_first_release_name_every_command() -> None:
    commands = (ROOT / "CHANGELOG.md").read_text("utf-8").partition("**Commands.**")[2].partition("\n\n")[0]
    assert {name.split()[0] for name in re.findall(r"`([^`]+)`", commands)} == set(documented_commands())
