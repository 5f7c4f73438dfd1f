#!/usr/bin/env python3
"""The lanes of CI, defined in ci/matrix.toml: lists them, runs them locally, and renders the CI workflow.

    python3 ci/matrix.py list             every lane, and whether this machine can run it
    python3 ci/matrix.py run LANE         create the lane's environment in build/lanes and run it
    python3 ci/matrix.py render           write .github/workflows/ci.yml; --check only compares

The CI service only starts `run LANE` on a machine with certain labels. A lane that cannot run, because hardware, Python
or a package is missing, prints the reason and exits with 77: neither passed nor failed.
"""

from __future__ import annotations

import argparse
import glob
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "ci" / "matrix.toml"
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
CONSTRAINTS = ROOT / "ci" / "constraints" / "cpu.txt"
LANES = ROOT / "build" / "lanes"
NOT_RUN = 77
HOSTED = ("ubuntu-latest",)
DOES = ("gate", "tests", "brain", "conform", "xla", "template", "clients")


class TableError(Exception):
    """ci/matrix.toml is invalid."""


@dataclass(frozen=True)
class Lane:
    """One lane; ci/matrix.toml documents the fields."""

    name: str
    device: str
    python: str
    torch: str
    contract: str
    does: str
    packages: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    runner: tuple[str, ...] = HOSTED
    until: str = ""

    @property
    def folders(self) -> tuple[str, ...]:
        """Folders of the packages, without extras."""
        return tuple(package.partition("[")[0] for package in self.packages)

    @property
    def needs_hardware(self) -> bool:
        """Whether it runs only on machines with certain labels."""
        return bool(self.needs)


def read_lanes(path: Path = TABLE) -> list[Lane]:
    """The lanes of the table.

    Raises:
        TableError: A lane has an unknown or missing column, a value of the wrong type, or a name that is used twice.
    """
    rows = tomllib.loads(path.read_text(encoding="utf-8")).get("lane", [])
    columns = {f.name: f for f in fields(Lane)}
    required = ("name", "device", "python", "torch", "contract", "does")
    lanes: list[Lane] = []
    for row in rows:
        name = row.get("name", "(no name)")
        if unknown := row.keys() - columns.keys():
            raise TableError(f"lane {name}: there is no column {', '.join(sorted(unknown))}")
        if missing := [column for column in required if not isinstance(row.get(column), str)]:
            raise TableError(f"lane {name}: {', '.join(missing)} must be given, as text")
        if row["does"] not in DOES:
            raise TableError(f"lane {name}: does must be one of {', '.join(DOES)}, found {row['does']!r}")
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name) or any(lane.name == name for lane in lanes):
            raise TableError(f"lane {name}: names are lower-case words joined by dashes, each used once")
        lanes.append(Lane(**{key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}))
    return lanes


# ------------------------------------------------------------------------------------------------------- running here


def why_not(lane: Lane) -> str:
    """Why this machine cannot run a lane; empty if it can."""
    if lane.until:
        return lane.until
    if absent := [folder for folder in lane.folders if not (ROOT / folder / "pyproject.toml").is_file()]:
        return f"there is no {' and no '.join(absent)} in this repository yet"
    if lane.needs and not any(glob.glob(pattern) for pattern in lane.needs):
        return f"this machine has no {lane.device} device (looked for {', '.join(lane.needs)})"
    if find_python(lane.python) is None:
        return f"this machine has no python{lane.python}"
    return ""


def find_python(version: str) -> str | None:
    """A working interpreter of version MAJOR.MINOR. Commands of version managers may exist without the version."""
    if version == "{}.{}".format(*sys.version_info[:2]):
        return sys.executable
    found = shutil.which(f"python{version}")
    if found is None or subprocess.run([found, "-c", ""], capture_output=True).returncode != 0:
        return None
    return found


def run_lane(lane: Lane, *, start: Callable[..., int] | None = None) -> int:
    """Runs a lane; returns 77 if it cannot run here, 1 if a command failed, else 0."""
    start = start or start_command
    if reason := why_not(lane):
        return report_not_run(lane, reason)
    for command in commands_of(lane):
        print(f"$ {shlex.join(command)}", flush=True)
        status = start(command, cwd=ROOT)
        if status == NOT_RUN:
            return report_not_run(lane, "its log says why")
        if status:
            print(f"{lane.name}: FAILED (exit status {status})", flush=True)
            return 1
    print(f"{lane.name}: passed", flush=True)
    return 0


def report_not_run(lane: Lane, reason: str) -> int:
    """Prints the reason, and reports it to the service's last job; returns NOT_RUN."""
    print(f"{lane.name}: NOT RUN: {reason}", flush=True)
    if outputs := os.environ.get("GITHUB_OUTPUT"):
        with open(outputs, "a", encoding="utf-8") as file:
            file.write(f"not_run={reason}\n")
    return NOT_RUN


def start_command(command: Sequence[str], cwd: Path) -> int:
    """Runs a command with the lane's settings; returns its exit status."""
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    ).returncode


def commands_of(lane: Lane) -> list[list[str]]:
    """The commands of a lane, in order: create the environment, install packages, run the tests."""
    interpreter = find_python(lane.python) or f"python{lane.python}"
    if lane.does == "gate":
        return [[interpreter, "ci/dev.py", "test", "--all"]]
    if lane.does == "xla":
        return [[interpreter, "ci/dev.py", "conform", "tpu"]]
    if lane.does == "clients":  # the tests make an environment for each client; server and tests run in .venv
        return [
            [interpreter, "ci/dev.py", "setup"],
            # With the variable a client that cannot be installed is a failure.
            ["env", "CLIENTS_REQUIRED=1", str(ROOT / ".venv/bin/python"), "-m", "pytest", "-q", "-rs", "tests/clients"],
        ]
    folder = LANES / lane.name
    python, mvllm = str(folder / "bin" / "python"), str(folder / "bin" / "mvllm")
    reports = folder / "reports"
    # A lane with another torch uses all pins except that of torch.
    constraints = str(folder / "constraints.txt")
    narrow = f"import sys; print(*(l for l in open({str(CONSTRAINTS)!r}) if not l.startswith('torch==')), sep='', "
    pip = [python, "-m", "pip", "install", "-q", "--progress-bar", "off", "-c", constraints]
    found = [
        [interpreter, "-m", "venv", "--clear", str(folder)],
        [interpreter, "-c", f"{narrow}file=open({constraints!r}, 'w'))"],
    ]
    if lane.torch != "none":
        found.append([*pip, f"torch=={lane.torch}"])
    extra = "dev" if lane.does == "tests" or lane.tests else "testing"
    found.append([*pip, f".[{extra}]", "./plugins/conformance", *(f"./{package}" for package in lane.packages)])
    conformance = [mvllm, "conformance", "--platform", lane.device, "--report", str(reports / "conformance.json")]
    if lane.does == "brain":
        found.append([python, "-m", "pytest", "-q", "tests/unit/scheduler", "tests/unit/kv_cache"])
    elif lane.does == "tests":
        found.append(
            [python, "-m", "pytest", "-q", "-m", "not serial", "tests/unit", "tests/engine", "platforms/cpu/tests"]
        )
    else:
        written = folder / f"mvllm-{lane.device}"
        if lane.does == "template":
            found.append([mvllm, "plugin", "new", lane.device, "--dir", str(written)])
            found.append([*pip, str(written)])
        waivers = ROOT / lane.folders[0] / "waivers.toml" if lane.folders else written / "waivers.toml"
        if lane.does == "template" or waivers.is_file():
            conformance += ["--waivers", str(waivers)]
        found += [[python, "-c", f"import os; os.makedirs({str(reports)!r}, exist_ok=True)"], conformance]
    if lane.tests:
        found.append([python, "-m", "pytest", "-q", *lane.tests])
    return found


def list_lanes(lanes: Sequence[Lane]) -> None:
    """Prints the table, and whether this machine can run each lane."""
    rows = [("lane", "device", "python", "torch", "contract", "does", "here")]
    rows += [
        (
            lane.name,
            lane.device,
            lane.python,
            lane.torch,
            lane.contract,
            lane.does,
            "NOT RUN" if why_not(lane) else "runs",
        )
        for lane in lanes
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for lane in lanes:
        if reason := why_not(lane):
            print(f"NOT RUN here: {lane.name}: {reason}")


# ---------------------------------------------------------------------------------------------------------- rendering

HEAD = """\
# Rendered from ci/matrix.toml by `python3 ci/matrix.py render`. Change that file, not this one.
name: ci
on:
  push:
  pull_request:
  schedule:
    - cron: "41 3 * * *"
permissions:
  contents: read
env:
  # Where the index answers `torch==` with an accelerator build: the address of one that has builds for hosts.
  PIP_EXTRA_INDEX_URL: ${{ vars.MVLLM_PIP_EXTRA_INDEX_URL }}
concurrency:
  group: ci-${{ github.ref }}
  cancel-in-progress: true
jobs:
"""


def render(lanes: Sequence[Lane]) -> str:
    """The workflow: a job per lane, and a job with a summary."""
    return HEAD + "".join(map(render_lane, lanes)) + render_verdict(lanes)


def render_lane(lane: Lane) -> str:
    """The job of a lane. A lane with hardware is skipped unless the JSON list MVLLM_DEVICES names its device."""
    title = f"{lane.name}: {lane.device}, Python {lane.python}, torch {lane.torch}, contract {lane.contract}"
    guard = f"    if: contains(fromJSON(vars.MVLLM_DEVICES || '[]'), '{lane.device}')\n" if lane.needs_hardware else ""
    return f"""\
  {lane.name}:
    name: "{title}"
{guard}    runs-on: [{", ".join(lane.runner)}]
    timeout-minutes: 120
    outputs:
      not_run: ${{{{ steps.lane.outputs.not_run }}}}
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "{lane.python}"
      - id: lane
        run: python ci/matrix.py run {lane.name}
      - if: always()
        uses: actions/upload-artifact@v4
        with:
          name: report-{lane.name}
          path: build/lanes/{lane.name}/reports
          if-no-files-found: ignore
"""


def render_verdict(lanes: Sequence[Lane]) -> str:
    """The last job: a table of the results. It fails if a lane failed."""
    names = ", ".join(lane.name for lane in lanes)
    lines = "".join(
        f"          {variable_of(lane)}: ${{{{ needs.{lane.name}.result }}}}\n"
        f"          {variable_of(lane, 'NOT_RUN')}: ${{{{ needs.{lane.name}.outputs.not_run }}}}\n"
        for lane in lanes
    )
    return f"""\
  verdict:
    name: what ran, and what did not
    if: always()
    needs: [{names}]
    runs-on: [{", ".join(HOSTED)}]
    steps:
      - uses: actions/checkout@v4
      - name: report
        env:
{lines}        run: python3 ci/matrix.py verdict >> "$GITHUB_STEP_SUMMARY"
"""


def variable_of(lane: Lane, what: str = "RESULT") -> str:
    """The environment variable with a lane's result in the last job."""
    return f"{what}_" + lane.name.upper().replace("-", "_")


def verdict(lanes: Sequence[Lane], results: dict[str, str], not_run: dict[str, str] | None = None) -> tuple[str, int]:
    """The results of all lanes as Markdown, and the exit status: 1 if a lane failed, or did not run though it could.

    Args:
        results: The service's result of each lane: success, failure, cancelled or skipped.
        not_run: Reasons of lanes that exited with 77, which the service counts as failed.
    """
    words = {"success": "passed", "failure": "**failed**", "cancelled": "**cancelled**", "skipped": "not run"}
    rows = ["| lane | device | Python | torch | contract | result |", "| --- | --- | --- | --- | --- | --- |"]
    status = 0
    for lane in lanes:
        result = results.get(lane.name, "")
        shown = words.get(result, f"**unknown: {result or 'nothing reported'}**")
        if reason := (not_run or {}).get(lane.name):
            shown, status = f"not run: {reason}", 1
        elif result == "skipped" and lane.needs_hardware:
            shown = f"not run: no machine with a {lane.device} device"
        elif result != "success":
            status = 1
        rows.append(f"| {lane.name} | {lane.device} | {lane.python} | {lane.torch} | {lane.contract} | {shown} |")
    return "\n".join(rows) + "\n", status


def main(argv: Sequence[str]) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="ci/matrix.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("list", help="every lane, and whether this machine can run it")
    actions.add_parser("run", help="run one lane here; exits with 77 if it cannot run").add_argument("lane")
    actions.add_parser("render", help="write the workflow").add_argument("--check", action="store_true")
    actions.add_parser("verdict", help="inside the service: a table of the results in the variables RESULT_...")
    args = parser.parse_args(argv)
    lanes = read_lanes()
    if args.action == "list":
        list_lanes(lanes)
        return 0
    if args.action == "run":
        lane = next((lane for lane in lanes if lane.name == args.lane), None)
        if lane is None:
            names = ", ".join(lane.name for lane in lanes)
            print(
                f"error: there is no lane {args.lane!r}; there are {names}",
                file=sys.stderr,
            )
            return 2
        return run_lane(lane)
    if args.action == "verdict":
        results, reasons = (
            {lane.name: os.environ.get(variable_of(lane, what), "") for lane in lanes} for what in ("RESULT", "NOT_RUN")
        )
        text, status = verdict(lanes, results, reasons)
        print(text, end="")
        return status
    wanted = render(lanes)
    if args.check:
        same = WORKFLOW.is_file() and WORKFLOW.read_text(encoding="utf-8") == wanted
        print(f"{WORKFLOW.relative_to(ROOT)} is {'up to date' if same else 'stale: run python3 ci/matrix.py render'}")
        return 0 if same else 1
    WORKFLOW.parent.mkdir(parents=True, exist_ok=True)
    WORKFLOW.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
