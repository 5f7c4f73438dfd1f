"""`mvllm completion SHELL`: prints a script with which the shell completes commands, options and their values.

The script is static: it is as fast as the shell, and belongs to the installed version.
"""

from __future__ import annotations

import argparse
import importlib

from mvllm.entrypoints.cli.help import subcommands
from mvllm.errors import ConfigError

SHELLS = {
    "bash": "mvllm completion bash > ~/.local/share/bash-completion/completions/mvllm",
    "zsh": "mvllm completion zsh > ~/.zfunc/_mvllm  # a folder of $fpath",
    "fish": "mvllm completion fish > ~/.config/fish/completions/mvllm.fish",
}
"""Shells, each with the command that installs the script."""

_PATHS = ("FILE", "PATH", "FOLDER", "MODEL")  # metavars of values that are completed as files
_PATH_OPTIONS = ("model", "tokenizer", "chat_template")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument("shell", metavar="SHELL", choices=tuple(SHELLS), help=f"{', '.join(SHELLS)}.")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "To install it, and again after an update of mvllm:\n" + "\n".join(
        f"  {shell:5} {command}" for shell, command in SHELLS.items()
    )


def run(args: argparse.Namespace) -> int:
    """Prints the script."""
    try:
        import shtab
    except ImportError as e:
        raise ConfigError("`mvllm completion` needs the package shtab. Run: pip install 'mvllm[completion]'") from e
    print(shtab.complete(complete_parser(shtab.FILE), args.shell))
    return 0


def complete_parser(file_completion: object = None) -> argparse.ArgumentParser:
    """The parser of the whole command line, with the options of every command.

    Args:
        file_completion: Value of the attribute `complete` of arguments that are files; None sets none.
    """
    from mvllm.entrypoints.cli.main import COMMANDS, _make_parser

    parser = _make_parser(None, None)
    commands = subcommands(parser)
    for name in COMMANDS:
        importlib.import_module(f"mvllm.entrypoints.cli.{name.replace('-', '_')}").add_arguments(commands[name])
        for each in (commands[name], *subcommands(commands[name]).values()):
            for action in each._actions:
                if file_completion is not None and (action.metavar in _PATHS or action.dest in _PATH_OPTIONS):
                    action.complete = file_completion  # type: ignore[attr-defined]
    return parser
