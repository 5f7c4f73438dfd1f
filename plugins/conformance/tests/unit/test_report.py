"""Conformance reports: status of clauses, JSON round trip, Markdown."""

from __future__ import annotations

import json
import xml.etree.ElementTree
from dataclasses import replace

import pytest

from mvllm.errors import ConfigError
from mvllm_conformance.clauses import CLAUSES
from mvllm_conformance.report import REFUSED, Outcome, Report, Status, Subject, from_json
from mvllm_conformance.waivers import Waiver

SUBJECT = Subject("acme", "mvllm-acme", "1.2", "1.0", "Acme", ("Acme One, 4.0 GiB",), {"dtypes": "float32"})


def make(*outcomes, **settings):
    return Report(SUBJECT, "0.1", "1.0", outcomes=[Outcome(*o) for o in outcomes], **settings)


def status(report, clause="ATT-03"):
    return report.status(CLAUSES[clause])


def test_a_clause_has_the_status_of_its_worst_test():
    good = ("test_a", ["ATT-03"], Status.PASSED, 1.0)
    assert status(make(good)) is Status.PASSED
    assert status(make(good, ("test_b", ["ATT-03", "ATT-01"], Status.FAILED, 1.0, "off by 3"))) is Status.FAILED
    assert status(make(good, ("test_b", ["ATT-03"], Status.WAIVED, 1.0))) is Status.WAIVED


def test_refused_and_not_run_clauses_are_not_passed():
    assert status(make(("test_a", ["ATT-03"], Status.NOT_CLAIMED, 1.0))) is Status.NOT_CLAIMED
    assert status(make(("test_a", ["ATT-03"], Status.NOT_RUN, 0.0))) is Status.NOT_RUN
    assert status(make()) is Status.NOT_RUN


def test_only_a_whole_run_without_failures_is_conformant():
    good = ("test_a", ["ATT-03"], Status.PASSED, 1.0)
    assert make(good).conformant
    assert not make(good, only=("ATT",)).conformant and not make(good, quick=True).conformant
    assert not make(("test_a", ["ATT-03"], Status.FAILED, 1.0)).conformant


def test_a_waiver_is_unneeded_when_nothing_that_it_covers_fails():
    waiver = Waiver("ATT-03", "slow", "https://example.com", cases="*float16*")
    passed = ("test_a[float16]", ["ATT-03"], Status.PASSED, 1.0)
    waived = ("test_b[float16]", ["ATT-03"], Status.WAIVED, 1.0)
    other = ("test_a[float32]", ["ATT-03"], Status.PASSED, 1.0)
    assert make(passed, other, waivers=[waiver]).unneeded_waivers() == [waiver]
    assert make(passed, waived, waivers=[waiver]).unneeded_waivers() == []
    assert make(waivers=[waiver]).unneeded_waivers() == [waiver]
    assert make(other, waivers=[waiver], only=("ATT",)).unneeded_waivers() == []
    assert not make(passed, waivers=[waiver]).conformant


def test_a_report_can_be_written_and_read(tmp_path):
    report = make(
        ("test_a", ["ATT-03"], Status.PASSED, 1.5),
        ("test_b", ["ATT-04"], Status.FAILED, 0.5, "call: off by 3"),
        ("test_c", ["ATT-05"], Status.WAIVED, 0.5, "slow"),
        waivers=[Waiver("ATT-05", "slow", "https://example.com")],
    )
    report.write(tmp_path / "deep" / "report.json")
    again = from_json(tmp_path / "deep" / "report.json")
    assert (again.subject, again.outcomes, again.waivers) == (report.subject, report.outcomes, report.waivers)
    content = json.loads((tmp_path / "deep" / "report.json").read_text())
    assert content["clauses"]["ATT-04"] == {
        "status": "failed",
        "tests": 1,
        "counts": {"failed": 1},
        "seconds": 0.5,
        "since": "1.0",
        "needs": "torch_device",
    }
    assert content["conformant"] is False and content["plugin"]["version"] == "1.2"
    badge = xml.etree.ElementTree.fromstring((tmp_path / "deep" / "report.svg").read_text())
    assert badge.attrib["aria-label"] == "mvllm contract 1.0: 1 failed"


def test_the_page_has_a_row_for_every_clause():
    rows = make(("test_b", ["ATT-04"], Status.FAILED, 0.5, "call: off by 3")).markdown()
    for clause in CLAUSES.values():
        assert f"| {clause.id} | {clause.sentence} |" in rows
    assert "failed: 1 failed, first test_b" in rows


def test_all_tests_that_ran_are_counted_even_with_duration_zero(tmp_path):
    report = make(
        ("test_a", ["GRF-01"], Status.NOT_CLAIMED, 0.3, "graphs"),  # the duration of its set-up
        ("test_b", ["GRF-01"], Status.NOT_CLAIMED, 0.0001, REFUSED),
        ("test_c", ["ATT-04"], Status.PASSED, 0.0),
    )
    report.write(tmp_path / "report.json")
    for page in (report.markdown(), from_json(tmp_path / "report.json").markdown()):
        rows = {row.split(" | ")[0].removeprefix("| "): row.rstrip(" |").split(" | ")[-1] for row in page.splitlines()}
        assert (rows["GRF-01"], rows["ATT-04"]) == ("1", "1")


def test_the_page_counts_equal_devices():
    subject = replace(SUBJECT, devices=("Acme One", "Acme One", "Acme Two"))
    page = Report(subject, "0.1", "1.0", outcomes=[]).markdown()
    assert "\n- 2 of: Acme One\n- Acme Two\n" in page


@pytest.mark.parametrize("text", ["", "{}", '{"schema": 99}', "[]"])
def test_a_file_that_is_not_a_report_is_an_error(tmp_path, text):
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(ConfigError, match=r"report\.json is"):
        from_json(tmp_path / "report.json")
