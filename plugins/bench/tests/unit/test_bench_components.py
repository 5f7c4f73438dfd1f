"""Parts of `mvllm bench`: metrics, arrival times, datasets, offline and startup benchmarks."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image

from mvllm.entrypoints.cli.main import main
from mvllm.errors import ConfigError
from mvllm_bench import datasets
from mvllm_bench.arrivals import request_arrival_times
from mvllm_bench.client import ServerEndpoint
from mvllm_bench.datasets import BenchmarkTokenizer, sample_requests
from mvllm_bench.metrics import RequestResult, calculate_metrics, interpolated_percentile


@pytest.fixture(scope="module")
def tokenizer():
    return BenchmarkTokenizer("demo")


class TestMetrics:
    TRACES = (
        RequestResult(10.0, 0.1, 0.5, [0.1, 0.3], prompt_tokens=4, output_tokens=5, text="x"),
        RequestResult(10.2, 0.2, 0.2, [], prompt_tokens=6, output_tokens=1, text="y"),
        RequestResult(10.5, 0.0, 0.4, [], prompt_tokens=9, error="broken"),
    )

    def test_each_metric_has_its_value(self):
        result = calculate_metrics(self.TRACES, 2.0, percentiles=[50, 99], goodput={"ttft": 150, "tpot": 100.1})
        expected = {
            "duration": 2.0,
            "completed": 2,
            "failed": 1,
            "total_input_tokens": 10,
            "total_output_tokens": 6,
            "request_throughput": 1.0,
            "request_goodput": 0.5,
            "output_throughput": 3.0,
            "total_token_throughput": 8.0,
            "max_output_tokens_per_s": 6.0,
            "max_concurrent_requests": 2,
            "mean_ttft_ms": 150.0,
            "median_ttft_ms": 150.0,
            "std_ttft_ms": 50.0,
            "p50_ttft_ms": 150.0,
            "p99_ttft_ms": 199.0,
            "mean_tpot_ms": 100.0,
            "std_tpot_ms": 0.0,
            "mean_itl_ms": 200.0,
            "p99_itl_ms": 298.0,
            "mean_e2el_ms": 350.0,
            "std_e2el_ms": 150.0,
        }
        for name, value in expected.items():
            assert result[name] == pytest.approx(value), name

    def test_metrics_without_results_are_zero(self):
        result = calculate_metrics(self.TRACES[2:], 0.0)
        assert (result["completed"], result["failed"], result["p99_e2el_ms"], result["max_output_tokens_per_s"]) == (
            0, 1, 0, 0,
        )  # fmt: skip
        assert result["request_goodput"] is None

    def test_percentiles_are_interpolated(self):
        values = np.random.default_rng(0).random(37).tolist()
        for p in (0, 1, 50, 99, 99.9, 100):
            assert interpolated_percentile(values, p) == pytest.approx(np.percentile(values, p))


class TestArrivals:
    def test_arrival_times_follow_the_request_rate(self):
        assert request_arrival_times(3, float("inf"), 1.0, 0) == [0.0] * 3
        times = request_arrival_times(500, 50.0, 1.0, 7)
        assert times == sorted(times) and times[-1] == pytest.approx(10.0)
        assert times == request_arrival_times(500, 50.0, 1.0, 7) != request_arrival_times(500, 50.0, 1.0, 8)

    def test_burstiness_sets_the_variance_of_gaps(self):
        for burstiness in (0.25, 1.0, 4.0):
            gaps = np.diff(request_arrival_times(20000, 100.0, burstiness, 1))
            assert (gaps.std() / gaps.mean()) ** 2 == pytest.approx(1 / burstiness, rel=0.1)


class TestRequests:
    def test_random_prompts_have_the_requested_lengths(self, tokenizer):
        samples = sample_requests("random", 20, tokenizer=tokenizer, seed=1, input_len=50, output_len=10)
        assert {s.prompt_len for s in samples} == {50} and {s.output_len for s in samples} == {10}
        assert len({s.prompt for s in samples}) == 20
        assert all(list(s.token_ids) == tokenizer.encode(s.prompt) for s in samples)
        assert samples == sample_requests("random", 20, tokenizer=tokenizer, seed=1, input_len=50, output_len=10)
        assert samples != sample_requests("random", 20, tokenizer=tokenizer, seed=2, input_len=50, output_len=10)

    def test_range_ratio_sets_the_range_of_lengths(self, tokenizer):
        spread = {"input_len": 40, "output_len": 20, "range_ratio": 0.5}
        samples = sample_requests("random", 200, tokenizer=tokenizer, seed=0, **spread)
        inputs, outputs = {s.prompt_len for s in samples}, {s.output_len for s in samples}
        assert min(inputs) >= 20 and max(inputs) <= 60 and len(inputs) > 30
        assert min(outputs) == 10 and max(outputs) == 30

    def test_prefixes_are_shared(self, tokenizer):
        lengths = {"input_len": 12, "prefix_len": 30}
        samples = sample_requests("prefix_repetition", 8, tokenizer=tokenizer, seed=0, num_prefixes=2, **lengths)
        first = {s.token_ids[:30] for s in samples[::2]}
        assert len(first) == 1 and {s.token_ids[:30] for s in samples[1::2]} != first
        assert {s.prompt_len for s in samples} == {42} and len({s.token_ids[30:] for s in samples}) == 8
        assert {s.prompt_len for s in sample_requests("random", 2, tokenizer=tokenizer, seed=0, **lengths)} == {42}

    def test_random_pictures_come_before_the_words(self, tokenizer):
        settings = {"input_len": 12, "output_len": 4, "num_images": 2, "image_size": "40x30"}
        samples = sample_requests("random-mm", 3, tokenizer=tokenizer, seed=1, **settings)
        assert samples == sample_requests("random-mm", 3, tokenizer=tokenizer, seed=1, **settings)
        assert len({url for sample in samples for url in sample.images}) == 6
        assert {sample.prompt_len for sample in samples} == {None}  # the server counts the tokens of pictures
        body = json.loads(ServerEndpoint("http://host", "/v1/chat/completions", "m", chat=True).body(samples[0]))
        *pictures, words = body["messages"][0]["content"]
        assert words == {"type": "text", "text": samples[0].prompt}
        for picture in pictures:
            data = base64.b64decode(picture["image_url"]["url"].removeprefix("data:image/png;base64,"))
            assert Image.open(io.BytesIO(data)).size == (40, 30)
        with pytest.raises(ConfigError, match="640x480"):
            sample_requests("random-mm", 1, tokenizer=tokenizer, seed=1, image_size="big")

    def test_a_file_of_conversations(self, tokenizer, tmp_path):
        def said(*texts):
            return {"id": "x", "conversations": [{"from": "human", "value": text} for text in texts]}

        question, answer = "Tell me about the old dog and the cat.", "The dog and the cat are friends of the girl."
        entries = [said(question, answer, "more"), said("alone " * 9), said("Hi", answer), said(question, "")]
        entries += [
            said("word " * 3000, answer),
            said(question, "word " * 3000),
            {"no": 1},
            said(question + "!", answer),
        ]
        path = tmp_path / "chats.json"
        path.write_text(json.dumps(entries))
        samples = sample_requests("sharegpt", 5, tokenizer=tokenizer, seed=0, path=path)
        assert {s.prompt for s in samples} == {question, question + "!"} and len(samples) == 5
        assert {s.output_len for s in samples} == {len(tokenizer.encode(answer))}
        fixed = sample_requests("sharegpt", 2, tokenizer=tokenizer, seed=0, path=path, output_len=7)
        assert {s.output_len for s in fixed} == {7}
        assert {s.prompt_len for s in sample_requests("sharegpt", 2, tokenizer=None, seed=0, path=path)} == {None}

    @pytest.mark.parametrize(("content", "expected"), [("{", "not JSON"), ("{}", "list"), ("[]", "can be used")])
    def test_an_invalid_dataset_file_is_rejected(self, tokenizer, tmp_path, content, expected):
        path = tmp_path / "chats.json"
        path.write_text(content)
        with pytest.raises(ConfigError, match=expected):
            sample_requests("sharegpt", 5, tokenizer=tokenizer, seed=0, path=path)
        with pytest.raises(ConfigError, match="cannot be read"):
            sample_requests("sharegpt", 5, tokenizer=tokenizer, seed=0, path=tmp_path / "none.json")

    def test_builtin_prompts_need_no_tokenizer(self):
        samples = sample_requests("builtin", 20, tokenizer=None, seed=0)
        assert {s.prompt for s in samples} == set(datasets.BUILTIN_PROMPTS)
        assert {(s.prompt_len, s.output_len) for s in samples} == {(None, 128)}


class TestEngine:
    """Benchmarks of an engine with the demo model."""

    SMALL = ("--model", "demo", "--kv-cache-memory-bytes", str(32 << 20), "--platform", "cpu", "--disable-tqdm")

    def test_throughput(self, tmp_path, capsys):
        path = tmp_path / "new" / "r.json"
        argv = ["bench", "throughput", *self.SMALL, "--num-prompts", "6", "--input-len", "20", "--output-len", "4"]
        assert main([*argv, "--output-json", str(path)]) == 0
        result = json.loads(path.read_text())
        assert (result["num_requests"], result["total_output_tokens"], result["total_num_tokens"]) == (6, 24, 144)
        assert result["tokens_per_second"] == pytest.approx(144 / result["elapsed_time"])
        assert result["requests_per_second"] == pytest.approx(6 / result["elapsed_time"])
        out = capsys.readouterr().out
        assert "Output tokens per second:" in out and "Platform cpu" in out

    def test_latency(self, tmp_path, capsys):
        path = tmp_path / "r.json"
        argv = ["bench", "latency", *self.SMALL, "--batch-size", "2", "--input-len", "8", "--output-len", "3"]
        assert main([*argv, "--num-iters", "3", "--num-iters-warmup", "1", "--output-json", str(path)]) == 0
        result = json.loads(path.read_text())
        assert len(result["latencies"]) == 3
        assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 3)
        assert result["percentiles"]["50"] == pytest.approx(sorted(result["latencies"])[1])
        assert "Average latency (s):" in capsys.readouterr().out

    def test_startup(self, tmp_path, capsys):
        path = tmp_path / "r.json"
        argv = ["bench", "startup", *self.SMALL, "--num-iters", "1", "--num-iters-warmup", "0"]
        assert main([*argv, "--output-json", str(path)]) == 0
        result = json.loads(path.read_text())
        [seconds], [first], [phases] = (result[key] for key in ("startup_times", "first_token_times", "phases"))
        assert 0 < phases["import"] < seconds < first
        assert phases["engine: load model"] > 0 and sum(phases.values()) <= first + 0.5
        assert "engine: load model (s)" in capsys.readouterr().out

    def test_a_failed_start_is_reported(self, capsys):
        assert main(["bench", "startup", "--model", "/nowhere"]) == 1
        assert "/nowhere" in capsys.readouterr().err
        argv = ["bench", "startup", "--model", "demo", "--platform", "no-such", "--num-iters-warmup", "0"]
        assert main(argv) == 1
        error = capsys.readouterr().err
        assert "did not start (exit status 1)" in error and "no-such" in error
        assert main(["bench", "throughput", *self.SMALL, "--input-len", "5000", "--num-prompts", "1"]) == 1
        assert "--max-model-len" in capsys.readouterr().err
