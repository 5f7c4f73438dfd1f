"""`mvllm bench` as a command of another package: found by its entry point, with help, completion and config files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mvllm.entrypoints.cli.completion import complete_parser
from mvllm.entrypoints.cli.help import subcommands
from mvllm.entrypoints.cli.main import _make_parser, installed_commands, load_command, main

BENCHMARKS = ("serve", "throughput", "latency", "startup", "sweep")
HEAVY = """
import sys
from mvllm.entrypoints.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
heavy = {"torch", "transformers", "numpy", "tokenizers", "huggingface_hub"} & set(sys.modules)
sys.exit(f"loaded {heavy}" if heavy else "mvllm_bench" not in sys.modules)
"""


def help_of(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_it_is_listed_by_its_package_and_not_imported() -> None:
    program = "import sys\nfrom mvllm.entrypoints.cli.main import main\ntry:\n    main(['--help'])\nfinally:\n    "
    program += "assert 'mvllm_bench' not in sys.modules"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert "bench      benchmarks of engines and of servers" in ran.stdout and "(mvllm-bench 0.9.0)" in ran.stdout


def test_its_help_imports_nothing_heavy(capsys: pytest.CaptureFixture[str]) -> None:
    ran = subprocess.run([sys.executable, "-c", HEAVY, "bench", "serve", "--help"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    text = help_of("bench", "--help", capsys=capsys)
    assert text.startswith("usage: mvllm bench BENCHMARK [OPTION ...]\n") and all(name in text for name in BENCHMARKS)
    text = help_of("bench", "serve", "--help", capsys=capsys)
    assert text.startswith("usage: mvllm bench serve [MODEL] [OPTION ...]\n")


def test_help_with_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of("bench", "--help=burst", capsys=capsys)
    assert text.startswith("mvllm bench serve") and "--burstiness" in text and "mvllm bench latency" not in text
    assert "--request-rate" in help_of("bench", "--help=rate", "serve", capsys=capsys)
    text = help_of("bench", "latency", "--help=batch", capsys=capsys)
    assert "--batch-size" in text and "--temperature" not in text


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_the_model_may_be_a_positional_argument(benchmark: str) -> None:
    parser = _make_parser("bench", load_command("bench"), installed_commands())
    for named in (["m"], ["--model", "m"], ["m", "--model", "m"], ["--model", "other", "--model", "m"]):
        assert parser.parse_args(["bench", benchmark, *named]).model == "m"
    assert not hasattr(parser.parse_args(["bench", benchmark]), "model")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["latency"], "no model is given; add one, as in `mvllm bench latency MODEL`"),
        (["latensy"], "mvllm bench: error: unknown benchmark 'latensy'. Did you mean latency?"),
    ],
)
def test_wrong_usage_prints_two_lines(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *words])
    lines = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 2 and error in lines[0] and "--help" in lines[1] and len(lines) == 2


def test_config_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("num_prompts: 0\nmodel: demo\ninput_len: 4\n")
    assert main(["bench", "throughput", "--config", str(path)]) == 1
    assert "number of prompts is 0" in capsys.readouterr().err
    assert main(["bench", "latency", "--config", str(path)]) == 1
    assert "num_prompts is not an option of `mvllm bench latency`" in capsys.readouterr().err


def test_the_shell_completes_it() -> None:
    benchmarks = subcommands(subcommands(complete_parser())["bench"])
    assert tuple(benchmarks) == BENCHMARKS
    assert "--burstiness" in benchmarks["serve"]._option_string_actions


@pytest.mark.parametrize("allowed", ["", "somebody-else"])
def test_an_allow_list_of_plugins_does_not_apply_to_parts_of_mvllm(
    allowed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MVLLM_PLUGINS", allowed)
    assert "throughput" in help_of("bench", "--help", capsys=capsys)
