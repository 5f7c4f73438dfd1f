"""The commands of docs/tutorials/writing-a-platform.md, run in a new environment beside a clone.

torch and the other requirements are links to those of the environment that runs the tests. mvllm and the suite are
installed from the clone, as the page says.
"""

from __future__ import annotations

import json
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mvllm_conformance.clauses import CLAUSES
from tests.packaging.conftest import REPOSITORY
from tests.packaging.user_environment import UserEnvironment

pytestmark = pytest.mark.slow

MACHINE_SECONDS = 300
"""Limit of the CPU time of all commands, independent of the machine's other load."""
FURTHER_CLAUSES = {i for i in CLAUSES if not i.startswith(("CFG", "KVL", "RUN"))}
"""Clauses that take longer, and those of the package's own tests. They run with the exhaustive tests only."""
FEWER_CLAUSES = f" --quick --only={','.join(sorted(set(CLAUSES) - FURTHER_CLAUSES))}"

PAGE = REPOSITORY / "docs" / "tutorials" / "writing-a-platform.md"
OURS_INSTALLED = {"mvllm", "mvllm-acme", "mvllm-conformance"}


def commands_of(page: str) -> list[str]:
    """The lines of every block with the marker `<!-- run -->`, in order."""
    blocks = re.findall(r"<!-- run -->\n```console\n(.*?)```", page, flags=re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


COMMANDS = commands_of(PAGE.read_text(encoding="utf-8"))
[QUICK, WHOLE] = [command for command in COMMANDS if command.startswith("mvllm conformance")]
LIMITS = {QUICK: FEWER_CLAUSES, WHOLE: " --quick --only=PLG,PRB"}
"""What the test adds to the two runs of the suite, which would take minutes."""


@pytest.fixture(scope="module")
def vendor(tmp_path_factory) -> UserEnvironment:
    root = tmp_path_factory.mktemp("vendor")
    return UserEnvironment(root, name="mvllm", work=root / "acme")


@pytest.fixture(scope="module")
def machine_seconds() -> dict[str, float]:
    """CPU time of each command, including its child processes."""
    return {}


@pytest.fixture(scope="module")
def tutorial(vendor, machine_seconds) -> dict[str, subprocess.CompletedProcess[str]]:
    """Runs every command of the page and returns its result; a failing command ends the run."""
    done: dict[str, subprocess.CompletedProcess[str]] = {}
    for command in COMMANDS:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done[command] = vendor.run(f"{command}{LIMITS.get(command, '')}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        machine_seconds[command] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if done[command].returncode != 0:
            pytest.fail(f"$ {command}\n{done[command].stdout[-6000:]}\n{done[command].stderr[-6000:]}", pytrace=False)
    return done


def output(tutorial, beginning: str) -> str:
    [found] = [done.stdout + done.stderr for command, done in tutorial.items() if command.startswith(beginning)]
    return found


def test_the_page_contains_all_steps_in_order():
    steps = ["uv venv", "uv pip install", "mvllm plugin new acme", "uv pip install -e ./mvllm-acme", "mvllm platforms"]
    steps.append("mvllm generate")
    places = [next(i for i, command in enumerate(COMMANDS) if command.startswith(step)) for step in steps]
    assert places == sorted(places)
    assert COMMANDS[-2:] == [QUICK, WHOLE] and all("--platform acme" in command for command in LIMITS)


def test_the_commands_take_less_than_five_minutes_of_cpu_time(tutorial, machine_seconds):
    for command, seconds in machine_seconds.items():
        print(f"{seconds:6.1f} s  {command}")
    print(f"{sum(machine_seconds.values()):6.1f} s  in all")
    assert sum(machine_seconds.values()) < MACHINE_SECONDS


def test_mvllm_comes_from_the_clone_and_nothing_else_of_ours_is_there(tutorial, vendor):
    listed = vendor.run("uv pip list").stdout
    assert {line.split()[0] for line in listed.splitlines() if line.startswith("mvllm")} == OURS_INSTALLED
    where = vendor.run(
        "python -c 'import mvllm, mvllm_acme; print(mvllm.__file__, mvllm_acme.__file__)'"
    ).stdout.split()
    assert Path(where[0]).is_relative_to(vendor.clone) and Path(where[1]).is_relative_to(vendor.work)


def test_the_platform_is_found_and_available(tutorial):
    found = output(tutorial, "mvllm platforms")
    assert "acme: available" in found and "mvllm-acme 0.9.0" in found


def test_the_doctor_runs_the_platforms_check(tutorial):
    assert "platform.acme.device" in output(tutorial, "mvllm doctor")


def test_its_operation_has_priority_over_the_reference(tutorial):
    assert re.search(r"^rms_norm +acme-rms-norm, reference", output(tutorial, "mvllm ops"), flags=re.MULTILINE)


def test_the_platform_generates_text(tutorial):
    text = output(tutorial, "mvllm generate")
    assert "Paris" in text and "platform acme, from mvllm-acme 0.9.0" in text


def test_it_passes_the_conformance_suite(tutorial):
    for command in LIMITS:
        closing = tutorial[command].stdout.strip().splitlines()[-1]
        assert re.search(r"\b[1-9]\d* passed", closing) and "failed" not in closing and "error" not in closing


@pytest.mark.exhaustive
def test_it_passes_the_further_clauses(tutorial, vendor):
    done = vendor.run(f"{QUICK} --only={','.join(sorted(FURTHER_CLAUSES))}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b[1-9]\d* passed", done.stdout.strip().splitlines()[-1])


def test_its_own_tests_are_the_suite_through_pytest(tutorial, vendor):
    done = vendor.run("python -m pytest -q -p no:cacheprovider --mvllm-only=PLG,PRB", cwd=vendor.work / "mvllm-acme")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b[1-9]\d* passed", done.stdout)


@pytest.mark.exhaustive
def test_the_generated_package_is_fully_typed(tutorial, vendor, tmp_path):
    python = vendor.venv / "bin" / "python"
    mypy = f"{sys.executable} -m mypy --strict --cache-dir {tmp_path} --python-executable {python} mvllm_acme"
    done = vendor.run(mypy, cwd=vendor.work / "mvllm-acme" / "src")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_generated_package_is_formatted(tutorial, vendor):
    source = vendor.work / "mvllm-acme" / "src"
    for command in (
        f"{sys.executable} -m ruff check --isolated --no-cache --line-length 120 --select E,F,W,I,UP,B mvllm_acme",
        f"{sys.executable} -m ruff format --isolated --no-cache --line-length 120 --check mvllm_acme",
    ):
        done = vendor.run(command, cwd=source)
        assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"


def test_the_package_builds_into_a_wheel_with_its_entry_point(tutorial, vendor, tmp_path):
    import zipfile

    done = vendor.run(f"uv build --wheel -o {tmp_path} ./mvllm-acme")
    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.glob("mvllm_acme-0.9.0-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert "mvllm_acme/py.typed" in names
        assert not [name for name in names if name.startswith("tests")]
        points = archive.read("mvllm_acme-0.9.0.dist-info/entry_points.txt").decode()
    assert "[mvllm.platforms]\nacme = mvllm_acme.plugin" in points


class TestRefusals:
    CASES = (
        ("acme", "already installed: mvllm-acme 0.9.0"),
        ("Acme_X1", "use 'acme-x1'"),
        ("9lives", "beginning with a letter"),
        ("a" * 41, "at most 40"),
        ("mvllm-zeta", "Leave out 'mvllm-'"),
        ("cpu", "reserved"),
        ("demo", "reserved"),
        ("zeta --dir mvllm-acme", "not an empty folder"),
        ("zeta --dir mvllm-acme/README.md", "not an empty folder"),
        ("zeta --dir mvllm-acme/README.md/below", "cannot be written"),
    )
    PROGRAM = """
import contextlib, io, json, sys
from mvllm.entrypoints.cli.main import main
results = []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        results.append((main(["plugin", "new", *arguments.split()]), errors.getvalue()))
print(json.dumps(results))
"""

    def test_an_invalid_name_or_folder_is_rejected_and_nothing_is_written(self, tutorial, vendor):
        before = sorted(vendor.work.rglob("*"))
        asked = json.dumps([arguments for arguments, _ in self.CASES])
        done = vendor.run(shlex.join(["python", "-c", self.PROGRAM, asked]))
        assert done.returncode == 0, done.stderr
        for (arguments, says), (status, errors) in zip(self.CASES, json.loads(done.stdout), strict=True):
            assert status == 1 and says in errors, (arguments, errors)
        assert sorted(vendor.work.rglob("*")) == before

    @pytest.mark.exhaustive  # tests/unit/test_plugin_new.py writes such a package
    def test_a_name_with_a_hyphen_gives_a_package_that_is_found(self, tutorial, vendor):
        (vendor.work / "elsewhere").mkdir()
        assert vendor.run("mvllm plugin new zeta-2 --dir elsewhere").returncode == 0, "an empty folder will do"
        assert vendor.run("uv pip install --no-deps ./elsewhere").returncode == 0
        assert "zeta-2: available" in vendor.run("mvllm platforms --platform zeta-2").stdout
        assert vendor.run("uv pip uninstall mvllm-zeta-2").returncode == 0
