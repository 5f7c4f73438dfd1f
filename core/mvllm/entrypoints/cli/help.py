"""`--help=WORD`: of a command's many options, those that have to do with a word."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence


def add_help_about(parser: argparse.ArgumentParser) -> None:
    """Adds the option behind `--help=WORD` to a command and to the commands below it."""
    for each in (parser, *subcommands(parser).values()):
        each.add_argument("--help-about", metavar="WORD", action=_FilteredHelp, help=argparse.SUPPRESS)


def expand_help(arguments: Sequence[str]) -> list[str]:
    """`--help=WORD`, which argparse does not know, as an option that it does."""
    return [f"--help-about={a.removeprefix('--help=')}" if a.startswith("--help=") else a for a in arguments]


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The commands below a command, by name."""
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {name: each for action in actions for name, each in action.choices.items()}


class _FilteredHelp(argparse.Action):
    """Prints the options that have to do with a word, and exits."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        below = subcommands(parser)
        texts = [text for each in (parser, *below.values()) if (text := _filtered_help(each, str(values), bool(below)))]
        print("\n\n".join(texts) or f"No option of `{parser.prog}` has to do with {values!r}.")
        parser.exit()


def _filtered_help(parser: argparse.ArgumentParser, word: str, named: bool) -> str:
    """The help of the options that have to do with a word, under the command's name if that is not clear."""
    chosen = argparse.ArgumentParser(prog=parser.prog, add_help=False, usage=argparse.SUPPRESS)
    for group in parser._action_groups:
        section = chosen.add_argument_group(group.title)
        for action in _matching(group, word.lower()):
            section._add_action(action)
    text = chosen.format_help().strip()
    return f"{parser.prog}\n\n{text}" if text and named else text


def _matching(group: argparse._ArgumentGroup, word: str) -> Iterator[argparse.Action]:
    whole = word in (group.title or "").lower()  # a word that names a group shows all of it
    for action in group._group_actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._SubParsersAction):
            continue
        text = f"{' '.join(action.option_strings)} {action.dest} {action.help}".lower()
        if whole or word in text or word.replace("-", "_") in text:
            yield action
