"""`mvllm completion SHELL`: prints a script with which the shell completes commands, options and their values.

The script is static: it is as fast as the shell, and belongs to the installed version.
"""

from __future__ import annotations

import argparse

from mvllm.entrypoints.cli.help import subcommands
from mvllm.errors import ConfigError
from mvllm.installation import install_command
from mvllm.logging import get_logger

logger = get_logger(__name__)

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
        command = install_command("mvllm[completion]")
        raise ConfigError(f"`mvllm completion` needs the package shtab. Run: {command}") from e
    print(shtab.complete(complete_parser(shtab.FILE), args.shell))
    return 0


def complete_parser(file_completion: object = None) -> argparse.ArgumentParser:
    """The parser of the whole command line, with the options of every command, those of other packages included.

    Commands of a package that cannot be imported are without options, with a warning.

    Args:
        file_completion: Value of the attribute `complete` of arguments that are files; None sets none.
    """
    from mvllm.entrypoints.cli.main import _make_parser, installed_commands, load_command

    parser = _make_parser(None, None, installed_commands())
    for name, command in subcommands(parser).items():
        try:
            load_command(name).add_arguments(command)
        except ConfigError as e:
            logger.warning("The options of `mvllm %s` are not completed. %s", name, e)
            continue
        for each in (command, *subcommands(command).values()):
            for action in each._actions:
                if file_completion is not None and (action.metavar in _PATHS or action.dest in _PATH_OPTIONS):
                    action.complete = file_completion  # type: ignore[attr-defined]
    return parser
