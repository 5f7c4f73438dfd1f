"""PLG: a plugin is discovered, imports quickly, and imports only the plugin API of mvllm."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mvllm.extension_api.testing import check_contract, choose_platform, find_sources
from mvllm.plugin_api import MvllmError
from mvllm_conformance.markers import clause
from mvllm_conformance.platform_under_test import PlatformUnderTest
from mvllm_conformance.subprocess_checks import run_in_subprocess

IMPORT_CPU_SECONDS = 2.0
"""CPU time limit of the entry point's module, without `mvllm.plugin_api`. Typical modules take 0.01 s."""

PLUGIN_API = "mvllm.plugin_api"
OWN_TESTS = "mvllm.testing"


def inspect_plugin(platform_under_test: PlatformUnderTest, **arguments: Any) -> dict[str, Any]:
    """Findings of `_probe_process` about the plugin."""
    assert platform_under_test.candidate is not None, (
        f"no installed distribution offers a platform {platform_under_test.name!r}"
    )
    module = platform_under_test.candidate.source.entry_point.partition(":")[0]
    settings = {"module": module, "bind_after_fork": False, **arguments}
    return run_in_subprocess("mvllm_conformance._probe_process", settings, environment=platform_under_test.environment)


@pytest.fixture(scope="module")
def facts(platform_under_test: PlatformUnderTest) -> dict[str, Any]:
    return inspect_plugin(platform_under_test)


@clause("PLG-01")
def test_importing_the_entry_point_loads_nothing_heavy(facts: dict[str, Any]) -> None:
    assert facts["imported"] == [], "the entry point's module must not import these packages"
    assert facts["libraries"] == [], "the entry point's module must not load these shared libraries"


@clause("PLG-01")
def test_importing_the_entry_point_takes_hardly_any_time(facts: dict[str, Any]) -> None:
    assert facts["import_seconds"] < IMPORT_CPU_SECONDS


@clause("PLG-02")
def test_the_plugin_calls_itself_what_its_entry_point_is_called(
    platform_under_test: PlatformUnderTest, facts: dict[str, Any]
) -> None:
    assert facts["is_spec"], "mvllm_platform() must return a PlatformSpec"
    assert facts["name"] == platform_under_test.name


@clause("PLG-03")
def test_the_package_imports_only_the_plugin_api(platform_under_test: PlatformUnderTest) -> None:
    files = list(sources_of(platform_under_test))
    assert files, "no source of the plugin was found"
    found = {f"{file.name}:{line}: {name}" for file in files for line, name in imports_of(file) if not allowed(name)}
    assert not found, f"a plugin may import only {PLUGIN_API} from mvllm; found {sorted(found)}"


@clause("PLG-04")
def test_one_distribution_claims_the_name(platform_under_test: PlatformUnderTest) -> None:
    owners = {f"{s.distribution} {s.version}" for s in find_sources() if s.name == platform_under_test.name}
    assert len(owners) == 1, f"distributions with the platform {platform_under_test.name!r}: {sorted(owners) or 'none'}"


@clause("PLG-04")
def test_core_speaks_the_plugins_contract(platform_under_test: PlatformUnderTest) -> None:
    candidate = platform_under_test.candidate
    assert candidate is not None and candidate.spec is not None, candidate and candidate.failure
    check_contract(candidate.spec, candidate.source)


@clause("PLG-04")
def test_the_platform_can_be_chosen_by_its_name(platform_under_test: PlatformUnderTest) -> None:
    try:
        chosen = choose_platform(platform_under_test.name, available_only=not platform_under_test.without_device)
    except MvllmError as e:
        pytest.fail(str(e), pytrace=False)
    assert chosen.platform.spec.name == chosen.source.name == platform_under_test.name


def sources_of(platform_under_test: PlatformUnderTest) -> Iterator[Path]:
    """The Python files of the entry point's package."""
    assert platform_under_test.candidate is not None
    source = platform_under_test.candidate.source
    module = source.entry_point.partition(":")[0]
    parents = module.split(".")
    for depth in range(1, len(parents) + 1):
        spec = importlib.util.find_spec(".".join(parents[:depth]))
        if spec is None:
            return
        if spec.origin is None:  # a namespace package, which other distributions may share
            continue
        origin = Path(spec.origin)
        yield from origin.parent.rglob("*.py") if origin.name == "__init__.py" else [origin]
        return


def imports_of(file: Path) -> Iterator[tuple[int, str]]:
    """Line numbers and full names of a file's imports."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "import_module":
            if node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def allowed(name: str) -> bool:
    """Whether a plugin may import a name."""
    is_mvllm = name == "mvllm" or name.startswith("mvllm.")
    allowed_modules = (PLUGIN_API, OWN_TESTS)
    return not is_mvllm or any(name == module or name.startswith(module + ".") for module in allowed_modules)
