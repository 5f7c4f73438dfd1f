"""Makes pytest understand the suite: which platform, which clauses are due, what came of them.

Opt-in: `pytest -p mvllm.testing.plugin ...`, or `from mvllm.testing.plugin import *` in a conftest.py. Tests without a
clause are left alone, so it may stand beside a vendor's own.

    collection   tests ──clause of another contract version──> skipped, not applicable
                       ──capability not claimed─────────────> skipped; its refusal is tested instead
                       ──waived─────────────────────────────> expected to fail
    end          outcomes ──> table, JSON report, badge; a waiver that nothing needed fails the run
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mvllm.errors import MvllmError
from mvllm.platform.phases import Phase, enter_phase
from mvllm.testing.clauses import CLAUSES, DEVICE_FREE, FAMILIES, claims
from mvllm.testing.markers import EXHAUSTIVE_MARKER, MARKER, NOT_APPLICABLE, NOT_CLAIMED, NOT_RUN
from mvllm.testing.platform_under_test import PlatformUnderTest, find_platform_under_test
from mvllm.testing.report import REFUSED, WITHOUT_DEVICE, Outcome, Report, Status
from mvllm.testing.waivers import Waiver, read_waivers
from mvllm.version import __version__

if TYPE_CHECKING:
    from mvllm.plugin_api import DeviceRuntime
    from mvllm.testing.zoo import Zoo

# Failures show values also where the tests are imported into a file of the vendor's own.
pytest.register_assert_rewrite("mvllm.testing.suite", "mvllm.testing.zoo", "mvllm.testing.leftover_processes")

PROPERTY = "mvllm-conformance"
"""Under this name a test's report carries its clauses, also from a worker of xdist."""

OPENING = frozenset({"bound_device", "free_device"})
"""Fixtures of tests that open the device, or leave it to a process of theirs."""


class SessionState:
    """What this plugin remembers between pytest's calls."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._platform_under_test: PlatformUnderTest | None = None
        self._waivers: list[Waiver] | None = None
        self.outcomes: dict[str, Outcome] = {}
        self.left_out: Counter[str] = Counter()
        """Tests that were not due, by why."""

    def option(self, name: str) -> Any:
        return self._config.getoption(f"mvllm_{name}", default=None)

    @property
    def platform_under_test(self) -> PlatformUnderTest:
        if self._platform_under_test is None:
            try:
                self._platform_under_test = find_platform_under_test(self.option("platform"), self.without_device)
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
        """Families and clauses that the run is limited to."""
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
            outcomes=sorted(self.outcomes.values(), key=lambda o: (min(o.clauses), o.test)),
            waivers=self.waivers,
            only=(*self.only, *([WITHOUT_DEVICE] if self.without_device else []), *narrowed),
            quick=self.quick,
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Takes in one phase of one test; of a worker of xdist as well."""
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
        if status is not None:
            self.outcomes[found.nodeid] = Outcome(name, list(facts["clauses"]), status, seconds, reason)


_RUN = pytest.StashKey[SessionState]()


def _run(config: pytest.Config) -> SessionState:
    if _RUN not in config.stash:
        config.stash[_RUN] = SessionState(config)
    return config.stash[_RUN]


def _fixtures(item: pytest.Item) -> Sequence[str]:
    return getattr(item, "fixturenames", ())


def _name(nodeid: str) -> str:
    """A test's own name, whatever file it was imported into."""
    return nodeid.partition("::")[2]


def _selection(config: pytest.Config, flag: str) -> str:
    return str(config.getoption({"-k": "keyword", "-m": "markexpr"}[flag], default="") or "")


# ------------------------------------------------------------------------------------------------------- pytest's hooks


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options, all of them beginning with --mvllm."""
    group = parser.getgroup("mvllm", "mvllm conformance")
    add = group.addoption
    add("--mvllm-platform", metavar="NAME", help="The platform to examine. Default: the only available one.")
    add("--mvllm-report", metavar="PATH", help="Write a JSON report, and a badge (SVG) beside it.")
    add("--mvllm-waivers", metavar="PATH", help="Known exceptions, with reasons and links (TOML).")
    add("--mvllm-only", metavar="IDS", help="Families or clauses to examine, for instance ATT,COM-03.")
    add("--mvllm-without-device", action="store_true", default=None, help="Examine only what opens no device.")
    add("--mvllm-quick", action="store_true", default=None, help="Thin out the grids. Proves no conformance.")


def pytest_configure(config: pytest.Config) -> None:
    """Declares the markers, and refuses wrong options before anything runs."""
    config.addinivalue_line("markers", f"{MARKER}(*ids, needs=None, refusal=False): the clauses that a test stands for")
    config.addinivalue_line("markers", f"{EXHAUSTIVE_MARKER}: left out by --mvllm-quick")
    run = _run(config)
    unknown = [part for part in run.only if part not in CLAUSES and part not in FAMILIES]
    if unknown:
        raise pytest.UsageError(
            f"--mvllm-only: there is no {', '.join(unknown)}. Families: {', '.join(FAMILIES)}; "
            "`mvllm conformance --clauses` lists the clauses."
        )
    _ = run.waivers
    config.pluginmanager.register(run, "mvllm-conformance-run")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs `claimed_dtype` through the compute dtypes that the platform claims."""
    if "claimed_dtype" in metafunc.fixturenames:
        metafunc.parametrize("claimed_dtype", _run(metafunc.config).platform_under_test.capabilities.dtypes)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Decides which tests are due, and gives each its clauses to carry."""
    run = _run(config)
    due: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        marker = item.get_closest_marker(MARKER)
        why = "" if marker is None else _deselection_reason(item, marker, run)
        (left_out if why else due).append(item)
        if why:
            run.left_out[why] += 1
        elif marker is not None:
            _prepare(item, marker, run)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = due


def _asked(marker: pytest.Mark, run: SessionState) -> list[str]:
    """A test's clauses, those that the run is limited to."""
    return [i for i in marker.args if not run.only or i in run.only or i[:3] in run.only]


def _unclaimed(marker: pytest.Mark, run: SessionState) -> list[str]:
    """Capabilities that a test needs and the platform does not claim."""
    wanted = {marker.kwargs.get("needs"), *(CLAUSES[i].needs for i in marker.args)} - {None}
    if run.platform_under_test.error:
        return []
    return sorted(str(need) for need in wanted if not claims(run.platform_under_test.capabilities, need))


def _deselection_reason(item: pytest.Item, marker: pytest.Mark, run: SessionState) -> str:
    """Why a test is not collected; empty where it is."""
    if not _asked(marker, run):
        return "of clauses that --only leaves out"
    if run.quick and item.get_closest_marker(EXHAUSTIVE_MARKER):
        return "that only a run without --quick has"
    if marker.kwargs.get("refusal") and not _unclaimed(marker, run):
        return "that expect a refusal of what this platform claims"
    return ""


def _prepare(item: pytest.Item, marker: pytest.Mark, run: SessionState) -> None:
    """Gives a test that is due its clauses to carry, and says whether it is to be skipped or to fail."""
    ids, unclaimed = _asked(marker, run), _unclaimed(marker, run)
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
    elif run.without_device and (not DEVICE_FREE.issuperset(marker.args) or OPENING.intersection(_fixtures(item))):
        item.add_marker(pytest.mark.skip(reason=NOT_RUN + WITHOUT_DEVICE))
    waiver = next((w for w in run.waivers if w.covers(ids, _name(item.nodeid))), None)
    if waiver is not None:
        item.add_marker(pytest.mark.xfail(reason=f"{waiver.reason} {waiver.link}", strict=False))
    item.user_properties.append((PROPERTY, {"clauses": ids, "refusal": refusal}))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int | pytest.ExitCode) -> None:
    """Fails a run whose waivers are not needed any more, and writes the report."""
    config = session.config
    if hasattr(config, "workerinput"):  # a worker of xdist: its reports travel to the one that writes
        return
    run = _run(config)
    if not run.outcomes:
        return
    report = run.report()
    if report.unneeded_waivers() and exitstatus in (pytest.ExitCode.OK, 0):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if path := run.option("report"):
        report.write(Path(path))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The table of clauses that were asked for, how many tests were not due and why, and the verdict."""
    run = _run(config)
    if not run.outcomes:
        return
    report = run.report()
    terminalreporter.section("mvllm conformance")
    terminalreporter.write_line(report.table())
    for waiver in report.unneeded_waivers():
        terminalreporter.write_line(f"FAILED: a waiver that nothing needs any more: {waiver}")
    for why, count in run.left_out.items():
        terminalreporter.write_line(f"left out: {count} tests {why}")
    terminalreporter.write_line(report.verdict())
    if path := run.option("report"):
        terminalreporter.write_line(f"report: {path}")


def _outcome_of_phase(found: pytest.TestReport, *, refusal: bool) -> tuple[Status | None, str]:
    """What one phase of a test means; None when it means nothing yet."""
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
    """The platform under test. Fails, with the reason, when it cannot be had."""
    platform_under_test = _run(request.config).platform_under_test
    if platform_under_test.error:
        pytest.fail(platform_under_test.error, pytrace=False)
    return platform_under_test


@pytest.fixture(scope="session")
def platform_under_test(request: pytest.FixtureRequest) -> PlatformUnderTest:
    """The same, whether it can be had or not: for clauses about plugins that do not load."""
    return _run(request.config).platform_under_test


class DeviceHolder:
    """Opens the device when a test wants it, and lets go of it before an engine in this process wants it too."""

    def __init__(self, platform_under_test: PlatformUnderTest) -> None:
        self._platform_under_test = platform_under_test
        self._runtime: DeviceRuntime | None = None

    def open(self) -> DeviceRuntime:
        """The bound device."""
        from mvllm.plugin_api import WorkerContext

        if self._runtime is None:
            with enter_phase(Phase.WORKER):
                self._runtime = self._platform_under_test.platform.init_device(WorkerContext())
        return self._runtime

    def close(self) -> None:
        """Releases it. Idempotent."""
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            with enter_phase(Phase.WORKER):
                runtime.shutdown()


@pytest.fixture(scope="session")
def device_holder(subject: PlatformUnderTest) -> Iterator[DeviceHolder]:
    """The one that may have the device open in this process."""
    holder = DeviceHolder(subject)
    yield holder
    holder.close()


@pytest.fixture
def bound_device(device_holder: DeviceHolder) -> Iterator[DeviceRuntime]:
    """The device, bound to this process; the test is in the phase `worker`."""
    runtime = device_holder.open()
    with enter_phase(Phase.WORKER):
        yield runtime


@pytest.fixture
def free_device(device_holder: DeviceHolder) -> None:
    """Nothing in this process has the device open: an engine or a worker may."""
    device_holder.close()


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """Tiny checkpoints and what the oracle makes of them."""
    from mvllm.testing.zoo import Zoo

    return Zoo(tmp_path_factory.mktemp("mvllm-zoo"))
