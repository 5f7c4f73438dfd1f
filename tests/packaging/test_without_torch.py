"""The core without torch: it installs, imports, and passes its scheduler's tests."""

from __future__ import annotations

import subprocess
import zipfile
from email.parser import Parser

import pytest
from packaging.requirements import Requirement

from tests.packaging.conftest import REPOSITORY


def metadata(wheel) -> object:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def test_the_core_wheel_requires_no_torch(core_only):
    required = [Requirement(text) for text in metadata(core_only.wheel).get_all("Requires-Dist")]
    assert "transformers" in {requirement.name for requirement in required}
    assert not [text for text in required if text.name.startswith(("torch", "nvidia", "triton"))]


def test_the_core_wheel_is_pure_python_and_complete(core_only):
    assert core_only.wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(core_only.wheel) as archive:
        names = set(archive.namelist())
    sources = {
        f"mvllm/{path.relative_to(REPOSITORY / 'core' / 'mvllm')}"
        for path in (REPOSITORY / "core" / "mvllm").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert sources <= names
    assert "mvllm/py.typed" in names
    assert any(name.startswith("mvllm/demo/model/") and name.endswith(".safetensors") for name in names)
    strangers = {name for name in names if not name.startswith("mvllm/") and ".dist-info/" not in name}
    assert strangers == set()


def test_torch_is_absent_from_the_environment(core_only):
    done = core_only.run("-c", "import torch")
    assert "No module named 'torch'" in done.stderr


def test_mvllm_imports_without_torch(core_only):
    printed = core_only.evaluate("""
        import mvllm
        from mvllm import SamplingParams
        print(mvllm.__file__)
        print(mvllm.__version__, SamplingParams(temperature=0.5).temperature)
    """)
    location, result = printed.splitlines()
    assert location.startswith(str(core_only.folder)), "the wheel is tested, not the working tree"
    assert result == "0.9.0 0.5"


def test_importing_mvllm_loads_nothing_heavy(core_only):
    loaded = core_only.evaluate("""
        import sys
        import mvllm
        print(" ".join(sorted({name.split(".")[0] for name in sys.modules})))
    """).split()
    assert not {"torch", "transformers", "tokenizers", "numpy", "huggingface_hub", "pluggy"} & set(loaded)


@pytest.mark.parametrize("package", ["plugin_api", "messages", "config", "kv_cache", "scheduler", "platform"])
def test_every_module_of_a_torch_free_package_imports(core_only, package):
    aliases = core_only.evaluate(f"""
        import importlib, pkgutil
        from mvllm.platform.module_aliases import MissingPartError
        package = importlib.import_module("mvllm.{package}")
        for module in pkgutil.walk_packages(getattr(package, "__path__", []), package.__name__ + "."):
            try:
                importlib.import_module(module.name)
            except MissingPartError:
                print(module.name)
    """)
    assert aliases.split() == (["mvllm.plugin_api.graph"] if package == "plugin_api" else [])


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["generate", "--help"]])
def test_the_installed_command_answers_without_torch(core_only, arguments):
    done = subprocess.run([core_only.folder / "bin" / "mvllm", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "mvllm" in done.stdout


SOME = """
import sys

import pytest


class Some:
    def pytest_collection_modifyitems(self, items):
        items[:] = items[::40]


sys.exit(pytest.main(sys.argv[1:], plugins=[Some()]))
"""
"""All files of tests are imported, and every fortieth test runs: what would import torch does so in any test."""


@pytest.mark.parametrize("tier", ["scheduler", "kv_cache"])
def test_the_scheduler_tests_pass_without_torch(core_only, tier):
    folder = REPOSITORY / "tests" / "unit" / tier
    assert list(folder.glob("test_*.py")), f"no tests in {folder}"
    # Long ones import the same modules as the others.
    quickly = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow and not exhaustive",
        "-k",
        "not traffic and not any_failure",
    ]
    done = core_only.run("-c", SOME, *quickly, folder, cwd=REPOSITORY, timeout=550)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
