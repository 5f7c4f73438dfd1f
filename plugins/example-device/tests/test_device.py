"""Runs the tests in device_rules.py, and tests the package without opening a device."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.plugins import EXAMPLE_SOURCE, ROOT, example_platform_path, prepend

RULES = Path(__file__).with_name("device_rules.py")
PACKAGE = EXAMPLE_SOURCE / "mvllm_example_device"


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Runs device_rules.py in a separate process: a PrivateUse1 backend cannot be unregistered."""
    path = [*example_platform_path(tmp_path_factory.mktemp("plugins")), str(ROOT), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    environment.pop("MVLLM_EXAMPLE_DEVICES", None)
    done = subprocess.run([sys.executable, RULES], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("rule", re.findall(r"^def (rule_\w+)", RULES.read_text("utf-8"), flags=re.MULTILINE))
def test_device(outcome, rule):
    assert outcome[rule] is None, outcome[rule]


FOREIGN = """
import sys
from pathlib import Path
import torch
from mvllm.errors import PlatformError
from mvllm.platform.topology import WorkerContext
from mvllm_example_device import runtime
from mvllm_example_device.platform import ExamplePlatform

def refusal():
    try:
        ExamplePlatform().init_device(WorkerContext())
    except PlatformError as e:
        return str(e)

runtime.LIBRARY = Path(sys.argv[1])
print(refusal())
torch.utils.rename_privateuse1_backend("acme")
print(refusal())
"""


def test_another_privateuse1_backend_and_a_library_for_another_torch_are_named(tmp_path):
    (tmp_path / "_device.so").write_bytes(b"not for this torch")
    path = os.pathsep.join([str(EXAMPLE_SOURCE), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", FOREIGN, tmp_path / "_device.so"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    other_torch, other_owner = done.stdout.splitlines()
    assert "does not load into torch" in other_torch and "reinstall mvllm-example-device" in other_torch
    assert "'acme' uses it" in other_owner


@pytest.fixture
def platform(tmp_path, monkeypatch):
    """The platform, without an open device."""
    prepend(monkeypatch, example_platform_path(tmp_path))
    for name in ("FAULT_INJECTION", "MVLLM_EXAMPLE_DEVICES", "MVLLM_EXAMPLE_MEMORY", "MVLLM_EXAMPLE_MODE"):
        monkeypatch.delenv(name, raising=False)
    from mvllm.platform.choose import choose_platform

    return choose_platform("example").platform


NO_DEVICE = """
import torch

from mvllm.config.engine_args import EngineArgs
from mvllm.config.engine_config import replace_field
from mvllm.platform.choose import choose_platform
from mvllm.platform.phases import Phase, enter_phase

platform = choose_platform("example").platform
config = EngineArgs.from_kwargs(model="demo").create_engine_config()
with enter_phase(Phase.FRONTEND):
    [change] = platform.plan(config).changes
    assert (change.field, change.value) == ("cache.memory_utilization", 0.9)
    assert platform.plan(replace_field(config, change.field, 0.5)).changes == ()
    assert [check.status.value for check in platform.doctor()] == ["ok"]
    assert platform.topology(config.parallel).num_workers == 1
assert torch._C._get_privateuse1_backend_name() == "privateuseone", "a device was opened"
"""


def test_choice_plan_topology_and_doctor_open_no_device(tmp_path):
    """In a process of its own, because other tests of this process may have opened a device."""
    path = os.pathsep.join([*example_platform_path(tmp_path), *filter(None, sys.path)])
    settings = ("FAULT_INJECTION", "MVLLM_EXAMPLE_DEVICES", "MVLLM_EXAMPLE_MEMORY", "MVLLM_EXAMPLE_MODE")
    done = subprocess.run(
        [sys.executable, "-c", NO_DEVICE],
        env={**{name: value for name, value in os.environ.items() if name not in settings}, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("MVLLM_EXAMPLE_MODE", "eagre", "one of eager, static, lazy, replay"),
        ("MVLLM_EXAMPLE_DEVICES", "0", "positive whole number"),
        ("MVLLM_EXAMPLE_MEMORY", "2 GiB", "positive whole number"),
    ],
)
def test_an_invalid_variable_makes_the_platform_unavailable_and_is_named(platform, monkeypatch, name, value, complaint):
    from mvllm_example_device.plugin import probe

    assert probe().available and len(probe().devices) == 8
    monkeypatch.setenv(name, value)
    result = probe()
    assert not result.available and name in result.reason and complaint in result.reason


def test_workers_get_the_settings_of_this_process(platform, monkeypatch):
    from mvllm.config.engine_config import ParallelConfig
    from mvllm_example_device.platform import ExamplePlatform

    given = {
        "MVLLM_EXAMPLE_DEVICES": "3",
        "MVLLM_EXAMPLE_MEMORY": "1000",
        "MVLLM_EXAMPLE_MODE": "lazy",
        "FAULT_INJECTION": "none",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert ExamplePlatform().topology(ParallelConfig(tensor_parallel_size=2)).env_per_worker == (given, given)


def test_the_plugin_has_at_most_660_lines_and_250_for_the_mode_replay():
    files = [*PACKAGE.glob("*.py"), EXAMPLE_SOURCE.parent / "setup.py"]
    replay = [file for file in files if file.name in ("replay.py", "replay_platform.py")]

    def num_lines(files):
        return sum(bool(line.strip()) for file in files for line in file.read_text("utf-8").splitlines())

    assert num_lines(set(files) - set(replay)) <= 660
    assert len(replay) == 2 and num_lines(replay) <= 250
