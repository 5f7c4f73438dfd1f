"""The tables of docs/reference/platforms.md: platforms, their claimed capabilities, and the tested ones.

python -m tests.unit.docs.platforms_page REPORT.json --on "a host's processor" --with "command"
                                                      merges a conformance report into the records, writes the page
python -m tests.unit.docs.platforms_page              writes the page from the records

A capability is *shown* if its clauses passed on a device that computes, and *claimed* otherwise.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.unit.docs.hardware import ran_on

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "platforms.md"
RECORDS = Path(__file__).with_name("platform_reports")
WITHOUT_DEVICE = "without a device"
NOT_RUN = "**no device**"

CLAUSES_OF: dict[str, tuple[str, ...]] = {
    "dtypes": ("ATT-07", "RUN-01"),
    "kv_dtypes": ("KVL-05",),
    "max_head_size": ("ATT-07", "CFG-04"),
    "torch_device": ("DEV-02", "DEV-04"),
    "lazy": ("DEV-06", "RUN-01"),
    "static_shapes": ("SHP-02",),
    "graphs": ("GRF-01", "GRF-02"),
    "compile": ("GRF-03",),
    "pinned_memory": ("DEV-02", "DEV-04"),
    "async_copies": ("DEV-07",),
    "fork_safe": ("PRB-02",),
    "unified_memory": ("MEM-01", "RUN-02"),
    "devices_per_process": ("DEV-01",),
    "collectives": tuple(f"COM-{number:02}" for number in range(1, 11)),
    "prefix_caching": ("E2E-04",),
    "chunked_prefill": ("E2E-05",),
    "sliding_window": ("ATT-02",),
    "soft_cap": ("ATT-08",),
    "sinks": ("ATT-09",),
    "deterministic": ("ATT-11",),
    "mla": ("ATT-12",),
    "lazy_kernels": ("RUN-01",),
    "batch_invariant": ("ATT-14", "OPS-04", "E2E-07"),
    "state": tuple(f"STA-{number:02}" for number in range(1, 8)),
    "sparse_attention": ("ATT-15", "ATT-16"),
    "non_causal_spans": ("ATT-17",),
    "graph_compiler": tuple(f"GRA-{number:02}" for number in range(1, 8)),
    "stores_by_block_table": ("KVL-03",),
    "kv_transfer": tuple(f"KVT-{number:02}" for number in range(1, 5)),
    "weight_offloading": ("LIF-07",),
    "scaled_memory_profile": ("MEM-01", "RUN-02"),
    "drafts_by_default": (),
}
"""The clauses of each capability, none if no clause can show it; a new field of Capabilities must be added here (a test
checks this)."""

_KERNELS = ("kernels in Triton's interpreter against float64, compiled for targets", "platforms/triton-kernels/tests")
_ON_THE_HOST = "the platform's own code and the whole engine on a stand-in in host memory"
FURTHER: dict[str, tuple[tuple[str, str], ...]] = {
    "cpu": (
        ("parity with transformers", "tests/conformance/models"),
        ("kernels against float64, sanitizers", "platforms/cpu/tests"),
    ),
    "cuda": (
        _KERNELS,
        (_ON_THE_HOST, "platforms/cuda/tests/test_engine_on_the_host.py"),
        ("tokens, kernels and speed of a dense model on one H200", "docs/how-to/gpu-runs.md"),
    ),
    "mlx": (("tokens of transformers for many families", "platforms/mlx/tests"),),
    "openvino": (("operations, attention, tokens of transformers for many families", "platforms/openvino/tests"),),
    "rocm": (
        _KERNELS,
        ("driver's files and lists of devices, made for the purpose", "platforms/rocm/tests"),
    ),
    "tpu": (("tokens of transformers, no compilation after the warm-up, two devices", "platforms/tpu/tests"),),
    "xpu": (
        (_ON_THE_HOST, "platforms/xpu/tests/test_engine_on_the_host.py"),
        ("kernel's files and lists of devices, made for the purpose", "platforms/xpu/tests"),
    ),
    "example": (("the engine's own tests of devices", "tests/engine/test_example_device.py"),),
}
"""Tests besides the conformance suite, and where they ran."""

VARYING: dict[str, frozenset[str]] = {
    "tpu": frozenset({"lazy", "compile", "unified_memory", "fork_safe", "devices_per_process"}),
}
"""Capabilities that depend on the installed software: a record has the value of its machine."""


def record_of(report: Mapping[str, Any], *, on: str, command: str, date: str) -> dict[str, Any]:
    """The entries of a record that come from a report.

    Args:
        report: The content of a JSON report.
        on: The computing device, for instance `a host's processor`; empty if nothing computed.
        command: The command that wrote the report.
        date: The day, YYYY-MM-DD.
    """
    return {
        "platform": report["platform"],
        "plugin": {name: report["plugin"][name] for name in ("distribution", "version", "contract")},
        "on": on,
        "command": command,
        "date": date,
        "devices": len(report["devices"]),
        "only": report["only"],
        "capabilities": report["capabilities"],
        "clauses": {name: [clause["status"], clause["tests"]] for name, clause in report["clauses"].items()},
        "waivers": [f"{waiver['clause']}: {waiver['reason']}" for waiver in report["waivers"]],
        "failed": sum(test["status"] == "failed" for test in report["tests"]),
    }


def read_records() -> dict[str, dict[str, Any]]:
    """All records by their file's name: the platform's name, with a suffix for a second record."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RECORDS.glob("*.json"))}


def is_shown(record: Mapping[str, Any], capability: str) -> bool:
    """Whether every clause of a capability passed on a device that computes."""
    clauses = record["clauses"]
    needed = CLAUSES_OF[capability]
    return bool(record["on"] and needed) and all(clauses[name][0] == "passed" for name in needed)


def tables(records: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Every generated part of the page by its name."""
    platforms = {
        record["platform"]: record for record in reversed(list(records.values()))
    }  # the first of each has precedence
    names = sorted(platforms)
    return {
        "platforms": _table(
            ("platform", "distribution", "has run on", "the suite ran on", "its clauses", "seen", "further evidence"),
            [_platform_row(record) for record in records.values()],
        ),
        "capabilities": _table(
            ("capability", *(f"`{name}`" for name in names)),
            [(f"`{c}`", *(_cell(platforms[name], c) for name in names)) for c in CLAUSES_OF],
        ),
        "waivers": "\n".join(
            [f"- `{name}` {text}" for name, record in records.items() for text in record["waivers"]] or ["None."]
        ),
    }


def _platform_row(record: Mapping[str, Any]) -> Sequence[str]:
    counts = Counter(status for status, _ in record["clauses"].values())
    order = ("passed", "failed", "waived", "not claimed", "not applicable", "not run")
    further = "; ".join(f"[{what}](../../{path})" for what, path in FURTHER.get(record["platform"], ()))
    plugin = record["plugin"]
    return (
        f"`{record['platform']}`",
        plugin["distribution"],
        ran_on(record["platform"]),
        (record["on"] or NOT_RUN)
        + (f", {record['devices']} devices" if record["on"] and record["devices"] > 1 else ""),
        ", ".join(f"{counts[status]} {status}" for status in order if counts[status]),
        f"{record['date']}, `{record['command']}`",
        further or "–",
    )


def _cell(record: Mapping[str, Any], capability: str) -> str:
    claimed = record["capabilities"].get(capability, "False")
    if claimed in ("False", "none"):
        return "–"
    value = "any" if claimed == "None" else claimed
    mark = "shown" if is_shown(record, capability) else "claimed"
    return mark if value == "True" else f"{value}: {mark}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def with_tables(page: str, records: Mapping[str, Mapping[str, Any]]) -> str:
    """The page with new generated parts."""
    for name, text in tables(records).items():
        begin, end = f"<!-- table: {name} -->\n", "\n<!-- end of table -->"
        before, found, rest = page.partition(begin)
        assert found and end in rest, f"the page has no place for the table {name!r}"
        page = before + begin + text + end + rest.partition(end)[2]
    return page


def main() -> None:
    """Merges a report, if there is one, and writes the page."""
    parser = argparse.ArgumentParser(description="Writes docs/reference/platforms.md.")
    parser.add_argument("report", nargs="?", type=Path)
    parser.add_argument("--on", default="", help="What computed; left out for a run without a device.")
    parser.add_argument("--with", dest="command", default="", help="The command that made the report.")
    parser.add_argument("--name", default=None, help="Of the record; default: the platform's.")
    args = parser.parse_args()
    if args.report is not None:
        report = json.loads(args.report.read_text(encoding="utf-8"))
        record = record_of(report, on=args.on, command=args.command, date=datetime.date.today().isoformat())
        RECORDS.mkdir(exist_ok=True)
        name = args.name or record["platform"]
        (RECORDS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), read_records()), encoding="utf-8")


if __name__ == "__main__":
    main()
