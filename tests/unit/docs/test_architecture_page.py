"""docs/architecture.md names every distribution, what finds it, every package of core and every extension point."""

from __future__ import annotations

import re
import tomllib

from mvllm import plugin_groups
from mvllm.platform.spec import ENTRY_POINT_GROUP
from tests.unit.docs.hardware import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
EXAMPLES = re.compile(r"plugins/(example-.*|null-device|fault-injection)")


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_every_distribution_is_in_the_table_with_its_entry_points() -> None:
    rows = [line for line in section("The packages").splitlines() if line.startswith("| `")]
    missing = []
    for path in [*ROOT.glob("platforms/*/pyproject.toml"), *ROOT.glob("plugins/*/pyproject.toml")]:
        if EXAMPLES.fullmatch(str(path.parent.relative_to(ROOT))):
            continue
        project = tomllib.loads(path.read_text("utf-8"))["project"]
        groups = {name for name in project.get("entry-points", {}) if name.startswith("mvllm.")}
        found = [row for row in rows if f"`{project['name']}`" in row]
        if len(found) != 1 or set(re.findall(r"`(mvllm\.\w+)`", found[0].split("|")[-2])) != groups:
            missing.append(project["name"])
    assert missing == []


def test_every_extension_point_is_named() -> None:
    groups = {each.group for each in vars(plugin_groups).values() if isinstance(each, plugin_groups.PluginGroup)}
    named = set(re.findall(r"`(mvllm\.\w+)`", section("Extension points").partition("\n\n`")[0]))
    assert named == groups | {ENTRY_POINT_GROUP}


def test_every_package_of_core_is_in_the_table() -> None:
    folders = {path.parent.name for path in (ROOT / "core" / "mvllm").glob("*/__init__.py")} - {"demo", "demo_vision"}
    named = set(re.findall(r"`(\w+)`", section("Inside core")))
    assert folders - named == set()


def test_files_that_the_page_names_exist() -> None:
    core = ROOT / "core" / "mvllm"
    for name in re.findall(r"`([\w/]+\.py)`", PAGE):
        assert list(core.rglob(name)) or (ROOT / name).exists() or list((ROOT / "ci").glob(name)), name


def test_names_of_the_code_exist() -> None:
    """CamelCase and snake_case names in code marks and diagrams; those with an index, as of processes, are examples."""
    blocks = re.findall(r"```.*?```", PAGE, re.DOTALL)
    marked = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL))
    words = set(re.findall(r"\b[A-Za-z_]\w+", "\n".join([*blocks, *marked])))
    names = {word for word in words if re.search(r"[a-z][A-Z]|_", word) and not re.search(r"\d$|_[ab]$", word)}
    known: set[str] = set()
    for folder in ("core/mvllm", "plugins", "platforms"):
        for path in (ROOT / folder).rglob("src/**/*.py" if folder != "core/mvllm" else "*.py"):
            known |= set(re.findall(r"\w+", path.read_text("utf-8")))
    assert len(names) > 150 and names - known == set()
