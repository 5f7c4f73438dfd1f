"""Tests of `mvllm run-batch`: reading batch files and errors of invalid lines. With a model: see tests/e2e."""

from __future__ import annotations

import asyncio
import io
import json
from types import SimpleNamespace

import pytest

from mvllm.entrypoints.cli.main import main
from mvllm.entrypoints.openai.common.serving_context import ServingContext
from mvllm.entrypoints.openai.common.serving_models import OpenAIServingModels
from mvllm.errors import EngineDeadError, QueueFullError
from mvllm_tools import batch_runner
from mvllm_tools.batch_runner import BatchRunner
from tests.unit.entrypoints.test_command_line import check_positional_model


def line(custom_id="1", url="/v1/completions", **more):
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {"prompt": "x"}, **more}).encode()


class Source(io.BytesIO):
    """A file that counts the lines read from it."""

    num_read = 0

    def readline(self, size=-1):
        found = super().readline(size)
        self.num_read += bool(found)
        return found


class Runner(BatchRunner):
    """A BatchRunner whose responses come from the function `respond`."""

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


async def succeed(line, call):
    return b'{"ok":true}'


def run(runner, *lines):
    target = io.BytesIO()
    counts = asyncio.run(runner.run(Source(b"\n".join(lines)), target))
    return counts, [json.loads(each) for each in target.getvalue().splitlines()]


def test_each_line_has_its_response():
    counts, answers = run(Runner(succeed), line("a"), b"", line("b"), b"  ")
    assert (counts.total, counts.failed) == (2, 0)
    assert {answer["custom_id"] for answer in answers} == {"a", "b"}
    assert len({answer["id"] for answer in answers} | {a["response"]["request_id"] for a in answers}) == 4
    for answer in answers:
        assert answer.keys() == {"id", "custom_id", "response", "error"} and answer["error"] is None
        assert answer["response"]["status_code"] == 200 and answer["response"]["body"] == {"ok": True}


def test_at_most_max_concurrency_lines_are_read_ahead():
    async def scenario():
        events = [asyncio.Event() for _ in range(20)]

        async def wait(line, call):
            await events[int(line.custom_id)].wait()
            return b"{}"

        async def until(condition):
            while not condition():
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)  # a runner that reads too many lines would read them in this time

        source, target = Source(b"\n".join(line(str(i)) for i in range(20))), io.BytesIO()
        running = asyncio.create_task(Runner(wait, max_concurrency=3).run(source, target))
        await until(lambda: source.num_read >= 3)
        assert source.num_read == 3 and not target.getvalue()
        events[1].set()  # the second is answered first
        await until(lambda: source.num_read >= 4 and target.getvalue())
        assert source.num_read == 4 and target.getvalue().count(b"\n") == 1
        for event in events:
            event.set()
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
    counts, [answer, other] = run(Runner(succeed), data, line("good"))
    if answer["custom_id"] == "good":
        answer, other = other, answer
    assert (counts.total, counts.failed) == (2, 1)
    assert answer["custom_id"] == custom_id and answer["response"] is None
    assert answer["error"]["code"] == "invalid_line" and expected in answer["error"]["message"]
    assert other["response"]["status_code"] == 200


def test_a_line_that_is_too_long_gets_an_error(monkeypatch):
    monkeypatch.setattr(batch_runner, "MAX_LINE_BYTES", 1000)
    _, answers = run(Runner(succeed), line("long", body={"prompt": "x" * 5000}), line("a"), line("b"))
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
def test_a_rejected_request_has_the_status_code_of_the_server(request_line, status, expected):
    async def call_base(line, call):
        return call(line)

    counts, [answer] = run(Runner(call_base), request_line)
    assert counts.failed == 1 and answer["error"] is None and answer["custom_id"] == "1"
    assert answer["response"]["status_code"] == status
    assert expected in answer["response"]["body"]["error"]["message"]


def test_a_request_waits_while_the_queue_is_full(monkeypatch):
    monkeypatch.setattr(batch_runner, "_RETRY_SECONDS", 0.0)
    num_failures_left = [3]

    async def full_at_first(line, call):
        num_failures_left[0] -= 1
        if num_failures_left[0] >= 0:
            raise QueueFullError("full")
        return b"{}"

    counts, _ = run(Runner(full_at_first), line())
    assert counts.failed == 0 and num_failures_left[0] == -1


def test_a_dead_engine_ends_the_run_after_the_running_requests():
    async def fail_engine(line, call):
        runner.engine.errored, runner.engine.dead_error = True, EngineDeadError("gone")
        raise EngineDeadError("gone")

    runner = Runner(fail_engine, max_concurrency=1)
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


def test_its_options_may_be_in_a_config_file(tmp_path, capsys):
    (tmp_path / "batch.yaml").write_text("input_file: /nowhere/in\noutput-file: out\nmodel: demo\n")
    assert main(["run-batch", "--config", str(tmp_path / "batch.yaml")]) == 1
    assert "/nowhere/in cannot be opened" in capsys.readouterr().err


def test_the_model_may_be_the_positional_argument(capsys):
    check_positional_model(["run-batch", "-i", "a", "-o", "b"])
    with pytest.raises(SystemExit):
        main(["run-batch", "--help"])
    assert capsys.readouterr().out.startswith("usage: mvllm run-batch -i FILE -o FILE [MODEL] [OPTION ...]\n")
