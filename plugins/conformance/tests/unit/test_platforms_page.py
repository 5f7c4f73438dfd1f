"""The tables of platforms equal the plugins' current claims, and mark as shown only what passed in a report."""

from __future__ import annotations

import copy
import tomllib
from dataclasses import fields

import pytest

from mvllm.platform.choose import choose_platform
from mvllm.plugin_api import Capabilities
from mvllm_conformance.clauses import CLAUSES
from mvllm_conformance.platform_under_test import PlatformUnderTest
from tests.unit.docs.platforms_page import (
    CLAUSES_OF,
    FURTHER,
    NOT_RUN,
    PAGE,
    ROOT,
    VARYING,
    WITHOUT_DEVICE,
    is_shown,
    read_records,
    record_of,
    tables,
    with_tables,
)

COMMAND = "run: python -m tests.unit.docs.platforms_page"
RECORDS = read_records()


def entry_points() -> set[str]:
    """Names of the repository's hardware platforms."""
    found: set[str] = set()
    for project in ROOT.glob("platforms/*/pyproject.toml"):
        content = tomllib.loads(project.read_text(encoding="utf-8"))
        found |= set(content["project"].get("entry-points", {}).get("mvllm.platforms", {}))
    return found


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page, RECORDS) == page, COMMAND


def test_every_platform_has_a_record_and_links_are_valid() -> None:
    assert {record["platform"] for record in RECORDS.values()} == entry_points() | {"example"}
    assert [path for found in FURTHER.values() for _, path in found if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_has_the_plugins_current_claims(name: str) -> None:
    record = RECORDS[name]
    today = PlatformUnderTest(record["platform"], without_device=True).describe()
    varying = VARYING.get(record["platform"], frozenset())
    seen, claimed = (
        {key: value for key, value in found.items() if key not in varying}
        for found in (record["capabilities"], today.capabilities)
    )
    assert seen == claimed, f"run the suite again, then {COMMAND} REPORT.json"
    spec = choose_platform(record["platform"], available_only=False).platform.spec
    assert record["plugin"]["contract"] == ".".join(map(str, spec.contract))
    assert record["failed"] == 0 and record["command"] and bool(record["on"]) == (WITHOUT_DEVICE not in record["only"])


def test_each_capability_has_clauses() -> None:
    assert set(CLAUSES_OF) == {field.name for field in fields(Capabilities)}
    assert {clause for clauses in CLAUSES_OF.values() for clause in clauses} <= set(CLAUSES)


# --- the functions that generate the tables

REPORT = {
    "platform": "acme",
    "plugin": {"distribution": "mvllm-acme", "version": "1.0", "contract": "1.0", "vendor": "Acme"},
    "devices": ["A100", "A100"],
    "only": [],
    "capabilities": {"dtypes": "float32", "sinks": "True", "mla": "False", "max_head_size": "None"},
    "clauses": {name: {"status": "passed", "tests": 2, "seconds": 1.0} for name in CLAUSES},
    "tests": [{"test": "test_a", "status": "passed"}],
    "waivers": [{"clause": "ATT-07", "reason": "slow sums"}],
}


def cells(record: dict[str, object]) -> dict[str, str]:
    lines = tables({"acme": record})["capabilities"].splitlines()[2:]
    return {name.strip(" `"): value.strip() for _, name, value, _ in (line.split("|") for line in lines)}


def test_passed_capabilities_are_marked_as_tested_and_others_as_claimed() -> None:
    record = record_of(REPORT, on="a device", command="mvllm conformance", date="2026-01-01")
    assert cells(record)["sinks"] == "shown" and cells(record)["dtypes"] == "float32: shown"
    assert cells(record)["mla"] == "–" and cells(record)["max_head_size"] == "any: shown"
    waived = copy.deepcopy(REPORT)
    waived["clauses"]["ATT-09"]["status"] = "waived"  # type: ignore[index, call-overload]
    assert cells(record_of(waived, on="a device", command="c", date="d"))["sinks"] == "claimed"


def test_without_a_computing_device_no_capability_is_marked_as_tested() -> None:
    record = record_of(REPORT, on="", command="mvllm conformance", date="2026-01-01")
    assert not any(is_shown(record, name) for name in CLAUSES_OF)
    assert f"| {NOT_RUN} |" in tables({"acme": record})["platforms"]


def test_devices_and_waivers_are_listed() -> None:
    shown = tables({"acme": record_of(REPORT, on="a device", command="c", date="2026-01-01")})
    assert "a device, 2 devices" in shown["platforms"] and "- `acme` ATT-07: slow sums" in shown["waivers"]
