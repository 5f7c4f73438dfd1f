"""Progress: log lines without a terminal, and a status line on one."""

from __future__ import annotations

import io
import logging
import threading

import pytest

from mvllm import progress
from mvllm.progress import ERASE_LINE, show_status
from tests.helpers.processes import wait_until


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

    monkeypatch.setattr(progress.time, "monotonic", lambda: Clock.now)
    return Clock


@pytest.fixture(autouse=True)
def log(caplog):
    with caplog.at_level("INFO", logger="mvllm"):
        yield


def test_long_work_logs_a_line_every_ten_seconds_and_one_at_the_end(clock, caplog, capsys):
    with progress.show_progress(1 << 30, "Loading", unit="B", unit_scale=True, unit_divisor=1024) as bar:
        for _ in range(256):
            clock.now += 0.1
            bar.update(1 << 22)
            bar.refresh()
            bar.set_postfix_str("a-file", refresh=True)
    assert [line.partition(" in ")[0] for line in caplog.messages] == [
        "Loading: 400MB of 1.00GB (39%)",
        "Loading: 800MB of 1.00GB (78%)",
        "Loading: 1.00GB of 1.00GB (100%)",
    ]
    assert capsys.readouterr().err == ""


def test_quick_work_logs_one_line_and_empty_or_disabled_work_none(clock, caplog):
    with progress.show_progress(None, "Requests") as bar:
        for _ in range(1000):
            bar.update(1)
    bar.close()
    assert [line.partition(" in ")[0] for line in caplog.messages] == ["Requests: 1000"]
    caplog.clear()
    with progress.show_progress(5, "Requests"):
        pass
    with progress.show_progress(5, "Requests", disable=True) as bar:
        bar.update(5)
    assert not caplog.records


def test_a_terminal_gets_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(progress, "has_terminal", lambda: True)
    with progress.show_progress(2, "Requests") as bar:
        bar.update(2)
    assert "100%" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_status_is_shown_after_a_second_and_erased(monkeypatch):
    stderr = Terminal()
    monkeypatch.setattr("sys.stderr", stderr)
    logging.getLogger("mvllm").setLevel("WARNING")
    with show_status("Loading x"):
        pass
    assert stderr.getvalue() == ""
    with show_status("Loading x"):
        wait_until(lambda: "Loading x: 1 s" in stderr.getvalue(), 30, stderr.getvalue)
    assert stderr.getvalue().endswith(ERASE_LINE)


def test_no_status_without_a_terminal_or_beside_a_log(monkeypatch):
    for terminal, level in ((io.StringIO(), "WARNING"), (Terminal(), "INFO")):
        monkeypatch.setattr("sys.stderr", terminal)
        logging.getLogger("mvllm").setLevel(level)
        before = threading.active_count()
        with show_status("Loading x"):
            assert threading.active_count() == before
