"""Selection of an engine's executor: built in, by entry point, by dotted path; and every error."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace

import pytest

from mvllm.config.engine_config import EngineConfig, ParallelConfig
from mvllm.errors import ConfigError, PlatformError
from mvllm.executor.factory import make_executor
from mvllm.executor.uniproc import UniProcExecutor
from mvllm.installable import installable_platforms
from mvllm.installation import install_command
from mvllm.platform.phases import Phase
from mvllm.platform.topology import LaunchTopology
from mvllm.plugin_groups import EXECUTORS
from tests.unit.engine.builders import make_config
from tests.unit.worker.fake_platform import FakePlatform


class Remote(UniProcExecutor):
    """An executor of another package."""


class Clustered(Remote):
    """An executor that platforms must list; it prefers engines that need more devices than this machine has."""

    needs_platform_support = True

    @classmethod
    def is_preferred(cls, topology, count_devices, *, platform):
        return topology.num_workers > (count_devices() or 0)


class NotAnExecutor:
    pass


def config(backend: str | None = None, tp: int = 1, pp: int = 1) -> EngineConfig:
    parallel = ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp, distributed_executor_backend=backend)
    return replace(make_config(), parallel=parallel)


def refusal(settings: EngineConfig, platform: FakePlatform | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        make_executor(settings, platform or FakePlatform())
    return str(caught.value)


@pytest.fixture
def entry_points(monkeypatch):
    """The installed entry points of the test, by name."""

    def install(**values):
        group = EXECUTORS.group
        found = {name: importlib.metadata.EntryPoint(name, value, group) for name, value in values.items()}

        def search(*, group):
            assert group == EXECUTORS.group
            return list(found.values())

        monkeypatch.setattr(importlib.metadata, "entry_points", search)

    return install


@pytest.mark.parametrize("backend", [None, "uni"])
def test_one_worker_runs_in_this_process(backend):
    assert type(make_executor(config(backend), FakePlatform())) is UniProcExecutor


@pytest.mark.parametrize("path", [f"{__name__}.Remote", f"{__name__}:Remote"])
def test_a_dotted_path_names_a_class(path):
    assert isinstance(make_executor(config(path), FakePlatform()), Remote)


def test_an_entry_point_names_a_class(entry_points):
    entry_points(remote=f"{__name__}:Remote")
    assert isinstance(make_executor(config("remote"), FakePlatform()), Remote)


def test_a_named_executor_may_run_several_workers(entry_points):
    entry_points(remote=f"{__name__}:Remote")
    assert isinstance(make_executor(config("remote", tp=2), FakePlatform()), Remote)


def test_topology_is_called_in_the_engine_phase():
    platform = FakePlatform()
    make_executor(config(), platform)
    assert platform.phases["topology"] is Phase.ENGINE


def test_several_workers_without_a_named_executor_are_refused_with_the_factors():
    text = refusal(config(tp=2, pp=3))
    for word in ("6 workers", "tensor_parallel_size 2", "pipeline_parallel_size 3", "distributed_executor_backend"):
        assert word in text


def test_several_workers_cannot_share_one_process():
    assert "runs one worker; this configuration needs 2" in refusal(config("uni", tp=2))


def test_an_executor_that_the_platform_does_not_allow(entry_points):
    text = refusal(config("mp"))
    assert "'mp'" in text and "allows only uni" in text and "--distributed-executor-backend" in text
    text = refusal(config("uni"), FakePlatform(executors=("mp", "ray")))
    assert "'uni'" in text and "'acme'" in text and "mp, ray" in text
    entry_points(clustered=f"{__name__}:Clustered")
    assert "'clustered' was asked for, but the platform 'acme' allows only uni" in refusal(config("clustered"))
    allowing = FakePlatform(executors=("uni", "clustered"))
    assert isinstance(make_executor(config("clustered"), allowing), Clustered)


def test_a_listed_executor_that_prefers_an_engine_of_several_workers_is_chosen(entry_points, monkeypatch):
    entry_points(clustered=f"{__name__}:Clustered", remote=f"{__name__}:Remote")
    listing = FakePlatform(executors=("uni", "mp", "remote", "clustered"))
    monkeypatch.setattr("mvllm.executor.factory._count_devices", lambda platform: 1)
    assert isinstance(make_executor(config(tp=2), listing), Clustered)
    assert type(make_executor(config(), listing)) is UniProcExecutor
    without = FakePlatform(executors=("uni", "clustered"))
    monkeypatch.setattr("mvllm.executor.factory._count_devices", lambda platform: 2)
    assert "2 workers are needed" in refusal(config(tp=2), without)  # it is installed, and does not prefer this engine
    monkeypatch.setattr("mvllm.executor.factory._count_devices", lambda platform: 1)
    monkeypatch.setenv("MVLLM_PLUGINS", "remote")
    assert "2 workers are needed" in refusal(config(tp=2), without)


def test_a_listed_executor_that_cannot_be_loaded_is_not_chosen(entry_points, caplog):
    entry_points(clustered="there_is_no_such_module:Clustered")
    with caplog.at_level("WARNING", logger="mvllm"):
        assert "2 workers are needed" in refusal(config(tp=2), FakePlatform(executors=("clustered",)))
    assert "'clustered' is not considered" in caplog.text and "there_is_no_such_module" in caplog.text


def test_the_error_for_an_executor_without_its_package_has_the_install_command(entry_points, monkeypatch):
    entry_points()
    required = ['mvllm-acme>=1; extra == "acme"', 'mvllm-far>=1; extra == "far"', 'mvllm-far>=1; extra == "executors"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: required)
    text = refusal(config("far"), FakePlatform(executors=("far",)))
    assert f"package that provides this executor is not installed. Run: {install_command('mvllm-far')}" in text
    assert "there is no such executor. There are" in refusal(config("acme"))
    assert installable_platforms() == ["mvllm-acme"]


@pytest.mark.parametrize("name", ["nope", "nope.Executor", f"{__name__}.Absent", "a:b:c", ":", "."])
def test_the_error_for_an_unknown_name_lists_where_it_was_searched(entry_points, name):
    entry_points()
    text = refusal(config(name))
    assert repr(name) in text
    assert "there is no such executor" in text and "uni" in text and "dotted path" in text


@pytest.mark.parametrize("path", [f"{__name__}.NotAnExecutor", "mvllm.executor.factory.make_executor"])
def test_a_class_that_is_not_an_executor_is_refused(path):
    assert "not an Executor class" in refusal(config(path))


def test_an_entry_point_that_cannot_be_loaded_is_named(entry_points):
    entry_points(remote="there_is_no_such_module:Remote")
    text = refusal(config("remote"))
    assert "there_is_no_such_module:Remote" in text and "cannot be loaded" in text


@pytest.mark.parametrize(
    ("topology", "says"),
    [
        ({"num_workers": 2, "env_per_worker": ({"DEVICE": "0"},)}, "variables for 1 workers, the topology has 2"),
        ({"num_workers": 0}, "at least one worker"),
        ({"executors": ()}, "one executor"),
    ],
)
def test_a_contradictory_topology_is_an_error_of_the_platform(topology, says):
    class Confused(FakePlatform):
        def topology(self, parallel):
            return LaunchTopology(**{"num_workers": 1, "devices_per_worker": 1, "executors": ("mp",), **topology})

    with pytest.raises(PlatformError, match=f"'acme' failed in topology: ValueError: .*{says}"):
        make_executor(config("mp"), Confused())


def of(num_workers: int, devices: int, **capabilities: object) -> FakePlatform:
    """A platform with the default worker and the given topology."""

    class Several(FakePlatform):
        def topology(self, parallel):
            return LaunchTopology(num_workers, devices, ("uni", "mp"))

        def worker_class(self):
            return None

    made = Several()
    made.capabilities = replace(made.capabilities, **{"devices_per_process": None, **capabilities})
    return made


def test_one_worker_of_several_devices_runs_in_this_process():
    executor = make_executor(config(tp=4), of(1, 4))
    assert type(executor) is UniProcExecutor


def test_a_worker_of_several_devices_holds_one_stage():
    text = refusal(config(tp=1, pp=2), of(1, 2))
    assert "each worker of the platform 'acme' drives 2 devices, which share layers" in text
    assert "Set tensor_parallel_size to a multiple of 2" in text


def test_workers_of_several_devices_need_collectives_among_them_only():
    text = refusal(config("uni", tp=4), of(2, 2, collectives=frozenset()))
    assert "2 workers of 2 device(s). They need all_reduce, all_gather" in text


@pytest.mark.parametrize(("workers", "devices"), [(3, 2), (1, 2), (2, 1)])
def test_a_topology_with_too_few_devices_is_an_error_of_the_platform(workers, devices):
    with pytest.raises(PlatformError, match=f"makes 4 ranks, for which .* has {workers} workers of {devices} devices"):
        make_executor(config("uni", tp=4), of(workers, devices))


def test_more_devices_than_the_platform_claims_are_refused():
    with pytest.raises(PlatformError, match=r"each worker drive 4 devices, but it claims at most 2"):
        make_executor(config(tp=4), of(1, 4, devices_per_process=2))
