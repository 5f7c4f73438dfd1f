"""The pytest plugin, run in a subprocess on sample tests and the CPU platform."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mvllm_conformance.platform_under_test import PlatformUnderTest
from mvllm_conformance.rank_launcher import run_ranks
from tests.helpers.plugins import prepend, write_metadata

ROOT = Path(__file__).parents[4]
SUITE = """
from mvllm.testing.markers import clause, exhaustive, skip_not_run

@clause("ATT-03")
def test_good(claimed_dtype): pass

@clause("ATT-04")
def test_bad(subject): assert subject.name == "another"

@clause("ATT-11")
def test_claimed_by_nobody(): assert False

@clause("GRF-01", refusal=True)
def test_refused(): pass

@clause("ATT-02", needs="sliding_window", refusal=True)
def test_refusal_of_what_is_claimed(): assert False

@clause("COM-03")
def test_impossible(): skip_not_run("one device")

@exhaustive
@clause("ATT-01")
def test_thorough(): pass

def test_of_the_vendors_own(): pass
"""
WAIVER = '[[waiver]]\nclause = "{}"\nreason = "known"\nlink = "https://example.com/1"\n'


@pytest.fixture
def run(tmp_path):
    (tmp_path / "test_some.py").write_text(SUITE)

    def start(*options: str, plugin: bool = True) -> tuple[subprocess.CompletedProcess[str], dict]:
        where = os.pathsep.join([str(ROOT / "core"), str(ROOT / "platforms" / "cpu" / "src")])
        report = tmp_path / "report.json"
        report.unlink(missing_ok=True)
        chosen = ["-p", "mvllm.testing.plugin", "--mvllm-platform", "cpu", "--mvllm-report", str(report)]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-rs", *(chosen if plugin else []), *options, "test_some.py"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": where},
            capture_output=True,
            text=True,
            timeout=300,
        )
        return done, json.loads(report.read_text()) if report.exists() else {}

    return start


def statuses(report):
    return {name: entry["status"] for name, entry in report["clauses"].items() if entry["status"] != "not run"}


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one process", "xdist"])
def test_outcomes_become_clauses(run, options):
    done, report = run(*options)
    assert done.returncode == 1, done.stdout
    assert statuses(report) == {
        "ATT-01": "passed",
        "ATT-03": "passed",
        "ATT-04": "failed",
        "ATT-11": "not claimed",
        "GRF-01": "not claimed",
    }
    assert report["clauses"]["ATT-03"]["tests"] == 3, "one for each dtype that is claimed"
    assert "test_of_the_vendors_own" not in str(report["tests"])
    assert "another" in next(t["reason"] for t in report["tests"] if t["status"] == "failed")
    assert report["plugin"]["distribution"] == "mvllm-cpu" and report["devices"]
    assert "ATT-04  failed" in done.stdout and "platform cpu: 2 passed, 1 failed" in done.stdout


def test_a_waived_failure_does_not_fail_the_run(run, tmp_path):
    (tmp_path / "w.toml").write_text(WAIVER.format("ATT-04"))
    done, report = run("--mvllm-waivers", "w.toml")
    assert done.returncode == 0, done.stdout
    assert report["clauses"]["ATT-04"]["status"] == "waived" and report["waivers"][0]["needed"]


def test_an_unneeded_waiver_fails_the_run(run, tmp_path):
    (tmp_path / "w.toml").write_text(WAIVER.format("ATT-04") + WAIVER.format("ATT-03"))
    done, report = run("--mvllm-waivers", "w.toml")
    assert done.returncode == 1
    assert "unneeded waiver: ATT-03" in done.stdout
    assert [w["needed"] for w in report["waivers"]] == [True, False]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--mvllm-only", "ATX"), "unknown ATX"),
        (("--mvllm-waivers", "none.toml"), "cannot be read"),
    ],
)
def test_wrong_options_end_the_run_before_it_begins(run, options, complaint):
    done, _ = run(*options)
    assert done.returncode == 4
    assert complaint in done.stdout + done.stderr


def test_a_run_can_be_limited(run):
    done, report = run("--mvllm-only", "ATT-03,GRF", "--mvllm-quick")
    assert done.returncode == 0
    assert set(statuses(report)) == {"ATT-03", "GRF-01"} and not report["conformant"]
    assert "  ATT-03  passed " in done.stdout and "DEV-01" not in done.stdout
    assert re.search(r"^deselected: \d+ tests of clauses that --only excludes$", done.stdout, re.MULTILINE)
    whole, quick = run("--mvllm-quick")
    assert re.search(r"^deselected: \d+ tests that --quick excludes$", whole.stdout, re.MULTILINE)
    assert "ATT-01" not in statuses(quick)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])  # the second is not available on most machines
def test_without_a_device_only_device_free_clauses_run(run, tmp_path, platform):
    (tmp_path / "test_some.py").write_text(
        "from mvllm.testing.markers import clause\n"
        "@clause('CFG-03')\ndef test_free(subject): assert subject.platform.capabilities.dtypes\n"
        "@clause('CFG-05')\ndef test_opening(bound_device): assert False\n"
        "@clause('ATT-03')\ndef test_of_the_device(subject): assert False\n"
        "@clause('E2E-01')\ndef test_of_the_engine(free_device): assert False\n"
    )
    done, report = run("--mvllm-platform", platform, "--mvllm-without-device")
    assert done.returncode == 0, done.stdout
    assert statuses(report) == {"CFG-03": "passed"}
    assert {test["reason"] for test in report["tests"] if test["status"] == "not run"} == {"without a device"}
    assert not report["conformant"] and report["only"] == ["without a device"]


def test_a_clause_newer_than_the_plugins_contract_does_not_apply(run, tmp_path):
    (tmp_path / "conftest.py").write_text(
        "import dataclasses\nfrom mvllm.testing import clauses\n"
        "clauses.CLAUSES['ATT-04'] = dataclasses.replace(clauses.CLAUSES['ATT-04'], since=(1, 9))\n"
    )
    done, report = run()
    assert done.returncode == 0, done.stdout
    assert report["clauses"]["ATT-04"]["status"] == "not applicable"


def test_a_platform_that_is_not_installed_fails_with_the_reason(run):
    done, report = run("--mvllm-platform", "acme")
    assert done.returncode == 1
    assert report["clauses"]["ATT-04"]["status"] == "failed"
    assert "No platform is called 'acme'; installed: " in done.stdout


def test_the_plugin_is_opt_in(run):
    done, _ = run("--mvllm-platform", "cpu", plugin=False)
    assert "unrecognized arguments" in done.stderr


@pytest.mark.exhaustive
def test_two_one_line_files_are_enough(tmp_path, run):
    (tmp_path / "conftest.py").write_text("from mvllm.testing.plugin import *\n")
    (tmp_path / "test_some.py").write_text("from mvllm.testing.suite.everything import *\n")
    done, _ = run("--mvllm-platform", "cpu", "--mvllm-only", "PLG,CFG-05,KVL", plugin=False)
    assert done.returncode == 0, done.stdout
    assert "KVL-03  passed" in done.stdout and "ATT-01" not in done.stdout


def test_the_command_loads_neither_the_suite_nor_pytest_before_it_runs():
    code = (
        "import sys\nimport mvllm_conformance.cli\n"
        "sys.exit(str(sorted({m for m in sys.modules if m.startswith('mvllm_conformance.') or m == 'pytest'}))"
    )
    done = subprocess.run([sys.executable, "-c", f"{code})"], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "['mvllm_conformance.cli']"


ALIAS = """
import importlib, sys
import pytest
from mvllm.testing.suite.test_plg_plugin import *
from mvllm.testing.suite import everything

def test_both_names_of_a_module_are_one_object():
    for name in ("plugin", "clauses", "suite.everything", "suite.test_plg_plugin"):
        published = importlib.import_module(f"mvllm.testing.{name}")
        assert published is importlib.import_module(f"mvllm_conformance.{name}")
        assert published.__name__ == published.__spec__.name == f"mvllm_conformance.{name}"
    names = {getattr(module, "__name__", "") for module in sys.modules.values()}
    assert {name for name in names if name.startswith("mvllm.testing.")} == {"mvllm.testing.suite"}

def test_the_suites_assertions_show_their_values():
    assert type(everything.test_the_package_imports_only_the_plugin_api.__globals__["__loader__"]).__name__ == HOOK

HOOK = "AssertionRewritingHook"
"""


@pytest.mark.fresh_programs
@pytest.mark.parametrize(
    "conftest",
    [
        "",
        pytest.param("import mvllm.testing\n", marks=pytest.mark.exhaustive),
        "from mvllm.testing.plugin import *\n",
    ],
)
def test_the_suite_is_imported_once_under_both_names(run, tmp_path, conftest):
    (tmp_path / "test_some.py").write_text(ALIAS)
    (tmp_path / "conftest.py").write_text(conftest)
    done, _ = run("--mvllm-platform", "cpu", "--mvllm-only", "PLG-02", plugin="plugin" not in conftest)
    assert done.returncode == 0 and "warning" not in done.stdout, done.stdout


def test_the_suite_is_collected_by_its_published_name(run):
    done, _ = run("--pyargs", "mvllm.testing.suite", "--collect-only", "--mvllm-only", "PLG-02")
    assert re.search(r"^.*test_plg_plugin.py::test_the_plugin_calls_itself", done.stdout, flags=re.MULTILINE)


CUT = """
import ctypes, os, signal, time
from mvllm.testing.markers import clause

@clause("ATT-04")
def test_z(): assert False, "the scale is wrong"

@clause("ATT-04")
def test_a(): assert False, "too"

@clause("ATT-05")
def test_cut():
    if os.environ["CUT_BY"] == "SIGTERM":
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the background of a script
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    ctypes.CDLL(None).poll(None, 0, 60_000)  # as a library that does not return to Python

@clause("ATT-06")
def test_never_run(): pass
"""


@pytest.mark.parametrize("cut_by", ["SIGTERM", "time limit"])
def test_a_run_that_is_cut_leaves_its_table_and_report(run, tmp_path, monkeypatch, cut_by):
    (tmp_path / "test_some.py").write_text(CUT)
    monkeypatch.setenv("CUT_BY", cut_by)
    done, report = run("--mvllm-timeout", "1" if cut_by == "time limit" else "60")
    assert done.returncode != 0
    assert not report["complete"] and not report["conformant"]
    expected = {"ATT-04": "failed"} if cut_by == "SIGTERM" else {"ATT-04": "failed", "ATT-05": "failed"}
    assert statuses(report) == expected, done.stdout
    assert "ATT-04 failed, test_z: the scale is wrong" in done.stdout, "at once, not only at the end"
    table = (tmp_path / "report.txt").read_text()
    assert re.search(r"ATT-04  failed .*  2 failed, first test_z\n +the scale is wrong\n", table)
    assert table.strip() in done.stdout
    assert table.endswith("the run was cut, or is not over\n")
    if cut_by == "time limit":
        assert "test_cut" in done.stdout + done.stderr and "did not end within 1 s" in table


HANGING = """
import time
from mvllm.plugin_api import PlatformSpec, hookimpl
from mvllm_cpu.platform import CPUPlatform

SPEC = PlatformSpec("hanging", "tests", (1, 1), "mvllm_cpu.probe:probe", "hanging_device:HangingPlatform")

@hookimpl
def mvllm_platform(): return SPEC

class HangingPlatform(CPUPlatform):
    spec = SPEC

    def communicator(self, group, device):
        while True:
            time.sleep(0.5)
"""


@pytest.mark.exhaustive
def test_a_rank_that_hangs_in_its_start_is_named_with_its_stack(tmp_path, monkeypatch):
    (
        write_metadata(tmp_path, "mvllm-hanging", "[mvllm.platforms]\nhanging = hanging_device\n") / "hanging_device.py"
    ).write_text(HANGING)
    prepend(monkeypatch, [str(tmp_path), str(ROOT)])
    subject = PlatformUnderTest("hanging", start_timeout=2.0)
    [result] = run_ranks(subject, 2, ["bind", "join", "close"], local_ranks=[0])
    assert not result.error_of("bind")
    error = result.error_of("join")
    assert error.startswith(
        "Platform.communicator did not return within 2 s; it waits in communicator (hanging_device.py:"
    )
    assert "hanging_device.py" in error.partition("Its stack:")[2]
    assert result.error_of("close") == error
