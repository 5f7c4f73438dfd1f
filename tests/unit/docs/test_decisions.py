"""Every decision record has the same structure and is in the index, and every mention of a decision is a valid link."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "docs" / "decisions"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")
NUMBERS = {path.name[:4] for path in PAGES}

MAX_LINES = 60
TEXT_SUFFIXES = {".py", ".pyi", ".md", ".toml", ".yml", ".yaml", ".c", ".h", ".cpp"}

STATUS = re.compile(r"Status: (accepted|superseded by \d{4}) \(\d{4}-\d{2}\)\. Applies to: .+\.")
PATH_MENTION = re.compile(r"decisions/([\w-]+\.md)")
NUMBER_MENTION = re.compile(r"\bdecisions? (\d{4})\b", re.IGNORECASE)
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+\.md)[^)]*\)")


def slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def title_of(page: Path) -> str:
    return page.read_text("utf-8").split("\n", 1)[0].removeprefix("# ")


def text_files() -> Iterator[Path]:
    """Text files of the repository, without environments, build outputs and this file."""
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in {"build", "dist", "shared"}]
        for name in files:
            path = Path(folder, name)
            if path.suffix in TEXT_SUFFIXES and path != Path(__file__):
                yield path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name[:4])
class TestForm:
    def test_the_title_is_the_file_name(self, page):
        assert page.read_text("utf-8").startswith("# ")
        assert page.name == f"{page.name[:4]}-{slug(title_of(page))}.md"

    def test_the_status_follows_the_title(self, page):
        paragraphs = page.read_text("utf-8").split("\n\n")
        assert STATUS.fullmatch(paragraphs[1].replace("\n", " "))

    def test_context_decision_and_consequences_follow_each_other(self, page):
        text = page.read_text("utf-8")
        places = [text.find(f"\n**{section}") for section in ("Context.", "Decision", "Consequences.")]
        assert -1 not in places
        assert places == sorted(places)

    def test_it_is_at_most_one_page(self, page):
        lines = page.read_text("utf-8").splitlines()
        assert len(lines) <= MAX_LINES
        assert [line for line in lines if len(line) > 100 and not line.startswith("|")] == []


def test_every_number_is_used_once():
    assert len(NUMBERS) == len(PAGES)


def test_the_index_names_every_decision_once_with_its_title():
    links = LINK.findall((FOLDER / "README.md").read_text("utf-8"))
    assert sorted(links) == [(f"{page.name[:4]} {title_of(page)}", page.name) for page in PAGES]


def test_every_mention_refers_to_an_existing_decision():
    names = {path.name for path in FOLDER.iterdir()}
    dangling = []
    for path in text_files():
        text = path.read_text("utf-8", errors="replace")
        missing = {name for name in PATH_MENTION.findall(text) if name not in names}
        missing |= {number for number in NUMBER_MENTION.findall(text) if number not in NUMBERS}
        if path.parent == FOLDER:
            missing |= {target for _, target in LINK.findall(text) if not (FOLDER / target).is_file()}
        dangling += [f"{path.relative_to(ROOT)}: {name}" for name in sorted(missing)]
    assert dangling == []


def test_a_link_text_with_a_number_has_the_number_of_its_target():
    wrong = []
    for path in text_files():
        if path.suffix == ".md":
            for text, target in LINK.findall(path.read_text("utf-8", errors="replace")):
                number = re.fullmatch(r"(?:decision )?(\d{4})", text)
                if number and not Path(target).name.startswith(f"{number[1]}-"):
                    wrong.append(f"{path.relative_to(ROOT)}: [{text}]({target})")
    assert wrong == []
