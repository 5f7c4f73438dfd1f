"""The numbers of docs/explanation/porting-cost.md equal those of the current plugins, and the counting is correct."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]


def load_script():
    spec = importlib.util.spec_from_file_location("plugin_figures", REPOSITORY / "ci" / "plugin_figures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


figures = load_script()


@pytest.fixture
def count(tmp_path):
    """Counts a plugin of one module with this source, which is never run."""

    def make(source, name="thing.py"):
        folder = tmp_path / "src" / "mvllm_acme"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(source)
        return figures.count(tmp_path)

    return make


def test_the_page_is_up_to_date():
    page = figures.PAGE.read_text("utf-8")
    assert figures.with_tables(page) == page, "run: python3 ci/plugin_figures.py --write"


def test_the_page_has_every_platform_of_the_repository():
    names = {folder.name for folder in figures.plugins()}
    assert {"cpu", "fault-injection"} <= names
    assert all(f"/{name}]" in figures.PAGE.read_text("utf-8") for name in names)


def test_our_plugins_use_the_public_interface_and_patch_nothing():
    for folder in figures.plugins():
        found = figures.count(folder)
        assert "mvllm.plugin_api" in found.modules <= {"mvllm.plugin_api", "mvllm.plugin_api.graph"}, folder
        assert found.patched == set(), folder
        assert found.symbols >= found.subclassed >= {"mvllm.plugin_api.Platform"} or folder.name != "cpu"


def test_published_rows_have_a_cell_for_each_column():
    assert all(len(row) == len(figures.THEIRS) + len(figures.HOLD) for row in figures.PUBLISHED)


@pytest.mark.parametrize(
    ("source", "symbols", "modules"),
    [
        ("from mvllm.plugin_api import Platform, Plan\nfrom mvllm.plugin_api import Plan as P", 2, 1),
        ("from mvllm import plugin_api as api\napi.Plan(), api.Plan(), api.Check", 2, 1),
        ("import mvllm.plugin_api\nmvllm.plugin_api.Plan()", 1, 1),
        ("import mvllm.plugin_api as api\napi.Plan()", 1, 1),
        ("from mvllm.engine.core.engine_core import EngineCore\nfrom mvllm import LLM", 2, 2),
        ("def f():\n    from mvllm.plugin_api import Plan", 1, 1),
        ("from mvllm_cpu.plugin import mvllm_platform\nimport torch", 0, 0),
    ],
)
def test_each_symbol_counts_once_however_it_is_imported(count, source, symbols, modules):
    found = count(source)
    assert (len(found.symbols), len(found.modules)) == (symbols, modules), found


def test_classes_derived_from_are_counted_once_each(count):
    found = count(
        "from mvllm import plugin_api as api\nfrom mvllm.plugin_api import Platform\nimport abc\n"
        "class A(Platform): ...\nclass B(api.Platform): ...\nclass C(api.DeviceRuntime, abc.ABC): ...\nclass D(A): ..."
    )
    assert found.subclassed == {"mvllm.plugin_api.Platform", "mvllm.plugin_api.DeviceRuntime"}


@pytest.mark.parametrize(
    "patch",
    [
        "core.step = mine",
        "core.EngineCore.step = mine",
        "core.a, core.b = mine, other",
        "core.limit += 1",
        "del core.step",
        "setattr(core, 'step', mine)",
        "setattr(core.EngineCore, name, mine)",
        "sys.modules['mvllm.engine.core.engine_core'] = mine",
        "core.TABLE['x'] = mine",
        "def activate():\n    core.step = mine",
    ],
)
def test_patches_are_detected_in_every_form(count, patch):
    assert count(f"import sys\nfrom mvllm.engine import core\n{patch}\n").patched


def test_assignments_to_own_objects_are_no_patches(count):
    found = count("import torch\nfrom mvllm.plugin_api import Plan\nself.x = Plan()\nPlan().y = 1\nz.w = Plan\nx = 1")
    assert (found.patched, found.torch_patched) == (set(), set())


def test_patches_of_torch_are_counted_separately(count):
    found = count("import torch\ntorch.Tensor.cuda = mine\ntorch.empty_cache = mine")
    assert found.torch_patched == {"torch.Tensor.cuda", "torch.empty_cache"} and not found.patched


def test_lines_of_the_platform_and_of_a_runner_are_counted_separately(count, tmp_path):
    count("class R:\n    def load_model(self): ...\n    def execute_model(self, plan): ...\n\nx = 1\n", "worker.py")
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "k.cpp").write_text("int\nx;\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "k.cpp").write_text("int y;\n")
    found = count("a = 1\nb = 2\n", "platform.py")
    assert (found.python, found.platform, found.runner, found.native) == (7, 2, 3, 2)


@pytest.mark.parametrize(("lines", "text"), [(0, "none"), (7, "7"), (95, "95"), (113, "110"), (1296, "1 300")])
def test_lines_are_rounded_to_two_digits(lines, text):
    assert figures.rounded(lines) == text
