"""A forked program equals a new process: arguments, variables, descriptors, folder, parent, exit status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mvllm.config.engine_config import ParallelConfig
from mvllm.platform.choose import choose_platform
from tests.engine.program_report import MODULE
from tests.helpers import program_server
from tests.helpers.plugins import ROOT
from tests.helpers.processes import wait_until

COMMAND = [sys.executable, "-m", MODULE]
here = pytest.mark.skipif(not program_server.is_possible(), reason="no program is forked: OMP_NUM_THREADS is not 1")


def report_of(
    *arguments: str, folder: Path = ROOT, **variables: str
) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(
        [*COMMAND, *arguments], input="hello", capture_output=True, text=True, cwd=folder, env=environment, timeout=120
    )
    return json.loads(done.stdout), done


@here
def test_it_has_the_arguments_variables_and_folder_of_its_start(tmp_path: Path) -> None:
    report, done = report_of("one", "two", folder=tmp_path, REPORT="yes")
    assert done.returncode == 7 and done.stderr == "to stderr\n"
    assert report["is forked"] and report["input"] == "hello"
    assert report["arguments"] == ["one", "two"] and report["command"] == [*COMMAND, "one", "two"]
    assert report["variable"] == "yes" and "REPORT=yes" in report["shown variables"]
    assert report["folder"] == str(tmp_path) and report["parent"] == os.getpid() and report["group"] == os.getpgrp()
    child = report["child"]
    assert child["is forked"] and child["parent"] == report["pid"] and child["command"] == [*COMMAND, "two"]


def test_it_has_the_descriptors_of_a_new_process() -> None:
    own = 1 if program_server.is_possible() else 0  # the connection to its own program server
    reading, writing = os.pipe()
    with program_server.programs(fresh=True):
        fresh = subprocess.run(COMMAND, input="", capture_output=True, text=True, pass_fds=[writing])
    forked = subprocess.run(COMMAND, input="", capture_output=True, text=True, pass_fds=[writing])
    os.close(writing)
    os.close(reading)
    expected, found = (json.loads(done.stdout)["descriptors"] for done in (fresh, forked))
    assert writing in found and len(found) == len(expected) + own


def test_other_values_of_library_variables_start_a_new_process() -> None:
    report, _ = report_of(OMP_NUM_THREADS="3")
    assert not report["is forked"]


@here
def test_the_variables_of_a_worker_of_the_platform_permit_a_fork() -> None:
    """Else each of the hundreds of workers in the tests imports torch."""
    platform = choose_platform(None).platform
    [variables] = platform.topology(ParallelConfig(distributed_executor_backend="mp")).env_per_worker
    report, _ = report_of(**variables)
    assert report["is forked"] and {f"{name}={value}" for name, value in variables.items()} <= {
        *report["shown variables"]
    }


@pytest.mark.fresh_programs
def test_the_mark_fresh_programs_starts_a_new_process() -> None:
    report, _ = report_of()
    assert not report["is forked"]


def test_a_killed_program_has_the_exit_status_of_a_killed_child() -> None:
    process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, process_group=0)
    wait_until(lambda: os.getpgid(process.pid) == process.pid, 120, "a group of its own")
    process.send_signal(signal.SIGKILL)
    assert process.wait(120) == -signal.SIGKILL
    assert process.stdin is not None
    process.stdin.close()
