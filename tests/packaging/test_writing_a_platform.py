"""The page docs/writing-a-platform.md is followed to the letter: its files make a plugin that generates text."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "writing-a-platform.md"


def files_of(page: str) -> dict[str, str]:
    """File name -> contents, for every block that the page marks as a file."""
    return dict(re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", page, flags=re.DOTALL))


@pytest.fixture(scope="module")
def toy_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that, on the module search path, makes mvllm-toy an installed distribution."""
    root = tmp_path_factory.mktemp("toy")
    for name, text in files_of(PAGE.read_text(encoding="utf-8")).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (root / "src" / "mvllm_toy" / "__init__.py").touch()
    info = root / "src" / "mvllm_toy-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mvllm-toy\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[mvllm.platforms]\ntoy = mvllm_toy.plugin\n")
    return root / "src"


def run_mvllm(search_path: Path, *args: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    start = "from mvllm.entrypoints.cli.main import main; sys.exit(main())"
    code = f"import sys; sys.path.insert(0, {str(search_path)!r}); {start}"
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=timeout)


def test_the_page_shows_every_file_that_it_speaks_of() -> None:
    assert set(files_of(PAGE.read_text(encoding="utf-8"))) == {
        "pyproject.toml",
        "src/mvllm_toy/plugin.py",
        "src/mvllm_toy/platform.py",
    }


def test_the_plugin_of_the_page_is_fully_typed(toy_package: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), str(toy_package / "mvllm_toy")]
    checked = subprocess.run(command, cwd=toy_package, capture_output=True, text=True, timeout=300)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_plugin_of_the_page_is_listed_as_available(toy_package: Path) -> None:
    listed = run_mvllm(toy_package, "platforms")
    assert listed.returncode == 0, listed.stderr
    assert "mvllm-toy 0.1.0" in listed.stdout
    assert "the host can always be used" in listed.stdout


def test_the_plugin_of_the_page_generates_the_same_text_as_the_cpu_platform(toy_package: Path) -> None:
    command = [
        "generate",
        "--model",
        "demo",
        "--prompt",
        "The capital of France is",
        "--temperature",
        "0",
        "--dtype",
        "float32",
    ]
    toy = run_mvllm(toy_package, *command, "--platform", "toy")
    assert toy.returncode == 0, toy.stderr
    assert "toy = mvllm_toy.plugin" in toy.stdout + toy.stderr
    cpu = run_mvllm(toy_package, *command, "--platform", "cpu")
    assert cpu.returncode == 0, cpu.stderr
    assert toy.stdout.splitlines()[0] == cpu.stdout.splitlines()[0]


def test_the_plugin_of_the_page_keeps_the_contract(toy_package: Path) -> None:
    """And core refuses, or does without, what it does not claim: a soft cap, sinks, several ranks."""
    examined = run_mvllm(toy_package, "conformance", "--platform", "toy", "--quick", timeout=900)
    assert examined.returncode == 0, examined.stdout[-5000:] + examined.stderr[-2000:]
    assert " not claimed (of " in examined.stdout and " failed" not in examined.stdout
