"""The site's pages, without its generator; the names of models; the fragments of release notes."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from tests.unit.docs import models_page

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
LINK = re.compile(r"\]\(([^)\s]+)\)")


def load_stage() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stage", ROOT / "ci" / "site" / "stage.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


stage = load_stage()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pages of the site."""
    folder = tmp_path_factory.mktemp("site")
    stage.stage(folder)
    return folder


def without_code(text: str) -> str:
    return re.sub(r"^(`{3,}).*?^\1|`[^`\n]+`", "`code`", text, flags=re.DOTALL | re.MULTILINE)


def test_every_link_of_the_site_names_a_file_of_the_site(site: Path) -> None:
    num_links = 0
    for page in site.rglob("*.md"):
        for link in LINK.findall(without_code(page.read_text("utf-8"))):
            target = link.partition("#")[0]
            if target and not re.match(r"[a-z]+:", target):
                num_links += 1
                assert (page.parent / target).is_file(), f"{page.relative_to(site)}: {link}"
    assert num_links > 300


def test_every_page_of_the_documentation_is_in_the_table_of_contents(site: Path) -> None:
    listed = {"index"}
    for page in (site / "index.md", site / "decisions" / "index.md"):
        for block in re.findall(
            r"^```\{toctree\}\n.*?\n\n(.*?)\n```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE
        ):
            listed |= {str((page.parent / name).relative_to(site)) for name in block.split("\n")}
    pages = {str(page.relative_to(site).with_suffix("")) for page in site.rglob("*.md")}
    assert {page for page in pages if not page.startswith("repository/")} == listed


def test_files_outside_of_the_pages_have_pages(site: Path) -> None:
    example = (site / "repository" / "docs" / "examples" / "chat.py.md").read_text("utf-8")
    assert (DOCS / "examples" / "chat.py").read_text("utf-8").rstrip() in example
    assert (site / "repository" / "README.md").exists() and (site / "repository" / "CHANGELOG.md").exists()


def test_a_link_to_a_missing_file_is_an_error() -> None:
    with pytest.raises(stage.BrokenLink, match=r"README\.md links to gone\.md"):
        stage.with_new_links("[there](gone.md) `[not](this.md)`", DOCS / "README.md")


def test_models_are_named_with_families_that_tests_show() -> None:
    rows = re.findall(
        r"^\| .* \| ([^|]+) \| ([\w ]+) \|$", (DOCS / "reference/models-by-name.md").read_text(), re.MULTILINE
    )
    shown = re.findall(r"^\| `(\w+)` \| (\w+) \| yes", (DOCS / "reference/models.md").read_text(), re.MULTILINE)
    named = [(family, kind) for families, kind in rows for family in re.findall(r"`(\w+)`", families)][1:]
    assert len(named) > 20 and set(named) <= set(shown), set(named) - set(shown)


def test_the_leading_names_of_models_are_known_and_their_gguf_files_are_read() -> None:
    by_name = (DOCS / "reference/models-by-name.md").read_text("utf-8")
    formats = (DOCS / "how-to/load-models.md").read_text("utf-8")
    listed = formats.partition("Supported are these architectures")[2].partition("Of files")[0]
    read = set(re.split(r"[\s,.:()]+", listed))
    for name, _, family, gguf in models_page.NAMES:
        assert f"`{family}`" in by_name, name
        assert not gguf or gguf in read, name


def test_fragments_have_a_kind_that_release_notes_have() -> None:
    kinds = {
        each["directory"] for each in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]["type"]
    }
    readme = (DOCS / "changes" / "README.md").read_text("utf-8")
    assert set(re.findall(r"`(\w+)`", readme)) == kinds
    for path in (DOCS / "changes").glob("*.md"):
        if path.name != "README.md":
            topic, kind, suffix = path.name.split(".")
            assert topic and kind in kinds and suffix == "md" and path.read_text("utf-8").strip(), path.name
