"""Packages add options to `mvllm serve`, and servers that take the run over; a missing part is named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mvllm import installable, plugin_groups
from mvllm.entrypoints.cli import main as command_line
from mvllm.entrypoints.cli.main import main
from mvllm.installation import install_command
from mvllm.logging import get_logger
from mvllm.plugin_groups import PluginSource
from tests.helpers.plugins import prepend, write_metadata

EXTENSION = """
from pathlib import Path

def add_arguments(parser):
    parser.add_argument("--other", metavar="FILE", help="Serves something else.")

def make_server(command):
    if command.args.other is None:
        return None
    engine, settings = command.model_settings(command.args, command.settings)
    def serve(listener):
        Path(command.args.other).write_text(f"{engine.model} {settings.host} {listener.getsockname()[1] > 0}")
        return 7
    return serve
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, entry: str = "serve:other") -> None:
    """Installs the distribution mvllm-other, with an entry point GROUP:NAME, as the only allowed package."""
    group, _, name = entry.partition(":")
    (folder / "the_other_package.py").write_text(text)
    prepend(
        monkeypatch,
        [str(write_metadata(folder, "mvllm-other", f"[mvllm.{group}]\n{name} = the_other_package\n")), str(folder)],
    )
    monkeypatch.setenv("MVLLM_PLUGINS", "mvllm-other")
    monkeypatch.delitem(sys.modules, "the_other_package", raising=False)


def test_an_extension_adds_options_and_takes_the_run_over_if_they_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, monkeypatch, EXTENSION)
    file = tmp_path / "called"
    assert main(["serve", "demo", "--port", "0", "--other", str(file)]) == 7
    assert file.read_text() == "demo 127.0.0.1 True"
    with pytest.raises(SystemExit, match="0"):
        main(["serve", "--help=something"])
    assert "--other FILE" in capsys.readouterr().out
    assert main(["serve", "--port", "0"]) == 1  # without the option, the server of one model runs
    assert "No model is given" in capsys.readouterr().err


def test_the_option_of_a_part_that_is_not_installed_names_its_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plugin_groups, "list_plugins", lambda group: [])
    monkeypatch.setattr(installable, "_installed_version", lambda package: None)
    for option in ("--models", "--models-dir"):
        assert main(["serve", option, "x.yaml"]) == 1
        assert capsys.readouterr().err == (
            f"error: `mvllm serve {option}` needs the package mvllm-router, which is not installed. "
            f"Run: {install_command('mvllm-router')}\n"
        )
    assert main(["router"]) == 1
    assert "`mvllm router` needs the package mvllm-router" in capsys.readouterr().err


def test_the_option_of_a_part_that_is_not_allowed_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = PluginSource(name="router", entry_point="acme", distribution="acme-router", version="1")
    monkeypatch.setattr(plugin_groups, "list_plugins", lambda group: [source])
    monkeypatch.setenv("MVLLM_PLUGINS", "")
    assert main(["serve", "--models", "x.yaml"]) == 1
    assert "which MVLLM_PLUGINS does not let in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nothing_of_this_name", "'other' is the_other_package of mvllm-other 0.1.0"),
        ("", "must name a module with add_arguments(parser) and make_server(command)"),
    ],
)
def test_an_extension_that_cannot_be_loaded_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    install(tmp_path, monkeypatch, text)
    assert main(["serve", "demo"]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("is_server", [True, False])
def test_signals_end_a_command_that_serves_from_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_server: bool
) -> None:
    called: list[str] = []
    monkeypatch.setattr(command_line, "exit_on_signals", lambda: called.append("handlers"))
    text = f"IS_SERVER = {is_server}\ndef add_arguments(parser): pass\ndef run(args): return 3\n"
    install(tmp_path, monkeypatch, text, "cli:run-other")
    assert command_line._run("run-other", ["run-other"], is_program=True) == 3
    assert called == ["handlers"] * is_server
    called.clear()
    assert main(["run-other"]) == 3 and not called  # another program has called it


def test_packages_log_below_mvllm() -> None:
    assert get_logger("mvllm_other.part").name == "mvllm.other.part"
    assert get_logger("mvllm.engine").name == "mvllm.engine" and get_logger("mvllmx").name == "mvllmx"
