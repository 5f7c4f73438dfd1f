"""Errors and doctor reports for mismatched core and plugins: wheels in a clean environment.

Each combination runs the doctor and selects a platform, both in one new interpreter.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from mvllm.plugin_api import CONTRACT
from tests.packaging import wheels

MAJOR, MINOR = CONTRACT

ASK = """
import contextlib, io, json, sys
from mvllm.entrypoints.cli.main import main
from mvllm.errors import PlatformError
from mvllm.platform.choose import choose_platform

out = io.StringIO()
with contextlib.redirect_stdout(out):
    status = main(["doctor", "--json"])
report = json.loads(out.getvalue())
assert report["ok"] == (status == 0)
answers = {}
for name in (None, *sys.argv[1:]):
    try:
        answers[name or ""] = str(choose_platform(name).source)
    except PlatformError as error:
        answers[name or ""] = f"{type(error).__name__}: {error}"
print(json.dumps({"checks": report["checks"], "answers": answers}))
"""


@dataclass
class Seen:
    """The doctor's checks by id (the last of each), and the result of platform selection by requested name."""

    checks: dict
    answers: dict

    def found(self, check_id, status, *words):
        """Asserts that the check has this status and contains all of `words`, in `found` or `remedy`."""
        check = self.checks[check_id]
        assert check["status"] == status, check
        text = f"{check['found']} -> {check['remedy']}"
        assert [word for word in words if word not in text] == [], text
        assert status == "ok" or check["remedy"], "it says what to do"

    def refused(self, name, *words):
        """Asserts that selecting the platform (or, with "", any platform) failed with all of `words`."""
        answer = self.answers[name]
        assert answer.startswith(("PlatformError: ", "ContractError: ")), answer
        assert [word for word in words if word not in answer] == [], answer


@pytest.fixture
def seen_with(tmp_path, core_only):
    def see(*built, ask=(), **variables):
        site = wheels.install(tmp_path / "site", *built)
        done = core_only.run("-c", ASK, *ask, path=[site], **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        report = json.loads(done.stdout.splitlines()[-1])
        return Seen({check["id"]: check for check in report["checks"]}, report["answers"])

    return see


@pytest.fixture
def acme(tmp_path):
    return lambda **facts: wheels.plugin_wheel(tmp_path, "acme", **facts)


@pytest.fixture
def torch(tmp_path):
    return lambda version: wheels.library_wheel(tmp_path, "torch", version, "# only its version matters here\n")


def test_no_plugin(seen_with):
    seen = seen_with()
    seen.found("platform.entry_points", "broken", "no platform plugin is installed", "-r WHEELHOUSE/cpu.txt")
    seen.found("platform.choice", "broken", "no platform can be used")
    seen.refused("", "No platform plugin is installed", "mvllm-cpu, ", "-r WHEELHOUSE/cpu.txt")


def test_two_plugins(seen_with, tmp_path, acme):
    seen = seen_with(acme(), wheels.plugin_wheel(tmp_path, "zeta"), ask=["zeta"])
    seen.found("platform.choice", "warning", "2 platforms are available", "--platform acme or --platform zeta")
    seen.refused("", "--platform acme or --platform zeta", "MVLLM_PLATFORM", "mvllm-acme 1.2.3", "mvllm-zeta 1.2.3")
    assert "mvllm-zeta 1.2.3" in seen.answers["zeta"]


@pytest.mark.parametrize(
    ("contract", "command"),
    [
        ((MAJOR - 1, 9), "pip install -U mvllm-acme"),
        ((MAJOR, MINOR + 1), "pip install --require-hashes --no-deps -r WHEELHOUSE/PLATFORM.txt"),
        ((MAJOR + 1, 0), "pip install --require-hashes --no-deps -r WHEELHOUSE/PLATFORM.txt"),
    ],
    ids=["old", "newer", "new"],
)
def test_another_contract(seen_with, acme, contract, command):
    seen = seen_with(acme(contract=contract), ask=["acme"])
    dotted = ".".join(map(str, contract))
    facts = ("mvllm-acme 1.2.3", f"contract {dotted}", "mvllm 0.9.0", f"speaks {MAJOR}.{MINOR}")
    seen.found("platform.acme.contract", "broken", *facts, command)
    for name in ("", "acme"):
        seen.refused(name, *facts, "Run: ", command)
    assert seen.answers["acme"].startswith("ContractError: ")


@pytest.mark.parametrize(
    ("peculiarity", "lacking"),
    [
        ({"first_line": "from mvllm.plugin_api import DeviceWarp"}, "DeviceWarp in mvllm.plugin_api"),
        ({"first_line": "from mvllm.platforms.interface import Platform"}, "the module mvllm.platforms"),
        pytest.param(
            {"first_line": "from mvllm import plugin_api\nplugin_api.DeviceWarp"},
            "'DeviceWarp'",
            marks=pytest.mark.exhaustive,
        ),
        ({"spec": "warp=9,"}, "'warp'"),
    ],
    ids=["name", "module", "attribute", "field"],
)
def test_a_stale_plugin_that_fails_before_it_reports_its_contract(seen_with, acme, peculiarity, lacking):
    seen = seen_with(acme(**peculiarity), ask=["acme"])
    facts = ("mvllm-acme 1.2.3 was built for another platform contract", lacking, f"contract {MAJOR}.{MINOR} of mvllm")
    seen.found("platform.acme.contract", "broken", *facts, "WHEELHOUSE/PLATFORM.txt && ", "pip install -U mvllm-acme")
    for name in ("", "acme"):
        seen.refused(name, *facts, "Run: ", "WHEELHOUSE/PLATFORM.txt && ", "pip install -U mvllm-acme")
    assert seen.answers["acme"].startswith("ContractError: ")


def test_a_stale_device_module_is_reported_when_the_platform_is_created(seen_with, acme):
    seen = seen_with(acme(device_line="from mvllm.plugin_api import DeviceWarp"), ask=["acme"])
    seen.found("platform.acme.factory", "broken", "DeviceWarp")
    seen.refused("acme", "mvllm-acme 1.2.3 was built for another platform contract", "DeviceWarp", "pip install -U")


def test_a_plugin_whose_metadata_requires_another_core(seen_with, acme, core_only, tmp_path):
    wheel = acme(requires=["mvllm>=7,<8", "rocket-fuel"])
    seen = seen_with(wheel)
    seen.found(
        *("platform.acme.requirements", "broken", "mvllm is 0.9.0, required is <8,>=7", "rocket-fuel is missing"),
        *("-r WHEELHOUSE/PLATFORM.txt && ", "the packages of mvllm of a newer release"),
    )
    done = core_only.run("-m", "pip", "install", "--no-index", "--target", tmp_path / "other", wheel)
    assert done.returncode != 0 and "mvllm<8,>=7" in done.stdout + done.stderr, "pip itself would not have done it"


@pytest.mark.parametrize(("version", "fits"), [("2.5.1", False), ("2.10.0.dev20260101", True), ("2.9.0+acme", False)])
def test_a_torch_below_the_floor(seen_with, acme, torch, version, fits):
    seen = seen_with(acme(spec="torch_floor='2.10',"), torch(version), ask=["acme"])
    if fits:
        seen.found("platform.acme.torch", "ok", version)
        assert "mvllm-acme" in seen.answers[""]
        return
    command = "pip install -U mvllm-acme 'torch>=2.10'"
    seen.found("platform.acme.torch", "broken", f"torch {version}", "2.10 or newer", command)
    for name in ("", "acme"):
        facts = ("mvllm-acme 1.2.3 needs torch 2.10 or newer", f"torch {version} is installed", command)
        seen.refused(name, *facts)


def test_no_torch_at_all(seen_with, acme):
    seen = seen_with(acme(spec="torch_floor='2.10',"), ask=["acme"])
    seen.found("torch.import", "broken", "torch is not installed")
    seen.refused(
        "acme", "needs torch 2.10 or newer", "torch is not installed", "pip install -U mvllm-acme 'torch>=2.10'"
    )


def test_the_torch_requirement_of_an_unavailable_platform_is_ignored(seen_with, tmp_path, acme):
    absent = acme(spec="torch_floor='2.10',", probe="return ProbeResult(False, 'no device', remedy='buy one')")
    seen = seen_with(absent, wheels.plugin_wheel(tmp_path, "zeta"))
    assert "mvllm-zeta" in seen.answers[""]


def test_two_distributions_with_one_name(seen_with, acme):
    fork = acme(distribution="acme-fork", version="9.0")
    seen = seen_with(acme(), fork, ask=["acme"])
    facts = ("'acme'", "mvllm-acme 1.2.3", "acme-fork 9.0", "pip uninstall")
    seen.found("platform.acme.plugin", "broken", *facts)
    for name in ("", "acme"):
        seen.refused(name, *facts)


def test_a_broken_import_is_never_skipped_silently(seen_with, tmp_path, acme):
    broken = acme(first_line="raise ImportError('libacme.so.7: cannot open shared object file')")
    seen = seen_with(broken, wheels.plugin_wheel(tmp_path, "zeta"), ask=["acme", "zeta"])
    facts = (
        "mvllm-acme 1.2.3",
        "ImportError: libacme.so.7: cannot open shared object file",
        "pip uninstall mvllm-acme",
    )
    seen.found("platform.acme.plugin", "broken", *facts)
    seen.found("platform.choice", "broken", "repair acme, or choose with --platform zeta")
    seen.refused("", *facts, "--platform zeta")
    seen.refused("acme", *facts)
    assert "mvllm-zeta" in seen.answers["zeta"]


def test_two_platforms_that_want_torchs_only_privateuse1_backend(seen_with, tmp_path, acme):
    zeta = wheels.plugin_wheel(tmp_path, "zeta", spec="torch_backend='zeta',")
    seen = seen_with(acme(spec="torch_backend='acme',"), zeta)
    facts = ("PrivateUse1", "'acme' of mvllm-acme 1.2.3", "'zeta' of mvllm-zeta 1.2.3")
    seen.found("torch.backends", "warning", *facts, "--platform acme or --platform zeta")


def test_two_platforms_with_backends_of_which_torch_autoloads_one(seen_with, tmp_path, acme):
    library = wheels.library_wheel(tmp_path, "torch-zeta", "7.0", "def start(): ...\n", autoload=True)
    zeta = wheels.plugin_wheel(tmp_path, "zeta", spec="torch_backend='zeta',", requires=["torch-zeta"])
    seen = seen_with(acme(spec="torch_backend='acme',"), zeta, library)
    seen.found("torch.backends", "broken", "PrivateUse1", "TORCH_DEVICE_BACKEND_AUTOLOAD=0", "or uninstall")


def test_an_unrelated_library_that_torch_autoloads_is_a_warning(seen_with, tmp_path, acme):
    library = wheels.library_wheel(tmp_path, "torch-lava", "7.0", "def start(): ...\n", autoload=True)
    seen = seen_with(acme(spec="torch_backend='acme',"), library)
    seen.found(
        "torch.backends", "warning", "torch-lava, which torch loads automatically", "TORCH_DEVICE_BACKEND_AUTOLOAD=0"
    )


def test_one_platform_with_its_autoloaded_library_is_ok(seen_with, tmp_path, acme):
    library = wheels.library_wheel(tmp_path, "torch-acme", "7.0", "def start(): ...\n", autoload=True)
    seen = seen_with(acme(spec="torch_backend='acme',", requires=["torch-acme"]), library)
    seen.found("torch.backends", "ok", "'acme' of mvllm-acme 1.2.3")


def test_hidden_devices(seen_with, acme):
    """The variable is the one that the platform declares in its topology; core knows none."""
    probe = "import os\n    if os.environ.get('ACME_CHIPS') == '': return ProbeResult(False, 'ACME_CHIPS hides all')"
    wheel = acme(probe=probe)
    hidden = seen_with(wheel, ask=["acme"], ACME_CHIPS="")
    hidden.found("platform.acme.visible_devices", "warning", "ACME_CHIPS=''", "unset it, or list the devices to use")
    hidden.found("platform.acme.devices", "warning", "ACME_CHIPS hides all")
    hidden.refused("acme", "ACME_CHIPS hides all")
