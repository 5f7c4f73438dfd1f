"""The prompt of `mvllm chat`: Ctrl-C, Ctrl-D and commands, with scripted key presses."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mvllm.extension_api import RequestError
from mvllm.extension_api.terminal import ThroughputCounter
from mvllm_tools.chat import ChatSession, _commands
from mvllm_tools.input_lines import Command, answer_lines

LEAVE = "Press Ctrl-C again or type /exit to leave."
CTRL_C, CTRL_D = KeyboardInterrupt(), EOFError()
Keys = str | BaseException
TypeIn = Callable[..., tuple[list[str], str]]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def type_in(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> TypeIn:
    """Answers these lines and key presses on a terminal; returns the lines that were answered, and what was printed."""

    def run(*keys: Keys, answer: Any = None, commands: Any = ()) -> tuple[list[str], str]:
        typed: Iterator[Keys] = iter(keys)
        answered: list[str] = []

        def read(prompt: str) -> str:
            key = next(typed)
            if isinstance(key, BaseException):
                raise key
            return key

        monkeypatch.setattr("builtins.input", read)
        monkeypatch.setattr("sys.stdin", Terminal())
        answer_lines(answer or (lambda line: answered.append(line)), commands)
        assert list(typed) == []  # it has not left before
        printed = capsys.readouterr()
        return answered, printed.out + printed.err

    return run


def test_ctrl_c_at_the_prompt_asks_and_the_second_one_leaves(type_in: TypeIn) -> None:
    answered, printed = type_in("One", CTRL_C, "Two", CTRL_C, CTRL_C)
    assert answered == ["One", "Two"] and printed.count(LEAVE) == 2


@pytest.mark.parametrize("end", [CTRL_D, "/exit", " /bye ", "/quit"])
def test_what_leaves_at_once(type_in: TypeIn, end: Keys) -> None:
    assert type_in("One", end)[0] == ["One"]


def test_ctrl_c_during_an_answer_stops_it_and_a_second_press_only_asks(
    type_in: TypeIn,
) -> None:
    def answer(line: str) -> str | None:
        raise KeyboardInterrupt

    _, printed = type_in("One", CTRL_C, "/exit", answer=answer)
    assert printed.count("[stopped]") == 1 and printed.count(LEAVE) == 1


def test_an_error_is_printed_and_the_next_line_answered(type_in: TypeIn) -> None:
    def answer(line: str) -> str | None:
        if line == "bad":
            raise RequestError("It is bad.")
        return "It failed." if line == "fails" else print(f"<{line}>")

    _, printed = type_in("bad", "fails", "good", CTRL_D, answer=answer)
    assert "error: It is bad." in printed and "error: It failed." in printed and "<good>" in printed


def test_a_misspelt_command_is_not_sent_but_a_path_is(type_in: TypeIn) -> None:
    answered, printed = type_in("/hlep", "/etc/hosts is what?", " /hlep", "", CTRL_D)
    assert answered == ["/etc/hosts is what?", " /hlep"] and "There is no command /hlep. /help lists them." in printed


def test_help_lists_every_command(type_in: TypeIn) -> None:
    seen: list[str] = []
    commands = [Command(("/one", "/first"), "do one", lambda text: seen.append(text), "FILE")]
    _, printed = type_in("/help", "/first a b", "/one", CTRL_D, commands=commands)
    for words in ("/one, /first FILE", "do one", "/help, /?", "/exit, /bye, /quit", "Ctrl-C", "Ctrl-D"):
        assert words in printed
    assert seen == ["a b", ""]


def test_without_a_terminal_ctrl_c_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("One\n"))

    def answer(line: str) -> str | None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer_lines(answer)


class TestConversation:
    @staticmethod
    def session(system: str | None = None) -> tuple[ChatSession, list[Any]]:
        sent: list[Any] = []

        def print_message(messages: Any, speed: ThroughputCounter) -> tuple[str, str | None]:
            sent.append([(each["role"], each["content"]) for each in messages])
            return f"answer {len(sent)}", None

        return ChatSession(print_message, system=system), sent

    def test_retry_answers_the_last_message_again(self, type_in: TypeIn) -> None:
        session, sent = self.session()
        speed = ThroughputCounter()
        commands = _commands(session, speed, "here")
        _, printed = type_in(
            *("/retry", "One", "Two", "/retry", "Three", CTRL_D),
            answer=lambda text: session.respond(text, speed),
            commands=commands,
        )
        assert "There is no message to answer again." in printed
        assert sent[1] == sent[2] == [("user", "One"), ("assistant", "answer 1"), ("user", "Two")]
        assert sent[3] == [*sent[2], ("assistant", "answer 3"), ("user", "Three")]

    def test_the_system_message_can_be_set_and_removed(self) -> None:
        session, sent = self.session("Be brief.")
        speed = ThroughputCounter()
        for text in ("Be kind.", ""):
            session.respond("Hello", speed)
            session.set_system(text)
        session.reset()
        session.respond("Hello", speed)
        assert [messages[0] for messages in sent] == [
            ("system", "Be brief."),
            ("system", "Be kind."),
            ("user", "Hello"),
        ]
        assert len(sent[2]) == 1
