"""`mvllm chat`, `run` and `complete`, run in this process with a scripted engine core."""

from __future__ import annotations

import sys

import pytest

from mvllm.entrypoints.cli.main import PART_COMMANDS, command_summary, installed_commands, main
from tests.unit.entrypoints.builders import ANSWER_TEXT, TOKENIZER
from tests.unit.entrypoints.test_command_line import (
    check_engine_options,
    check_light_help,
    check_positional_model,
    clients,  # noqa: F401  (a fixture)
    folder,  # noqa: F401  (a fixture)
    type_in,
)

TOOLS = PART_COMMANDS["tools"]


def test_every_command_has_a_summary_of_its_own():
    commands = {name: source for name, source in installed_commands().items() if source.distribution == "mvllm-tools"}
    assert {name: command_summary(source) for name, source in commands.items()} == TOOLS


def test_help_imports_no_torch():
    check_light_help(*([command, "--help"] for command in TOOLS))


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_options_and_the_model(command, capsys):
    check_engine_options(command, capsys)
    check_positional_model([command])


class TestRun:
    def test_a_message_after_the_model_is_answered_and_input_is_not_read(self, folder, clients, capsys, monkeypatch):  # noqa: F811
        monkeypatch.setattr(sys, "stdin", None)
        assert main(["run", folder, "Why", "so?", "--max-tokens", "8"]) == 0
        assert capsys.readouterr().out.strip() == ANSWER_TEXT.strip()


class TestChat:
    def test_earlier_messages_are_part_of_the_prompt(self, folder, clients, monkeypatch, capsys):  # noqa: F811
        type_in(monkeypatch, "Hello\n\nAgain\n/exit\nNever\n")
        assert main(["chat", "--model", folder, "--system", "Be brief."]) == 0
        first, second = (r.prompt_token_ids for r in clients[0].requests)
        assert capsys.readouterr().out.count(ANSWER_TEXT) == 2
        text = TOKENIZER.decode(second, skip_special_tokens=False)
        assert text.startswith(TOKENIZER.decode(first, skip_special_tokens=False))
        assert "Be brief." in text
        assert f"{ANSWER_TEXT}<|im_end|>\n<|im_start|>user\nAgain" in text

    def test_reset_drops_earlier_messages(self, folder, clients, monkeypatch):  # noqa: F811
        type_in(monkeypatch, "Hello\n/reset\nHello\n")
        assert main(["chat", "--model", folder]) == 0
        first, second = (r.prompt_token_ids for r in clients[0].requests)
        assert first == second

    def test_by_default_an_answer_may_fill_the_context(self, folder, clients, monkeypatch):  # noqa: F811
        type_in(monkeypatch, "Hello\n")
        main(["chat", "--model", folder])
        (request,) = clients[0].requests
        assert request.sampling_params.max_tokens == 256 - len(request.prompt_token_ids)

    def test_a_conversation_that_has_grown_too_long_can_be_reset(self, folder, clients, monkeypatch, capsys):  # noqa: F811
        type_in(monkeypatch, "Hello " * 300 + "\nHello\n")
        assert main(["chat", "--model", folder]) == 0
        captured = capsys.readouterr()
        assert "max_model_len" in captured.err
        assert ANSWER_TEXT in captured.out


class TestComplete:
    def test_one_prompt(self, folder, clients, capsys):  # noqa: F811
        assert main(["complete", "--model", folder, "--prompt", "Hello"]) == 0
        assert capsys.readouterr().out == ANSWER_TEXT + "\n"

    def test_each_line_of_input(self, folder, clients, monkeypatch, capsys):  # noqa: F811
        type_in(monkeypatch, "Hello\nWorld\n")
        assert main(["complete", "--model", folder]) == 0
        assert capsys.readouterr().out == f"{ANSWER_TEXT}\n" * 2


def test_bye_ends_a_conversation(folder, clients, monkeypatch, capsys):  # noqa: F811
    for command in ("chat", "complete"):
        type_in(monkeypatch, "Hello\n/bye\nNever\n")
        assert main([command, folder]) == 0
        assert capsys.readouterr().out.count(ANSWER_TEXT) == 1
