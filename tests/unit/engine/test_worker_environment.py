"""The environment of a worker in the engine's process: its platform's variables during start-up; the user's variables
always."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from mvllm.config.engine_config import ParallelConfig
from mvllm.engine.core.worker_environment import worker_environment
from mvllm.platform.topology import LaunchTopology

PROGRAM = """
import os, sys
from mvllm.config.engine_config import ParallelConfig
from mvllm.engine.core.worker_environment import worker_environment
from mvllm.platform.choose import choose_platform
platform = choose_platform("cpu").platform
if "torch" in sys.argv:
    import torch
parallel = ParallelConfig(distributed_executor_backend=None if "uni" in sys.argv else "mp")
before = dict(os.environ)
with worker_environment(parallel, platform):
    print(os.environ.get("THP_MEM_ALLOC_ENABLE"), os.environ.get("OMP_NUM_THREADS", "unset") != "unset")
    os.environ["OMP_NUM_THREADS"] = "7"
assert os.environ.pop("OMP_NUM_THREADS") == "7"  # whatever is set meanwhile is somebody's own
before.pop("OMP_NUM_THREADS", None)
assert dict(os.environ) == before
"""


def seen(*words: str, **variables: str) -> str:
    env = {name: value for name, value in os.environ.items() if name not in ("THP_MEM_ALLOC_ENABLE", "OMP_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        env=env | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_variables_are_set_during_the_start() -> None:
    assert seen("uni") == "1 True"


def test_variables_set_by_the_user_are_kept() -> None:
    assert seen("uni", THP_MEM_ALLOC_ENABLE="0", OMP_NUM_THREADS="3") == "0 True"


def test_nothing_is_set_with_worker_processes() -> None:
    assert seen("mp") == "None False"


def test_nothing_is_set_when_torch_is_loaded() -> None:
    assert seen("uni", "torch") == "None False"


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A platform that requests two variables, the second of which is invalid."""
    monkeypatch.delenv("ACME_THREADS", raising=False)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    variables: dict[str, Any] = {"ACME_THREADS": "2", "ACME_PAGES": 1}
    topology = LaunchTopology(1, 1, ("uni",), (variables,))
    return SimpleNamespace(topology=lambda parallel: topology, variables=variables, spec=SimpleNamespace(name="acme"))


def test_no_variable_stays_if_one_cannot_be_set(platform: Any) -> None:
    with pytest.raises(TypeError), worker_environment(ParallelConfig(), platform):
        pass
    assert "ACME_THREADS" not in os.environ


def test_the_end_of_one_start_keeps_the_variables_of_a_concurrent_one(platform: Any) -> None:
    del platform.variables["ACME_PAGES"]
    with ExitStack() as second:
        with worker_environment(ParallelConfig(), platform):
            platform.variables["ACME_THREADS"] = "3"  # too late: the value of the other start applies
            second.enter_context(worker_environment(ParallelConfig(), platform))
        assert os.environ["ACME_THREADS"] == "2"
    assert "ACME_THREADS" not in os.environ
