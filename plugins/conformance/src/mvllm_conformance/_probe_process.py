"""A process that imports a plugin's entry point, probes the platform, and reports the time and the side effects."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from mvllm.extension_api.testing import enter_phase, load_attribute
from mvllm.plugin_api import Phase, PlatformSpec, ProbeResult, WorkerContext
from mvllm_conformance.subprocess_checks import print_answer

HEAVY = ("torch", "transformers", "jax", "tensorflow")
ORDINARY_LIBRARIES = tuple(
    f"lib{name}"
    for name in "c m dl rt pthread gcc_s stdc++ z bz2 lzma ffi ssl crypto expat uuid sqlite3 util".split()  # noqa: SIM905
)


def mapped_libraries() -> set[str]:
    """Paths of this process's shared libraries, except Python modules and ORDINARY_LIBRARIES."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return set()
    paths = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    modules = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    found = set()
    for path in paths - modules:
        name = os.path.basename(path)
        bundled = os.path.basename(os.path.dirname(path)).endswith(".libs")  # part of a wheel
        if ".so" in name and not bundled and not name.startswith(ORDINARY_LIBRARIES):
            found.add(path)
    return found


def import_and_probe(settings: dict[str, Any]) -> dict[str, Any]:
    """Imports the entry point's module, then probes twice; returns the findings."""
    before = mapped_libraries()
    started = time.process_time()
    with enter_phase(Phase.PROBE):
        module = importlib.import_module(settings["module"])
        facts: dict[str, Any] = {"import_seconds": time.process_time() - started}
        facts["imported"] = sorted({name.partition(".")[0] for name in sys.modules} & set(HEAVY))
        facts["libraries"] = sorted(mapped_libraries() - before)
        spec = module.mvllm_platform()
    facts["is_spec"] = isinstance(spec, PlatformSpec)
    if facts["is_spec"]:
        facts["name"], facts["contract"] = spec.name, list(spec.contract)
        facts.update(probe(spec))
        facts["fork"] = fork(lambda: load_attribute(spec.probe)())
        if settings["bind_after_fork"]:
            facts["bind_after_fork"] = fork(lambda: bind(spec))
    return facts


def probe(spec: PlatformSpec) -> dict[str, Any]:
    """Probes twice; returns the results and the changes to the process."""
    environment, threads = dict(os.environ), threading.active_count()
    process = psutil.Process()
    native, children = process.num_threads(), len(process.children())
    facts: dict[str, Any] = {"error": "", "cpu_seconds": [], "seconds": []}
    results = []
    for _ in range(2):
        started, since = time.process_time(), time.perf_counter()
        try:
            with enter_phase(Phase.PROBE):
                results.append(load_attribute(spec.probe)())
        except BaseException:  # noqa: BLE001  (reported to the parent)
            facts["error"] = traceback.format_exc()
            return facts
        facts["cpu_seconds"].append(time.process_time() - started)
        facts["seconds"].append(time.perf_counter() - since)
    first = results[0]
    facts["is_result"] = isinstance(first, ProbeResult)
    facts["same"] = results[0] == results[1]
    if facts["is_result"]:
        facts["available"], facts["reason"], facts["remedy"] = first.available, first.reason, first.remedy
        facts["indices"] = [device.index for device in first.devices]
    facts["loaded"] = sorted({name.partition(".")[0] for name in sys.modules} & set(HEAVY))
    facts["new_threads"] = max(threading.active_count() - threads, process.num_threads() - native)
    facts["new_children"] = len(process.children()) - children
    changed = {k for k in environment.keys() | os.environ.keys() if environment.get(k) != os.environ.get(k)}
    facts["changed_variables"] = sorted(changed)
    return facts


def fork(action: Callable[[], object]) -> str:
    """Runs `action` in a forked child; returns the error, or an empty string."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            action()
            status = 0
        except BaseException:  # noqa: BLE001  (shown on stderr)
            traceback.print_exc()
        finally:
            os._exit(status)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return "" if status == 0 else f"the child ended with status {os.waitstatus_to_exitcode(status)}"
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return "the child did not end within 60 s"


def bind(spec: PlatformSpec) -> None:
    """Uses the device in this process, the fork of a process that has probed."""
    import torch

    with enter_phase(Phase.FRONTEND):
        platform = load_attribute(spec.factory)()
    with enter_phase(Phase.WORKER):
        runtime = platform.init_device(WorkerContext())
        assert runtime.to_host(runtime.to_device(torch.arange(4))).wait().tolist() == [0, 1, 2, 3]


if __name__ == "__main__":
    print_answer(import_and_probe(json.loads(sys.argv[1])))
