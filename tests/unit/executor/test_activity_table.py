"""The table of activities is read while a worker in another process writes it."""

from __future__ import annotations

import subprocess
import sys
import time

from mvllm.executor.process.activity_table import ActivityTable

WRITER = """
import sys
from mvllm.executor.process.activity_table import ActivityTable
table = ActivityTable(int(sys.argv[1]))
print("ready", flush=True)
while True:
    table.write(0, "load_model")
"""


def test_an_activity_that_is_being_written_does_not_seem_old() -> None:
    begin = time.monotonic()
    table = ActivityTable.create(1)  # has this time until the writer's first one
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(table.fd)], pass_fds=(table.fd,), stdout=subprocess.PIPE, text=True
    )
    try:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            oldest = min(table.since(0) for _ in range(10_000))
            assert oldest >= begin
    finally:
        writer.kill()
        writer.wait()
        table.close()
