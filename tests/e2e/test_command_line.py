"""The installed `mvllm` command with a tiny random model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.model_zoo import make_checkpoint

SMALL = ["--kv-cache-memory-bytes", "4194304", "--max-model-len", "200", "--dtype", "float32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint("llama-gqa", tmp_path_factory.mktemp("model") / "llama"))


def mvllm(*argv: str, stdin: str = "", installed: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs the command's module, which starts quickly as a fork, or the installed script."""
    module = [sys.executable, "-m", "mvllm.entrypoints.cli.main"]
    command = [*([str(Path(sys.executable).parent / "mvllm")] if installed else module), *argv]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=300, check=False)


def test_generate_prints_text_and_ends_with_speed_and_platform(folder: str) -> None:
    ran = mvllm(
        "generate", "--model", folder, "--prompt", "Hello", "--max-tokens", "8", "--ignore-eos", *SMALL, installed=True
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("Hello") and "INFO" not in ran.stderr
    last = ran.stderr.rstrip().splitlines()[-1]
    assert re.search(r"8 output tokens in .* [\d,.]+ output tokens/s, platform cpu", last)
    assert "entry point cpu = mvllm_cpu.plugin" in last


def test_a_seed_makes_samples_the_same_every_time(folder: str) -> None:
    argv = ["generate", "--model", folder, "--prompt", "a", "--prompt", "b", "--seed", "3", "--n", "2", *SMALL]
    texts = [mvllm(*argv, "--max-tokens", "6").stdout for _ in range(2)]
    assert texts[0] == texts[1]
    assert texts[0]


def test_ctrl_c_exits_with_130_and_without_a_traceback(folder: str) -> None:
    command = [
        str(Path(sys.executable).parent / "mvllm"),
        "generate",
        "--model",
        folder,
        "--prompt",
        "Hello",
        "--ignore-eos",
    ]
    command += ["--n", "64", "--max-tokens", "100000", "--temperature", "1", "--kv-cache-memory-bytes", "67108864"]
    environment = {**os.environ, "MVLLM_LOGGING_LEVEL": "INFO"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    for line in process.stderr:
        if "KV cache" in line:
            break
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors


def test_the_list_of_platforms_names_the_plugin() -> None:
    ran = mvllm("platforms")
    assert ran.returncode == 0
    assert "cpu: available" in ran.stdout
    assert "entry point cpu = mvllm_cpu.plugin" in ran.stdout


def test_doctor_reports_no_problem(folder: str) -> None:
    ran = mvllm("doctor", "--json", "--model", folder)
    report = json.loads(ran.stdout)
    broken = [check for check in report["checks"] if check["status"] == "broken"]
    assert not broken
    assert ran.returncode == 0


def test_an_unknown_platform_is_reported(folder: str) -> None:
    ran = mvllm("generate", "--model", folder, "--prompt", "x", "--platform", "acme")
    assert ran.returncode == 1
    assert "acme" in ran.stderr
    assert "Traceback" not in ran.stderr


def shell(script: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {script}"], env={"PATH": path}, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    ("script", "status", "words"),
    [
        pytest.param("mvllm doctor --json | true", 1, "", marks=pytest.mark.exhaustive),
        ("mvllm platforms >/dev/full", 1, "error: The output cannot be written: No space left on device."),
        ("mvllm platforms >&-", 0, ""),
        pytest.param(
            "PYTHONUTF8=0 PYTHONIOENCODING=ascii mvllm generate --model {folder} --prompt a --max-tokens 30 {small}",
            0,
            "",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_closed_full_or_ascii_standard_streams(folder: str, script: str, status: int, words: str) -> None:
    ran = shell(script.format(folder=folder, small=" ".join(SMALL)))
    assert (ran.returncode, "Traceback" in ran.stderr) == (status, False), ran.stderr
    assert words in ran.stderr
