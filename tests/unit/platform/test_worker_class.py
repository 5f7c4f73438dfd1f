"""The worker of a platform: its own class, that of a package for one of its capabilities, or core's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mvllm import plugin_groups
from mvllm.errors import PlatformError
from mvllm.executor.worker_topology import check_topology, launch_topology
from mvllm.installation import install_command
from mvllm.platform.worker_class import worker_class_of
from mvllm.plugin_groups import PluginSource
from tests.unit.engine.builders import make_config
from tests.unit.worker.fake_platform import FakePlatform


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[PluginSource]:
    """The installed workers, none at first."""
    found: list[PluginSource] = []
    monkeypatch.setattr(plugin_groups, "list_plugins", lambda group: found if group is plugin_groups.WORKERS else [])
    return found


def platform(path: str | None = None, **capabilities: bool) -> FakePlatform:
    made = FakePlatform()
    made.capabilities = replace(made.capabilities, **capabilities)
    made.worker_class = lambda: path  # type: ignore[method-assign]
    return made


GRAPHS = PluginSource("graph_compiler", "acme_graphs:Worker", "mvllm-acme-graphs", "1.0")


def test_a_class_that_the_platform_names_is_used(installed: list[PluginSource]) -> None:
    assert worker_class_of(platform("mine:Worker", graph_compiler=True)) == "mine:Worker"


def test_others_run_on_cores_worker(installed: list[PluginSource]) -> None:
    installed.append(GRAPHS)
    assert worker_class_of(platform()) == "mvllm.worker.worker:Worker"


def test_a_package_has_the_worker_of_platforms_with_a_capability(installed: list[PluginSource]) -> None:
    installed.append(GRAPHS)
    assert worker_class_of(platform(graph_compiler=True)) == "acme_graphs:Worker"


def test_cores_worker_named_by_a_platform_with_graphs_is_no_choice(installed: list[PluginSource]) -> None:
    made, config = platform("mvllm.worker.worker:Worker", graph_compiler=True), make_config()
    with pytest.raises(PlatformError, match="needs the package mvllm-graph"):
        check_topology(config, made, launch_topology(config, made))
    installed.append(GRAPHS)
    assert worker_class_of(made) == "acme_graphs:Worker"
    assert worker_class_of(platform("mvllm.worker.worker:Worker")) == "mvllm.worker.worker:Worker"


def test_a_missing_worker_is_named_in_one_line_before_workers_start(installed: list[PluginSource]) -> None:
    made, config = platform(graph_compiler=True), make_config()
    with pytest.raises(PlatformError) as found:
        check_topology(config, made, launch_topology(config, made))
    assert str(found.value) == (
        "The platform 'acme', which runs models as graphs, needs the package mvllm-graph, which is not installed. "
        f"Run: {install_command('mvllm-graph')}"
    )
