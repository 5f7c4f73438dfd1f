"""The argument parser of `mvllm`: error messages of two lines with a suggestion, and one-line usages."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from mvllm import plugin_groups
from mvllm.entrypoints.cli.help import subcommands
from mvllm.entrypoints.cli.option_words import in_options, option_names
from mvllm.errors import MvllmError

_PLAIN = {
    "the following arguments are required: COMMAND": "no command is given",
    "the following arguments are required: ": "missing: ",
    ": expected one argument": ": a value is missing",
    ": expected at least one argument": ": a value is missing",
}
"""Messages of argparse, in other words."""
_KINDS = {int: "an integer", float: "a number"}


class CommandLineParser(argparse.ArgumentParser):
    """An ArgumentParser with errors of two lines, without argparse's list of all options."""

    arguments: Sequence[str] = ()
    """The whole command line. The outermost parser needs it to report options that no subcommand has."""

    def error(self, message: str) -> NoReturn:
        """Prints the error and exits with status 2."""
        parser: argparse.ArgumentParser = self
        if message.startswith("unrecognized arguments:"):
            parser = find_subcommand(self, self.arguments)[0]
            message += _suggest_options(parser, message.split()[2:])
            if "--tensor-parallel-size" in parser._option_string_actions:  # a command with the engine's settings
                missing = plugin_groups.missing_part_of(plugin_groups.FOREIGN_KEYWORDS)
                message += f".{missing}" if missing and not message.endswith("?") else missing
        for said, plain in _PLAIN.items():
            message = message.replace(said, plain)
        message = in_options(message, option_names(parser, self.arguments))
        what = "commands" if subcommands(parser) else "options"
        self.exit(2, f"{parser.prog}: error: {message}\n`{parser.prog} --help` lists the {what}.\n")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """The value of an argument. Its errors say what the option takes, not which function has read it."""
        convert = self._registry_get("type", action.type, action.type)
        try:
            return convert(arg_string)
        except argparse.ArgumentTypeError as e:
            text = str(e)
        except MvllmError as e:
            text = str(e).removesuffix(".")
        except (TypeError, ValueError):
            text = f"must be {_KINDS.get(convert, 'another value')}, found {arg_string!r}"
        raise argparse.ArgumentError(action, text)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raises ArgumentError with the nearest choice if `value` is not one of the choices."""
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        if isinstance(action, argparse._SubParsersAction):
            text = f"unknown {str(action.metavar or 'command').lower()} {value!r}"
        else:
            text = f"invalid choice: {value!r} (choose from {', '.join(known)})"
        hint = getattr(action, "hints", {}).get(str(value).lower())
        raise argparse.ArgumentError(
            None if isinstance(action, argparse._SubParsersAction) else action,
            f"{text}. {hint}" if hint else f"{text}.{did_you_mean(str(value), known)}",
        )


def add_positional_model(parser: argparse.ArgumentParser, text: str = "As --model.") -> None:
    """Adds the positional argument MODEL, an alternative to `--model`."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", action=ModelAction, default=argparse.SUPPRESS, help=text.replace("%", "%%")
    )


class ModelAction(argparse.Action):
    """Stores MODEL or `--model`; the last one counts. `check_model` compares the two later.

    By then an unknown option whose value was read as MODEL has been reported.
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
    """Exits with an error if two different models are given, or none for a command that needs one.

    Args:
        parser: The parser of the command.
        args: The parsed arguments.
    """
    by_position, by_option = (getattr(args, name, None) for name in ("model_from_position", "model_from_option"))
    if None not in (by_position, by_option) and by_position != by_option:
        parser.error(f"two models are given, {by_position!r} and --model {by_option!r}; give one")
    if getattr(args, "needs_model", False) and not hasattr(args, "model"):
        parser.error(f"no model is given; add one, as in `{parser.prog} MODEL` or with --model")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` Did you mean ...?` with the most similar known word; empty if none is similar.

    Dashes at the beginning do not count, and numbers have to be equal: `float8` is not `float`, nor `--json` `--stop`.
    """
    names = {name.lstrip("-"): name for name in known}
    numbers = re.findall(r"\d+", word)
    comparable = [name for name in names if re.findall(r"\d+", name) == numbers]
    similar = difflib.get_close_matches(word.lstrip("-").lower(), comparable, n=1)
    return f" Did you mean {names[similar[0]]}?" if similar else ""


def shorten_usage(parser: argparse.ArgumentParser) -> None:
    """Sets one-line usages of a command and its subcommands: required arguments, then `[OPTION ...]`."""
    words = [parser.prog]
    for action in parser._actions:
        if action.option_strings:
            if action.required:
                words.append(f"{action.option_strings[0]} {action.metavar or action.dest.upper()}")
        elif action.help != argparse.SUPPRESS:
            name = str(action.metavar or action.dest)
            words.append({"?": f"[{name}]", "*": f"[{name} ...]"}.get(str(action.nargs), name))
    words.append("[OPTION ...]")
    for subparser in subcommands(parser).values():
        shorten_usage(subparser)
    parser.usage = " ".join(words).replace("%", "%%")


def find_subcommand(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[argparse.ArgumentParser, Sequence[str]]:
    """The parser of the innermost subcommand on the command line, and the arguments after its name."""
    while children := subcommands(parser):
        index = next((i for i, argument in enumerate(arguments) if not argument.startswith("-")), None)
        if index is None or arguments[index] not in children:
            break
        parser, arguments = children[arguments[index]], arguments[index + 1 :]
    return parser, arguments


def _suggest_options(parser: argparse.ArgumentParser, words: Sequence[str]) -> str:
    known = [text for action in parser._actions if action.help != argparse.SUPPRESS for text in action.option_strings]
    for word in words:
        if word.startswith("--") and (hint := did_you_mean(word.partition("=")[0], known)):
            return f".{hint}"
    if "--prompt" in known and not any(word.startswith("-") for word in words):
        return ". A text is given with --prompt"
    return ""
