"""`mvllm chat`, `complete` and `run-batch` as programs: with engines of their own, and with a server."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mvllm.entrypoints.cli.main import main
from tests.e2e.server.test_demo_vision import CIRCLE, png
from tests.e2e.test_command_line import SMALL, folder, mvllm, shell  # noqa: F401  (a fixture)
from tests.helpers.server import SMALL as SERVER_SIZE
from tests.helpers.server import ServerProcess
from tests.helpers.sse_server import DONE, Answer, SSEServer, event

PROMPT = "Once upon a time"
PROMPTS = (PROMPT, "The capital of France is", "The old dog")
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
        ("mvllm chat --model {folder} --chat-template /bin/ls", 1, "error: --chat-template: the file '/bin/ls' cannot"),
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


def test_a_batch_file_has_the_responses_of_the_server(server, tmp_path):
    client = server.client()
    requests = {
        f"{prompt}-{n}": ("/v1/completions", {"prompt": prompt, "max_tokens": n, "temperature": 0, "logprobs": 1})
        for prompt in PROMPTS
        for n in (1, 5, 14)
    }
    requests["chat"] = ("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 9, "temperature": 0})
    requests["several"] = ("/v1/completions", {"prompt": list(PROMPTS), "max_tokens": 3, "temperature": 0})
    requests["vectors"] = ("/v1/embeddings", {"input": list(PROMPTS), "dimensions": 4})
    requests["bad"] = ("/v1/completions", {"prompt": "x", "top_p": 7})
    requests["long"] = ("/v1/completions", {"prompt": "word " * 4000})
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [json.dumps({"custom_id": i, "method": "POST", "url": u, "body": b}) for i, (u, b) in requests.items()]
    source.write_text("\n".join(lines * 3))
    command = [sys.executable, "-m", "mvllm.entrypoints.cli.main", "run-batch", "-i", str(source), "-o", str(target)]
    options = ["--served-model-name", "demo", "--max-concurrency", "8", "--max-num-seqs", "4", *SERVER_SIZE]
    ran = subprocess.run(
        [*command, "--model", "demo", *options],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert f"{3 * len(requests)} requests, 6 failed." in ran.stderr
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert sorted(a["custom_id"] for a in answers) == sorted([*requests] * 3)
    expected = {name: client.post(url, json=body) for name, (url, body) in requests.items()}
    for answer in answers:
        response, same = answer["response"], expected[answer["custom_id"]]
        assert response["status_code"] == same.status_code and answer["error"] is None
        if same.status_code != 200:
            assert response["body"] == same.json()
            continue
        if answer["custom_id"] == "vectors":
            for found, wanted in zip(response["body"]["data"], same.json()["data"], strict=True):
                assert found["embedding"] == pytest.approx(wanted["embedding"], abs=0.05)  # in bfloat16
            assert response["body"]["usage"] == same.json()["usage"]
            continue
        choices, wanted = response["body"]["choices"], same.json()["choices"]
        assert [choice.get("text") for choice in choices] == [choice.get("text") for choice in wanted]
        assert [choice.get("message") for choice in choices] == [choice.get("message") for choice in wanted]
        assert [choice["finish_reason"] for choice in choices] == [choice["finish_reason"] for choice in wanted]
        assert response["body"]["usage"]["completion_tokens"] == same.json()["usage"]["completion_tokens"]


@pytest.mark.exhaustive
def test_a_batch_file_with_a_picture(tmp_path: Path) -> None:
    picture = {"url": f"data:image/png;base64,{base64.b64encode(png(CIRCLE)).decode()}"}
    content = [{"type": "image_url", "image_url": picture}, {"type": "text", "text": "What colour is the circle?"}]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    ran = mvllm(
        "run-batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "demo-vision", *SERVER_SIZE
    )
    assert ran.returncode == 0, ran.stderr
    response = json.loads((tmp_path / "out.jsonl").read_text())["response"]
    assert "red" in response["body"]["choices"][0]["message"]["content"], response


def test_the_terminal_stays_as_it_was() -> None:
    """`mvllm chat` on a pseudo-terminal: no log, Ctrl-C stops an answer and then asks, and echo works afterwards."""

    def answer(request: Any, index: int) -> Answer:
        said = event(choices=[{"index": 0, "delta": {"content": "Well "}, "finish_reason": None}])
        return Answer([said, 60.0, DONE])

    terminal, inside = os.openpty()
    before = termios.tcgetattr(inside)
    seen = b""

    def wait_for(pattern: str, times: int = 1) -> None:
        nonlocal seen
        os.set_blocking(terminal, False)
        deadline = time.monotonic() + 120
        while len(re.findall(pattern.encode(), seen)) < times:
            assert time.monotonic() < deadline and process.poll() is None, (pattern, seen)
            try:
                seen += os.read(terminal, 1 << 16)
            except BlockingIOError:
                time.sleep(0.02)

    with SSEServer(answer) as server:
        command = [sys.executable, "-m", "mvllm.entrypoints.cli.main", "chat", "--url", server.url, "--model", "m"]
        process = subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside)
        try:
            wait_for(r"> $")
            os.write(terminal, b"Hello\n")
            wait_for("Well ")
            process.send_signal(signal.SIGINT)
            wait_for(r"\[stopped\]\s+> $")
            process.send_signal(signal.SIGINT)
            wait_for(r"Press Ctrl-C again or type /exit to leave.\s+> $")
            os.write(terminal, b"/exit\n")
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait(60)
    assert termios.tcgetattr(inside) == before
    assert b"INFO" not in seen and b"Traceback" not in seen
    os.close(terminal)
    os.close(inside)
