"""`mvllm plugin new`: generated files, placeholders, names and existing folders."""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from pathlib import Path

import psutil
import pytest
import yaml

import mvllm_conformance
from mvllm.entrypoints.cli.main import main
from mvllm.errors import ConfigError
from mvllm.plugin_api import CONTRACT, WorkerContext
from mvllm_conformance import plugin_command
from mvllm_conformance.clauses import FAMILIES
from tests.helpers.plugins import ROOT

TEMPLATE = Path(mvllm_conformance.__file__).parent / "plugin_template"


def test_every_template_file_is_used():
    sources = {name for files in (plugin_command.FILES, plugin_command.GRAPH_FILES) for name in files.values() if name}
    sources.add(plugin_command.SHARED_WORKFLOW)
    assert sources == {path.name for path in TEMPLATE.iterdir()}


def test_the_help_of_the_command_is_that_of_its_subcommand(capsys):
    with pytest.raises(SystemExit):
        main(["plugin", "--help=name"])
    assert capsys.readouterr().out.startswith("mvllm plugin new\n")
    with pytest.raises(SystemExit):
        main(["plugin", "new", "--help"])
    assert capsys.readouterr().out.startswith("usage: mvllm plugin new NAME [OPTION ...]\n")


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(
    ("name", "package", "cls"), [("acme", "mvllm_acme", "Acme"), ("x-2-go", "mvllm_x_2_go", "X2Go")]
)
def test_all_placeholders_are_replaced_and_files_are_valid(tmp_path, name, package, cls, graph):
    for path in plugin_command.write_plugin(name, tmp_path / "new", graph=graph):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"@\w+@", text) and "@" not in path.name
        if path.suffix == ".py":
            ast.parse(text)
        elif path.suffix == ".toml":
            tomllib.loads(text)
        elif path.suffix == ".yml":
            yaml.safe_load(text)
    folder = tmp_path / "new" / "src" / package
    assert f"class {cls}Platform({'Graph' * graph}Platform)" in (folder / "platform.py").read_text()
    assert (folder / "compiler.py").exists() == graph and (folder / "runtime.py").exists() != graph
    assert f"contract={CONTRACT}" in (folder / "plugin.py").read_text()
    project = tomllib.loads((tmp_path / "new" / "pyproject.toml").read_text())["project"]
    assert project["name"] == f"mvllm-{name}"
    assert project["entry-points"]["mvllm.platforms"] == {name: f"{package}.plugin"}
    for text in project["dependencies"]:  # floors only, but the name mvllm is another project's on the public index
        assert re.fullmatch(r"mvllm[\w-]*>=[\d.]+,<1" if text.startswith("mvllm") else r"[\w\[\]-]+(>=[\d.]+)?", text)
    assert project["license"] and project["authors"][0]["name"] and set(project["urls"]) == {"Homepage", "Issues"}
    readme = (tmp_path / "new" / "README.md").read_text()
    assert "REPLACE this paragraph: which devices" in readme, "it is about the device, not about the host"
    assert "host" not in readme.partition("## Development")[0]


def test_the_default_folder_has_the_packages_name_and_next_steps_are_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plugin", "new", "acme"]) == 0
    assert (tmp_path / "mvllm-acme" / "tests" / "test_conformance.py").read_text().count("\n") == 1
    assert (tmp_path / "mvllm-acme" / "tests" / "conftest.py").read_text().count("\n") == 1
    printed = capsys.readouterr().out
    assert "pip install -e mvllm-acme" in printed and "mvllm conformance --platform acme" in printed


def workflow_of(folder):
    return yaml.safe_load((folder / ".github" / "workflows" / "conformance.yml").read_text())["jobs"]["conformance"]


def test_the_default_workflow_is_self_contained(tmp_path):
    plugin_command.write_plugin("acme", tmp_path)
    job = workflow_of(tmp_path)
    assert "uses" not in job, "a workflow elsewhere is called only where its place was given"
    used = [step["uses"] for step in job["steps"] if "uses" in step]
    assert used and all(name.startswith("actions/") for name in used)
    assert any(name.startswith("actions/cache@") for name in used) and job["timeout-minutes"] <= 60
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands.index("uv pip install --system --require-hashes -r WHEELHOUSE/cpu.txt") == (
        commands.index("uv pip install --system .") - 1
    ), "mvllm comes first, from its wheelhouse, with torch's build for processors"
    command = "mvllm conformance --platform acme --waivers waivers.toml --report conformance.json"
    [found] = [line for line in commands if line.startswith(command)]
    assert "format('--only {0}', matrix.part.only)" in found


def test_the_parts_of_the_workflow_have_every_family_once_and_each_week_all_in_one_run(tmp_path):
    plugin_command.write_plugin("acme", tmp_path)
    parts = workflow_of(tmp_path)["strategy"]["matrix"]["part"]
    weekly, each_change = re.findall(r"'(\[.*?\])'", parts, flags=re.DOTALL)
    assert [part["only"] for part in json.loads(weekly)] == [""]
    families = [name for part in json.loads(each_change) for name in part["only"].split(",")]
    assert sorted(families) == sorted(FAMILIES)


def test_a_shared_workflow_is_called_with_its_inputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plugin", "new", "acme", "--workflow", "acme-inc/mvllm@v0.1"]) == 0
    job = workflow_of(tmp_path / "mvllm-acme")
    assert job["uses"] == "acme-inc/mvllm/.github/workflows/conformance.yml@v0.1"
    called = yaml.safe_load((ROOT / ".github" / "workflows" / "conformance.yml").read_text())
    offered = called[True]["workflow_call"]["inputs"]  # YAML parses the key `on` as True
    assert job["with"]["platform"] == "acme" and set(job["with"]) <= set(offered)
    assert {name for name, facts in offered.items() if facts.get("required")} <= set(job["with"])


@pytest.mark.parametrize("workflow", ["", "mvllm", "a/b", "a/b@", "@main", "a b/c@main", "/b@main", "a/b/c@main"])
def test_an_incomplete_workflow_reference_is_rejected(tmp_path, monkeypatch, capsys, workflow):
    monkeypatch.chdir(tmp_path)
    assert main(["plugin", "new", "acme", "--workflow", workflow]) == 1
    assert "OWNER/REPOSITORY@REF" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_non_empty_folder_is_not_changed(tmp_path):
    (tmp_path / "precious").write_text("x")
    with pytest.raises(ConfigError, match="not an empty folder"):
        plugin_command.write_plugin("acme", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize(
    "name", ["", "-a", "a-", "a--b", "a_b", "Ä", "a b", "../x", "a" * 41, "mvllm-a", "cpu", "auto", "gguf", "ray"]
)
def test_invalid_names_are_rejected(name):
    with pytest.raises(ConfigError):
        plugin_command.check_name(name)


@pytest.mark.parametrize("name", ["acme", "a", "a1-b2", "x" * 40])
def test_valid_names_are_accepted(name):
    plugin_command.check_name(name)


def test_the_template_imports_only_the_public_plugin_api():
    for path in TEMPLATE.glob("*.py.tmpl"):
        for module in re.findall(r"^\s*(?:from|import) (mvllm[\w.]*)", path.read_text(), flags=re.MULTILINE):
            allowed = ("mvllm.plugin_api", "mvllm.plugin_api.graph", "mvllm.testing.suite.everything")
            assert module in allowed, path.name


def test_the_page_about_conformance_shows_the_files_of_the_template():
    page = (ROOT / "docs" / "how-to" / "conformance.md").read_text(encoding="utf-8")
    for name in ("conftest.py", "test_conformance.py"):
        [line] = re.findall(rf"^# tests/{name}\n(.*)$", page, flags=re.MULTILINE)
        assert line == (TEMPLATE / f"{name}.tmpl").read_text(encoding="utf-8").strip().partition("  #")[0], name


def test_the_null_device_has_the_bounds_of_the_template(tmp_path):
    plugin_command.write_plugin("acme", tmp_path)
    ours, new = (
        tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))
        for folder in (ROOT / "plugins" / "null-device", tmp_path)
    )
    assert ours["project"]["dependencies"] == new["project"]["dependencies"][:1], "it has no torch"
    assert ours["build-system"] == new["build-system"]
    assert ours["project"]["requires-python"] == new["project"]["requires-python"]


def test_the_runtime_counts_the_page_cache_as_free_memory(tmp_path, monkeypatch):
    plugin_command.write_plugin("acme", tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "src")
    monkeypatch.delitem(sys.modules, "mvllm_acme", raising=False)
    from mvllm_acme.runtime import AcmeRuntime

    memory = AcmeRuntime(WorkerContext()).memory()
    assert memory.total == psutil.virtual_memory().total
    assert abs(memory.free - psutil.virtual_memory().available) < memory.total // 20, "other processes come and go"
    assert 0 < memory.used_by_me <= memory.peak_by_me
