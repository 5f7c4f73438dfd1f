"""Parts of mvllm that are not installed: what uses them names the package and the command that installs it."""

from __future__ import annotations

WHEELHOUSE = "pip install --require-hashes --no-deps -r WHEELHOUSE/PLATFORM.txt (docs/how-to/install.md"
"""The wheel that the environment was made of came from no wheelhouse."""


def test_a_command_of_a_missing_part_names_its_package(core_only):
    done = core_only.run("-m", "mvllm.entrypoints.cli.main", "conformance", "--platform", "acme")
    assert (done.returncode, done.stdout) == (1, "")
    begin = "error: `mvllm conformance` needs the package mvllm-conformance, which is not installed. Run: "
    assert done.stderr.startswith(begin) and WHEELHOUSE in done.stderr and done.stderr.count("\n") == 1


def test_a_module_of_a_missing_part_names_its_package(core_only):
    done = core_only.run("-m", "pytest", "-p", "mvllm.testing.plugin")
    assert done.returncode != 0
    assert "mvllm.testing needs the package mvllm-conformance, which is not installed. Run: " in done.stderr
    assert WHEELHOUSE in done.stderr


def test_a_command_of_another_name_than_its_part_names_the_package(core_only):
    done = core_only.run("-m", "mvllm", "plugin", "new", "acme")
    assert (done.returncode, done.stdout) == (1, "")
    begin = "error: `mvllm plugin` needs the package mvllm-conformance, which is not installed. Run: "
    assert done.stderr.startswith(begin) and WHEELHOUSE in done.stderr and done.stderr.count("\n") == 1


def test_the_contract_of_graphs_names_the_package_that_has_it(core_only):
    done = core_only.run("-c", "from mvllm.plugin_api.graph import GraphPlatform")
    [*_, last] = done.stderr.splitlines()
    assert "MissingPartError: mvllm.plugin_api.graph needs the package mvllm-graph, which is not installed. Run" in last
    assert WHEELHOUSE in last
