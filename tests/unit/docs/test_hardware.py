"""Every page says the same of what has run on which hardware: what docs/reference/hardware.toml states."""

from __future__ import annotations

import tomllib

import pytest

from tests.unit.docs.hardware import PLATFORMS, ROOT, plain, untrue_claims

PAGES = (
    "README.md",
    "CHANGELOG.md",
    "docs/reference/platforms.md",
    "docs/reference/features.md",
)


def test_every_platform_is_stated() -> None:
    projects = [tomllib.loads(path.read_text("utf-8"))["project"] for path in ROOT.glob("platforms/*/pyproject.toml")]
    packages = {each["name"] for each in projects if "mvllm.platforms" in each.get("entry-points", {})}
    assert {each.package for each in PLATFORMS.values()} == packages


@pytest.mark.parametrize("name", PAGES)
def test_a_page_that_lists_platforms_repeats_the_statements(name: str) -> None:
    text = plain((ROOT / name).read_text("utf-8"))
    assert [each.package for each in PLATFORMS.values() if each.package not in text or each.ran not in text] == []


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_readme_of_a_platform_repeats_its_statement(platform: str) -> None:
    text = plain((ROOT / "platforms" / platform / "README.md").read_text("utf-8"))
    assert f"Has run on {PLATFORMS[platform].ran}." in text
    assert (ROOT / PLATFORMS[platform].link.partition("#")[0]).exists()


def test_no_page_says_that_something_runs_where_nothing_has_run() -> None:
    pages = list(ROOT.glob("*.md"))
    for pattern in ("platforms/*/*.md", "plugins/*/*.md", "docs/*.md", "docs/*/*.md"):
        pages += [path for path in ROOT.glob(pattern) if path.parent.name not in ("decisions", "changes")]
    found = {str(path.relative_to(ROOT)): untrue_claims(path.read_text("utf-8")) for path in pages}
    assert len(found) > 60 and {name: claims for name, claims in found.items() if claims} == {}


@pytest.mark.parametrize(
    ("sentence", "is_true"),
    [
        ("| `mvllm-cpu` | x86-64 and ARM processors | hardware |", False),
        ("It runs on x86-64 and 64-bit Arm.", False),
        ("It has run\non a [TPU](x.md).", False),
        ("| `mvllm-rocm` | AMD GPUs | tested |", False),
        ("Its kernels for Arm have run in an emulator only.", True),
        ("It was not run on a TPU.", True),
        ("Set `PJRT_DEVICE=TPU`.", True),
    ],
)
def test_an_untrue_claim_is_found(sentence: str, is_true: bool) -> None:
    assert untrue_claims(f"# Page\n\n{sentence}\n") == ([] if is_true else [plain(sentence).strip()])
