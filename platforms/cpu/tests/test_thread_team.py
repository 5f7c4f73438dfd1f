"""The kernels' thread team: each part is executed once, threads sleep between calls, and their number adapts."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mvllm_cpu import kernels
from mvllm_cpu.thread_team import ThreadUseLog

HERE = Path(__file__).resolve().parent
CSRC = HERE.parent / "csrc"


@pytest.mark.parametrize("sanitizer", ["thread", pytest.param("address,undefined", marks=pytest.mark.exhaustive)])
def test_every_part_is_executed_once_and_the_number_of_threads_follows_the_waits(tmp_path, sanitizer):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to build with")
    program = tmp_path / "team_stress"
    sources = [str(HERE / "team_stress.cpp"), str(CSRC / "thread_team.cpp")]
    command = [compiler, "-g1", "-O1", "-std=c++17", "-fopenmp", "-pthread", f"-fsanitize={sanitizer}", f"-I{CSRC}"]
    built = subprocess.run([*command, *sources, "-o", str(program)], capture_output=True, text=True, timeout=300)
    if built.returncode and "san" in built.stderr and "cannot find" in built.stderr:
        pytest.skip("this g++ comes without the sanitizer")
    assert built.returncode == 0, built.stderr
    environment = {**os.environ, "TSAN_OPTIONS": "die_after_fork=0"}
    done = subprocess.run([str(program)], env=environment, capture_output=True, text=True, timeout=300)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer does not support this system's address layout")
    assert done.returncode == 0 and "done" in done.stdout, done.stdout + done.stderr[-3000:]


@pytest.mark.skipif(kernels.load().library is None, reason="no kernels")
def test_threads_sleep_between_calls():
    library = kernels.load().library
    x = torch.ones(2048, 2048)
    out = torch.empty_like(x)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        library.mvllm_cpu_silu_and_mul(
            pointer(x.data_ptr()), number(2048), pointer(out.data_ptr()), number(2048), number(1024), 0
        )
        time.sleep(0.05)
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.1
    finally:
        torch.set_num_threads(threads)


def test_a_changed_number_of_threads_is_logged_once(caplog):
    found = iter([4, 3, 3, 4, 4])
    log = ThreadUseLog(lambda: next(found), configured=lambda: 4, interval=1, pause=0.0)
    with caplog.at_level("INFO"):
        for _ in range(5):
            log.step()
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert "3 of 4 threads" in texts[0] and "all 4 threads" in texts[1]


@pytest.mark.skipif(kernels.load().library is None, reason="no kernels")
def test_all_threads_are_kept_if_adaptation_is_off(tmp_path):
    program = "from mvllm_cpu import kernels; print(kernels.load().library.mvllm_cpu_threads_adapt())"
    for value, adapts in ((None, "1"), ("0", "0")):
        env = {name: text for name, text in os.environ.items() if name != "MVLLM_CPU_ADAPTIVE_THREADS"}
        env |= {} if value is None else {"MVLLM_CPU_ADAPTIVE_THREADS": value}
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
        assert done.stdout.strip() == adapts, done.stderr
