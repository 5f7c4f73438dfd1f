"""`--help=WORD`: the help of those options of a command that match a word."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

_FEW_GROUPS = 3


def add_help_about(parser: argparse.ArgumentParser) -> None:
    """Adds the hidden option behind `--help=WORD` to a command and its subcommands."""
    for each in (parser, *subcommands(parser).values()):
        each.add_argument("--help-about", metavar="WORD", action=_FilteredHelp, help=argparse.SUPPRESS)


def list_groups(parser: argparse.ArgumentParser) -> None:
    """Ends the help of commands with many options with the names of their groups."""
    for each in (parser, *subcommands(parser).values()):
        titles = [str(group.title) for group in each._action_groups if group._group_actions][2:]
        if each.epilog is None and len(titles) > _FEW_GROUPS:
            word = next((title for title in titles if " " not in title), "WORD")
            each.epilog = (
                f"Groups of options: {', '.join(titles)}. `{each.prog} --help={word}` prints one group, "
                "--help=WORD all options about a word."
            ).replace("%", "%%")


def expand_help(arguments: Sequence[str]) -> list[str]:
    """Replaces `--help=WORD`, which argparse does not support, with the hidden option."""
    return [f"--help-about={a.removeprefix('--help=')}" if a.startswith("--help=") else a for a in arguments]


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a command's subcommands, by name."""
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {name: each for action in actions for name, each in action.choices.items()}


class _FilteredHelp(argparse.Action):
    """Prints the options that match a word, and exits."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        children = subcommands(parser)
        helps = (_filtered_help(each, str(values), bool(children)) for each in (parser, *children.values()))
        print("\n\n".join(filter(None, helps)) or f"No option of `{parser.prog}` matches {values!r}.")
        parser.exit()


def _filtered_help(parser: argparse.ArgumentParser, word: str, named: bool) -> str:
    """The help of the options that match a word, under the command's name if `named`."""
    chosen = argparse.ArgumentParser(prog=parser.prog, add_help=False, usage=argparse.SUPPRESS)
    for group in parser._action_groups:
        section = chosen.add_argument_group(group.title)
        for action in _matching(group, word.lower()):
            section._add_action(action)
    text = chosen.format_help().strip()
    return f"{parser.prog}\n\n{text}" if text and named else text


def _matching(group: argparse._ArgumentGroup, word: str) -> Iterator[argparse.Action]:
    whole = word in (group.title or "").lower()  # a word in the group's title matches the whole group
    for action in group._group_actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._SubParsersAction):
            continue
        text = f"{' '.join(action.option_strings)} {action.dest} {action.help}".lower()
        if whole or word in text or word.replace("-", "_") in text:
            yield action
