"""Which of Ray's resources one device of a platform is: entry points of the platform's package, or of this one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mvllm.errors import ConfigError
from mvllm.plugin_api import LaunchTopology
from mvllm_ray.resources import find_resource, require_resource
from tests.helpers.plugins import prepend, write_metadata

TOPOLOGY = LaunchTopology(2, 1, ("mp", "ray"))
DEPRECATED = LaunchTopology(2, 1, ("mp", "ray"), ray_resource="acme-core")


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package whose module has a resource and an object that is none."""
    points = "acme = acme_ray:RESOURCE\ncpu = acme_ray:RESOURCE\nwrong = acme_ray:NUMBER\nabsent = acme_ray:ABSENT\n"
    folder = write_metadata(tmp_path, "acme", f"[mvllm_ray.resources]\n{points}")
    (folder / "acme_ray.py").write_text("RESOURCE, NUMBER = 'acme-chip', 5\n")
    prepend(monkeypatch, [str(folder)])
    monkeypatch.delitem(sys.modules, "acme_ray", raising=False)


@pytest.mark.parametrize(("platform", "resource"), [("cpu", "CPU"), ("cuda", "GPU"), ("rocm", "GPU"), ("xpu", "GPU")])
def test_mvllms_own_platforms_are_known(platform: str, resource: str) -> None:
    assert find_resource(platform, TOPOLOGY) == require_resource(platform, TOPOLOGY) == resource


@pytest.mark.usefixtures("acme")
def test_a_platforms_package_names_its_resource_and_comes_before_this_one(caplog: pytest.LogCaptureFixture) -> None:
    assert require_resource("acme", DEPRECATED) == "acme-chip"
    assert find_resource("cpu", TOPOLOGY) == "acme-chip"
    assert not caplog.records


def test_the_field_of_the_topology_is_accepted_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert find_resource("acme", DEPRECATED) == "acme-core" and not caplog.records
    assert require_resource("acme", DEPRECATED) == "acme-core"
    assert "'acme'" in caplog.text and "deprecated" in caplog.text


@pytest.mark.usefixtures("acme")
def test_entry_points_that_are_no_resources_are_refused_with_their_package() -> None:
    assert find_resource("other", TOPOLOGY) is None
    with pytest.raises(ConfigError, match=r"no installed package says .* 'other' is, by an entry point"):
        require_resource("other", TOPOLOGY)
    with pytest.raises(ConfigError, match=r"acme_ray:NUMBER of acme 0\.1\.0.*must be the name.*found 5"):
        find_resource("wrong", TOPOLOGY)
    with pytest.raises(ConfigError, match=r"acme_ray:ABSENT of acme 0\.1\.0.*cannot be loaded: AttributeError"):
        find_resource("absent", TOPOLOGY)
