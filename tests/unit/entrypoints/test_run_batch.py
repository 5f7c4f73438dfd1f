"""Batch files: how they are read, and the errors of invalid lines. Responses of a model: tests/e2e."""

from __future__ import annotations

import asyncio
import io
import json
from types import SimpleNamespace

import pytest

pytest.importorskip("starlette")

from mvllm.entrypoints.cli.main import main
from mvllm.entrypoints.openai import batch_runner
from mvllm.entrypoints.openai.batch_runner import BatchRunner
from mvllm.entrypoints.openai.common.serving_context import ServingContext
from mvllm.entrypoints.openai.common.serving_models import OpenAIServingModels
from mvllm.errors import EngineDeadError, QueueFullError


def line(custom_id="1", url="/v1/completions", **more):
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {"prompt": "x"}, **more}).encode()


class Source(io.BytesIO):
    """A file that counts the lines that were read."""

    num_read = 0

    def readline(self, size=-1):
        found = super().readline(size)
        self.num_read += bool(found)
        return found


class Runner(BatchRunner):
    """Answers when the test says so."""

    def __init__(self, respond, max_concurrency=4):
        self.engine = SimpleNamespace(errored=False, dead_error=None)
        context = ServingContext(self.engine, None, None)
        super().__init__(context, OpenAIServingModels(["m"], "m"), max_concurrency=max_concurrency)
        self.respond = respond

    def _make_handler(self, line):
        super_call = super()._make_handler
        return SimpleNamespace(
            start=self.start, full_response=lambda: self.respond(line, super_call), close=lambda: None
        )

    async def start(self):
        pass


async def fine(line, call):
    return b'{"ok":true}'


def run(runner, *lines):
    target = io.BytesIO()
    tally = asyncio.run(runner.run(Source(b"\n".join(lines)), target))
    return tally, [json.loads(each) for each in target.getvalue().splitlines()]


def test_each_line_has_its_response():
    tally, answers = run(Runner(fine), line("a"), b"", line("b"), b"  ")
    assert (tally.total, tally.failed) == (2, 0)
    assert {answer["custom_id"] for answer in answers} == {"a", "b"}
    assert len({answer["id"] for answer in answers} | {a["response"]["request_id"] for a in answers}) == 4
    for answer in answers:
        assert answer.keys() == {"id", "custom_id", "response", "error"} and answer["error"] is None
        assert answer["response"]["status_code"] == 200 and answer["response"]["body"] == {"ok": True}


def test_no_more_lines_are_read_than_run_at_a_time():
    async def scenario():
        gates = [asyncio.Event() for _ in range(20)]

        async def wait(line, call):
            await gates[int(line.custom_id)].wait()
            return b"{}"

        async def until(is_so):
            while not is_so():
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)  # time in which one that goes too far would go on

        source, target = Source(b"\n".join(line(str(i)) for i in range(20))), io.BytesIO()
        running = asyncio.create_task(Runner(wait, max_concurrency=3).run(source, target))
        await until(lambda: source.num_read >= 3)
        assert source.num_read == 3 and not target.getvalue()
        gates[1].set()  # the second is answered first
        await until(lambda: source.num_read >= 4 and target.getvalue())
        assert source.num_read == 4 and target.getvalue().count(b"\n") == 1
        for gate in gates:
            gate.set()
        assert (await running).total == 20
        return target

    answers = [json.loads(each) for each in asyncio.run(scenario()).getvalue().splitlines()]
    assert answers[0]["custom_id"] == "1" and {int(a["custom_id"]) for a in answers} == set(range(20))


@pytest.mark.parametrize(
    ("data", "custom_id", "expected"),
    [
        (b"nonsense", None, "malformed"),
        (b"[" * 100_000, None, "not a valid request"),
        (b"\xff\xfe", None, "not a valid request"),
        (b'{"custom_id": "x", "url": "/v1/completions"}', "x", "body"),
        (b'{"custom_id": 7, "url": "/v1/completions", "body": {}}', None, "str"),
        (b'{"url": "/v1/completions", "body": {}}', None, "custom_id"),
        (b'["a"]', None, "object"),
    ],
)
def test_an_invalid_line_gets_an_error_and_the_rest_run(data, custom_id, expected):
    tally, [answer, other] = run(Runner(fine), data, line("good"))
    if answer["custom_id"] == "good":
        answer, other = other, answer
    assert (tally.total, tally.failed) == (2, 1)
    assert answer["custom_id"] == custom_id and answer["response"] is None
    assert answer["error"]["code"] == "invalid_line" and expected in answer["error"]["message"]
    assert other["response"]["status_code"] == 200


def test_a_line_that_is_too_long_gets_an_error(monkeypatch):
    monkeypatch.setattr(batch_runner, "MAX_LINE_BYTES", 1000)
    _, answers = run(Runner(fine), line("long", body={"prompt": "x" * 5000}), line("a"), line("b"))
    assert {a["custom_id"]: a["error"] is None for a in answers} == {None: False, "a": True, "b": True}
    [error] = [a["error"] for a in answers if a["error"]]
    assert "longer than 1000 bytes" in error["message"]


@pytest.mark.parametrize(
    ("request_line", "status", "expected"),
    [
        (line(url="/v1/images"), 404, "a batch may have"),
        (line(method="GET"), 405, "it must be 'POST'"),
        (line(body={"prompt": "x", "stream": True}), 400, "stream is not supported in a batch"),
        (line(body={"prompt": "x", "model": "other"}), 404, "does not exist"),
        (line(body={"prompt": "x", "max_tokens": "many"}), 400, "max_tokens"),
        (line(body={"prompt": "x", "suffix": "y"}), 400, "suffix is not supported"),
        (line(body=7), 400, "body"),
    ],
)
def test_a_rejected_request_has_the_servers_status(request_line, status, expected):
    async def as_it_is(line, call):
        return call(line)

    tally, [answer] = run(Runner(as_it_is), request_line)
    assert tally.failed == 1 and answer["error"] is None and answer["custom_id"] == "1"
    assert answer["response"]["status_code"] == status
    assert expected in answer["response"]["body"]["error"]["message"]


def test_a_request_waits_while_the_queue_is_full(monkeypatch):
    monkeypatch.setattr(batch_runner, "_RETRY_SECONDS", 0.0)
    left = [3]

    async def full_at_first(line, call):
        left[0] -= 1
        if left[0] >= 0:
            raise QueueFullError("full")
        return b"{}"

    tally, _ = run(Runner(full_at_first), line())
    assert tally.failed == 0 and left[0] == -1


def test_an_engine_that_dies_ends_the_run_after_the_running_requests():
    async def die(line, call):
        runner.engine.errored, runner.engine.dead_error = True, EngineDeadError("gone")
        raise EngineDeadError("gone")

    runner = Runner(die, max_concurrency=1)
    target = io.BytesIO()
    with pytest.raises(EngineDeadError, match="gone"):
        asyncio.run(runner.run(Source(b"\n".join([line("a"), line("b"), line("c")])), target))
    answers = [json.loads(each) for each in target.getvalue().splitlines()]
    assert answers[0]["response"]["status_code"] == 500 and len(answers) <= 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-i", "/nowhere/in", "-o", "{folder}/out"], "/nowhere/in cannot be opened: No such file"),
        (["-i", "{folder}/in", "-o", "/nowhere/out"], "/nowhere/out cannot be opened"),
        (["-i", "{folder}/in", "-o", "{folder}/in"], "is also the output file"),
        (["-i", "{folder}/in", "-o", "{folder}/out", "--max-concurrency", "0"], "--max-concurrency is 0"),
        (["-i", "{folder}/in", "-o", "{folder}/out", "--chat-template", "/nowhere/t"], "/nowhere/t"),
    ],
)
def test_invalid_arguments_are_rejected_before_the_model_is_loaded(arguments, expected, tmp_path, capsys):
    (tmp_path / "in").write_bytes(line())
    argv = [argument.format(folder=tmp_path) for argument in arguments]
    assert main(["run-batch", *argv, "--model", "demo"]) == 1
    assert expected in capsys.readouterr().err
    assert (tmp_path / "in").read_bytes() == line()
