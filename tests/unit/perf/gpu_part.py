"""A part of a GPU run whose items end in every possible way; run by test_gpu_script.py."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from tests.gpu.result_log import OK, ResultLog, Row
from tests.gpu.settings import Item, Settings


def items(settings: Settings) -> list[Item]:
    patient = ("passes", "asserts", "goes on", "raises", "comes after", "dies", "comes last")
    if settings.platform == "scripted":
        return [Item(name, 40, 120) for name in ("first", "second", "third", "raises")]
    if settings.only == ("leaves",):
        return [Item("leaves a process", 0.1, 120)]
    return [*(Item(name, 0.1, 120) for name in patient), Item("hangs", 0.1, 6.0), Item("too long", 1e9, 1e9)]


def run(item: str, settings: Settings, result_log: ResultLog) -> None:
    if item == "asserts":
        raise AssertionError("seven is not eight")
    if item == "raises":
        raise RuntimeError("the device\nis gone")
    figures: dict[str, float | int] = {"pid": os.getpid(), "left": settings.seconds_left()}
    if item == "leaves a process":
        figures["other"] = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid
    result_log.add(Row("gpu_part", item, item, OK, figures))
    if item == "dies":
        os._exit(7)
    if item in ("hangs", "leaves a process"):
        threading.Event().wait()
