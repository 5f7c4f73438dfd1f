"""Copies the documentation into one folder that a site generator can read.

The pages in docs/ are written for the repository: they link to files anywhere in it, and their index is a README. A
site has only pages. So the copy has

    docs/README.md             index.md, with a table of contents from its own links
    docs/how-to/install.md     how-to/install.md
    docs/examples/chat.py      repository/docs/examples/chat.py.md      a page with the file's text
    platforms/tpu/README.md    repository/platforms/tpu/README.md
    platforms/tpu              the page of its README, or a page with the names of its files

and every link names the copy. Only files that a page links to are copied.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
ELSEWHERE = "repository"  # folder of pages for files outside of the pages in docs/
IMAGES = {".svg", ".png", ".jpg", ".gif"}
LANGUAGES = {".py": "python", ".json": "json", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".cpp": "cpp"}
CONTENTS = ("README.md", "decisions/README.md")
"""Pages of docs/ whose links to other pages of docs/ are the site's table of contents."""

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.DOTALL | re.MULTILINE)


class BrokenLink(Exception):
    """A page links to a file that does not exist."""


def stage(target: Path, generated: dict[Path, Callable[[str], str]] | None = None) -> list[Path]:
    """Fills an empty folder with the pages of the site.

    Args:
        target: The folder.
        generated: Functions that complete the text of a page, by the page's path.

    Returns:
        The copied pages, as paths below `target`.

    Raises:
        BrokenLink: A page links to a file that does not exist.
    """
    waiting = [page for page in sorted(DOCS.rglob("*.md")) if DOCS / "changes" not in page.parents]
    staged: dict[Path, Path] = {}
    while waiting:
        source = waiting.pop(0)
        if source in staged:
            continue
        staged[source] = place = place_of(source)
        path = target / place
        path.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix in IMAGES:
            shutil.copyfile(source, path)
            continue
        text = page_text(source)
        if generated is not None and source in generated:
            text = generated[source](text)
        text, linked = with_new_links(text, source)
        waiting += linked
        if is_page(source):
            text += contents(source)
        else:
            text = f"---\norphan: true\n---\n\n{text}"  # reached by links only
        path.write_text(text, encoding="utf-8")
    return sorted(place for source, place in staged.items() if source.suffix not in IMAGES)


def place_of(source: Path) -> Path:
    """Where the copy of a file or folder is, below the site's folder."""
    if source.is_relative_to(DOCS) and (is_page(source) or source.suffix in IMAGES):
        place = source.relative_to(DOCS)
        return place.with_name("index.md") if place.name == "README.md" else place
    place = Path(ELSEWHERE) / source.relative_to(ROOT)
    return place if source.suffix == ".md" or source.suffix in IMAGES else place.with_name(f"{place.name}.md")


def is_page(source: Path) -> bool:
    """Whether a file is a page of docs/, which belongs into the table of contents."""
    return source.suffix == ".md" and source.is_relative_to(DOCS) and DOCS / "changes" not in source.parents


def page_text(source: Path) -> str:
    """The text of a page: a Markdown file's own, or a page that shows another file, or a folder's file names."""
    if source.suffix == ".md":
        return source.read_text(encoding="utf-8")
    name = source.relative_to(ROOT)
    if source.is_dir():
        names = [f"{path.name}{'/' * path.is_dir()}" for path in sorted(source.iterdir()) if is_shown(path)]
        return f"# {name}/\n\n```text\n" + "\n".join(names) + "\n```\n"
    text = source.read_text(encoding="utf-8")
    fence = "`" * (max(map(len, re.findall(r"`{3,}", text)), default=2) + 1)
    return f"# {name}\n\n{fence}{LANGUAGES.get(source.suffix, 'text')}\n{text.rstrip()}\n{fence}\n"


def is_shown(path: Path) -> bool:
    """Whether a name is in the list of a folder's files, as opposed to what tools left there."""
    return not path.name.startswith((".", "__pycache__")) and path.suffix not in (".so", ".pyc", ".egg-info")


def with_new_links(text: str, source: Path) -> tuple[str, list[Path]]:
    """The text with links to the copies, and the files that it links to. Code is left as it is."""
    linked: list[Path] = []
    here = place_of(source).parent

    def replace(match: re.Match[str]) -> str:
        target, hash_sign, anchor = match[1].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        path = Path(os.path.normpath(source.parent / target))
        if path.is_dir() and (path / "README.md").exists():
            path = path / "README.md"
        if not path.exists():
            raise BrokenLink(f"{source.relative_to(ROOT)} links to {target}, which does not exist")
        linked.append(path)
        return f"]({os.path.relpath(place_of(path), here)}{hash_sign}{anchor})"

    if source.suffix == ".md":
        parts = _CODE.split(text)
        # A link's text may contain code, so that the link begins in one part and ends in the next.
        parts[::2] = [_LINK.sub(replace, part) for part in parts[::2]]
        text = "".join(parts)
    return text, linked


def contents(source: Path) -> str:
    """The hidden table of contents of an index page: one list for each of its sections, in the order of its links."""
    if str(source.relative_to(DOCS)) not in CONTENTS:
        return ""
    lists = ((title, "\n".join(pages)) for title, pages in sections(source))
    return "".join(f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{names}\n```\n" for title, names in lists)


def sections(source: Path) -> Iterator[tuple[str, list[str]]]:
    """Sections of an index page with the pages below docs/ that they link to, relative to the index page's folder."""
    seen = {source}
    for section in re.split(r"^## ", source.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        pages = []
        for target in _LINK.findall(section):
            path = Path(os.path.normpath(source.parent / target.partition("#")[0]))
            if path not in seen and is_page(path) and path.exists():
                seen.add(path)
                pages.append(os.path.relpath(place_of(path), place_of(source).parent).removesuffix(".md"))
        if pages:
            yield section.partition("\n")[0], pages
