"""The pytest plugin of the conformance suite: selects tests by platform and clauses, and writes the report.

Opt-in: `pytest -p mvllm.testing.plugin ...`, or `from mvllm.testing.plugin import *` in a conftest.py. It does not
affect tests without a clause, so a vendor's own tests can run in the same session.

    collection   tests ──clause of another contract version──> skipped, not applicable
                       ──capability not claimed─────────────> skipped; refusal tests run instead
                       ──waived─────────────────────────────> expected to fail
    each test    outcome ──> JSON report, table and badge, so that a run that is cut leaves what it has found
    end          outcomes ──> table; an unneeded waiver fails the run
"""

from __future__ import annotations

import datetime
import faulthandler
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mvllm.extension_api.testing import __version__, enter_phase
from mvllm.plugin_api import MvllmError, Phase
from mvllm_conformance.clauses import CLAUSES, DEVICE_FREE, FAMILIES, claims
from mvllm_conformance.markers import EXHAUSTIVE_MARKER, MARKER, NOT_APPLICABLE, NOT_CLAIMED, NOT_RUN
from mvllm_conformance.platform_under_test import START_TIMEOUT, PlatformUnderTest, find_platform_under_test
from mvllm_conformance.report import REFUSED, WITHOUT_DEVICE, Outcome, Report, Status
from mvllm_conformance.waivers import Waiver, read_waivers

if TYPE_CHECKING:
    from mvllm.plugin_api import DeviceRuntime
    from mvllm_conformance.zoo import Zoo

# Shows values in assertion errors, also if a vendor's file imports the tests.
pytest.register_assert_rewrite(
    "mvllm_conformance.suite", "mvllm_conformance.zoo", "mvllm_conformance.leftover_processes"
)

PROPERTY = "mvllm-conformance"
"""Key of the user property with a test's clauses; xdist sends user properties from its workers to the controller."""

_WRITE_SECONDS = 2.0
"""Between two writes of the report, which takes some milliseconds."""

_TEST_TIMEOUT = 600.0
"""Default of --mvllm-timeout: seconds that a test may take."""

_GRACE_SECONDS = 30.0
"""After the time limit, for a test that does not react to it."""

DEVICE_FIXTURES = frozenset({"bound_device", "free_device"})
"""Fixtures of tests that open the device, in this process or another."""


class SessionState:
    """The plugin's state in a pytest session: options, platform, waivers and outcomes."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._platform_under_test: PlatformUnderTest | None = None
        self._waivers: list[Waiver] | None = None
        self.outcomes: dict[str, Outcome] = {}
        """By the tests' node ids, in the order in which they ended."""
        self.complete = False
        self._written = 0.0
        self.deselected: Counter[str] = Counter()
        """Number of deselected tests by reason."""

    def option(self, name: str) -> Any:
        return self._config.getoption(f"mvllm_{name}", default=None)

    @property
    def platform_under_test(self) -> PlatformUnderTest:
        if self._platform_under_test is None:
            try:
                self._platform_under_test = find_platform_under_test(
                    self.option("platform"), self.without_device, self.option("start_timeout") or START_TIMEOUT
                )
            except MvllmError as e:
                raise pytest.UsageError(str(e)) from e
        return self._platform_under_test

    @property
    def waivers(self) -> list[Waiver]:
        if self._waivers is None:
            path = self.option("waivers")
            try:
                self._waivers = read_waivers(Path(path), datetime.date.today()) if path else []
            except MvllmError as e:
                raise pytest.UsageError(str(e)) from e
        return self._waivers

    @property
    def only(self) -> tuple[str, ...]:
        """Families and clauses to which the run is limited."""
        return tuple(part.strip().upper() for part in (self.option("only") or "").split(",") if part.strip())

    @property
    def without_device(self) -> bool:
        return bool(self.option("without_device"))

    @property
    def quick(self) -> bool:
        return bool(self.option("quick"))

    def report(self) -> Report:
        from mvllm.plugin_api import CONTRACT

        narrowed = tuple(f"{flag} {text}" for flag in ("-k", "-m") if (text := _selection(self._config, flag)))
        return Report(
            subject=self.platform_under_test.describe(),
            core_version=__version__,
            core_contract=".".join(map(str, CONTRACT)),
            outcomes=list(self.outcomes.values()),
            waivers=self.waivers,
            only=(*self.only, *([WITHOUT_DEVICE] if self.without_device else []), *narrowed),
            quick=self.quick,
            complete=self.complete,
        )

    def write(self) -> None:
        """Writes the report so far, if one was asked for."""
        if (path := self.option("report")) and self.outcomes and not hasattr(self._config, "workerinput"):
            self.report().write(Path(path))
            self._written = time.monotonic()

    def fail_hung(self, item: pytest.Item, seconds: float) -> None:
        """Ends the process, whose current test does not end: a library waits without returning to Python.

        The test counts as failed. The report and the table of the tests so far are written.
        """
        capture = self._config.pluginmanager.getplugin("capturemanager")
        if capture is not None:
            capture.suspend_global_capture(in_=True)
        faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
        facts = dict(item.user_properties).get(PROPERTY)
        if isinstance(facts, dict):
            reason = f"call: did not end within {seconds:g} s; the run ends here. The stack is in the output."
            name = _name(item.nodeid)
            self.outcomes[item.nodeid] = Outcome(name, list(facts["clauses"]), Status.FAILED, seconds, reason)
        self.write()
        print(f"\n{self.report().table()}\n{self.report().verdict()}", file=sys.__stdout__, flush=True)
        os._exit(1)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Records the report of one phase of a test, also from a worker of xdist."""
        found, facts = report, dict(report.user_properties).get(PROPERTY)
        if not isinstance(facts, dict):
            return
        name = _name(found.nodeid)
        status, reason = _outcome_of_phase(found, refusal=bool(facts["refusal"]))
        before = self.outcomes.get(found.nodeid)
        if before is not None:
            seconds = before.seconds + found.duration
            keep = status is None or before.status in (Status.FAILED, Status.WAIVED)
            status, reason = (before.status, before.reason) if keep else (status, reason)
        else:
            seconds = found.duration
        if status is None:
            return
        self.outcomes[found.nodeid] = outcome = Outcome(name, list(facts["clauses"]), status, seconds, reason)
        if status is Status.FAILED and found.outcome == "failed":
            terminal = self._config.pluginmanager.getplugin("terminalreporter")
            if terminal is not None:  # at once, since the tracebacks come at the end
                terminal.ensure_newline()
                terminal.write_line(f"{', '.join(outcome.clauses)} failed, {outcome.test}: {outcome.sentence}")
        if time.monotonic() - self._written > _WRITE_SECONDS:
            self.write()


_RUN = pytest.StashKey[SessionState]()


def _run(config: pytest.Config) -> SessionState:
    if _RUN not in config.stash:
        config.stash[_RUN] = SessionState(config)
    return config.stash[_RUN]


def _fixtures(item: pytest.Item) -> Sequence[str]:
    return getattr(item, "fixturenames", ())


def _name(nodeid: str) -> str:
    """The name of a test without its file, which may be a vendor's."""
    return nodeid.partition("::")[2]


def _selection(config: pytest.Config, flag: str) -> str:
    return str(config.getoption({"-k": "keyword", "-m": "markexpr"}[flag], default="") or "")


# ------------------------------------------------------------------------------------------------------- pytest's hooks


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options, which all begin with --mvllm."""
    group = parser.getgroup("mvllm", "mvllm conformance")
    add = group.addoption
    add("--mvllm-platform", metavar="NAME", help="The platform to test. Default: the only available one.")
    add("--mvllm-report", metavar="PATH", help="Write a JSON report, and table and badge beside it.")
    add("--mvllm-waivers", metavar="PATH", help="Known exceptions, with reasons and links (TOML).")
    add("--mvllm-only", metavar="IDS", help="Families or clauses to test, for instance ATT,COM-03.")
    add("--mvllm-without-device", action="store_true", default=None, help="Test only clauses that need no device.")
    add(
        "--mvllm-timeout",
        metavar="SECONDS",
        type=float,
        help=f"How long a test may take. Default: {_TEST_TIMEOUT:g}.",
    )
    add(
        "--mvllm-start-timeout",
        metavar="SECONDS",
        type=float,
        help="How long init_device, communicator and each phase of an engine's start may take. "
        f"Default: {START_TIMEOUT:g}.",
    )
    add("--mvllm-quick", action="store_true", default=None, help="Run fewer cases of each grid. Proves no conformance.")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the markers and validates the options."""
    config.addinivalue_line("markers", f"{MARKER}(*ids, needs=None, refusal=False): the clauses that a test covers")
    config.addinivalue_line("markers", f"{EXHAUSTIVE_MARKER}: left out by --mvllm-quick")
    run = _run(config)
    unknown = [part for part in run.only if part not in CLAUSES and part not in FAMILIES]
    if unknown:
        raise pytest.UsageError(
            f"--mvllm-only: unknown {', '.join(unknown)}. Families: {', '.join(FAMILIES)}; "
            "`mvllm conformance --clauses` lists the clauses."
        )
    _ = run.waivers
    if not hasattr(config, "workerinput") and threading.current_thread() is threading.main_thread():

        def interrupt(*_: object) -> None:
            # As Ctrl-C: pytest ends the run and prints its summaries. Commands in the background ignore SIGINT itself.
            raise KeyboardInterrupt

        previous = signal.signal(signal.SIGTERM, interrupt)

        def restore() -> None:
            signal.signal(signal.SIGTERM, previous)

        config.add_cleanup(restore)
    config.pluginmanager.register(run, "mvllm-conformance-run")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrizes `claimed_dtype` with the compute dtypes that the platform claims."""
    if "claimed_dtype" in metafunc.fixturenames:
        metafunc.parametrize("claimed_dtype", _run(metafunc.config).platform_under_test.capabilities.dtypes)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects and skips tests, and attaches the clauses to the others."""
    run = _run(config)
    selected: list[pytest.Item] = []
    deselected: list[pytest.Item] = []
    for item in items:
        marker = item.get_closest_marker(MARKER)
        why = "" if marker is None else _deselection_reason(item, marker, run)
        (deselected if why else selected).append(item)
        if why:
            run.deselected[why] += 1
        elif marker is not None:
            _prepare(item, marker, run)
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = selected


def _selected_clauses(marker: pytest.Mark, run: SessionState) -> list[str]:
    """The clauses of a test that the run includes."""
    return [i for i in marker.args if not run.only or i in run.only or i[:3] in run.only]


def _unclaimed(marker: pytest.Mark, run: SessionState) -> list[str]:
    """Capabilities that a test needs and that the platform does not claim."""
    wanted = {marker.kwargs.get("needs"), *(CLAUSES[i].needs for i in marker.args)} - {None}
    if run.platform_under_test.error:
        return []
    return sorted(str(need) for need in wanted if not claims(run.platform_under_test.capabilities, need))


def _deselection_reason(item: pytest.Item, marker: pytest.Mark, run: SessionState) -> str:
    """Why a test is deselected; empty if it is selected."""
    if not _selected_clauses(marker, run):
        return "of clauses that --only excludes"
    if run.quick and item.get_closest_marker(EXHAUSTIVE_MARKER):
        return "that --quick excludes"
    if marker.kwargs.get("refusal") and not _unclaimed(marker, run):
        return "that expect the refusal of a capability that the platform claims"
    return ""


def _prepare(item: pytest.Item, marker: pytest.Mark, run: SessionState) -> None:
    """Attaches the clauses to a selected test, and marks it as skipped or as expected to fail."""
    ids, unclaimed = _selected_clauses(marker, run), _unclaimed(marker, run)
    platform_under_test = run.platform_under_test
    refusal = bool(marker.kwargs.get("refusal"))
    contract = platform_under_test.contract
    if contract is not None:
        applicable = [i for i in ids if CLAUSES[i].since <= contract]
        if not applicable:
            since = ".".join(map(str, CLAUSES[ids[0]].since))
            item.add_marker(pytest.mark.skip(reason=f"{NOT_APPLICABLE}since contract {since}"))
        ids = applicable or ids
    if unclaimed and not refusal:
        item.add_marker(pytest.mark.skip(reason=NOT_CLAIMED + ", ".join(unclaimed)))
    elif run.without_device and (
        not DEVICE_FREE.issuperset(marker.args) or DEVICE_FIXTURES.intersection(_fixtures(item))
    ):
        item.add_marker(pytest.mark.skip(reason=NOT_RUN + WITHOUT_DEVICE))
    waiver = next((w for w in run.waivers if w.covers(ids, _name(item.nodeid))), None)
    if waiver is not None:
        item.add_marker(pytest.mark.xfail(reason=f"{waiver.reason} {waiver.link}", strict=False))
    if item.config.pluginmanager.hasplugin("timeout") and item.get_closest_marker("timeout") is None:
        item.add_marker(pytest.mark.timeout(run.option("timeout") or _TEST_TIMEOUT))
    item.user_properties.append((PROPERTY, {"clauses": ids, "refusal": refusal}))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Ends the run if a test does not end, nor reacts to the time limit of pytest-timeout."""
    run = _run(item.config)
    if item.get_closest_marker(MARKER) is None:
        return (yield)
    seconds = run.option("timeout") or _TEST_TIMEOUT
    watchdog = threading.Timer(seconds + min(_GRACE_SECONDS, seconds), run.fail_hung, (item, seconds))
    watchdog.daemon = True
    watchdog.start()
    try:
        return (yield)
    finally:
        watchdog.cancel()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int | pytest.ExitCode) -> None:
    """Fails the run if a waiver is unneeded, and writes the report."""
    config = session.config
    if hasattr(config, "workerinput"):  # a worker of xdist: the controller writes the report
        return
    run = _run(config)
    if not run.outcomes:
        return
    run.complete = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not session.shouldstop
    report = run.report()
    if report.unneeded_waivers() and exitstatus in (pytest.ExitCode.OK, 0):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    run.write()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Prints the table of clauses, the number of deselected tests by reason, and the verdict."""
    run = _run(config)
    if not run.outcomes:
        return
    report = run.report()
    terminalreporter.section("mvllm conformance")
    terminalreporter.write_line(report.table())
    for waiver in report.unneeded_waivers():
        terminalreporter.write_line(f"FAILED: unneeded waiver: {waiver}")
    for why, count in run.deselected.items():
        terminalreporter.write_line(f"deselected: {count} tests {why}")
    terminalreporter.write_line(report.verdict())
    if path := run.option("report"):
        terminalreporter.write_line(f"report: {path}")


def _outcome_of_phase(found: pytest.TestReport, *, refusal: bool) -> tuple[Status | None, str]:
    """Status and reason after one phase of a test; None if the phase decides nothing."""
    if hasattr(found, "wasxfail"):
        if found.outcome == "skipped":
            return Status.WAIVED, str(found.wasxfail)
        return (Status.PASSED, "") if found.when == "call" else (None, "")
    if found.outcome == "failed":
        crash = getattr(found.longrepr, "reprcrash", None)
        text = getattr(crash, "message", None) or found.longreprtext or "failed"
        return Status.FAILED, f"{found.when}: {text.strip().splitlines()[0]}"[:600]
    if found.outcome == "skipped":
        reason = found.longrepr[2] if isinstance(found.longrepr, tuple) else str(found.longrepr)
        reason = reason.removeprefix("Skipped: ")
        for prefix, status in ((NOT_CLAIMED, Status.NOT_CLAIMED), (NOT_APPLICABLE, Status.NOT_APPLICABLE)):
            if reason.startswith(prefix):
                return status, reason.removeprefix(prefix)
        return Status.NOT_RUN, reason.removeprefix(NOT_RUN)
    if found.when != "call":
        return None, ""
    return (Status.NOT_CLAIMED, REFUSED) if refusal else (Status.PASSED, "")


# ------------------------------------------------------------------------------------------------------------- fixtures


@pytest.fixture(scope="session")
def subject(request: pytest.FixtureRequest) -> PlatformUnderTest:
    """The platform under test. Fails with the reason if it cannot be loaded."""
    platform_under_test = _run(request.config).platform_under_test
    if platform_under_test.error:
        pytest.fail(platform_under_test.error, pytrace=False)
    return platform_under_test


@pytest.fixture(scope="session")
def platform_under_test(request: pytest.FixtureRequest) -> PlatformUnderTest:
    """The platform under test, which may be impossible to load."""
    return _run(request.config).platform_under_test


class DeviceHolder:
    """Opens the device for tests, and releases it before an engine in this process opens it."""

    def __init__(self, platform_under_test: PlatformUnderTest) -> None:
        self._platform_under_test = platform_under_test
        self._runtime: DeviceRuntime | None = None

    def open(self) -> DeviceRuntime:
        """Binds the device, or returns the bound one."""
        from mvllm.plugin_api import WorkerContext

        if self._runtime is None:
            with enter_phase(Phase.WORKER):
                self._runtime = self._platform_under_test.platform.init_device(WorkerContext())
        return self._runtime

    def close(self) -> None:
        """Releases the device. Idempotent."""
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            with enter_phase(Phase.WORKER):
                runtime.shutdown()


@pytest.fixture(scope="session")
def device_holder(subject: PlatformUnderTest) -> Iterator[DeviceHolder]:
    """The holder of this process's device."""
    holder = DeviceHolder(subject)
    yield holder
    holder.close()


@pytest.fixture
def bound_device(device_holder: DeviceHolder) -> Iterator[DeviceRuntime]:
    """The device, bound to this process; the test runs in the phase `worker`."""
    runtime = device_holder.open()
    with enter_phase(Phase.WORKER):
        yield runtime


@pytest.fixture
def free_device(device_holder: DeviceHolder) -> None:
    """Releases the device of this process, so that an engine or a worker can open it."""
    device_holder.close()


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """Tiny checkpoints and their oracle."""
    from mvllm_conformance.zoo import Zoo

    return Zoo(tmp_path_factory.mktemp("mvllm-zoo"))
