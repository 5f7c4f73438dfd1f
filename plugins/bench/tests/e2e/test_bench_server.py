"""`mvllm bench serve` against a server with the demo model."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from mvllm.entrypoints.cli.main import main
from tests.helpers.server import SMALL, ServerProcess


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), "demo", "--port", "0", *SMALL) as server:
        yield server.wait_ready()


@pytest.mark.parametrize("kind", ["openai", "openai-chat"])
def test_bench_serve(server, tmp_path, kind):
    arguments = ["--endpoint-type", kind, "--num-prompts", "12", "--input-len", "20", "--output-len", "9"]
    arguments += ["--max-concurrency", "4", "--tokenizer", "demo", "--ignore-eos", "--goodput", "e2el:1000000"]
    arguments += ["--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
    assert main(["bench", "serve", "--base-url", server.url, *arguments]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["completed"], result["failed"], result["model_id"]) == (12, 0, "demo")
    assert result["output_lens"] == [9] * 12 and result["errors"] == [""] * 12
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert all(
        20 <= length <= 45 for length in result["input_lens"]
    )  # including the tokens that the template or the tokenizer adds
    assert 0 < result["mean_ttft_ms"] < result["mean_e2el_ms"]
    assert 1 <= result["max_concurrent_requests"] <= 4
