"""Builds the documentation as a static site in build/site, in the environment .venv-docs.

    python3 ci/dev.py docs         the site; warnings are errors, and every link is followed
    python3 ci/dev.py changelog    prints the notes of the next release; with a version, writes them to CHANGELOG.md

Sphinx warns about pages that the index does not name, and about links within pages. The finished pages are checked
once more, since themes and generated pages have links, too.
"""

from __future__ import annotations

import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from environments import Environment, StepFailed, Steps

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "ci" / "site"))
import stage  # noqa: E402

DOCS = Environment(ROOT, ROOT / ".venv-docs")
CONSTRAINTS = ROOT / "ci" / "constraints" / "docs.txt"
SOURCE = ROOT / "build" / "site-source"
SITE = ROOT / "build" / "site"
CHANGELOG = ROOT / "CHANGELOG.md"
NOTES_BEGIN = "<!-- towncrier release notes start -->\n"


def setup() -> None:
    """Creates or updates .venv-docs; returns at once if it is up to date.

    Raises:
        StepFailed: A command failed.
    """
    titles = ("virtual environment for the documentation", "Sphinx and its theme (120 MB)")
    DOCS.install_pins(CONSTRAINTS, ("sphinx-build", "towncrier"), titles)


def build() -> int:
    """Builds the site; returns 1 if a page has a dead link, or is missing in the index."""
    setup()
    for folder in (SOURCE, SITE):
        shutil.rmtree(folder, ignore_errors=True)
    notes = draft()
    pages = stage.stage(SOURCE, {CHANGELOG: lambda text: text.replace(NOTES_BEGIN, notes)})
    steps = Steps(DOCS, total=1)
    steps.run(
        f"Sphinx, {len(pages)} pages",
        [
            *(DOCS.bin / "sphinx-build", "--fail-on-warning", "--keep-going", "--quiet", "--jobs", "auto"),
            *("-c", ROOT / "ci" / "site", "-d", ROOT / "build" / "site-doctrees", SOURCE, SITE),
        ],
    )
    dead = dead_links(SITE)
    for page, link in dead:
        print(f"error: {page} has a dead link: {link}")
    print(f"{SITE.relative_to(ROOT)}/index.html: {len(pages)} pages, {len(dead)} dead links", flush=True)
    return 1 if dead else 0


def changelog(version: str | None) -> int:
    """Prints the notes of the next release. With a version, writes them and removes the fragments.

    Raises:
        StepFailed: There are no fragments, or CHANGELOG.md has a section of the version.
    """
    if version is None:
        setup()
        print(draft() or f"docs/changes has no notes: nothing has changed since the last section of {CHANGELOG.name}")
        return 0
    if not re.fullmatch(r"\d+\.\d+\.\w+", version):
        raise StepFailed(f"error: {version!r} is no version\n  remedy: write it as 0.9.0")
    if re.search(rf"^## {re.escape(version)}\b", CHANGELOG.read_text(encoding="utf-8"), re.MULTILINE):
        raise StepFailed(f"error: {CHANGELOG.name} has a section of {version} already\n  remedy: write into it by hand")
    if not fragments():
        raise StepFailed(f"error: docs/changes has no notes, so a section of {version} would be empty")
    setup()
    command = [DOCS.bin / "towncrier", "build", "--yes", "--version", version]
    Steps(DOCS, total=1).run(f"CHANGELOG.md, {version}", command)
    return 0


def fragments() -> list[Path]:
    """The files with notes of the next release."""
    return [path for path in (ROOT / "docs" / "changes").glob("*.md") if path.name != "README.md"]


def draft() -> str:
    """The notes of the changes since the last release, in Markdown; empty without changes.

    Raises:
        StepFailed: towncrier failed.
    """
    if not fragments():
        return ""
    output, status = DOCS.capture([DOCS.bin / "towncrier", "build", "--draft", "--version", "Not released"])
    if status != 0:
        raise StepFailed(f"error: towncrier failed:\n{output}")
    return output[output.find("## ") :] if "## " in output else ""


class _Links(HTMLParser):
    """Collects the links of a page, and the names that links may have behind `#`."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Reads one tag."""
        for name, value in attrs:
            if name in ("href", "src") and value and tag != "link":
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.names.add(value)


def dead_links(site: Path) -> list[tuple[str, str]]:
    """Links between pages of a site whose file or heading does not exist, as (page, link)."""
    pages: dict[Path, _Links] = {}
    for path in sorted(site.rglob("*.html")):
        pages[path] = _Links()
        pages[path].feed(path.read_text(encoding="utf-8"))
    dead = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            named = target not in pages or not parts.fragment or unquote(parts.fragment) in pages[target].names
            if not target.exists() or not named:
                dead.append((str(path.relative_to(site)), link))
    return dead
