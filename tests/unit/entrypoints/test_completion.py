"""`mvllm completion`: shells complete commands, options and values."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mvllm.entrypoints.cli.completion import SHELLS, complete_parser
from mvllm.entrypoints.cli.help import subcommands
from mvllm.entrypoints.cli.main import COMMANDS, main


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "words, expected",
    [
        (["ser"], {"serve"}),
        (["plugin", "n"], {"new"}),
        (["serve", "demo", "--max-num-b"], {"--max-num-batched-tokens"}),
        (["serve", "--scheduling-policy", ""], {"fcfs", "priority"}),
        (["serve", "--config", "ser"], {"serve.yaml"}),
        (["serve", "--help-a"], set()),  # a hidden option
    ],
)
def test_bash_completes(
    words: list[str], expected: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "serve.yaml").touch()
    (tmp_path / "script").write_text(script("bash", capsys))
    ask = 'source ./script; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_mvllm; printf "%s\\n" "${COMPREPLY[@]}"'
    found = subprocess.run(
        ["bash", "-c", ask, "-", "mvllm", *words], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (set(found.stdout.split()), found.stderr) == (expected, "")


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_a_script_with_all_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    assert all(name in text for name in COMMANDS) and "max-num-batched-tokens" in text


def test_the_script_covers_the_options_of_every_command() -> None:
    commands = subcommands(complete_parser())
    assert set(commands) >= set(COMMANDS)
    assert all(len(parser._actions) > 1 or name in ("list",) for name, parser in commands.items())


def test_without_the_library_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert "pip install 'shtab" in capsys.readouterr().err
