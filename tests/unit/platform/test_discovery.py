"""Discovery: each plugin is loaded separately, and its failure is stored with its name."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import types
from dataclasses import replace

import pytest

from mvllm import plugin_api
from mvllm.errors import ContractError, PlatformError
from mvllm.installation import install_command
from mvllm.platform import choose, discovery, isolated_probes
from mvllm.platform.discovery import check_contract, check_torch, discover, load_attribute
from mvllm.platform.hookspecs import hookimpl
from mvllm.platform.interface import Platform
from mvllm.platform.phases import Phase, current_phase
from mvllm.platform.spec import CONTRACT, PlatformSpec, ProbeResult
from mvllm.plugin_groups import PluginSource

MAJOR, MINOR = CONTRACT
SPEC = PlatformSpec(
    "acme", "Acme", CONTRACT, probe="acme_probe:probe", factory="acme_device:make", probe_in_process=True
)
SOURCE = PluginSource("acme", "acme_plugin", "mvllm-acme", "1.2")


class Installed:
    """Plugins that exist in `sys.modules` only."""

    def __init__(self, monkeypatch):
        self._monkeypatch = monkeypatch
        self.sources = []
        monkeypatch.setattr(discovery, "find_sources", lambda: list(self.sources))
        monkeypatch.setattr(choose, "find_sources", lambda: list(self.sources))

    def module(self, name, **attributes):
        module = types.ModuleType(name)
        vars(module).update(attributes)
        self._monkeypatch.setitem(sys.modules, name, module)

    def add(self, source=SOURCE, *, hook=lambda: SPEC, probe=lambda: ProbeResult(True, "1 device")):
        self.sources.append(source)

        @hookimpl
        def mvllm_platform():
            return hook()

        self.module(source.entry_point, mvllm_platform=mvllm_platform)
        self.module("acme_probe", probe=probe)


@pytest.fixture
def installed(monkeypatch):
    return Installed(monkeypatch)


def failure_of(only=None):
    [candidate] = discover(only)
    assert candidate.failure is not None and not candidate.available
    return candidate.failure


def raising(error):
    def act():
        raise error

    return act


class TestContractVersion:
    @pytest.mark.parametrize("contract", [CONTRACT, *([(MAJOR, MINOR - 1)] if MINOR else [])])
    def test_the_same_major_and_a_minor_up_to_ours_are_accepted(self, contract):
        check_contract(replace(SPEC, contract=contract), SOURCE)

    def test_an_older_minor_is_accepted_by_a_newer_core(self, monkeypatch):
        monkeypatch.setattr(discovery, "CONTRACT", (MAJOR, 3))
        check_contract(replace(SPEC, contract=(MAJOR, 0)), SOURCE)
        check_contract(replace(SPEC, contract=(MAJOR, 3)), SOURCE)
        with pytest.raises(ContractError):
            check_contract(replace(SPEC, contract=(MAJOR, 4)), SOURCE)

    @pytest.mark.parametrize(
        ("contract", "older"),
        [
            ((MAJOR, MINOR + 1), "mvllm"),
            ((MAJOR + 1, 0), "mvllm"),
            ((MAJOR + 1, MINOR), "mvllm"),
            ((MAJOR - 1, MINOR), "mvllm-acme"),
            ((MAJOR - 1, MINOR + 5), "mvllm-acme"),
        ],
    )
    def test_others_are_refused_with_the_command_for_the_older_side(self, contract, older):
        with pytest.raises(ContractError) as caught:
            check_contract(replace(SPEC, contract=contract), SOURCE)
        text = str(caught.value)
        assert "mvllm-acme 1.2" in text and f"{contract[0]}.{contract[1]}" in text and f"{MAJOR}.{MINOR}" in text
        assert text.endswith(f"Run: {install_command(older, upgrade=True)}")

    def test_it_is_checked_before_the_probe_is_imported(self, installed):
        installed.add(hook=lambda: replace(SPEC, contract=(MAJOR + 1, 0), probe="never_imported:probe"))
        failure = failure_of()
        assert failure.stage == "contract"
        assert failure.remedy == install_command("mvllm", upgrade=True)
        assert isinstance(failure.error, ContractError)

    @pytest.mark.parametrize("contract", ["1.0", (1,), (1, 0, 0), None, (1, "0"), 1.0])
    def test_an_invalid_contract_version_is_refused(self, contract):
        with pytest.raises(ContractError, match=r"a contract is \(major, minor\).*Run: .*pip install -U mvllm-acme"):
            check_contract(replace(SPEC, contract=contract), SOURCE)


class TestTorch:
    @pytest.fixture(autouse=True)
    def torch(self, monkeypatch):
        versions = {"torch": "2.9.1+cpu"}

        def version(name):
            if name not in versions:
                raise discovery.importlib.metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(discovery.importlib.metadata, "version", version)
        return versions

    @pytest.mark.parametrize("floor", [None, "2.6", "2.9", "2.9.1", "2.9.1+acme"])
    def test_a_torch_that_is_new_enough_passes(self, floor):
        check_torch(replace(SPEC, torch_floor=floor), SOURCE)

    @pytest.mark.parametrize("floor", ["2.10", "3", "2.9.2"])
    def test_a_torch_that_is_too_old_is_reported_with_both_versions_and_the_command(self, floor):
        with pytest.raises(PlatformError) as caught:
            check_torch(replace(SPEC, torch_floor=floor), SOURCE)
        assert f"needs torch {floor} or newer, but torch 2.9.1+cpu is installed" in str(caught.value)
        command = install_command("mvllm-acme", f"torch>={floor}", upgrade=True)
        assert str(caught.value).endswith(f"Run: {command}")
        assert f"pip install -U mvllm-acme 'torch>={floor}'" in command

    def test_a_torch_without_metadata_may_be_of_any_version(self, torch):
        torch.clear()
        check_torch(replace(SPEC, torch_floor="99"), SOURCE)

    def test_it_fails_if_there_are_devices_and_keeps_the_probes_facts(self, installed):
        installed.add(hook=lambda: replace(SPEC, torch_floor="99"))
        [candidate] = discover()
        assert candidate.failure is not None and candidate.failure.stage == "torch"
        assert candidate.failure.remedy == install_command("mvllm-acme", "torch>=99", upgrade=True)
        assert "Run:" not in candidate.failure.message
        assert candidate.probe is not None and not candidate.available

    def test_without_a_device_it_is_ignored(self, installed):
        installed.add(hook=lambda: replace(SPEC, torch_floor="99"), probe=lambda: ProbeResult(False, "no device"))
        [candidate] = discover()
        assert candidate.failure is None


def import_a_name_of_another_core() -> None:
    from mvllm.plugin_api import DeviceWarp  # type: ignore[attr-defined]  # noqa: F401


class TestAnotherContract:
    """A plugin that requires missing names is stale or too new, and not reported as broken code."""

    @pytest.mark.parametrize(
        "act",
        [
            import_a_name_of_another_core,
            lambda: importlib.import_module("mvllm.device_warp"),
            lambda: plugin_api.DeviceWarp,  # type: ignore[attr-defined]
            lambda: PlatformSpec("acme", "Acme", CONTRACT, "x:y", "x:z", warp=9),  # type: ignore[call-arg]
            lambda: ProbeResult(True),  # type: ignore[call-arg]
        ],
    )
    def test_it_is_reported_with_both_distributions_and_the_cause(self, installed, act):
        installed.add(hook=act)
        failure = failure_of()
        assert failure.stage == "contract" and isinstance(failure.error, ContractError)
        assert "mvllm-acme 1.2 was built for another platform contract" in failure.message
        assert failure.remedy == install_command("mvllm", "mvllm-acme", upgrade=True)
        assert isinstance(failure.error.__cause__, ImportError | AttributeError | TypeError)

    @pytest.mark.parametrize(
        "error",
        [
            ImportError("cannot import name 'x' from 'torch'", name="torch"),
            ModuleNotFoundError("No module named 'mvllm_acme.gone'", name="mvllm_acme.gone"),
            AttributeError("module 'acme' has no attribute 'mvllm'"),
            TypeError("AcmeSpec.__init__() got an unexpected keyword argument 'x'"),
        ],
    )
    def test_other_errors_are_the_plugins_own(self, installed, error):
        installed.add(hook=raising(error))
        assert failure_of().stage == "import"


class TestFailures:
    def test_a_module_that_cannot_be_imported(self, installed):
        installed.sources.append(replace(SOURCE, entry_point="there_is_no_such_module"))
        failure = failure_of()
        assert failure.stage == "import"
        assert "there_is_no_such_module" in failure.message
        assert "ModuleNotFoundError" in failure.details()
        assert "mvllm-acme" in failure.remedy

    @pytest.mark.parametrize(
        ("hook", "words"),
        [
            (raising(OSError("no driver")), "no driver"),
            (raising(SystemExit("gone")), "gone"),
            (lambda: None, "mvllm_platform()"),
            (lambda: "acme", "return one PlatformSpec"),
            (lambda: replace(SPEC, name="other"), "calls itself 'other'"),
        ],
    )
    def test_a_hook_that_fails_or_returns_an_invalid_value(self, installed, hook, words):
        installed.add(hook=hook)
        assert words in failure_of().message

    def test_a_module_without_the_hook(self, installed):
        installed.sources.append(SOURCE)
        installed.module("acme_plugin")
        assert "mvllm_platform()" in failure_of().message

    @pytest.mark.parametrize(
        ("probe", "words"),
        [
            (raising(RuntimeError("driver too old")), "driver too old"),
            (raising(SystemExit(3)), "SystemExit"),
            (lambda: True, "must return a ProbeResult"),
        ],
    )
    def test_a_probe_that_fails_keeps_the_earlier_facts(self, installed, probe, words):
        installed.add(probe=probe)
        [candidate] = discover()
        assert candidate.spec == SPEC
        assert candidate.failure is not None and candidate.failure.stage == "probe"
        assert words in candidate.failure.message

    def test_ctrl_c_is_not_a_failure_of_the_plugin(self, installed):
        installed.add(probe=raising(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            discover()

    def test_a_name_of_two_distributions_is_loaded_from_neither(self, installed):
        installed.sources += [replace(SOURCE, entry_point="never_imported"), replace(SOURCE, distribution="acme-fork")]
        first, second = discover()
        for candidate in (first, second):
            assert candidate.failure is not None and candidate.failure.stage == "duplicate"
            assert "mvllm-acme 1.2" in candidate.failure.message and "acme-fork 1.2" in candidate.failure.message
        assert second.failure is not None and "pip uninstall acme-fork" in second.failure.remedy

    def test_other_plugins_are_still_loaded(self, installed):
        installed.add(replace(SOURCE, name="broken", entry_point="broken_plugin"), hook=raising(OSError))
        installed.add()
        broken, good = discover()
        assert broken.failure is not None
        assert good.available and good.probe == ProbeResult(True, "1 device")


def test_only_the_requested_plugin_is_imported(installed):
    installed.sources.append(replace(SOURCE, name="other", entry_point="there_is_no_such_module"))
    installed.add()
    [candidate] = discover(only="acme")
    assert candidate.available


def test_hook_and_probe_run_in_the_probe_phase(installed):
    phases = []

    def hook():
        phases.append(current_phase())
        return SPEC

    def probe():
        phases.append(current_phase())
        return ProbeResult(False, "nothing here", remedy="plug it in")

    installed.add(hook=hook, probe=probe)
    [candidate] = discover()
    assert phases == [Phase.PROBE, Phase.PROBE]
    assert not candidate.available and candidate.failure is None
    assert candidate.probe_seconds >= 0


def test_the_factory_runs_in_the_frontend_phase(installed):
    installed.add()
    seen = []
    installed.module("acme_device", make=lambda: seen.append(current_phase()))
    with pytest.raises(choose.PlatformError, match=r"must return a mvllm\.plugin_api\.Platform"):
        choose.choose_platform("acme")
    assert seen == [Phase.FRONTEND]


def test_attributes_are_found_by_module_and_name():
    assert load_attribute("mvllm.platform.spec:CONTRACT") is CONTRACT


class TestByNameOnly:
    """A platform with `by_name_only` is selected only by its name, and does not affect automatic selection."""

    @pytest.fixture
    def add(self, installed):
        class SomePlatform(Platform):
            spec = capabilities = None
            plan = topology = init_device = communicator = attention_backend = None

        def add(name, *, by_name_only, probe=lambda: ProbeResult(True, "1 device")):
            installed.module(f"{name}_device", make=SomePlatform, probe=probe)
            spec = PlatformSpec(
                name,
                "Acme",
                CONTRACT,
                f"{name}_device:probe",
                f"{name}_device:make",
                by_name_only=by_name_only,
                probe_in_process=True,
            )
            installed.add(PluginSource(name, f"{name}_plugin", f"mvllm-{name}", "1"), hook=lambda: spec)

        return add

    def test_it_is_ignored_by_automatic_selection(self, add):
        add("real", by_name_only=False)
        add("test", by_name_only=True)
        real, test = choose.choose_platform(), choose.choose_platform("test")
        assert (real.source.name, test.source.name) == ("real", "test")
        assert real.reason == "the only available one of real, test; test would have to be named"
        assert test.reason == "named by the settings"

    def test_alone_it_is_listed_but_not_chosen(self, add):
        add("test", by_name_only=True)
        with pytest.raises(PlatformError, match="Only if you name it: --platform test"):
            choose.choose_platform()

    def test_a_broken_one_does_not_block_other_platforms(self, add):
        add("real", by_name_only=False)
        add("test", by_name_only=True, probe=raising(OSError("no such device")))
        assert choose.choose_platform().source.name == "real"
        with pytest.raises(PlatformError, match="no such device"):
            choose.choose_platform("test")


DEVICE, HOST, NAMED = {}, {"is_host": True}, {"by_name_only": True}
ABSENT, BROKEN = ProbeResult(False, "no device"), OSError("no driver")
IT_HAS = "it has a device, "


@pytest.mark.parametrize(
    ("installed_platforms", "chosen", "words"),
    [
        (
            {"acme": DEVICE, "cpu": HOST},
            "acme",
            IT_HAS + "cpu is the host; to choose: --platform acme or ",
        ),
        ({"cpu": HOST, "z": DEVICE}, "z", IT_HAS + "cpu is the host; to choose: --platform z or --platform cpu"),
        (
            {"a": HOST, "b": HOST, "c": DEVICE},
            "c",
            IT_HAS + "a and b are the host; to choose: --platform c or --platform a or --platform b",
        ),
        ({"cpu": HOST}, "cpu", "the only platform that is installed"),
        ({"acme": {**DEVICE, "probe": ABSENT}, "cpu": HOST}, "cpu", "the only available one of acme, cpu"),
        ({"acme": {**NAMED, **DEVICE}, "cpu": HOST}, "cpu", "the only available one of acme, cpu; acme would have to"),
        ({"acme": DEVICE, "cpu": {**NAMED, **HOST}}, "acme", "the only available one of acme, cpu; cpu would have to"),
        ({"acme": DEVICE, "cpu": {**HOST, "probe": ABSENT}}, "acme", "the only available one of acme, cpu"),
        ({"acme": DEVICE, "cpu": HOST, "zeta": DEVICE}, None, "choose one with --platform acme or --platform cpu or"),
        ({"acme": DEVICE, "zeta": DEVICE}, None, "--platform acme or --platform zeta"),
        ({"a": HOST, "b": HOST}, None, "--platform a or --platform b"),
        ({"acme": {**DEVICE, "probe": BROKEN}, "cpu": HOST}, None, "To go on without it: --platform cpu"),
        ({"acme": DEVICE, "cpu": {**HOST, "probe": BROKEN}}, None, "To go on without it: --platform acme"),
        ({"acme": DEVICE, "cpu": HOST, "zeta": {"probe": BROKEN}}, None, "To go on without it: --platform acme"),
    ],
)
def test_one_device_is_chosen_before_the_host(installed, installed_platforms, chosen, words):
    class SomePlatform(Platform):
        spec = capabilities = None
        plan = topology = init_device = communicator = attention_backend = None

    for name, facts in installed_platforms.items():
        found = facts.get("probe", ProbeResult(True, "found"))
        probe = raising(found) if isinstance(found, Exception) else lambda found=found: found
        installed.module(f"{name}_device", make=SomePlatform, probe=probe)
        given = {key: value for key, value in facts.items() if key != "probe"}
        spec = PlatformSpec(
            name, "X", CONTRACT, f"{name}_device:probe", f"{name}_device:make", probe_in_process=True, **given
        )
        installed.add(PluginSource(name, f"{name}_plugin", f"mvllm-{name}", "1"), hook=lambda spec=spec: spec)
    if chosen is None:
        with pytest.raises(PlatformError, match=words):
            choose.choose_platform()
        assert choose.choose_platform(next(n for n, f in installed_platforms.items() if "probe" not in f))
        return
    found = choose.choose_platform()
    assert found.source.name == chosen and found.reason.startswith(words)


PROBES = """
import ctypes, os, sys, time
from mvllm.plugin_api import DeviceInfo, Platform, ProbeResult

def good(): return ProbeResult(True, f"1 device, process {os.getpid()}", (DeviceInfo(0, "Acme One", 2**30),))
def absent(): return ProbeResult(False, "no device", remedy="plug it in")
def crashing():
    print("acme: no firmware", file=sys.stderr, flush=True)
    ctypes.string_at(0)
def exiting(): os._exit(3)
def hanging(): time.sleep(1); time.sleep(1)
def raising(): raise OSError("driver too old")
def stale(): return ProbeResult(True)
def wrong(): return True
class Bytes:
    def __index__(self): return 2**40
def foreign_number(): return ProbeResult(True, "1 device", (DeviceInfo(0, "Acme One", Bytes()),))
def variable(): return ProbeResult(True, os.environ.get("PYTHONPATH", "none"))

class AcmePlatform(Platform):
    spec = capabilities = None
    plan = topology = init_device = communicator = attention_backend = None
"""


class TestIsolatedProbes:
    """Plugins whose probes run in a child process."""

    @pytest.fixture
    def add(self, installed, tmp_path, monkeypatch):
        (tmp_path / "acme_probes.py").write_text(PROBES)
        monkeypatch.syspath_prepend(tmp_path)

        def add(*probes):
            for name in probes:
                spec = PlatformSpec(name, "Acme", CONTRACT, f"acme_probes:{name}", "acme_probes:AcmePlatform")
                installed.add(PluginSource(name, f"{name}_plugin", f"mvllm-{name}", "1"), hook=lambda spec=spec: spec)

        return add

    def test_results_and_exceptions_arrive_as_from_this_process(self, add):
        add("good", "absent", "raising", "stale", "wrong")
        found = {candidate.name: candidate for candidate in discover()}
        good = found["good"].probe
        assert found["good"].available and good.devices[0].memory_bytes == 2**30
        assert good.reason != f"1 device, process {os.getpid()}"
        assert found["absent"].probe == ProbeResult(False, "no device", remedy="plug it in")
        failures = {name: found[name].failure for name in ("raising", "stale", "wrong")}
        assert failures["raising"].message == "OSError: driver too old"
        assert "in raising" in failures["raising"].details(), "the traceback of the child"
        assert failures["stale"].stage == "contract" and isinstance(failures["stale"].error, ContractError)
        assert "must return a ProbeResult" in failures["wrong"].message

    def test_a_probe_that_crashes_is_named_and_the_others_are_probed(self, add):
        add("absent", "crashing", "exiting", "good")
        absent, crashing, exiting, good = discover()
        assert (absent.failure, good.failure) == (None, None) and good.available
        assert crashing.failure.stage == exiting.failure.stage == "crash"
        assert "signal 11 (SIGSEGV); it printed last: acme: no firmware" in crashing.failure.message
        assert "acme_probes:crashing" in crashing.failure.message
        assert "exit status 3" in exiting.failure.message
        assert "pip uninstall mvllm-crashing" in crashing.failure.remedy

    def test_a_probe_that_hangs_is_ended(self, add, monkeypatch):
        monkeypatch.setattr(isolated_probes, "TIMEOUT_SECONDS", 0.5)
        read, for_start = isolated_probes.read_line, iter([60])  # on a busy machine the child takes seconds to start
        monkeypatch.setattr(isolated_probes, "read_line", lambda fd, end: read(fd, end + next(for_start, 0)))
        add("hanging")
        assert "did not answer within 0.5 s" in failure_of().message

    def test_the_only_other_platform_is_chosen_with_a_warning(self, add, caplog):
        add("crashing", "good")
        with caplog.at_level(logging.WARNING, logger="mvllm"):
            chosen = choose.choose_platform()
        assert chosen.source.name == "good" and chosen.reason.endswith("the probe of crashing crashed")
        assert "'crashing' is left out" in caplog.text and "SIGSEGV" in caplog.text
        with pytest.raises(PlatformError, match="SIGSEGV"):
            choose.choose_platform("crashing")

    def test_a_crash_alone_is_an_error_with_the_reason(self, add):
        add("crashing", "absent")
        with pytest.raises(PlatformError, match=r"(?s)None of the installed platforms.*SIGSEGV"):
            choose.choose_platform()

    @pytest.mark.parametrize(
        "program",
        ["/nonexistent/python", "/bin/false", "", None],
        ids=["no-such-file", "another-program", "unknown", "frozen"],
    )
    def test_without_a_child_process_probes_run_in_this_one(self, add, monkeypatch, program):
        add("good")
        if program is None:
            monkeypatch.setattr(sys, "frozen", True, raising=False)
        else:
            monkeypatch.setattr(sys, "executable", program)
        open_before = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
        (found,) = discover()
        assert found.available and found.probe.reason == f"1 device, process {os.getpid()}"
        if open_before:
            assert len(os.listdir("/proc/self/fd")) == len(open_before)

    def test_the_child_imports_nothing_from_the_current_folder(self, add, tmp_path, monkeypatch):
        folder = tmp_path / "untrusted"
        folder.mkdir()
        (folder / "tempfile.py").write_text("import os; os._exit(9)")
        monkeypatch.chdir(folder)
        add("good")
        assert discover()[0].probe.reason not in ("", f"1 device, process {os.getpid()}")

    def test_programs_that_a_probe_starts_get_the_search_path_of_the_user(self, add, monkeypatch):
        add("variable")
        monkeypatch.delenv("PYTHONPATH", raising=False)
        assert discover()[0].probe.reason == "none"
        monkeypatch.setenv("PYTHONPATH", "/a/folder")
        assert discover()[0].probe.reason == "/a/folder"

    def test_numbers_of_other_types_arrive(self, add):
        add("foreign_number")
        assert discover()[0].probe.devices[0].memory_bytes == 2**40

    def test_it_works_in_a_process_with_many_open_files(self, add):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if 0 <= hard < 1200:
            pytest.skip("this machine permits too few open files")
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
        opened = []
        try:
            while not opened or opened[-1] < 1100:
                opened.append(os.dup(1))
            add("good")
            found = discover()[0]
        finally:
            for fd in opened:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert found.available and f"process {os.getpid()}" not in found.probe.reason
