"""CFG: a platform's capabilities, plans and topologies are pure and complete, and core enforces them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from mvllm.extension_api import WorkerWrapper
from mvllm.extension_api.testing import EngineArgs, enter_phase, known_executors, replace_field, resolve_config
from mvllm.plugin_api import (
    Capabilities,
    CheckStatus,
    ConfigError,
    EngineConfig,
    LaunchTopology,
    ParallelConfig,
    Phase,
    Plan,
    Platform,
    PlatformError,
    Refusals,
)
from mvllm_conformance.markers import clause, exhaustive
from mvllm_conformance.platform_under_test import PlatformUnderTest
from mvllm_conformance.rank_launcher import parallel_config
from mvllm_conformance.subprocess_checks import open_devices

EXECUTORS = known_executors()
COLLECTIVES = {
    *("all_reduce", "all_gather", "reduce_scatter", "broadcast"),
    *("send_recv", "gather", "all_to_all", "barrier"),
}
WORLDS = [(1, 1), (2, 1), (1, 2), pytest.param((2, 2), marks=exhaustive), pytest.param((8, 1), marks=exhaustive)]
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "small": {"max_num_seqs": 2, "max_num_batched_tokens": 16, "block_size": 16, "enforce_eager": True},
    "two ranks": {"tensor_parallel_size": 2, "enable_prefix_caching": False},
}


@pytest.fixture
def frontend(subject: PlatformUnderTest) -> Iterator[Platform]:
    """The platform, in the phase in which core calls `plan`."""
    with enter_phase(Phase.FRONTEND):
        yield subject.platform


def make_config(**settings: Any) -> EngineConfig:
    """An EngineConfig for the demo model."""
    return EngineArgs.from_kwargs(model="demo", **settings).create_engine_config()


@clause("CFG-01")
@pytest.mark.parametrize("settings", SETTINGS)
def test_plan_changes_nothing_and_answers_equal_questions_equally(frontend: Platform, settings: str) -> None:
    config = make_config(**SETTINGS[settings])
    before, twin = plain(config), copy.deepcopy(config)
    first = frontend.plan(config)
    assert plain(config) == before, "plan changed its argument"
    assert frontend.plan(twin) == first == frontend.plan(config)


def plain(value: Any) -> Any:
    """A configuration as nested dicts of comparable values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "__dict__"):
        return {name: plain(inner) for name, inner in vars(value).items()}
    return copy.deepcopy(value)


@clause("CFG-01", "CFG-03")
def test_neither_plan_nor_topology_opens_a_device(frontend: Platform) -> None:
    before = open_devices()
    frontend.plan(make_config())
    frontend.topology(ParallelConfig())
    assert frontend.capabilities == frontend.capabilities
    assert open_devices() <= before


@clause("CFG-02")
@pytest.mark.parametrize("settings", SETTINGS)
def test_changes_have_reasons_and_can_be_applied(frontend: Platform, settings: str) -> None:
    answer = frontend.plan(make_config(**SETTINGS[settings]))
    assert isinstance(answer, Plan | Refusals)
    if isinstance(answer, Refusals):
        assert_refusals(answer)
        return
    config = make_config(**SETTINGS[settings])
    for change in answer.changes:
        assert change.reason.strip(), change
        config = replace_field(config, change.field, change.value)


@clause("CFG-02")
def test_the_plain_configuration_is_accepted(frontend: Platform) -> None:
    resolved = resolve_config(make_config(), frontend)
    assert resolved.model.dtype in frontend.capabilities.dtypes
    assert resolved.cache.memory_utilization is not None


@clause("CFG-02")
def test_a_dtype_that_is_not_offered_is_refused_with_what_is(frontend: Platform) -> None:
    config = make_config()
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="float8_e8m0fnu"))
    answer = frontend.plan(config)
    if isinstance(answer, Refusals):
        assert_refusals(answer)
    with pytest.raises(ConfigError, match="float8_e8m0fnu"):
        resolve_config(config, frontend)


def assert_refusals(answer: Refusals) -> None:
    assert answer.reasons
    for refusal in answer.reasons:
        assert refusal.reason.strip() and refusal.remedy.strip() and refusal.field.strip(), refusal


@clause("CFG-03")
def test_two_reads_of_capabilities_and_spec_are_equal(frontend: Platform) -> None:
    assert isinstance(frontend.capabilities, Capabilities)
    assert frontend.capabilities == frontend.capabilities
    assert frontend.spec == frontend.spec


@clause("CFG-03")
def test_capabilities_name_what_there_is(frontend: Platform) -> None:
    from mvllm.extension_api.testing import torch_dtype

    capabilities = frontend.capabilities
    assert capabilities.dtypes, "capabilities.dtypes must not be empty"
    for name in (*capabilities.dtypes, *capabilities.kv_dtypes):
        torch_dtype(name)  # raises for unknown names
    assert capabilities.collectives <= COLLECTIVES
    assert capabilities.max_head_size is None or capabilities.max_head_size > 0
    for field in dataclasses.fields(Capabilities):
        if field.type == "bool":
            assert isinstance(getattr(capabilities, field.name), bool), field.name


@clause("CFG-03")
def test_an_unknown_capability_is_an_error(frontend: Platform) -> None:
    with pytest.raises(TypeError):
        dataclasses.replace(frontend.capabilities, time_travel=True)  # type: ignore[call-arg]


@clause("CFG-03", "CFG-05")
@pytest.mark.parametrize("world", WORLDS)
def test_topology_answers_equal_questions_equally(frontend: Platform, world: tuple[int, int]) -> None:
    parallel = parallel_config(*world)
    assert frontend.topology(parallel) == frontend.topology(parallel_config(*world))


@clause("CFG-05")
@pytest.mark.parametrize("world", WORLDS)
def test_topology_is_complete(frontend: Platform, world: tuple[int, int]) -> None:
    parallel = parallel_config(*world)
    topology = frontend.topology(parallel)
    assert isinstance(topology, LaunchTopology)
    assert topology.num_workers >= 1 and topology.devices_per_worker >= 1
    assert topology.num_workers * topology.devices_per_worker >= parallel.world_size
    most = frontend.capabilities.devices_per_process
    assert most is None or topology.devices_per_worker <= most
    assert topology.executors and set(topology.executors) <= EXECUTORS
    assert len(topology.env_per_worker) in (0, topology.num_workers)
    others = [
        pair for env in topology.env_per_worker for pair in env.items() if not all(isinstance(v, str) for v in pair)
    ]
    assert not others, f"env_per_worker must map str to str; found {others}"


@clause("CFG-06")
def test_diagnostics_have_stable_ids_and_remedies(frontend: Platform) -> None:
    before = open_devices()
    checks = list(frontend.doctor())
    assert open_devices() <= before, "doctor opened a device"
    assert len({check.id for check in checks}) == len(checks)
    for check in checks:
        assert check.id.startswith(f"platform.{frontend.spec.name}."), check.id
        assert check.found.strip(), check.id
        assert check.status is CheckStatus.OK or (check.remedy or "").strip(), f"{check.id} is not OK and has no remedy"


# ----------------------------------------------------------- core disables or refuses capabilities that are not claimed


@clause("CFG-04", "E2E-04", needs="prefix_caching", refusal=True)
def test_prefix_caching_that_is_not_claimed_is_switched_off(frontend: Platform) -> None:
    assert resolve_config(make_config(enable_prefix_caching=True), frontend).cache.enable_prefix_caching is False


@clause("CFG-04", "E2E-05", needs="chunked_prefill", refusal=True)
def test_chunked_prefill_that_is_not_claimed_is_switched_off(frontend: Platform) -> None:
    requested = make_config(enable_chunked_prefill=True, max_num_seqs=4, max_num_batched_tokens=16)
    resolved = resolve_config(requested, frontend)
    assert resolved.scheduler.enable_chunked_prefill is False
    assert resolved.scheduler.max_num_batched_tokens >= resolved.model.max_model_len, "a step must hold every prompt"


@clause("CFG-04", "ATT-14", "OPS-04", "E2E-07", refusal=True)
def test_batch_invariance_that_is_not_claimed_is_refused(frontend: Platform) -> None:
    with pytest.raises(ConfigError, match="batch_invariant"):
        resolve_config(make_config(batch_invariant=True), frontend)


@clause("CFG-04", needs="sliding_window", refusal=True)
def test_a_model_with_a_window_that_is_not_claimed_is_refused(frontend: Platform) -> None:
    config = make_config()
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, sliding_window=16))
    with pytest.raises(ConfigError, match="sliding window"):
        resolve_config(config, frontend)


@clause("CFG-04")
def test_a_head_larger_than_the_largest_is_refused(frontend: Platform) -> None:
    largest = frontend.capabilities.max_head_size
    config = make_config()
    head_size = 1024 if largest is None else largest + 1
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, head_size=head_size))
    if largest is None:
        assert resolve_config(config, frontend).model.head_size == head_size
        return
    with pytest.raises(ConfigError, match=str(largest)):
        resolve_config(config, frontend)


@clause("CFG-04")
def test_a_cache_dtype_that_is_not_stored_is_refused(frontend: Platform) -> None:
    config = make_config()
    config = dataclasses.replace(config, cache=dataclasses.replace(config.cache, dtype="float8_e8m0fnu"))
    with pytest.raises(ConfigError, match="float8_e8m0fnu"):
        resolve_config(config, frontend)


@clause("CFG-04", needs="torch_device", refusal=True)
def test_without_torch_tensors_the_platform_brings_a_worker_of_its_own(subject: PlatformUnderTest) -> None:
    with enter_phase(Phase.WORKER):
        assert subject.platform.worker_class() is not None


@clause("CFG-04", needs="torch_device")
def test_a_worker_class_that_is_named_can_be_loaded(subject: PlatformUnderTest) -> None:
    from mvllm.plugin_api import WorkerContext

    try:
        WorkerWrapper(resolve_config(make_config(), subject.platform), subject.platform, WorkerContext())
    except PlatformError as e:
        pytest.fail(str(e), pytrace=False)


@clause("COM-03", "COM-04", needs="collectives:all_reduce", refusal=True)
def test_tensor_parallelism_without_its_collectives_is_refused(frontend: Platform) -> None:
    with pytest.raises(ConfigError, match="all_reduce"):
        resolve_config(make_config(tensor_parallel_size=2), frontend)


@clause("COM-07", needs="collectives:send_recv", refusal=True)
def test_pipelines_without_send_and_recv_are_refused(frontend: Platform) -> None:
    with pytest.raises(ConfigError, match="send_recv"):
        resolve_config(make_config(pipeline_parallel_size=2), frontend)
