"""ci/tpu_lane.py: it has a separate environment; without one the lane is not run and never reported as passed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.packaging.conftest import CONSTRAINTS, REPOSITORY, load_script

COPIED = (
    *(f"ci/{name}.py" for name in ("tpu_lane", "environments", "stub_libraries")),
    "ci/constraints/tpu.txt",
    "pyproject.toml",
    "platforms/tpu/pyproject.toml",
    "plugins/conformance/pyproject.toml",
)


@pytest.fixture
def lane(tmp_path, monkeypatch):
    """The script in a minimal repository. Its commands are recorded, not run; those of pip create empty files."""
    for name in COPIED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    module = load_script(tmp_path / "ci" / "tpu_lane.py", monkeypatch)
    module.commands = []
    module.failing = None

    def capture(environment, command, limit=None, extra=None):
        module.commands.append(" ".join(map(str, command)))
        if module.failing and module.failing in module.commands[-1]:
            return "Could not fetch URL: name resolution failed", 1
        if "-m venv" in module.commands[-1]:
            environment.bin.mkdir(parents=True)
            (environment.folder / "lib/python3/site-packages/torch/lib").mkdir(parents=True)
        for tool in module.TOOLS:
            (environment.bin / tool).touch()
        return "", 0

    monkeypatch.setattr(module.Environment, "capture", capture)
    monkeypatch.setattr(module.stub_libraries, "missing_tools", list)
    module.started = []
    module.statuses = {}

    def start(command, variables, log):
        module.started.append((command, variables))
        log.write_text(f"printed by {command[0]}")
        status = next((status for word, status in module.statuses.items() if word in " ".join(command)), 0)
        return SimpleNamespace(poll=lambda: status)

    module.start_recorded = start
    return module


def test_the_environment_is_created_once_without_resolving_torchs_requirements(lane):
    lane.setup()
    installs = [command for command in lane.commands if " pip install " in command]
    assert all("--no-deps" in command for command in installs)
    assert f"torch=={lane.pinned('torch', lane.CONSTRAINTS)} torch_xla==" in installs[0]
    assert installs[1].endswith("ci/constraints/tpu.txt")
    assert all(str(folder) in installs[2] for folder in (lane.PLATFORM, lane.SUITE))
    [stubs] = [i for i, command in enumerate(lane.commands) if "stub_libraries.py" in command]
    assert "torch_xla==" in lane.commands[stubs - 1], "stubs are made once there is a torch"
    lane.commands.clear()
    lane.setup()
    assert lane.commands == []


@pytest.mark.parametrize(
    ("file", "anew"),
    [
        ("ci/constraints/tpu.txt", True),
        ("ci/stub_libraries.py", True),
        ("platforms/tpu/pyproject.toml", False),
        ("plugins/conformance/pyproject.toml", False),
        ("pyproject.toml", False),
    ],
)
def test_a_changed_input_updates_it_and_only_changed_pins_recreate_it(lane, file, anew):
    lane.setup()
    lane.commands.clear()
    with open(lane.ROOT / file, "a") as changed:
        changed.write("\n# changed\n")
    lane.setup()
    assert any("-m venv" in command for command in lane.commands) == anew
    assert any(str(lane.PLATFORM) in command for command in lane.commands)
    lane.commands.clear()
    lane.setup()
    assert lane.commands == []


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (lambda lane, patch: setattr(lane, "failing", "torch_xla=="), "name resolution"),
        (lambda lane, patch: setattr(lane, "failing", "stub_libraries"), "could not be made"),
        (lambda lane, patch: patch.setattr(lane.stub_libraries, "missing_tools", lambda: ["gcc"]), "has no gcc"),
        (lambda lane, patch: patch.setattr(lane, "NUM_BYTES", 10**18), "GB of disk"),
        (lambda lane, patch: shutil.rmtree(lane.PLATFORM), "no platforms/tpu"),
    ],
    ids=["no network", "no stubs", "no compiler", "no disk", "no platform"],
)
def test_where_there_is_no_environment_nothing_runs_and_the_reason_is_given(lane, monkeypatch, capsys, prepare, says):
    prepare(lane, monkeypatch)
    assert lane.run(lane.whole(), start_command=lane.start_recorded) == 77
    printed = capsys.readouterr().out
    assert "tpu: NOT RUN: " in printed and says in printed and "passed" not in printed
    assert lane.started == []


def test_an_environment_whose_setup_failed_is_retried(lane):
    lane.failing = "torch_xla=="
    with pytest.raises(lane.NotRun):
        lane.setup()
    lane.failing = None
    lane.commands.clear()
    lane.setup()
    assert "-m venv" in lane.commands[0]


def test_everything_runs_on_xlas_cpu_with_one_and_two_devices_then_tests_and_parity(lane, monkeypatch, capsys):
    monkeypatch.setenv("XLA_FLAGS", "--mine")
    assert lane.run(lane.whole(), start_command=lane.start_recorded) == 0
    assert {variables["PJRT_DEVICE"] for _, variables in lane.started} == {"CPU"}
    assert {variables["XLA_FLAGS"] for _, variables in lane.started} == {f"--mine {lane.XLA_FLAGS}"}
    suites = [variables for command, variables in lane.started if "conformance" in command]
    assert [variables["CPU_NUM_DEVICES"] for variables in suites] == ["1", "2"]
    reports = {command[command.index("--report") + 1] for command, _ in lane.started if "--report" in command}
    assert len(reports) == 2, "neither run overwrites the other's report"
    own, parity = [command for command, _ in lane.started if command[0] == "pytest"]
    assert "platforms/tpu/tests" in own
    files = [word for word in parity if word.endswith(".py")]
    assert len(files) == 3 and all((REPOSITORY / file).is_file() for file in files)
    assert "passed" in capsys.readouterr().out


def test_arguments_go_to_the_suite_which_then_runs_alone(lane):
    lane.run(lane.whole(["--only", "ATT"]), start_command=lane.start_recorded)
    assert len(lane.started) == 2
    assert all(command[1] == "conformance" and command[-2:] == ("--only", "ATT") for command, _ in lane.started)


def test_the_platforms_waivers_are_passed_unless_others_are_given(lane):
    assert "--waivers" not in lane.conformance()
    lane.WAIVERS.touch()
    assert str(lane.WAIVERS) in lane.conformance()
    assert lane.conformance("--waivers", "mine.toml").count("--waivers") == 1


@pytest.mark.parametrize("failing", ["conformance", "pytest"])
def test_a_failed_part_fails_the_lane_and_the_other_parts_still_run(lane, capsys, failing):
    lane.statuses[failing] = 3
    assert lane.run(lane.smoke(), start_command=lane.start_recorded) == 1
    printed = capsys.readouterr().out
    assert "tpu: FAILED: " in printed and "exit status 3" in printed and "passed" not in printed
    assert len(lane.started) == len(lane.smoke())


class Slow:
    """A process that runs until it is terminated."""

    def __init__(self):
        self.status = None
        self.asked = False

    def poll(self):
        return self.status

    def terminate(self):
        self.asked = True

    def kill(self):
        self.status = -9

    def wait(self, timeout=None):
        if self.status is None and timeout is not None:
            raise subprocess.TimeoutExpired("slow", timeout)
        assert self.status is not None, "this would wait for ever"
        return self.status


@pytest.mark.parametrize("cores", [1, 2, 16])
def test_one_part_per_core_runs_at_a_time_and_each_shows_its_output(lane, monkeypatch, capsys, cores):
    monkeypatch.setattr(lane.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(lane, "SECONDS_BETWEEN_LINES", 0.0)
    under_way, most = [], []

    def start(command, variables, log):
        log.write_text(f"...... [ 50%]\nof part {len(most)}\n..")
        under_way.append(Slow())
        most.append(sum(each.status is None for each in under_way))
        return under_way[-1]

    def end_the_newest(seconds):
        next(each for each in reversed(under_way) if each.status is None).status = 0

    monkeypatch.setattr(lane.time, "sleep", end_the_newest)
    parts = lane.whole()
    assert lane.run(parts, start_command=start) == 0
    assert max(most) == min(cores, len(parts)) and len(most) == len(parts)
    printed = capsys.readouterr().out
    assert all(printed.count(f"of part {number}\n") == 1 for number in range(len(parts)))
    assert "conformance, 1 device: 50% after 0 min" in printed


def test_interrupting_the_lane_stops_all_parts(lane, monkeypatch):
    started = []

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(lane.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        lane.run(lane.whole(), start_command=lambda *_: started.append(Slow()) or started[-1])
    assert started and all(each.asked and each.status == -9 for each in started)


def test_a_part_that_cannot_be_started_does_not_stop_the_others(lane, capsys):
    def start(command, variables, log):
        if command[0] == "pytest":
            raise FileNotFoundError(2, "No such file or directory", "pytest")
        return lane.start_recorded(command, variables, log)

    parts = lane.whole()
    assert lane.run(parts, start_command=start) == 1
    printed = capsys.readouterr().out
    assert printed.count("printed by mvllm") == 2 and printed.count("could not be started") == 2
    assert "tpu: FAILED: the platform's tests (could not be started: " in printed


@pytest.mark.parametrize("given", [["--report", "found.json"], ["--report=found.json", "--quick"]])
def test_two_runs_write_two_reports(lane, given):
    first, second = (" ".join(part.command) for part in lane.whole(given))
    assert "found.json" in first and "found-2-devices.json" in second and "found.json" not in second


def test_a_part_that_exceeds_its_time_limit_is_ended(tmp_path, monkeypatch):
    environments = load_script(REPOSITORY / "ci" / "environments.py", monkeypatch)
    steps = environments.Steps(environments.Environment(tmp_path, tmp_path / "venv"), total=1, ends=0.0)
    with pytest.raises(environments.StepFailed, match="ended after 1 s"):
        steps.run("a long one", [sys.executable, "-c", "print('begun', flush=True); import time; time.sleep(300)"])


def test_its_pins_are_those_of_the_other_environment_except_for_torch():
    def pins(path):
        return dict(re.findall(r"^([\w.-]+)==([\w.+-]+)", path.read_text(), re.MULTILINE))

    ours, others = pins(REPOSITORY / "ci/constraints/tpu.txt"), pins(CONSTRAINTS)
    assert {name: pin for name, pin in ours.items() if others.get(name, pin) != pin} == {"torch": ours["torch"]}
    assert ours.keys() - others.keys() == {"torch_xla", "absl-py"}


def test_the_destructors_of_a_native_library_do_not_change_the_exit_status(tmp_path):
    """A destructor that libc calls stands for the library; those of Python's `atexit` run."""
    (tmp_path / "conftest.py").write_text(
        "import atexit, ctypes, os\n"
        "crash = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: os.kill(os.getpid(), 11))\n"
        "ctypes.CDLL(None).__cxa_atexit(crash, None, None)\n"
        "atexit.register(print, 'left to the end')\n"
    )
    (tmp_path / "test_both.py").write_text("def test_good(): pass\ndef test_bad(): assert False\n")

    def run(*arguments):
        script = [sys.executable, str(REPOSITORY / "ci" / "without_destructors.py"), "pytest", "-q", "-p", "no:xdist"]
        ended = subprocess.run([*script, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
        return ended.returncode, ended.stdout.endswith("left to the end\n")

    assert run("-k", "good") == (0, True)
    assert run("-k", "bad") == (1, True)
