"""Runs the conformance suite on the mutants of the example device.

Each mutant is a copy of the device's sources with its edits, so the fault is in every process that imports them.
`python -m plugins.conformance.tests.suite.mutant_runs FOLDER` runs all of them, or those whose numbers follow:

    one process imports torch ──fork──> the suite on a copy of the device ──> its JSON report
                              ──fork──> the suite on the next copy        ──> ...
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import Any

from plugins.conformance.tests.suite.mutants import FURTHER_EDITS, MUTANTS, Mutant

from tests.helpers.plugins import EXAMPLE_SOURCE, write_metadata

PACKAGE = "mvllm_example_device"
AT_ONCE = 2
"""Number of mutants that run in parallel."""


def install_mutant(mutant: Mutant, folder: Path) -> Path:
    """Installs a copy of the device with the fault in `folder`.

    Raises:
        AssertionError: The text to replace does not occur exactly once.
    """
    write_metadata(folder, "mvllm-example-device", f"[mvllm.platforms]\nexample = {PACKAGE}.plugin\n")
    package = folder / PACKAGE
    shutil.copytree(EXAMPLE_SOURCE / PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    (package / "_device.so").symlink_to(EXAMPLE_SOURCE / PACKAGE / "_device.so")
    edits = [(mutant.file, mutant.old, mutant.new)] if mutant.file else []
    if mutant.name in FURTHER_EDITS:
        edits.append(FURTHER_EDITS[mutant.name])
    for file, old, new in edits:
        source = (package / file).read_text(encoding="utf-8")
        assert source.count(old) == 1, f"{mutant.name}: {file} has {old!r} {source.count(old)} times, not once"
        (package / file).write_text(source.replace(old, new), encoding="utf-8")
    return folder


_QUICKLY = ("-ra", "--assert=plain", "-p", "pytest_timeout")
"""Disables pytest's assertion rewriting, which takes a third of the time and only improves failure messages."""


def run_suite(mutant: Mutant, clauses: tuple[str, ...], folder: Path) -> None:
    """Runs the suite on the device in `folder` and ends the process; the results are in report.json and output.txt."""
    from mvllm_conformance.run import Settings, run

    sink = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **mutant.environment}
    sys.path.insert(0, str(folder))
    try:
        run(Settings("example", folder / "report.json", only=",".join(clauses), quick=True, pytest_arguments=_QUICKLY))
        sys.stdout.flush()
    except BaseException:  # the caller reports the missing report
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)


def statuses(folder: Path) -> dict[str, str]:
    """The suite's status of each clause, in the order of the contract's page.

    Raises:
        AssertionError: The suite did not finish.
    """
    path = folder / "report.json"
    assert path.exists(), (folder / "output.txt").read_text(encoding="utf-8", errors="replace")[-3000:]
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["clauses"]
    return {name: clause["status"] for name, clause in found.items()}


def unchanged(chosen: Collection[int] | None = None) -> list[tuple[Mutant, tuple[str, ...]]]:
    """The unmodified device as mutants without an edit: one per environment, with the clauses of all mutants in it.

    Args:
        chosen: Indices in MUTANTS of the mutants to run; None for all.
    """
    runs: dict[tuple[tuple[str, str], ...], set[str]] = {}
    for number, mutant in enumerate(MUTANTS):
        clauses = runs.setdefault(tuple(mutant.environment.items()), set())
        if chosen is None or number in chosen:
            clauses.update(mutant.clauses)
    return [
        (Mutant(f"unchanged {dict(variables) or ''}".strip(), "", environment=dict(variables)), tuple(sorted(clauses)))
        for variables, clauses in runs.items()
    ]


def main(folder: Path, chosen: Collection[int] | None = None) -> None:
    """Runs the suite on each in `folder`/number, first on the unmodified device.

    Args:
        chosen: Indices in MUTANTS; None for all. An index out of range: only the unmodified device.
    """
    import pytest  # noqa: F401  (these are imported before the forks, once for all)
    import torch  # noqa: F401
    from transformers import AutoModelForCausalLM, GPT2LMHeadModel, LlamaForCausalLM  # noqa: F401

    import mvllm.entrypoints.llm
    import mvllm.worker.worker  # noqa: F401

    gc.freeze()  # each pytest collects garbage more than once, and would scan all imported objects
    running: set[int] = set()
    against = unchanged({number for number in chosen or () if number >= 0} or None)
    first = len(against)
    for number, (mutant, clauses) in enumerate([*against, *((m, m.clauses) for m in MUTANTS)]):
        if not clauses or (number >= first and chosen is not None and number - first not in chosen):
            continue
        home = install_mutant(mutant, folder / str(number))
        while len(running) >= AT_ONCE:
            running.discard(os.wait()[0])
        started = os.fork()
        if started == 0:
            run_suite(mutant, clauses, home)
        running.add(started)
    while running:
        running.discard(os.wait()[0])


if __name__ == "__main__":
    begun = time.monotonic()
    main(Path(sys.argv[1]), {int(number) for number in sys.argv[2:]} or None)
    print(f"{time.monotonic() - begun:.0f} seconds")
