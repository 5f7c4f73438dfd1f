"""`mvllm bench sweep`: successive halving, the journal, the settings that are compared, and the config file."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mvllm.config.engine_args import EngineArgs
from mvllm.entrypoints.cli import serve
from mvllm.entrypoints.cli.config_file import expand_config
from mvllm.entrypoints.cli.main import _make_parser, main
from mvllm.errors import ConfigError, MvllmError
from mvllm_bench.sweep import DEFAULT, Candidate, Journal, Round, Start, SweepResult, count_starts, sweep
from mvllm_bench.sweep_settings import (
    API_SERVERS,
    candidates,
    config_file,
    default_axes,
    fixed_settings,
    format_result,
    read_axes,
    summary,
)


def candidate(**settings: Any) -> Candidate:
    return Candidate(tuple(settings.items()))


CANDIDATES = [candidate(max_num_seqs=n) for n in (8, 16, 32, 64, 128)]


def machine(speeds: dict[Candidate, float], noise: float = 0.02, seed: int = 0) -> Callable[[Start], list[Round]]:
    """Measures made-up speeds with normally distributed noise; a speed of 0 is a failure."""
    draw = random.Random(seed)

    def measure(start: Start) -> list[Round]:
        if not speeds[start.candidate]:
            raise MvllmError("out of memory")
        return [Round(draw.gauss(1, noise) * speeds[start.candidate]) for _ in range(start.num_rounds)]

    return measure


def speeds_of(*values: float, default: float = 100) -> dict[Candidate, float]:
    return {DEFAULT: default, **dict(zip(CANDIDATES, values, strict=True))}


class TestHalving:
    def test_the_fastest_is_chosen_and_measured_most(self) -> None:
        starts: list[Start] = []
        measure = machine(speeds_of(50, 90, 120, 130, 70))
        result = sweep(CANDIDATES, measure, on_start=starts.append)
        assert result.chosen == candidate(max_num_seqs=64)
        assert [each.candidate.settings[0][1] for each in result.measured] == [64, 32, 16, 128, 8]
        assert [len(each.rounds) for each in result.measured] == [4, 4, 2, 1, 1]
        assert len(starts) == count_starts(len(CANDIDATES))
        assert result.gain == pytest.approx(0.3, abs=0.05) and result.noise == pytest.approx(0.02, abs=0.015)

    def test_last_rounds_of_the_fastest_and_the_defaults_alternate(self) -> None:
        starts: list[Start] = []
        sweep(CANDIDATES[:1], machine(speeds_of(50, 1, 1, 1, 1)), on_start=starts.append)
        assert [start.candidate for start in starts] == [CANDIDATES[0], DEFAULT] * 2
        assert [start.first_round for start in starts] == [0, 0, 2, 2]

    def test_equal_speeds_keep_the_defaults_with_few_exceptions(self) -> None:
        noisy = [machine(speeds_of(100, 100, 100, 100, 100), noise=0.1, seed=seed) for seed in range(200)]
        results = [sweep(CANDIDATES, measure) for measure in noisy]
        kept = [result for result in results if result.chosen == DEFAULT]
        assert len(kept) > 185 and "no settings are faster" in summary(kept[0])  # two standard errors: one in forty

    def test_settings_that_fail_are_dropped(self) -> None:
        result = sweep(CANDIDATES, machine(speeds_of(0, 0, 120, 0, 0)))
        assert result.chosen == candidate(max_num_seqs=32)
        assert sum(each.error == "out of memory" for each in result.measured) == 4
        assert "failed: out of memory" in format_result(result, "tokens/s")

    def test_defaults_that_fail_lose(self) -> None:
        result = sweep(CANDIDATES, machine(speeds_of(1, 2, 3, 4, 5, default=0)))
        assert result.chosen == candidate(max_num_seqs=128) and "do not work" in summary(result)

    def test_nothing_works(self) -> None:
        result = sweep(CANDIDATES, machine(speeds_of(0, 0, 0, 0, 0)))
        assert result.best is None and result.chosen == DEFAULT

    def test_the_table_has_the_defaults_first(self) -> None:
        result = sweep(CANDIDATES, machine(speeds_of(50, 90, 120, 130, 70)))
        lines = format_result(result, "tokens/s").splitlines()
        assert lines[0].split() == ["settings", "tokens/s", "+-", "rounds"]
        assert [line.split("  ")[0] for line in lines[2:5]] == [
            "default settings",
            "max_num_seqs 64",
            "max_num_seqs 32",
        ]


HEADER = {"model": "demo", "values": {"max_num_seqs": [8, 16]}}


class TestJournal:
    def run(self, path: Path, measure: Callable[[Start], list[Round]], *, resume: bool) -> SweepResult:
        journal = Journal(path, HEADER, resume=resume)
        return sweep(CANDIDATES, lambda start: journal.measure(start, measure))

    def test_an_interrupted_sweep_continues_with_the_recorded_rounds(self, tmp_path: Path) -> None:
        measured: list[Start] = []
        fast = machine(speeds_of(50, 90, 120, 130, 0))

        def interrupted(start: Start) -> list[Round]:
            if len(measured) == 8:
                raise KeyboardInterrupt
            measured.append(start)
            return fast(start)

        path = tmp_path / "journal"
        with pytest.raises(KeyboardInterrupt):
            self.run(path, interrupted, resume=False)
        with path.open("a") as file:
            file.write('{"candidate": "cut o')  # the process ended while it wrote
        rest: list[Start] = []
        result = self.run(path, lambda start: record(rest, fast, start), resume=True)
        assert result.chosen == candidate(max_num_seqs=64)
        assert not {(s.candidate, s.stage, s.first_round) for s in rest} & {
            (s.candidate, s.stage, s.first_round) for s in measured
        }
        assert self.run(path, lambda start: pytest.fail("everything is recorded"), resume=True).chosen == result.chosen

    def test_other_options_or_no_resume_are_errors(self, tmp_path: Path) -> None:
        path = tmp_path / "journal"
        Journal(path, HEADER, resume=False)
        with pytest.raises(ConfigError, match="Add --resume to continue it, or --overwrite"):
            Journal(path, HEADER, resume=False)
        with pytest.raises(ConfigError, match="other values of model"):
            Journal(path, {**HEADER, "model": "other"}, resume=True)


def record(starts: list[Start], measure: Callable[[Start], list[Round]], start: Start) -> list[Round]:
    starts.append(start)
    return measure(start)


class TestSettings:
    def test_values_are_read_as_the_settings_are(self) -> None:
        given = [
            "max-num-batched-tokens=1k,none",
            "enable_prefix_caching=false",
            "quantization=none,int8",
            "THREADS=1,2",
            "max_model_len=auto,32k",
        ]
        axes = read_axes([*given, "api_server_count=1,2"], server=True)
        assert axes == {
            "max_num_batched_tokens": [1000, None],
            "enable_prefix_caching": [False],
            "quantization": [None, "int8"],
            "THREADS": ["1", "2"],
            "max_model_len": ["auto", 32000],
            API_SERVERS: [1, 2],
        }

    @pytest.mark.parametrize(
        "text, message",
        [
            ("max_num_seq=1", "Did you mean max_num_seqs?"),
            ("max_num_seqs=many", "must be an integer >= 1"),
            ("max_num_seqs", "must be NAME=VALUE"),
            ("model=a,b", "cannot be varied|not a setting that can be varied"),
            ("api_server_count=2", "Add --measure server"),
        ],
    )
    def test_wrong_ones_are_errors(self, text: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            read_axes([text], server=False)

    def test_combinations_that_are_not_permitted_or_the_defaults_are_left_out(self) -> None:
        axes = {"max_num_seqs": [256, 512], "max_num_batched_tokens": [256, 2048]}
        found = candidates(axes, EngineArgs(model="demo"))
        assert [dict(each.settings) for each in found] == [
            {"max_num_seqs": 256, "max_num_batched_tokens": 256},
            {"max_num_seqs": 512, "max_num_batched_tokens": 2048},
        ]
        with pytest.raises(ConfigError, match="all are the default settings"):
            candidates({"max_num_seqs": [256]}, EngineArgs(model="demo"))

    def test_default_values_end_where_more_makes_no_difference(self) -> None:
        assert default_axes(100)["max_num_seqs"] == [64, 128]

    def test_the_file_is_a_config_file_of_the_server(self, tmp_path: Path) -> None:
        settings = EngineArgs(model="demo", kv_cache_memory_bytes=64 << 20, hf_token="secret", seed=1)
        chosen = candidate(
            max_num_seqs=64, enable_prefix_caching=False, api_server_count=2, THREADS="2", quantization=None
        )
        text = config_file(fixed_settings(settings), chosen, ["Written by a test."])
        assert "secret" not in text and "# Start the server with: THREADS=2 mvllm serve" in text
        assert set(yaml.safe_load(text)) == {
            *("model", "kv_cache_memory_bytes", "max_num_seqs", "enable_prefix_caching", "api_server_count"),
        }
        path = tmp_path / "serve.yaml"
        path.write_text(text)
        parser = _make_parser("serve", serve)
        args = parser.parse_args(expand_config(parser, ["serve", "--config", str(path)]))
        assert (args.model, args.max_num_seqs, args.enable_prefix_caching, args.api_server_count) == (
            "demo",
            64,
            False,
            2,
        )


class TestCommand:
    SMALL = ("--num-prompts", "4", "--input-len", "4", "--output-len", "4", "--kv-cache-memory-bytes", "64M")

    def sweep(self, folder: Path, *options: str) -> dict[str, Any]:
        output = folder / "out" / "serve.yaml"
        output.parent.mkdir()
        assert main(["bench", "sweep", "demo", "--output", str(output), *self.SMALL, *options]) == 0
        return yaml.safe_load(output.read_text())

    def test_an_engine_is_measured_with_the_settings(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("mvllm_bench.sweep._FINAL_STARTS", 1)
        found = self.sweep(tmp_path, "--vary", "max_num_seqs=1")
        assert found.items() >= {"model": "demo", "kv_cache_memory_bytes": 64 << 20}.items()
        printed = capsys.readouterr()
        assert "[2/2] stage 1: default settings ..." in printed.err
        assert [line.split("  ")[0] for line in printed.out.splitlines()[2:4]] == ["default settings", "max_num_seqs 1"]

    @pytest.mark.exhaustive
    def test_a_server_is_measured_under_load(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.sweep(tmp_path, "--vary", "max_num_seqs=1", "--goodput", "ttft:60000", "--max-concurrency", "2")
        assert "good tokens/s" in capsys.readouterr().out

    @pytest.mark.exhaustive
    def test_settings_that_do_not_start_are_reported_by_their_error(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.sweep(tmp_path, "--vary", "block_size=7")
        assert "failed: block_size" in capsys.readouterr().out

    def test_an_existing_file_is_kept(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "serve.yaml").write_text("model: mine\n")
        assert main(["bench", "sweep", "demo", "--output", str(tmp_path / "serve.yaml")]) == 1
        assert "add --overwrite" in capsys.readouterr().err and (tmp_path / "serve.yaml").read_text() == "model: mine\n"
