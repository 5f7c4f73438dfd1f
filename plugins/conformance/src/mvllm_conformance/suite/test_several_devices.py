"""DEV-09, MEM-05, KVL-06, RUN-03: one worker that drives several devices distributes tensors over them.

Each check runs in a new process, since device libraries often fix the number of devices at their start.
"""

from __future__ import annotations

import dataclasses

import pytest

from mvllm.extension_api.testing import EngineArgs, check_topology, enter_phase
from mvllm.plugin_api import LaunchTopology, Phase, PlatformError
from mvllm_conformance.markers import clause, skip_not_claimed
from mvllm_conformance.platform_under_test import PlatformUnderTest
from mvllm_conformance.rank_launcher import multi_device_skip_reason, parallel_config, run_on_multiple_devices
from mvllm_conformance.zoo import Zoo


def check(subject: PlatformUnderTest, what: str, zoo: Zoo | None = None) -> None:
    """Runs a check of `_rank_process` in a worker with two devices."""
    if why := multi_device_skip_reason(subject, 2):
        skip_not_claimed(why)
    checkpoint = None if zoo is None else zoo.checkpoint("llama")
    error = run_on_multiple_devices(subject, what, checkpoint=checkpoint).error_of(what)
    assert not error, error


@clause("DEV-09")
def test_tensors_are_spread_over_the_devices(subject: PlatformUnderTest) -> None:
    check(subject, "place")


@clause("MEM-05")
def test_the_memory_of_all_devices_counts(subject: PlatformUnderTest) -> None:
    if why := multi_device_skip_reason(subject, 2):
        skip_not_claimed(why)
    totals = []
    for count in (1, 2):
        result = run_on_multiple_devices(subject, "total", count)
        assert not result.error_of("total"), result.error_of("total")
        totals.append(int(result.answers["total"]["total"]))
    one, two = totals
    if subject.capabilities.unified_memory:
        assert abs(two - one) < 0.1 * one, f"the host has {one} bytes; with two devices memory() gives {two}"
    else:
        assert abs(two - 2 * one) < 0.2 * one, f"one device has {one} bytes; with two devices memory() gives {two}"


@clause("KVL-06")
def test_the_cache_is_spread_over_the_devices(subject: PlatformUnderTest) -> None:
    check(subject, "cache")


@clause("RUN-03")
def test_weights_are_spread_over_the_devices(subject: PlatformUnderTest, free_device: None, zoo: Zoo) -> None:
    check(subject, "weights", zoo)


@clause("DEV-09", "MEM-05", "KVL-06", "RUN-03", refusal=True)
def test_a_worker_of_several_devices_that_are_not_claimed_is_refused(subject: PlatformUnderTest) -> None:
    if subject.platform.worker_class() is not None:
        skip_not_claimed("the platform has its own worker class, which drives devices itself")
    config = EngineArgs.from_kwargs(model="demo").create_engine_config()
    config = dataclasses.replace(config, parallel=parallel_config(tensor=2))
    with enter_phase(Phase.ENGINE), pytest.raises(PlatformError, match="devices_per_process"):
        check_topology(config, subject.platform, LaunchTopology(1, 2, ("uni",)))
