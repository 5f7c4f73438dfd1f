"""A worker in the engine's process has its platform's variables while it starts, and the user's own always."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import os, sys
from mvllm.config.engine_config import ParallelConfig
from mvllm.engine.worker_environment import worker_environment
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


def test_set_for_the_time_of_the_start() -> None:
    assert seen("uni") == "1 True"


def test_what_the_user_has_set_stays() -> None:
    assert seen("uni", THP_MEM_ALLOC_ENABLE="0", OMP_NUM_THREADS="3") == "0 True"


def test_workers_elsewhere_get_theirs_another_way() -> None:
    assert seen("mp") == "None False"


def test_too_late_when_torch_is_loaded() -> None:
    assert seen("uni", "torch") == "None False"
