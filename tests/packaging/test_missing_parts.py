"""Parts of mvllm that are not installed: what uses them names the package and the command that installs it."""

from __future__ import annotations


def test_a_command_of_a_missing_part_names_its_package(core_only):
    done = core_only.run("-m", "mvllm.entrypoints.cli.main", "conformance", "--platform", "acme")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: `mvllm conformance` needs the package mvllm-conformance, which is not installed: "
        'pip install "mvllm[conformance]"\n'
    )


def test_a_module_of_a_missing_part_names_its_package(core_only):
    done = core_only.run("-m", "pytest", "-p", "mvllm.testing.plugin")
    assert done.returncode != 0
    assert (
        'mvllm.testing needs the package mvllm-conformance, which is not installed: pip install "mvllm[' in done.stderr
    )


def test_operations_of_graphs_name_the_package_that_has_them(core_only):
    wanted = 'needs the package mvllm-graph, which is not installed: pip install "mvllm[graph]"'
    done = core_only.run("-m", "mvllm", "ops", "--graph")
    assert (done.returncode, done.stderr) == (1, f"error: `mvllm ops --graph` {wanted}\n")
    done = core_only.run("-c", "from mvllm.plugin_api.graph import GraphPlatform")
    assert done.stderr.splitlines()[-1].endswith(f"MissingPartError: mvllm.plugin_api.graph {wanted}")
