"""PRB: a probe is fast and has no side effects."""

from __future__ import annotations

from typing import Any

import pytest

from mvllm.extension_api.testing import SLOW_PROBE_SECONDS
from mvllm_conformance.markers import clause, skip_not_run
from mvllm_conformance.platform_under_test import PlatformUnderTest
from mvllm_conformance.report import WITHOUT_DEVICE
from mvllm_conformance.suite.test_plg_plugin import inspect_plugin

PROBE_CPU_SECONDS = 1.0
"""CPU time limit of a probe, independent of the load of the machine."""


@pytest.fixture(scope="module")
def probed(platform_under_test: PlatformUnderTest) -> dict[str, Any]:
    capabilities = platform_under_test.capabilities
    claimed = not platform_under_test.error and capabilities.fork_safe and capabilities.torch_device
    claimed = claimed and not platform_under_test.without_device
    return inspect_plugin(platform_under_test, bind_after_fork=claimed)


@clause("PRB-01")
def test_a_probe_raises_nothing_and_answers_with_a_result(probed: dict[str, Any]) -> None:
    assert not probed["error"], probed["error"]
    assert probed["is_result"], "the probe must return a ProbeResult"


@clause("PRB-01")
def test_a_probe_says_what_it_found_or_what_is_missing(probed: dict[str, Any]) -> None:
    assert probed["reason"].strip()
    if not probed["available"]:
        assert (probed["remedy"] or "").strip(), "a probe that finds no device must give a remedy"
    assert probed["indices"] == list(range(len(probed["indices"]))), "devices must be numbered from 0"


@clause("PRB-01")
def test_a_probe_takes_under_a_second(probed: dict[str, Any]) -> None:
    assert max(probed["cpu_seconds"]) < PROBE_CPU_SECONDS
    shortest = min(probed["seconds"])
    assert shortest < SLOW_PROBE_SECONDS, (
        f"of two probes, the shorter one took {shortest:.1f} s; each start waits for it"
    )


@clause("PRB-02")
def test_a_process_that_has_probed_can_be_forked_and_the_child_can_probe(probed: dict[str, Any]) -> None:
    assert probed["fork"] == ""


@clause("PRB-02", needs="fork_safe")
def test_the_child_of_a_process_that_has_probed_can_use_the_device(
    platform_under_test: PlatformUnderTest, probed: dict[str, Any]
) -> None:
    if platform_under_test.without_device:
        skip_not_run(WITHOUT_DEVICE)
    assert probed.get("bind_after_fork", "") == ""


@clause("PRB-03")
def test_a_probe_loads_no_torch(probed: dict[str, Any]) -> None:
    assert probed["loaded"] == []


@clause("PRB-03")
def test_a_probe_leaves_nothing_behind(probed: dict[str, Any]) -> None:
    assert (probed["new_threads"], probed["new_children"], probed["changed_variables"]) == (0, 0, [])


@clause("PRB-03")
def test_two_probes_answer_the_same(probed: dict[str, Any]) -> None:
    assert probed["same"]
