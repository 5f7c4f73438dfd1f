"""The lanes of CI: one table, a workflow generated from it, and a lane that was not run is never reported as passed."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import subprocess
import sys
import tomllib

import pytest
import yaml

from mvllm.plugin_api import CONTRACT
from tests.clients.environments import REQUIRED
from tests.packaging.conftest import CONSTRAINTS, REPOSITORY


def load_matrix():
    spec = importlib.util.spec_from_file_location("ci_matrix", REPOSITORY / "ci" / "matrix.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


matrix = load_matrix()
LANES = matrix.read_lanes()
WORKFLOWS = REPOSITORY / ".github" / "workflows"
DOCKERFILES = sorted((REPOSITORY / "docs" / "deploy").glob("*.Dockerfile"))


def lane(**facts):
    given = dict(name="acme", device="acme", python="3.11", torch="2.13.0", contract="1.0", does="conform")  # noqa: C408
    return matrix.Lane(**{**given, **facts})


class TestTable:
    def test_every_platform_of_the_repository_has_a_lane_that_tests_it(self):
        examined = {folder for one in LANES if one.does in ("conform", "xla") for folder in one.folders}
        assert {f"platforms/{path.name}" for path in (REPOSITORY / "platforms").iterdir()} <= examined

    def test_every_python_that_the_core_declares_has_a_lane(self):
        oldest = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["requires-python"]
        assert {one.python for one in LANES} >= {oldest.removeprefix(">="), "3.12", "3.13"}

    def test_the_tested_torch_and_the_declared_floor_have_lanes(self):
        pinned = re.search(r"^torch==(\S+)", CONSTRAINTS.read_text(), re.MULTILINE)[1]
        [floor] = [
            requirement.removeprefix("torch>=")
            for requirement in tomllib.loads((REPOSITORY / "platforms/cpu/pyproject.toml").read_text())["project"][
                "dependencies"
            ]
            if requirement.startswith("torch")
        ]
        assert {one.torch for one in LANES if one.device == "cpu"} >= {pinned, f"{floor}.0"}
        assert "none" in {one.torch for one in LANES}

    def test_contracts_are_those_that_this_core_supports(self):
        spoken = {f"{CONTRACT[0]}.{minor}" for minor in range(CONTRACT[1] + 1)}
        assert {one.contract for one in LANES} <= spoken
        assert f"{CONTRACT[0]}.{CONTRACT[1]}" in {one.contract for one in LANES}

    @pytest.mark.parametrize(
        ("row", "says"),
        [
            ('name = "a"', "device, python, torch, contract, does"),
            ('name = "A b"\ndevice="x"\npython="3"\ntorch="2"\ncontract="1.0"\ndoes="gate"', "names are"),
            ('name = "a"\ndevice="x"\npython="3"\ntorch="2"\ncontract="1.0"\ndoes="dance"', "'dance'"),
            ('name = "a"\ndevice="x"\npython="3"\ntorch="2"\ncontract="1.0"\ndoes="gate"\nspeed="9"', "column speed"),
            ('name = "a"\ndevice="x"\npython="3"\ntorch="2"\ncontract=1.0\ndoes="gate"', "contract must be given"),
        ],
    )
    def test_an_invalid_row_is_an_error_that_names_it(self, tmp_path, row, says):
        (tmp_path / "matrix.toml").write_text(f"[[lane]]\n{row}\n")
        with pytest.raises(matrix.TableError, match=says):
            matrix.read_lanes(tmp_path / "matrix.toml")


class TestRunningHere:
    @pytest.mark.parametrize(
        ("facts", "says"),
        [
            ({"needs": ("/dev/there-is-no-such-device*",)}, "has no acme device"),
            ({"packages": ("platforms/acme",)}, "no platforms/acme in this repository"),
            ({"python": "3.99"}, "has no python3.99"),
            ({"until": "the vendor ships in spring"}, "spring"),
        ],
    )
    def test_a_lane_that_cannot_run_says_why_and_is_neither_passed_nor_failed(self, facts, says, capsys):
        status = matrix.run_lane(lane(**facts), start=lambda *a, **k: pytest.fail("started"))
        printed = capsys.readouterr().out
        assert status == 77
        assert "NOT RUN" in printed and says in printed and "passed" not in printed

    def test_a_version_manager_shim_without_the_version_is_not_used_as_python(self, tmp_path, monkeypatch):
        shim = tmp_path / "python3.99"
        shim.write_text("#!/bin/sh\nexit 127\n")
        shim.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        assert "has no python3.99" in matrix.why_not(lane(python="3.99"))
        shim.write_text("#!/bin/sh\nexit 0\n")
        assert matrix.why_not(lane(python="3.99")) == ""

    def test_a_lane_runs_its_commands_in_order_until_one_fails(self, capsys):
        started = []

        def start(command, cwd):
            started.append(command)
            return 3 if "conformance" in command else 0

        assert matrix.run_lane(lane(device="cpu", packages=("platforms/cpu",)), start=start) == 1
        texts = [" ".join(command) for command in started]
        assert "-m venv" in texts[0] and "torch==2.13.0" in texts[2] and "./platforms/cpu" in texts[3]
        assert "conformance --platform cpu" in texts[-1]
        assert "FAILED" in capsys.readouterr().out

    def test_a_command_that_finds_it_cannot_run_leaves_the_lane_not_run(self, capsys):
        assert matrix.run_lane(lane(does="xla"), start=lambda command, cwd: 77) == 77
        printed = capsys.readouterr().out
        assert "acme: NOT RUN" in printed and "passed" not in printed and "FAILED" not in printed

    def test_the_lane_of_clients_fails_if_one_cannot_be_installed(self):
        [clients] = [one for one in LANES if one.does == "clients"]
        assert f"{REQUIRED}=1" in matrix.commands_of(clients)[-1]

    def test_an_xla_lane_is_run_by_the_command_that_creates_its_environment(self):
        [xla] = [one for one in LANES if one.does == "xla"]
        assert [command[1:] for command in matrix.commands_of(xla)] == [["ci/dev.py", "conform", "tpu"]]
        assert not xla.needs, "XLA's CPU device is everywhere"
        pins = (REPOSITORY / "ci/constraints/tpu.txt").read_text()
        assert f"\ntorch=={xla.torch}\n" in pins, "the table says what is installed"

    def test_extras_are_requested_of_a_package_and_not_part_of_its_folder(self):
        texts = [" ".join(command) for command in matrix.commands_of(lane(packages=("platforms/cpu[fast]",)))]
        assert [text for text in texts if "./platforms/cpu[fast]" in text]
        assert matrix.why_not(lane(packages=("platforms/cpu[fast]",))) == ""

    def test_the_template_lane_tests_the_generated_package(self):
        [template] = [one for one in LANES if one.does == "template"]
        texts = [" ".join(command) for command in matrix.commands_of(template)]
        [new] = [i for i, text in enumerate(texts) if "plugin new acme" in text]
        assert "-m pip install" in texts[new + 1] and "mvllm-acme" in texts[new + 1]
        assert "conformance --platform acme" in texts[-1] and "mvllm-acme/waivers.toml" in texts[-1]

    def test_a_lane_without_torch_installs_none_and_one_with_another_takes_the_other_pins(self, tmp_path, monkeypatch):
        monkeypatch.setattr(matrix, "LANES", tmp_path)
        assert not [c for c in matrix.commands_of(lane(torch="none", does="brain")) if "torch==" in " ".join(c[3:])]
        (tmp_path / "acme").mkdir()
        subprocess.run(matrix.commands_of(lane(torch="2.6.0"))[1], check=True)
        pins = (tmp_path / "acme" / "constraints.txt").read_text()
        assert "\nnumpy==" in pins and "\ntorch==" not in pins

    def test_the_list_shows_every_lane_and_those_that_would_not_run(self):
        done = subprocess.run([sys.executable, "ci/matrix.py", "list"], cwd=REPOSITORY, capture_output=True, text=True)
        assert done.returncode == 0
        assert all(re.search(rf"^{one.name} ", done.stdout, flags=re.MULTILINE) for one in LANES)

    def test_an_unknown_lane_is_an_error_that_lists_those_there_are(self):
        command = [sys.executable, "ci/matrix.py", "run", "nowhere"]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        assert done.returncode == 2 and "gate" in done.stderr


class TestWorkflow:
    def test_it_is_up_to_date(self):
        text = (WORKFLOWS / "ci.yml").read_text()
        assert text == matrix.render(LANES), "run: python3 ci/matrix.py render"

    def test_it_has_a_job_for_each_lane_that_runs_the_lane(self):
        jobs = yaml.safe_load((WORKFLOWS / "ci.yml").read_text())["jobs"]
        assert list(jobs) == [*(one.name for one in LANES), "verdict"]
        for one in LANES:
            steps = jobs[one.name]["steps"]
            assert f"python ci/matrix.py run {one.name}" in [step.get("run") for step in steps]
            assert {"python-version": one.python} in [step.get("with") for step in steps]
            assert ("if" in jobs[one.name]) == bool(one.needs), "a job without hardware always runs"

    def test_the_summary_job_waits_for_every_lane_and_always_runs(self):
        job = yaml.safe_load((WORKFLOWS / "ci.yml").read_text())["jobs"]["verdict"]
        assert job["needs"] == [one.name for one in LANES] and job["if"] == "always()"
        told = {matrix.variable_of(one, what) for one in LANES for what in ("RESULT", "NOT_RUN")}
        assert set(job["steps"][-1]["env"]) == told

    def test_a_skipped_hardware_lane_is_not_run_and_never_passed(self):
        lanes = [lane(), lane(name="far", needs=("/dev/far",), runner=("self-hosted", "far"))]
        text, status = matrix.verdict(lanes, {"acme": "success", "far": "skipped"})
        [near, far] = text.splitlines()[2:]
        assert status == 0 and "passed" in near and "not run" in far and "passed" not in far

    def test_a_lane_that_detects_that_it_cannot_run_counts_as_not_run_and_says_why(self, tmp_path, monkeypatch):
        monkeypatch.setenv("GITHUB_OUTPUT", str(tmp_path / "outputs"))
        assert matrix.run_lane(lane(until="the vendor ships in spring")) == 77
        name, _, reason = (tmp_path / "outputs").read_text().strip().partition("=")
        job = yaml.safe_load((WORKFLOWS / "ci.yml").read_text())["jobs"]["tpu"]
        assert job["outputs"] == {name: f"${{{{ steps.{job['steps'][-2]['id']}.outputs.{name} }}}}"}
        text, status = matrix.verdict([lane()], {"acme": "failure"}, {"acme": reason})
        assert "not run: the vendor ships in spring" in text and "failed" not in text
        assert status == 1, "nobody takes it for a lane that has passed"

    @pytest.mark.parametrize("result", ["failure", "cancelled", "skipped", ""])
    def test_a_lane_without_requirements_must_succeed(self, result):
        text, status = matrix.verdict([lane()], {"acme": result})
        assert status == 1 and "passed" not in text

    def test_inputs_of_the_reusable_workflow_never_become_part_of_a_script(self):
        for job in yaml.safe_load((WORKFLOWS / "conformance.yml").read_text())["jobs"].values():
            assert not [step["run"] for step in job["steps"] if "${{" in step.get("run", "")]


class TestDockerfiles:
    def test_every_device_of_the_table_that_is_hardware_has_one(self):
        devices = {one.device for one in LANES if one.needs} | {"cpu"}
        assert {path.name.removesuffix(".Dockerfile") for path in DOCKERFILES} == devices

    @pytest.mark.parametrize("device", sorted({one.device for one in LANES if one.needs}))
    def test_untested_dockerfiles_say_so(self, device):
        text = (REPOSITORY / "docs" / "deploy" / f"{device}.Dockerfile").read_text()
        assert "NOT RUN ON HARDWARE" in text and 'mvllm.tested-on-hardware="no"' in text


def test_a_lane_is_one_row_of_plain_values():
    assert all(isinstance(getattr(one, f.name), str | tuple) for one in LANES for f in dataclasses.fields(one))
