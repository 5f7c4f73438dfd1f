"""`mvllm chat --url` and `mvllm complete --url`, with a scripted server."""

from __future__ import annotations

import io
import socket
import threading

import pytest

from mvllm.entrypoints.cli.main import main
from tests.helpers.sse_server import DONE, Answer, SSEServer, completion, event, usage


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def type_in(monkeypatch, text):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def continue_text(request, index):
    return Answer([completion(" lived"), completion(" a cat"), completion("", "stop"), usage(3, 4), DONE])


def chat_events(request, index):
    def delta(finish=None, **fields):
        return event(choices=[{"index": 0, "delta": fields, "finish_reason": finish}])

    said = delta(content=f"answer {index}")
    return Answer([delta(role="assistant", content=""), said, delta("stop"), usage(3, 4), DONE])


def test_a_prompt_is_continued(capsys):
    with SSEServer(continue_text) as server:
        assert main(["complete", "--url", server.url, "--prompt", "There", "--top-k", "3", "--stop", "a"]) == 0
    assert capsys.readouterr().out == " lived a cat\n"
    [request] = server.requests
    assert request.path == "/v1/completions" and "authorization" not in request.headers
    assert request.body == {
        "model": "model-of-the-server",
        "prompt": "There",
        "stream": True,
        "stream_options": {"include_usage": True},
        "top_k": 3,
        "stop": ["a"],
        "max_tokens": 128,
    }


def test_lines_of_input_are_continued_one_by_one(monkeypatch, capsys):
    type_in(monkeypatch, "One\nTwo\n/exit\nThree\n")
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with SSEServer(continue_text) as server:
        assert main(["complete", "--url", f"{server.url}/v1/", "--model", "other"]) == 0
    assert [r.body["prompt"] for r in server.requests] == ["One", "Two"]
    assert {r.body["model"] for r in server.requests} == {"other"}
    assert {r.headers["authorization"] for r in server.requests} == {"Bearer secret"}
    assert capsys.readouterr().out == " lived a cat\n" * 2


def test_requests_contain_the_conversation(monkeypatch, capsys):
    type_in(monkeypatch, "Hello\nAgain\n/stats\n/reset\nNew\n")
    with SSEServer(chat_events) as server:
        assert main(["chat", "--url", server.url, "--system", "Be brief.", "--temperature", "0"]) == 0
    out = capsys.readouterr().out
    assert "answer 0\nanswer 1\n8 output tokens in" in out and f"model model-of-the-server at {server.url}" in out
    system = {"role": "system", "content": "Be brief."}
    first, second, third = (r.body["messages"] for r in server.requests)
    assert first == [system, {"role": "user", "content": "Hello"}]
    assert second == [*first, {"role": "assistant", "content": "answer 0"}, {"role": "user", "content": "Again"}]
    assert third == [system, {"role": "user", "content": "New"}]
    assert "max_tokens" not in server.requests[0].body and server.requests[0].body["temperature"] == 0


def test_an_error_of_the_server_is_printed_and_the_conversation_continues(monkeypatch, capsys):
    def script(request, index):
        if index == 1:
            return Answer([b'{"error": {"message": "The conversation is too long."}}'], status=400)
        return chat_events(request, index)

    type_in(monkeypatch, "Hello\nAgain\nOnce more\n")
    with SSEServer(script) as server:
        assert main(["chat", "--url", server.url]) == 0
    captured = capsys.readouterr()
    assert "status 400: The conversation is too long." in captured.err
    assert "answer 0" in captured.out and "answer 2" in captured.out
    assert [m["content"] for m in server.requests[2].body["messages"]] == ["Hello", "answer 0", "Once more"]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Answer([completion("a"), event(error={"message": "engine died"}), DONE]), "engine died"),
        (Answer([completion("a")], cut=True), "broke off"),
        (Answer([completion("a")]), "broke off"),
        (Answer([b"data: {\n\n"]), "broke off"),
        (Answer([b"busy"], status=503), "status 503: busy"),
        (Answer([b"a key"], status=401), "status 401: a key Give the key with --api-key or OPENAI_API_KEY."),
    ],
)
def test_an_answer_that_fails_is_an_error(answer, expected, capsys):
    with SSEServer(lambda request, index: answer) as server:
        assert main(["complete", "--url", server.url, "--prompt", "x"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and expected in error and "Traceback" not in error


@pytest.mark.parametrize("body", [b"{", b'{"data": []}'])
def test_a_list_of_models_that_breaks_off_or_is_empty_is_an_error(body, capsys):
    def answer(listener):
        with listener.accept()[0] as connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n" + body)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=[listener])
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert main(["complete", "--url", url, "--prompt", "x"]) == 1
        thread.join()
    assert f"error: {url} lists no model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["complete", "--url", "http://127.0.0.1:1", "--prompt", "x"], "http://127.0.0.1:1 does not answer"),
        (["complete", "--url", "localhost:8000", "--prompt", "x"], "must be like http://localhost:8000"),
        (["complete", "--url", "http://h:port", "--prompt", "x"], "http://h:port"),
        (["chat", "--url", "http://h:1", "--max-model-len", "9"], "--max-model-len is a setting of an engine"),
        (["chat", "--url", "http://h:1", "--chat-template", "{}"], "--chat-template is for an engine"),
        (["complete", "--url", "http://h:1", "--top-p", "2"], "--top-p must be"),
        (["complete", "--prompt", "x"], "--model, or a running server with --url"),
        (["chat"], "--model, or a running server with --url"),
    ],
)
def test_invalid_options_are_rejected(argv, expected, capsys):
    assert main(argv) == 1
    assert expected in capsys.readouterr().err
