"""`mvllm bench serve` against a server with scripted responses."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from mvllm.entrypoints.cli.main import main
from mvllm.extension_api.openai_client import join_url
from mvllm_bench.client import ServerEndpoint
from tests.helpers.sse_server import DONE, Answer, SSEServer, completion, event, usage

PAUSE = 0.02
KEYS = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate",
    "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
    "request_throughput", "request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
    "max_concurrent_requests",
}  # fmt: skip
KEYS |= {f"{part}_{name}_ms" for part in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")}


def words(request, index):
    """Streams seven tokens in three chunks, with two pauses."""
    return Answer(
        [
            PAUSE,
            completion("one "),
            PAUSE,
            completion("two three"),
            completion(" four"),
            completion("", "length"),
            usage(5, 7),
            DONE,
        ]
    )


@pytest.fixture
def bench(tmp_path, capsys):
    """Runs the command; returns its exit status, result file and output."""

    def run(server, *arguments, count=4):
        url = server if isinstance(server, str) else server.url
        argv = ["bench", "serve", "--base-url", url, "--dataset-name", "builtin", "--num-prompts", str(count)]
        argv += ["--ready-check-timeout-sec", "0", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
        status = main([*argv, "--save-result", *arguments])
        captured = capsys.readouterr()
        file = tmp_path / "r.json"
        result = json.loads(file.read_text().splitlines()[-1]) if file.exists() else {}
        return status, result, captured

    return run


def test_metrics_come_from_the_responses(bench):
    with SSEServer(words) as server:
        status, result, captured = bench(server, "--save-detailed", "--metadata", "build=7", "--label", "mine")
    assert status == 0
    assert result.keys() >= KEYS
    assert (result["completed"], result["failed"], result["model_id"]) == (4, 0, "model-of-the-server")
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (20, 28)
    assert (result["build"], result["label"], result["request_rate"]) == ("7", "mine", "inf")
    assert result["output_lens"] == [7] * 4 and result["input_lens"] == [5] * 4
    assert result["generated_texts"] == ["one two three four"] * 4 and result["errors"] == [""] * 4
    assert result["output_throughput"] == pytest.approx(28 / result["duration"])
    for ttft, itl in zip(result["ttfts"], result["itls"], strict=True):
        assert ttft >= PAUSE * 0.99 and len(itl) == 2 and min(itl) >= 0
    latencies = [t + sum(i) for t, i in zip(result["ttfts"], result["itls"], strict=True)]
    assert result["mean_e2el_ms"] >= 1000 * sum(latencies) / 4 - 1e-6
    assert result["mean_tpot_ms"] == pytest.approx((result["mean_e2el_ms"] - result["mean_ttft_ms"]) / 6)
    assert result["mean_itl_ms"] == pytest.approx(1000 * sum(map(sum, result["itls"])) / 8)
    for text in ("Successful requests:", "Mean TTFT (ms):", "P99 E2EL (ms):", "Result written to"):
        assert text in captured.out


def test_requests_have_the_given_options(bench):
    with SSEServer(words) as server:
        bench(
            server,
            *("--output-len", "9", "--ignore-eos", "--api-key", "secret", "--header", "X-Test=1", "--top-k", "3"),
            *("--extra-body", '{"temperature": 0.5, "user": "me"}', "--model", "given"),
        )
    request = server.requests[0]
    assert request.path == "/v1/completions"
    assert request.headers["authorization"] == "Bearer secret" and request.headers["x-test"] == "1"
    prompt = request.body.pop("prompt")
    assert isinstance(prompt, str) and len({r.body.get("prompt", prompt) for r in server.requests}) == 4
    assert request.body == {
        "model": "given",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 9,
        "ignore_eos": True,
        "top_k": 3,
        "temperature": 0.5,
        "user": "me",
    }


def test_chat_counts_from_the_first_text_and_not_from_the_role(bench):
    def chat(request, index):
        def delta(finish=None, **fields):
            return event(choices=[{"index": 0, "delta": fields, "finish_reason": finish}])

        first = delta(role="assistant", content="")
        return Answer(
            [first, PAUSE, delta(reasoning_content="hm"), delta(content="yes"), delta("stop"), usage(3, 2), DONE]
        )

    with SSEServer(chat) as server:
        _, result, _ = bench(server, "--endpoint-type", "openai-chat", "--save-detailed")
    body = server.requests[0].body
    assert body["messages"][0]["role"] == "user" and "prompt" not in body
    assert body["max_completion_tokens"] == 128 and "ignore_eos" not in body
    assert server.requests[0].path == "/v1/chat/completions"
    assert min(result["ttfts"]) >= PAUSE * 0.99
    assert result["generated_texts"][0] == "hmyes" and len(result["itls"][0]) == 1
    assert result["total_output_tokens"] == 8


def test_events_may_be_split_anywhere(bench):
    def pieces(request, index):
        said = completion("Grüße").replace(b"\n\n", b"\r\n\r\n") + b": a comment\n\n" + completion(" an", "stop")
        said += usage(1, 2)
        return Answer([said[i : i + 7] for i in range(0, len(said), 7)])

    with SSEServer(pieces) as server:
        status, result, _ = bench(server, "--save-detailed", count=1)
    assert status == 0 and result["generated_texts"] == ["Grüße an"] and result["output_lens"] == [2]


FAILURES = {
    "HTTP status 500: out of order": Answer([b'{"error": {"message": "out of order", "type": "x"}}'], status=500),
    "HTTP status 429: <p>busy</p>": Answer([b"<p>busy</p>"], status=429),
    "error in the stream: engine died": Answer([completion("a"), event(error={"message": "engine died"}), DONE]),
    "the stream ended in the middle of the response": Answer([completion("a"), completion("b")]),
    "the stream ended without a response": Answer([usage(1, 0), DONE]),
    "closed the connection in the middle of the response": Answer([completion("a")], cut=True),
    "DecodeError": Answer([completion("a"), b"data: {'no': json}\n\n", DONE]),
    "ValidationError": Answer([b'data: {"choices": 3}\n\n', DONE]),
}


def test_failed_requests_are_counted_and_printed(bench):
    answers = list(FAILURES.values())

    def script(request, index):
        return answers[index] if index < len(answers) else words(request, index)

    with SSEServer(script) as server:
        status, result, captured = bench(server, "--save-detailed", "--max-concurrency", "1", count=len(answers) + 2)
    assert status == 0
    assert (result["completed"], result["failed"]) == (2, len(answers))
    assert (result["total_output_tokens"], result["total_input_tokens"]) == (14, 10)
    for expected, error in zip(FAILURES, result["errors"], strict=False):
        assert expected in error
    assert result["errors"][-2:] == ["", ""]
    assert captured.err.count("error, 1 times: ") == 5  # five of the eight errors are printed


def test_the_exit_status_is_1_if_all_requests_failed(bench):
    with SSEServer(lambda request, index: Answer([b"{}"], status=503)) as server:
        status, result, captured = bench(server)
    assert status == 1 and result["completed"] == 0 and result["mean_ttft_ms"] == 0
    assert "error, 4 times: HTTP status 503" in captured.err


def test_a_request_that_takes_too_long_is_a_failure(bench):
    with SSEServer(lambda request, index: Answer([completion("a"), 60.0])) as server:
        status, result, captured = bench(server, "--timeout", "0.2", "--model", "m", count=1)
    assert status == 1 and result["failed"] == 1 and "no complete response within the timeout" in captured.err


def test_an_unreachable_server_is_named(bench):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        status, _, captured = bench(url, "--model", "m", "--ready-check-timeout-sec", "0.1")
        assert status == 1 and f"{url}/v1/completions did not complete" in captured.err
        status, _, captured = bench(url)
    assert status == 1 and "Cannot get a model name" in captured.err and "--model" in captured.err


def test_max_concurrency_limits_concurrent_requests(bench):
    three = asyncio.Barrier(3)

    def script(request, index):
        return Answer([*([three.wait] if 1 <= index <= 3 else []), *words(request, index).parts])

    with SSEServer(script) as server:
        _, result, _ = bench(server, "--max-concurrency", "3", "--num-warmups", "1", count=9)
        # Without a limit, the server responds only after all nine requests have arrived.
    assert server.most_at_once == 3 and result["max_concurrent_requests"] <= 3
    assert len(server.requests) == 10 and result["completed"] == 9

    nine = asyncio.Barrier(9)
    with SSEServer(lambda request, index: Answer([nine.wait, *words(request, index).parts])) as server:
        bench(server, count=9)
    assert server.most_at_once == 9


def test_the_default_concurrency_is_1024(bench, monkeypatch):
    monkeypatch.setattr("mvllm_bench.server_benchmark.DEFAULT_MAX_CONCURRENCY", 3)
    with SSEServer(words) as server:
        _, result, captured = bench(server, count=9)
        assert server.most_at_once <= 3 and result["completed"] == 9 and result["max_concurrency"] == 3
        assert "At most 3 requests" in captured.err
        _, result, _ = bench(server, "--request-rate", "1000", count=4)
        assert result["max_concurrency"] is None


def test_a_full_queue_is_explained(bench):
    with SSEServer(lambda request, index: Answer([b"{}"], status=429)) as server:
        _, _, captured = bench(server, count=1)
    assert "--max-concurrency" in captured.err


def test_requests_are_sent_at_the_request_rate(bench):
    with SSEServer(words) as server:
        _, result, _ = bench(server, "--request-rate", "40", "--seed", "3", "--save-detailed", count=8)
    assert result["request_rate"] == 40 and result["start_times"] == sorted(result["start_times"])
    assert result["duration"] >= 8 / 40  # the last one is sent at count / rate


def test_goodput_counts_requests_within_the_limits(bench):
    def script(request, index):
        slow = [0.3] if index % 2 else []
        return Answer([*slow, *words(request, index).parts])

    with SSEServer(script) as server:
        _, result, _ = bench(server, "--goodput", "ttft:299.5", "e2el:100000", "--metric-percentiles", "50,99.9")
        assert result["request_goodput"] <= 2 / result["duration"]
        assert result["p99.9_ttft_ms"] >= 300 and "p99_ttft_ms" not in result
        _, result, _ = bench(server, "--goodput", "e2el:100000", "--percentile-metrics", "ttft")
        assert result["request_goodput"] == pytest.approx(4 / result["duration"])
        assert "mean_ttft_ms" in result and "mean_tpot_ms" not in result


def test_the_tokenizer_counts_tokens_if_the_server_does_not(bench):
    def script(request, index):
        return Answer([completion("Once upon a time"), completion(" there", "stop"), DONE])

    with SSEServer(script) as server:
        _, result, _ = bench(server, "--save-detailed", "--tokenizer", "demo", count=2)
        from mvllm_bench.datasets import BenchmarkTokenizer

        tokenizer = BenchmarkTokenizer("demo")
        assert result["output_lens"] == [len(tokenizer.encode("Once upon a time there"))] * 2
        assert result["input_lens"] == [len(tokenizer.encode(r.body["prompt"])) for r in server.requests]
        assert result["tokenizer_id"] == "demo"
        _, result, _ = bench(server, "--save-detailed", count=2)
    assert result["output_lens"] == [2, 2] and result["tokenizer_id"] is None


def test_results_can_be_appended_to_one_file(bench, tmp_path):
    with SSEServer(words) as server:
        for _ in range(2):
            bench(server, "--append-result", count=1)
    assert [json.loads(line)["completed"] for line in (tmp_path / "r.json").read_text().splitlines()] == [1, 1]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--goodput", "ttft:fast"], "--goodput: 'ttft:fast'"),
        (["--goodput", "itl:3"], "--goodput: 'itl:3'"),
        (["--percentile-metrics", "ttft,tbt"], "'tbt' is not one of ttft, tpot"),
        (["--metric-percentiles", "101"], "--metric-percentiles"),
        (["--metadata", "x"], "--metadata: 'x'"),
        (["--request-rate", "0"], "request rate"),
        (["--request-rate", "1", "--burstiness", "0"], "burstiness"),
        (["--max-concurrency", "0"], "concurrency"),
        (["--dataset-name", "sharegpt", "--tokenizer", "demo"], "--dataset-path"),
        (["--dataset-name", "random", "--tokenizer", "/no/such/folder"], "name one with --tokenizer"),
        (["--dataset-name", "random", "--tokenizer", "none"], "--tokenizer"),
    ],
)
def test_invalid_options_are_rejected(bench, arguments, expected):
    status, result, captured = bench("http://127.0.0.1:9", "--model", "m", *arguments)
    assert status == 1 and expected in captured.err and result == {}


@pytest.mark.parametrize("base", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_base_urls_may_end_with_v1(base):
    assert join_url(base, "/v1/models") == "http://h:1/v1/models"
    assert ServerEndpoint(base, "/generate", "m").url in ("http://h:1/generate", "http://h:1/v1/generate")
