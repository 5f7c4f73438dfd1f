"""Workers of xdist that `-p ci.forked_workers` forks: test files are imported once, a worker that ends is replaced."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.packaging.conftest import REPOSITORY

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="forks are made on Linux only"),
    pytest.mark.fresh_programs,
]

TEST_FILE = """
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
with open(HERE / "imports", "a") as imports:
    imports.write(f"{os.getpid()}\\n")
IMPORTED_BY = os.getpid()


@pytest.mark.parametrize("number", range(4))
def test_in_a_fork(number):
    with open(HERE / "workers", "a") as workers:
        workers.write(f"{os.environ['PYTEST_XDIST_WORKER']} {os.getpid()}\\n")
    assert os.getpid() != IMPORTED_BY
    assert subprocess.run([sys.executable, "-c", "exit(3)"]).returncode == 3, "children are waited for"


def test_that_ends_its_worker():
    os._exit(1)


def test_fails():
    assert sorted("ab") == ["b", "a"]
"""


def run(text, tmp_path):
    (tmp_path / "test_it.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "ci.forked_workers", "-n", "2", "--rootdir", str(tmp_path)]
    return subprocess.run(
        [*command, "--import-mode=importlib", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTEST_ADDOPTS": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_file_that_starts_a_thread_is_named(tmp_path):
    text = (
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\ndef test_it(): pass\n"
    )
    done = run(text, tmp_path)
    assert "1 passed" in done.stdout
    assert "note: test_it.py starts a thread when it is imported" in done.stderr


def test_files_are_imported_once_and_a_worker_that_ends_is_replaced(tmp_path):
    done = run(TEST_FILE, tmp_path)
    assert "2 failed, 4 passed" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    assert "['a', 'b'] == ['b', 'a']" in done.stdout, "asserts are rewritten"
    assert "crashed while running 'test_it.py::test_that_ends_its_worker'" in done.stdout
    assert len((tmp_path / "imports").read_text().split()) == 1
    workers = dict(line.split() for line in (tmp_path / "workers").read_text().splitlines())
    assert len(set(workers.values())) == len(workers) >= 1
