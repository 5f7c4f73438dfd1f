"""The argument parser of the command line: errors of two lines that name what may have been meant, and short usages."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from mvllm.entrypoints.cli.help import subcommands


class CommandLineParser(argparse.ArgumentParser):
    """Says what is wrong in two lines, where argparse would list every option first."""

    arguments: Sequence[str] = ()
    """The whole command line, if it is known: an option that no command has is reported by the outermost parser."""

    def error(self, message: str) -> NoReturn:
        """Ends the program with status 2."""
        parser: argparse.ArgumentParser = self
        if message.startswith("unrecognized arguments:"):
            parser = find_subcommand(self, self.arguments)[0]
            message += _suggest_options(parser, message.split()[2:])
        self.exit(2, f"{parser.prog}: error: {message}\n`{parser.prog} --help` lists what there is.\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse's, with the nearest choice."""
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        if isinstance(action, argparse._SubParsersAction):
            text = f"there is no {str(action.metavar or 'command').lower()} {value!r}"
        else:
            text = f"invalid choice: {value!r} (choose from {', '.join(known)})"
        raise argparse.ArgumentError(
            None if isinstance(action, argparse._SubParsersAction) else action,
            f"{text}.{did_you_mean(str(value), known)}",
        )


def add_positional_model(parser: argparse.ArgumentParser, text: str = "As --model.") -> None:
    """Adds MODEL, which may be given in place of `--model`."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", action=ModelAction, default=argparse.SUPPRESS, help=text.replace("%", "%%")
    )


class ModelAction(argparse.Action):
    """Takes the model, by its place or by `--model`, of which the last counts. Whether both agree is checked later.

    By then it is known whether a word that took the model's place belongs to an option that does not exist.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, "model_from_option" if option_string else "model_from_position", values)
        namespace.model = values


def check_model(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the program where two models are named, or none for a command that needs one.

    Args:
        parser: Of the command.
        args: What it has parsed.
    """
    by_place, by_option = (getattr(args, name, None) for name in ("model_from_position", "model_from_option"))
    if None not in (by_place, by_option) and by_place != by_option:
        parser.error(f"two models are named, {by_place!r} and --model {by_option!r}; name one")
    if getattr(args, "needs_model", False) and not hasattr(args, "model"):
        parser.error(f"name a model, as in `{parser.prog} MODEL` or with --model")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` Did you mean ...?`, or nothing where nothing is near."""
    nearest = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {nearest[0]}?" if nearest else ""


def shorten_usage(parser: argparse.ArgumentParser) -> None:
    """Makes the usage of a command and of those below it one line: what has to be given, and that there are options."""
    words = [parser.prog]
    for action in parser._actions:
        if action.option_strings:
            if action.required:
                words.append(f"{action.option_strings[0]} {action.metavar or action.dest.upper()}")
        elif action.help != argparse.SUPPRESS:
            name = str(action.metavar or action.dest)
            words.append({"?": f"[{name}]", "*": f"[{name} ...]"}.get(str(action.nargs), name))
    words.append("[OPTION ...]")
    for below in subcommands(parser).values():
        shorten_usage(below)
    parser.usage = " ".join(words).replace("%", "%%")


def find_subcommand(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[argparse.ArgumentParser, Sequence[str]]:
    """The parser of the command that is called, and the arguments behind the command's name."""
    while below := subcommands(parser):
        index = next((i for i, argument in enumerate(arguments) if not argument.startswith("-")), None)
        if index is None or arguments[index] not in below:
            break
        parser, arguments = below[arguments[index]], arguments[index + 1 :]
    return parser, arguments


def _suggest_options(parser: argparse.ArgumentParser, words: Sequence[str]) -> str:
    known = [text for action in parser._actions if action.help != argparse.SUPPRESS for text in action.option_strings]
    for word in words:
        if word.startswith("--") and (hint := did_you_mean(word.partition("=")[0], known)):
            return f".{hint}"
    return ""
