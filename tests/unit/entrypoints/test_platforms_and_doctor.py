"""`mvllm platforms` and `mvllm doctor` with available, unavailable and broken plugins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

import mvllm.plugin_api  # noqa: F401  # as every plugin does
from mvllm import installable, plugin_groups
from mvllm.entrypoints.cli import doctor_checks as doctor_checks
from mvllm.entrypoints.cli.main import main
from mvllm.errors import ContractError
from mvllm.installation import install_command
from mvllm.platform.capabilities import Capabilities
from mvllm.platform.discovery import Candidate, PluginFailure
from mvllm.platform.spec import CONTRACT, Check, CheckStatus, DeviceInfo, PlatformSpec, ProbeResult
from mvllm.plugin_groups import PluginSource
from tests.helpers.small_shared_memory import MIB, mount, needs_mount
from tests.unit.entrypoints.builders import save_model_folder

SPOKEN = f"{CONTRACT[0]}.{CONTRACT[1]}"


class Healthy:
    """The platform of the candidates below, with the members that doctor uses."""

    def doctor(self):
        return [Check("platform.good.fuel", CheckStatus.OK, "full")]

    capabilities = None


class Stale(Healthy):
    @property
    def capabilities(self):
        return Capabilities(dtypes=("float32",), kv_dtypes=("float32",), warp=True)


class Crashing(Healthy):
    def doctor(self):
        raise SystemExit(3)


def candidate(name, *, probe=None, failure=None, factory="Healthy", contract=(1, 0), by_name_only=False, is_host=False):
    spec = PlatformSpec(
        name=name,
        vendor="Acme",
        contract=contract,
        probe="x:y",
        factory=f"{__name__}:{factory}",
        torch_floor="2.6",
        by_name_only=by_name_only,
        is_host=is_host,
    )
    return Candidate(PluginSource(name, f"acme_{name}.plugin", f"mvllm-{name}", "1.2"), spec, probe, 0.002, failure)


GOOD = candidate("good", probe=ProbeResult(True, "1 device", (DeviceInfo(0, "Acme One", 2**34),)))
ABSENT = candidate("absent", probe=ProbeResult(False, "no device", remedy="buy one"))
BROKEN = candidate(
    "broken", failure=PluginFailure("import", "ImportError: no acme", ImportError("no acme"), "pip install -U acme")
)
ALIEN = candidate(
    "alien",
    contract=(2, 0),
    failure=PluginFailure("contract", "speaks 2.0", ContractError("speaks 2.0"), "install a newer core"),
)
CRASHING = candidate("crashing", probe=ProbeResult(True, "1 device"), factory="Crashing")


@pytest.fixture
def plugins(monkeypatch):
    """Replaces `discover` by the test's candidates."""

    def install(*found):
        def discover(only=None):
            return [c for c in found if only is None or c.name == only]

        monkeypatch.setattr("mvllm.entrypoints.cli.platforms.discover", discover)
        monkeypatch.setattr("mvllm.entrypoints.cli.platforms.find_sources", lambda: [c.source for c in found])
        monkeypatch.setattr(doctor_checks, "discover", discover)
        monkeypatch.setattr(doctor_checks, "find_sources", lambda: [c.source for c in found])

    return install


@pytest.fixture(autouse=True)
def fast_torch(monkeypatch):
    """Skips the import of torch in a subprocess; one test runs the import."""
    monkeypatch.setattr(doctor_checks, "_import_torch", lambda: None)


def doctor(capsys, *argv):
    status = main(["doctor", "--json", *argv])
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] == (status == 0)
    return status, {check["id"]: check for check in report["checks"]}


class TestPlatforms:
    def test_each_plugin_is_listed_with_its_facts(self, plugins, capsys):
        plugins(GOOD, ABSENT, BROKEN, ALIEN)
        assert main(["platforms"]) == 0
        out = capsys.readouterr().out
        for words in (
            "good: available",
            "mvllm-good 1.2 (entry point good = acme_good.plugin)",
            f"1.0 (this core speaks {SPOKEN})",
            "Acme One, 16.0 GiB",
            "absent: not available",
            "buy one",
            "broken: broken",
            "ImportError: no acme",
            "pip install -U acme",
            f"2.0 (this core speaks {SPOKEN})",
        ):
            assert words in out

    def test_the_traceback_is_shown_on_request(self, plugins, capsys):
        plugins(BROKEN)
        main(["platforms"])
        assert capsys.readouterr().out.count("ImportError: no acme") == 1
        main(["platforms", "--verbose"])
        assert capsys.readouterr().out.count("ImportError: no acme") == 2

    def test_as_json(self, plugins, capsys):
        plugins(GOOD, BROKEN)
        main(["platforms", "--json"])
        good, broken = json.loads(capsys.readouterr().out)["platforms"]
        assert (good["name"], good["available"], good["contract"]) == ("good", True, "1.0")
        assert good["devices"] == [{"index": 0, "name": "Acme One", "memory_bytes": 2**34}]
        assert (broken["available"], broken["failed_at"]) == (False, "import")

    def test_with_none_it_says_what_to_install(self, plugins, capsys):
        plugins()
        assert main(["platforms"]) == 0
        assert install_command("mvllm-cpu") in capsys.readouterr().out

    def test_a_name_with_a_typing_error_is_never_part_of_a_command(self, plugins, capsys):
        plugins(GOOD)
        assert main(["platforms", "--platform", "cdua"]) == 0
        assert capsys.readouterr().out.strip() == (
            f"No platform is called 'cdua'; installed: good. Did you mean 'cuda'? Run: {install_command('mvllm-cuda')}"
        )
        main(["platforms", "--platform", "Good"])
        assert capsys.readouterr().out.strip().endswith("Did you mean 'good'?")
        main(["platforms", "--platform", "quantum"])
        out = capsys.readouterr().out
        assert "mvllm has packages for cpu, cuda, " in out and "install " not in out
        assert doctor(capsys, "--platform", "cdua")[1]["platform.entry_points"]["remedy"] == install_command(
            "mvllm-cuda"
        )

    def test_the_chosen_one_of_several_is_marked(self, plugins, capsys):
        plugins(GOOD, candidate("host", probe=ProbeResult(True, "2 cores"), is_host=True))
        main(["platforms"])
        assert "  chosen    it has a device, host is the host; to choose: --platform good or --platform host" in (
            capsys.readouterr().out
        )
        status, found = doctor(capsys)
        assert status == 0 and found["platform.choice"]["found"].startswith("good, from mvllm-good 1.2")


class TestDoctor:
    def test_a_healthy_machine_gives_zero(self, plugins, capsys):
        plugins(GOOD)
        status, found = doctor(capsys)
        assert status == 0
        assert found["platform.good.fuel"]["found"] == "full"
        assert found["platform.choice"]["status"] == "ok"

    def test_the_ids_are_stable(self, plugins, capsys):
        plugins(GOOD)
        _, found = doctor(capsys)
        assert set(found) >= {
            "python.version",
            "core.version",
            "core.distribution",
            "core.dependencies",
            "core.parts",
            "torch.import",
            "platform.entry_points",
            "platform.good.plugin",
            "platform.good.contract",
            "platform.good.devices",
            "platform.good.torch",
            "platform.choice",
            "environment.visible_devices",
            "environment.unknown",
            "system.shared_memory",
            "system.open_files",
            "system.memory",
        }

    def test_parts_are_listed_with_their_versions_and_what_installs_the_others(self, plugins, capsys, monkeypatch):
        plugins(GOOD)
        versions = {"mvllm-bench": "0.1.0", "mvllm-router": "0.1.2"}
        monkeypatch.setattr(installable, "_installed_version", versions.get)
        monkeypatch.setattr(doctor_checks, "_requirements", lambda package: ["msgspec", "no-such-package"])
        check = doctor(capsys)[1]["core.parts"]
        installed, missing, problem, _ = check["found"].split("; ")
        others = sorted(installable.installable_parts().keys() - {"bench", "router"})
        assert installed == "bench 0.1.0, router 0.1.2"
        command = install_command(*(f"mvllm-{name}" for name in others))
        assert missing == f"not installed: {', '.join(others)}. To install: {command}"
        assert problem == "mvllm-bench: no-such-package is missing" and check["status"] == "warning"
        assert "\n" not in check["found"] and check["remedy"] == install_command("no-such-package")
        monkeypatch.setattr(installable, "_installed_version", lambda package: None)
        check = doctor(capsys)[1]["core.parts"]
        assert check["found"].startswith("none; not installed: bench, ") and check["status"] == "ok"

    def test_extensions_of_others_are_named_and_those_of_mvllm_are_counted(self, plugins, capsys, monkeypatch):
        plugins(GOOD)
        found = [(plugin_groups.MODELS, PluginSource("AcmeForCausalLM", "acme_models", "acme-models", "1.0"))]
        found += [(plugin_groups.COMMANDS, PluginSource(f"c{i}", "x:y", "mvllm-tools", "0.9.0")) for i in range(3)]
        monkeypatch.setattr(doctor_checks, "installed_plugins", lambda: found)
        check = doctor(capsys)[1]["extensions.installed"]
        assert check["found"] == "model AcmeForCausalLM (acme-models 1.0); of mvllm's own packages: command (3)"
        assert check["status"] == "ok"
        found.append((plugin_groups.MODELS, PluginSource("AcmeForCausalLM", "other", "other-models", "2.0")))
        check = doctor(capsys)[1]["extensions.installed"]
        assert check["status"] == "warning" and "two packages offer the model AcmeForCausalLM" in check["remedy"]

    def test_no_plugin_at_all_is_broken(self, plugins, capsys):
        plugins()
        status, found = doctor(capsys)
        assert status == 1
        assert found["platform.entry_points"]["status"] == "broken"
        assert "pip install" in found["platform.entry_points"]["remedy"]

    def test_a_broken_plugin_is_shown_beside_a_good_one(self, plugins, capsys):
        plugins(GOOD, BROKEN)
        status, found = doctor(capsys)
        assert status == 1
        assert "no acme" in found["platform.broken.plugin"]["found"]
        assert found["platform.broken.plugin"]["remedy"] == "pip install -U acme"
        assert found["platform.good.plugin"]["status"] == "ok"

    def test_a_plugin_of_another_contract_is_broken_at_the_contract(self, plugins, capsys):
        plugins(GOOD, ALIEN)
        status, found = doctor(capsys)
        assert status == 1
        assert found["platform.alien.contract"]["status"] == "broken"

    def test_a_plugin_that_exits_does_not_end_doctor(self, plugins, capsys):
        plugins(CRASHING)
        status, found = doctor(capsys)
        assert status == 1
        assert "SystemExit" in found["platform.crashing.doctor"]["found"]
        assert "system.memory" in found

    def test_an_unknown_capability_is_broken_as_it_is_when_an_engine_starts(self, plugins, capsys):
        plugins(candidate("stale", probe=ProbeResult(True, "1 device"), factory="Stale"))
        status, found = doctor(capsys)
        assert status == 1
        row = found["platform.stale.factory"]
        assert "was built for another platform contract" in row["found"] and "'warp'" in row["found"]
        assert row["remedy"] == install_command("mvllm", "mvllm-stale", upgrade=True)
        assert "platform.stale.doctor" not in found

    def test_a_factory_that_cannot_be_imported_names_who_can_help(self, plugins, capsys):
        plugins(candidate("gone", probe=ProbeResult(True, "1 device"), factory="NoSuchName"))
        status, found = doctor(capsys)
        assert status == 1
        row = found["platform.gone.factory"]
        assert "NoSuchName of mvllm-gone 1.2" in row["found"] and "AttributeError" in row["found"]
        assert row["remedy"].endswith("report it to the maintainers of mvllm-gone")

    def test_a_slow_probe_is_flagged(self, plugins, capsys):
        slow = replace(GOOD, probe_seconds=4.0)
        plugins(slow)
        row = doctor(capsys)[1]["platform.good.probe"]
        assert row["status"] == "warning" and "took 4.0 s" in row["found"] and "mvllm-good" in row["remedy"]
        main(["platforms"])
        assert "(4000 ms, slow: a probe takes under a second)" in capsys.readouterr().out

    def test_a_contract_that_is_no_version_is_shown_as_it_is(self, plugins, capsys):
        error = ContractError("no version")
        plugins(candidate("odd", contract="1.1", failure=PluginFailure("contract", "no version", error, "mend")))
        main(["platforms"])
        assert "contract  '1.1' (this core" in capsys.readouterr().out

    def test_no_device_is_a_warning_and_leaves_no_platform_to_choose(self, plugins, capsys):
        plugins(ABSENT)
        status, found = doctor(capsys)
        assert status == 1
        assert found["platform.absent.devices"]["status"] == "warning"
        assert found["platform.choice"]["status"] == "broken"

    def test_two_available_platforms_require_a_choice(self, plugins, capsys):
        plugins(GOOD, candidate("other", probe=ProbeResult(True, "1 device")))
        status, found = doctor(capsys)
        assert status == 0
        assert found["platform.choice"]["status"] == "warning"
        assert "--platform good or --platform other" in found["platform.choice"]["remedy"]

    def test_the_choice_may_come_from_the_environment(self, plugins, capsys, monkeypatch):
        plugins(GOOD, candidate("other", probe=ProbeResult(True, "1 device")))
        monkeypatch.setenv("MVLLM_PLATFORM", "other")
        assert "mvllm-other" in doctor(capsys)[1]["platform.choice"]["found"]

    def test_doctor_chooses_the_platform_of_an_engine(self, plugins, capsys):
        """A platform that requires its name is never chosen automatically."""
        named = candidate("test", probe=ProbeResult(True, "1 device"), by_name_only=True)
        broken = candidate("odd", failure=PluginFailure("probe", "x", OSError("x"), "mend"), by_name_only=True)
        plugins(GOOD, named, broken)
        choice = doctor(capsys)[1]["platform.choice"]
        assert choice["status"] == "ok" and choice["found"].startswith("good, from ")
        assert "the only available one of good, test, odd; test would have to be named" in choice["found"]
        plugins(named, ABSENT)
        assert doctor(capsys)[1]["platform.choice"]["status"] == "broken"

    @pytest.mark.parametrize(("value", "status"), [("0,1", "ok"), ("", "warning"), ("-1", "warning")])
    def test_variables_that_hide_devices(self, plugins, capsys, monkeypatch, value, status):
        plugins(GOOD)
        monkeypatch.setenv("ACME_VISIBLE_DEVICES", value)
        check = doctor(capsys)[1]["environment.visible_devices"]
        assert check["status"] == status
        assert "ACME_VISIBLE_DEVICES" in check["found"]

    def test_a_platform_may_name_the_variable_that_hides_its_devices(self, plugins, capsys, monkeypatch):
        plugins(ABSENT)
        monkeypatch.setattr(doctor_checks, "_device_variable", lambda factory: "ACME_CHIPS")
        assert "platform.absent.visible_devices" not in doctor(capsys)[1]
        monkeypatch.setenv("ACME_CHIPS", "7")
        check = doctor(capsys)[1]["platform.absent.visible_devices"]
        assert check["status"] == "warning"
        assert "ACME_CHIPS='7'" in check["found"] and "unset it" in check["remedy"]

    def test_a_platform_whose_topology_needs_a_device_names_no_variable(self, plugins, capsys, monkeypatch):
        plugins(ABSENT)

        def fail(factory: str) -> str:
            raise ImportError("no driver")

        monkeypatch.setattr(doctor_checks, "_device_variable", fail)
        assert "platform.absent.visible_devices" not in doctor(capsys)[1]

    @pytest.mark.parametrize(("free", "status"), [(64 * 2**20, "warning"), (2**30, "ok")])
    def test_small_shared_memory(self, plugins, capsys, monkeypatch, free, status):
        plugins(GOOD)
        usage = doctor_checks.shutil.disk_usage("/")
        monkeypatch.setattr(doctor_checks.shutil, "disk_usage", lambda folder: usage._replace(total=free, free=free))
        check = doctor(capsys)[1]["system.shared_memory"]
        assert check["status"] == status
        assert f"{free // 2**20:,} MiB free" in check["found"]
        if status == "warning":
            assert "--shm-size" in check["remedy"] and "--ipc=host" in check["remedy"]

    @needs_mount
    def test_shared_memory_that_is_really_small(self):
        size = 64 * MIB
        program = [sys.executable, "-m", "mvllm.entrypoints.cli.main", "doctor", "--platform", "none-of-that-name"]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder)}
        done = subprocess.run([*mount(size), *program, "--json"], env=env, capture_output=True, text=True, timeout=120)
        check = {found["id"]: found for found in json.loads(done.stdout)["checks"]}["system.shared_memory"]
        assert check["status"] == "warning", done.stderr
        assert f"{size // MIB:,} MiB free" in check["found"]

    def test_a_misspelt_variable(self, plugins, capsys, monkeypatch):
        plugins(GOOD)
        monkeypatch.setenv("MVLLM_LOGING_LEVEL", "x")
        monkeypatch.setenv("MVLLM_GOOD_FUEL", "belongs to the platform")
        check = doctor(capsys)[1]["environment.unknown"]
        assert check["status"] == "warning"
        assert "MVLLM_LOGGING_LEVEL" in check["found"]
        assert "MVLLM_GOOD_FUEL" not in check["found"]

    def test_an_old_torch_is_named_with_the_floor(self, plugins, capsys):
        too_new = candidate("good", probe=ProbeResult(True, "1 device"))
        object.__setattr__(too_new.spec, "torch_floor", "99.0")
        plugins(too_new)
        status, found = doctor(capsys)
        assert status == 1
        assert "99.0" in found["platform.good.torch"]["found"]

    def test_a_torch_that_cannot_be_imported(self, plugins, capsys, monkeypatch):
        def fail() -> None:
            raise ImportError("libacme.so is missing")

        monkeypatch.setattr(doctor_checks, "_import_torch", fail)
        plugins(GOOD)
        status, found = doctor(capsys)
        assert status == 1
        assert "libacme.so is missing" in found["torch.import"]["found"]

    def test_a_torch_that_works(self, plugins, capsys, monkeypatch):
        monkeypatch.undo()
        _, found = doctor(capsys, "--platform", "none-of-that-name")
        assert found["torch.import"]["status"] == "ok"

    def test_a_model_folder_is_checked(self, plugins, capsys, tmp_path):
        plugins(GOOD)
        folder = save_model_folder(tmp_path)
        status, found = doctor(capsys, "--model", folder)
        assert status == 1  # it has no weights
        assert found["model.folder"]["status"] == "ok"
        assert found["model.tokenizer"]["status"] == "ok"
        assert found["model.weights"]["status"] == "broken"

    def test_a_folder_without_a_model_is_broken(self, plugins, capsys, tmp_path):
        plugins(GOOD)
        _, found = doctor(capsys, "--model", str(tmp_path))
        assert "config.json" in found["model.folder"]["found"]

    def test_as_text_it_says_what_to_do(self, plugins, capsys):
        plugins(BROKEN)
        assert main(["doctor"]) == 1
        out = capsys.readouterr().out
        assert "BROKEN" in out
        assert "-> pip install -U acme" in out
