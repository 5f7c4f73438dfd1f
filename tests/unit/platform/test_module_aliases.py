"""Modules of mvllm that another package has: one object under both names, and the error when the package is missing."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from mvllm.platform.module_aliases import alias_module
from tests.helpers.plugins import write_metadata

FILES = {
    "acme_suite/__init__.py": "name = 'root'\n",
    "acme_suite/leaf.py": "class Leaf: pass\n",
    "acme_suite/folder/__init__.py": "name = 'folder'\n",
    "acme_suite/folder/deep.py": "from acme_suite.leaf import Leaf\n",
}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The alias `mvllm.sample` of an installed package."""
    site = write_metadata(tmp_path, "mvllm-acme-suite", "[mvllm.aliases]\nsample = acme_suite\n")
    for name, text in FILES.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return make_alias("sample")


def make_alias(name: str) -> ModuleType:
    """What a file mvllm/NAME.py makes."""
    module = ModuleType(f"mvllm.{name}")
    module.__path__ = []
    module.__dict__["__getattr__"] = alias_module(module.__name__, part="conformance")
    sys.modules[module.__name__] = module
    return module


def test_a_module_is_one_object_under_both_names(installed: ModuleType) -> None:
    deep = importlib.import_module("mvllm.sample.folder.deep")
    assert deep is importlib.import_module("acme_suite.folder.deep")
    assert deep.Leaf is importlib.import_module("mvllm.sample.leaf").Leaf
    assert deep.__name__ == deep.__spec__.name == "acme_suite.folder.deep"


def test_a_package_has_the_attributes_of_the_other_and_no_folder(installed: ModuleType) -> None:
    folder = importlib.import_module("mvllm.sample.folder")
    assert (installed.name, folder.name) == ("root", "folder")
    assert installed.__path__ == folder.__path__ == []
    assert importlib.util.find_spec("mvllm.sample.folder").origin.endswith("acme_suite/folder/__init__.py")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = installed.nothing


def test_an_unknown_submodule_is_not_found_by_its_published_name(installed: ModuleType) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'mvllm\.sample\.nothing'"):
        importlib.import_module("mvllm.sample.nothing")


def test_without_the_package_the_import_names_it_and_how_to_install_it() -> None:
    with pytest.raises(
        ModuleNotFoundError,
        match=r"^mvllm\.absent needs the package mvllm-conformance, .*\. Run: .*plugins/conformance$",
    ) as refused:
        make_alias("absent")
    assert refused.value.name == "mvllm.absent"


def test_a_package_that_is_not_allowed_is_named(installed: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MVLLM_PLUGINS", "another")
    with pytest.raises(ImportError, match=r"mvllm-acme-suite 0\.1\.0 .*, which MVLLM_PLUGINS does not let in"):
        make_alias("sample")
