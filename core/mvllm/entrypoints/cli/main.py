"""The `mvllm` command: imports the module of one subcommand and runs it."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, cast

from mvllm.entrypoints.cli.argument_parser import CommandLineParser, check_model, find_subcommand, shorten_usage
from mvllm.entrypoints.cli.config_file import expand_config
from mvllm.entrypoints.cli.help import add_help_about, expand_help, list_groups
from mvllm.entrypoints.cli.option_spellings import as_declared
from mvllm.entrypoints.cli.option_words import engine_options, in_options, option_names
from mvllm.entrypoints.shutdown_signals import exit_on_signals, exit_program, exits_on_signals
from mvllm.errors import ConfigError, MvllmError
from mvllm.logging import configure_logging, get_logger
from mvllm.version import __version__

if TYPE_CHECKING:
    from mvllm.plugin_groups import PluginSource

logger = get_logger(__name__)

COMMANDS = {
    "generate": "generate text from prompts given on the command line",
    "serve": "answer requests over HTTP, in the OpenAI API",
    "platforms": "list the installed platform plugins, and why each is available or not",
    "doctor": "check this installation and this machine",
    "completion": "print a script for the shell that completes commands and options",
}
"""Core's commands and their summaries. Each is a module of this package (`_` for `-`) with `add_arguments(parser)` and
`run(args) -> exit status`. One that prints text for people, who do not read the log, may have a LOG_LEVEL: its level
unless the environment sets one."""

PART_COMMANDS = {
    "conformance": {
        "contract": "print the platform contract, or its changes",
        "ops": "list the operations and their providers on a platform",
        "plugin": "create a platform plugin from a template: `mvllm plugin new NAME`",
    },
    "tools": {
        "chat": "talk with a model in the terminal",
        "run": "talk with a model, or answer one message: `mvllm run MODEL [PROMPT]`",
        "complete": "continue text, prompt by prompt",
        "run-batch": "answer a file of requests in the format of OpenAI batches",
        "list": "list the models in the local caches",
        "pull": "fetch a model from the hub into its cache",
        "rm": "remove models from the hub's cache",
        "show": "print facts about a model",
        "collect-env": "print facts about this machine for a bug report",
    },
}
"""Commands of parts of mvllm, by part, that have another name than the part, and their summaries."""

EXIT_ERROR = 1
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Returns:
        0; 1 after an error, which is printed on stderr; 130 after Ctrl-C. Wrong usage exits with 2. A server as a
        program exits the process instead of returning, without waiting for its threads.
    """
    _prepare_standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = next((a for a in arguments if not a.startswith("-")), None)
    is_program = argv is None  # and not a Python caller of this function
    if name == "serve" and is_program:
        exit_on_signals()  # before the server's imports
    status = _run(name, arguments, is_program=is_program)
    if exits_on_signals():
        exit_program(status)
    return status


def _run(name: str | None, arguments: list[str], *, is_program: bool) -> int:
    module: ModuleType | None = None
    options: Mapping[str, str] = {}
    try:
        installed = {} if name in COMMANDS else installed_commands()
        if name in COMMANDS or name in installed:
            module = load_command(name)
        elif name is not None:
            _require_part(name)
        if is_program and getattr(module, "IS_SERVER", False):
            exit_on_signals()
        parser = _make_parser(name, module, installed)
        arguments = expand_help(arguments)
        command, rest = find_subcommand(parser, arguments)
        arguments = [*arguments[: len(arguments) - len(rest)], *as_declared(command, rest)]
        parser.arguments = arguments
        arguments = expand_config(parser, arguments)
        options = option_names(command, arguments)
        args = parser.parse_args(arguments)
        check_model(command, args)
        configure_logging(default=getattr(module, "LOG_LEVEL", "INFO"))
        assert module is not None
        status: int = module.run(args)
        sys.stdout.flush()
        return status
    except MvllmError as e:
        return _fail(in_options(str(e), {**engine_options(), **options}))
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return EXIT_INTERRUPTED
    except OSError as e:
        if e.filename is not None:
            raise  # not an error of a standard stream
        # Else Python reports the error again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # The reader of a pipe may have closed it (`mvllm generate ... | head`).
        return (
            EXIT_ERROR if isinstance(e, BrokenPipeError) else _fail(f"The output cannot be written: {e.strerror or e}.")
        )


def _prepare_standard_streams() -> None:
    """Replaces closed standard streams with the null device; escapes characters that the terminal cannot encode."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (open until the process ends)
        elif mode == "w" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def installed_commands() -> dict[str, PluginSource]:
    """Allowed commands of other packages, by name. None is imported."""
    from mvllm import plugin_groups

    by_name: dict[str, list[PluginSource]] = {}
    for source in plugin_groups.list_plugins(plugin_groups.COMMANDS):
        if source.name not in COMMANDS and plugin_groups.is_allowed(source):
            by_name.setdefault(source.name, []).append(source)
    return {name: plugin_groups.preferred(same) or same[-1] for name, same in by_name.items()}


def command_summary(source: PluginSource) -> str:
    """The summary of a command of another package: from PART_COMMANDS, or else the package's, from its metadata."""
    from mvllm.installable import installable_parts

    part = _part_of(source.name)
    if source.name in PART_COMMANDS.get(part, {}) and source.distribution == installable_parts().get(part):
        return PART_COMMANDS[part][source.name]
    summary = (importlib.metadata.metadata(source.distribution)["Summary"] or "").strip().removesuffix(".")
    if not summary:
        return f"a command of {source.distribution}"
    return summary[0].lower() + summary[1:] if summary.partition(" ")[0].istitle() else summary


def load_command(name: str) -> ModuleType:
    """Imports the module of a command, of core or of another package.

    Raises:
        ConfigError: There is no such command, or its package cannot be imported.
    """
    if name in COMMANDS:
        return importlib.import_module(f"mvllm.entrypoints.cli.{name.replace('-', '_')}")
    from mvllm import plugin_groups

    source, module = plugin_groups.load_plugin_by_name(plugin_groups.COMMANDS, name)
    if not all(callable(getattr(module, function, None)) for function in ("add_arguments", "run")):
        raise ConfigError(f"{source} must name a module with add_arguments(parser) and run(args), found {module!r}.")
    return cast(ModuleType, module)


def _part_of(command: str) -> str:
    """The name of the part of mvllm that would have a command: another one, or the command's own."""
    return next((part for part, commands in PART_COMMANDS.items() if command in commands), command)


def _require_part(name: str) -> None:
    """
    Raises:
        ConfigError: A part of mvllm that is not installed has this command.
    """
    from mvllm.installable import missing_part, part_versions

    part = _part_of(name)
    if part_versions().get(part) is None and (message := missing_part(part, f"`mvllm {name}`")):
        raise ConfigError(message)


def _make_parser(
    name: str | None, module: ModuleType | None, installed: Mapping[str, PluginSource] = MappingProxyType({})
) -> CommandLineParser:
    parser = CommandLineParser(
        prog="mvllm",
        description="Run large language models on the hardware for which a platform plugin is installed.",
        epilog="`mvllm COMMAND --help` explains a command, `mvllm COMMAND --help=WORD` only its options about WORD.",
    )
    parser.add_argument("--version", action="version", version=f"mvllm {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    packages = {command: f" ({source.distribution} {source.version})" for command, source in installed.items()}
    summaries = {**COMMANDS, **{command: command_summary(source) for command, source in installed.items()}}
    for command, summary in summaries.items():
        sub = commands.add_parser(
            command,
            help=(summary + packages.get(command, "")).replace("%", "%%"),
            description=summary[0].upper() + summary[1:] + ".",
            allow_abbrev=False,
        )
        if command == name and module is not None:
            module.add_arguments(sub)
            add_help_about(sub)
            list_groups(sub)
    shorten_usage(parser)
    return parser


def _fail(message: str) -> int:
    """Prints an error message without a traceback."""
    print(f"error: {message}", file=sys.stderr)
    return EXIT_ERROR


if __name__ == "__main__":
    sys.exit(main())
