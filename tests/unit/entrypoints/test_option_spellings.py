"""Spellings of options, options with dots and JSON values, and settings of the server that requests see."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

import pytest

from mvllm import plugin_groups
from mvllm.entrypoints.cli import generate, serve
from mvllm.entrypoints.cli.argument_parser import find_subcommand
from mvllm.entrypoints.cli.arguments import engine_args
from mvllm.entrypoints.cli.main import _make_parser, main
from mvllm.entrypoints.cli.option_spellings import as_declared
from mvllm.entrypoints.cli.serve import apply_foreign_server_options
from mvllm.errors import ConfigError
from mvllm.installation import install_command
from tests.unit.entrypoints.builders import save_model_folder
from tests.unit.entrypoints.scripted_server import Server


def parse(*words: str) -> argparse.Namespace:
    parser = _make_parser("serve", serve)
    command = parser._subparsers._group_actions[0].choices["serve"]  # type: ignore[union-attr,index,call-overload]
    return parser.parse_args(["serve", *as_declared(command, ["demo", *words])])


def engine(*words: str) -> Any:
    return engine_args(parse(*words))


def server(*words: str) -> Any:
    args = parse(*words)
    apply_foreign_server_options(args)
    return serve._model(args, serve._settings(args))[1]


def test_options_with_dots_are_entries_of_an_object() -> None:
    found = engine(
        *("--hf-overrides", '{"a": 1, "b": {"c": 2}}', "--hf_overrides.b.d=x", "--hf-overrides.list+", "1,two"),
        *("--limit-mm-per-prompt.image", "3", "-sc.method", "ngram", "-sc.num_speculative_tokens", "2"),
    )
    assert found.hf_overrides == {"a": 1, "b": {"c": 2, "d": "x"}, "list": [1, "two"]}
    assert found.limit_mm_per_prompt == {"image": 3}
    assert found.speculative_config == {"method": "ngram", "num_speculative_tokens": 2}


def test_values_are_left_alone() -> None:
    for words in (["--chat-template", "a_b.c"], ["--served-model-name", "x.y_z"], ["--seed", "-1"]):
        assert as_declared(argparse.ArgumentParser(), words) == words
    assert as_declared(argparse.ArgumentParser(), ["--", "--max_model_len"]) == ["--", "--max_model_len"]


@pytest.mark.parametrize(
    "text",
    [
        "-n=5 apples",
        "-n.b. read this",
        "-q is what?",
        "-sc.x is what?",
        "--max_tokens is what?",
        "-O what",
        "- item_one",
    ],
)
def test_a_prompt_may_begin_with_a_dash(text: str) -> None:
    parser = _make_parser("generate", generate)
    command = find_subcommand(parser, ["generate"])[0]
    assert as_declared(command, ["demo", "--prompt", text]) == ["demo", "--prompt", text]
    assert as_declared(command, ['-sc={"method": "ngram"}']) == ['--speculative-config={"method": "ngram"}']


def test_the_number_of_machines_is_not_mistaken_for_that_of_outputs() -> None:
    command = find_subcommand(_make_parser("generate", generate), ["generate"])[0]
    assert as_declared(command, ["-n", "4"]) == ["-n", "4"], "unknown to argparse"


@pytest.mark.parametrize("option", ["--api-key", "--api_key", "--admin_api_key"])
def test_no_spelling_of_a_key_stays_on_the_command_line(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda path, words, environment: executed.append((words, environment)))
    for words in ([option, "secret"], [f"{option}=secret"]):
        monkeypatch.setattr(sys, "argv", ["mvllm", "serve", "demo", *words, "--port", "1"])
        serve.hide_keys(sys.argv)
    assert len(executed) == 2
    for command, environment in executed:
        assert command[-4:] == ["serve", "demo", "--port", "1"] and not any("secret" in word for word in command)
        assert "secret" in environment.values()


@pytest.mark.parametrize(
    "words",
    ["--port.x 3", "--max-model-lenn 3", "--hf-overrides.a"],
)
def test_wrong_options_stay_errors(words: str) -> None:
    with pytest.raises((SystemExit, ConfigError)):
        parse(*words.split())


def test_an_option_of_another_engine_names_the_missing_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    list_plugins = plugin_groups.list_plugins
    monkeypatch.setattr(
        plugin_groups,
        "list_plugins",
        lambda group: [] if group is plugin_groups.FOREIGN_KEYWORDS else list_plugins(group),
    )
    with pytest.raises(SystemExit):
        main(["generate", "demo", "--swap-space", "4"])
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith(
        "unrecognized arguments: --swap-space 4. A keyword of another engine needs the package mvllm-compat, which is "
        f"not installed. Run: {install_command('mvllm-compat')}"
    )
    assert "--help" in second


def test_adapters_may_be_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_check_adapters", lambda adapters, max_rank: None)  # there are no such folders
    words = ["--enable-lora", "--lora-modules", "a=/a", '{"name": "b", "path": "/b", "base_model_name": "m"}']
    found = server(*words, '[{"name": "c", "path": "/c=d"}]')
    assert found.lora_modules == (("a", "/a"), ("b", "/b"), ("c", "/c=d"))
    for wrong in ('{"name": "b"}', '{"name": "b", "path": 1}', "[1]", '{"name": "b", "path": "/b", "rank": 8}', "a"):
        with pytest.raises(ConfigError, match="--lora-modules"):
            server("--enable-lora", "--lora-modules", wrong)


TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ [enable_thinking, style] if style is defined else '' }}"
)


def test_default_variables_of_the_template_give_way_to_those_of_a_request(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = save_model_folder(tmp_path_factory.mktemp("model"), TEMPLATE)
    app = Server(folder, "x", default_template_variables={"enable_thinking": False, "style": "a"})
    ask = {"messages": [{"role": "user", "content": "Hi"}]}
    for more in ({}, {"chat_template_kwargs": {"style": "b"}}, {"reasoning_effort": "high"}):
        assert app.post({**ask, **more}).status_code == 200
    assert app.core.prompts == ["Hi[False, 'a']", "Hi[False, 'b']", "Hi[True, 'a']"]


def test_the_usage_can_end_every_stream(tmp_path_factory: pytest.TempPathFactory) -> None:
    app = Server(save_model_folder(tmp_path_factory.mktemp("model"), TEMPLATE), "x")
    app.force_include_usage = True
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/completions", {"prompt": "Hi", "stream_options": {"include_usage": False}}),
    ):
        lines = app.post({**body, "stream": True}, path).text.split("\n\n")
        assert json.loads(lines[-3].removeprefix("data: "))["usage"]["completion_tokens"] > 0
