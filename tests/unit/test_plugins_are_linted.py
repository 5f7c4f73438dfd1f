"""Every platform and plugin of the repository is covered by the same linters; a missing one fails the test."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
SOURCES = sorted(path.relative_to(ROOT) for kind in ("platforms", "plugins") for path in ROOT.glob(f"{kind}/*/src"))
PACKAGES = sorted(init.parent for source in SOURCES for init in (ROOT / source).glob("*/__init__.py"))
ENTRY_POINTS = {
    package.name: tomllib.loads((package.parents[1] / "pyproject.toml").read_text())["project"].get("entry-points", {})
    for package in PACKAGES
}
PLATFORMS = {name for name, points in ENTRY_POINTS.items() if "mvllm.platforms" in points}
LIBRARIES = {
    name for name, points in ENTRY_POINTS.items() if not points
}  # platforms use them, and the core does not; they may import the same modules as platforms


def test_there_are_platforms_and_plugins() -> None:
    assert {"mvllm_cpu", "mvllm_fault_injection"} <= {package.name for package in PACKAGES}


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_types_and_imports_of_every_source_folder_are_checked(source: Path) -> None:
    assert str(source) in TOOLS["mypy"]["files"] and str(source) in TOOLS["mypy"]["mypy_path"]
    for patterns in (TOOLS["ruff"]["src"], [f"{member}/src" for member in TOOLS["uv"]["workspace"]["members"]]):
        assert any(source in {path.relative_to(ROOT) for path in ROOT.glob(pattern)} for pattern in patterns)


@pytest.mark.parametrize("package", [package.name for package in PACKAGES])
def test_every_package_imports_only_the_plugin_api(package: str) -> None:
    linter = TOOLS["importlinter"]
    contracts = {contract["id"]: contract for contract in linter["contracts"]}
    assert package in linter["root_packages"]
    assert package in contracts["core-knows-no-platform"]["forbidden_modules"]
    assert package in TOOLS["ruff"]["lint"]["isort"]["known-first-party"]
    if package in contracts["kernels-alone"]["source_modules"]:
        assert package in LIBRARIES
        return
    contract = "plugin-api" if package in PLATFORMS | LIBRARIES else "extension-api"
    assert package in contracts[contract]["allowed_importers"]
    assert package in contracts[f"one-{contract}"]["source_modules"]


def test_cores_tests_name_no_module_of_a_part() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    parts = [requirement.partition(">")[0].replace("-", "_") for requirement in extras["parts"]]
    named = re.compile(rf"\b({'|'.join(parts)})\b")
    tools = {"perf", "gpu", "clients"}
    files = [path for path in (ROOT / "tests").rglob("*.py") if path.relative_to(ROOT / "tests").parts[0] not in tools]
    assert not [f"{path}: {found[0]}" for path in files if (found := named.search(path.read_text(encoding="utf-8")))]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_every_package_has_py_typed(package: Path) -> None:
    assert (package / "py.typed").is_file()
