"""`mvllm chat` and `complete` as programs: with engines of their own, and with a server."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mvllm.entrypoints.cli.main import main
from tests.e2e.server.test_demo_vision import CIRCLE, png
from tests.e2e.test_command_line import SMALL, folder, mvllm, shell  # noqa: F401  (a fixture)
from tests.helpers.server import SMALL as SERVER_SIZE
from tests.helpers.server import ServerProcess

PROMPT = "Once upon a time"
QUESTION = [{"role": "user", "content": "What is the capital of Italy?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), "demo", "--port", "0", *SERVER_SIZE) as server:
        yield server.wait_ready()


def test_complete_and_chat_print_the_servers_output(server, capsys, monkeypatch):
    client = server.client()
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    text = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    arguments = ["--url", server.url, "--max-tokens", "12", "--temperature", "0"]
    assert main(["complete", *arguments, "--prompt", PROMPT]) == 0
    assert capsys.readouterr().out == text + "\n"

    body = {"messages": QUESTION, "max_tokens": 12, "temperature": 0}
    answer = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    monkeypatch.setattr("sys.stdin", io.StringIO(QUESTION[0]["content"] + "\n"))
    assert main(["chat", *arguments]) == 0
    assert capsys.readouterr().out == answer + "\n"


def test_greedy_text_is_the_same_every_time(folder: str) -> None:  # noqa: F811
    argv = ["complete", "--model", folder, "--prompt", "Hello", "--temperature", "0", "--max-tokens", "12", *SMALL]
    first, second = mvllm(*argv), mvllm(*argv)
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout


def test_chat_answers_each_line_of_a_pipe(folder: str) -> None:  # noqa: F811
    ran = mvllm("chat", "--model", folder, "--max-tokens", "6", *SMALL, stdin="Hi\n/stats\n/exit\n")
    assert ran.returncode == 0, ran.stderr
    assert "output tokens/s, platform cpu" in ran.stdout


@pytest.mark.parametrize(
    ("script", "status", "words"),
    [
        ("mvllm chat --model {folder} {small} <&-", 0, ""),
        pytest.param(
            "printf '\\xff\\xfe\\n' | mvllm chat --model {folder} {small}",
            0,
            "lone surrogate",
            marks=pytest.mark.exhaustive,
        ),
        ("mvllm chat --model {folder} --chat-template /bin/ls", 1, "error: The chat template '/bin/ls' cannot be read"),
    ],
)
def test_closed_or_odd_standard_input(folder: str, script: str, status: int, words: str) -> None:  # noqa: F811
    ran = shell(script.format(folder=folder, small=" ".join(SMALL)))
    assert (ran.returncode, "Traceback" in ran.stderr) == (status, False), ran.stderr
    assert words in ran.stderr


def test_the_command_line_says_what_is_in_a_picture(tmp_path: Path) -> None:
    file = tmp_path / "circle.png"
    file.write_bytes(png(CIRCLE))
    command = [sys.executable, "-m", "mvllm.entrypoints.cli.main", "chat", "--model", "demo-vision"]
    command += ["--image", str(file), "--temperature", "0", *SERVER_SIZE]
    ran = subprocess.run(command, input="What colour is the circle?\n", capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert "A red circle." in ran.stdout and "The circle is red." in ran.stdout
