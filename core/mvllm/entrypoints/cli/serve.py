"""`mvllm serve`: starts the OpenAI-compatible server."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, get_args

from mvllm import plugin_groups
from mvllm.config.engine_args import EngineArgs
from mvllm.config.engine_settings import SERVER_LONG_PREFILL_SLOWDOWN, SERVER_MAX_QUEUED_REQUESTS
from mvllm.config.foreign_keywords import server_keywords, translate
from mvllm.config.human_readable_int import human_readable_int
from mvllm.config.option_arguments import add_foreign_options, json_object, json_or_text
from mvllm.entrypoints.cli.address_arguments import add_address, add_allowed_hosts, check_port
from mvllm.entrypoints.cli.arguments import add_engine_arguments, engine_args
from mvllm.entrypoints.cli.chat_arguments import (
    add_chat_template_argument,
    add_parser_arguments,
    load_chat_template,
)
from mvllm.entrypoints.cli.number_arguments import positive_int, seconds
from mvllm.entrypoints.cli.serve_extensions import Serve, ServeCommand, add_extension_arguments, load_extensions
from mvllm.entrypoints.openai.server.authentication import KeyLimits, read_api_keys, read_key_limits
from mvllm.entrypoints.openai.server.settings import ServerSettings, UnknownFieldsPolicy
from mvllm.entrypoints.root_plugins import add_plugin_arguments, hold_plugins, plugin_settings, root_plugins
from mvllm.errors import ConfigError, ModelError
from mvllm.installation import install_command

KEY_VARIABLE = "MVLLM_API_KEY"
ADMIN_KEY_VARIABLE = "MVLLM_ADMIN_API_KEY"
MOST_API_SERVERS = 64
_NEEDED = ("starlette", "uvicorn", "httptools", "prometheus_client")
_OPPOSITES = {"disable_fastapi_docs": "docs", "disable_uvicorn_access_log": "access_log"}
"""Switches of other engines' servers that turn one of ours off."""


_KEY_LIMITS = {
    "requests_per_minute": "Requests that each API key may start in a minute, or all clients together without keys. A "
    "line of a key file may have other limits behind its key: KEY requests_per_minute=60. Default: no limit.",
    "tokens_per_minute": "Tokens of prompts and outputs that each API key may use in a minute. Default: no limit.",
    "concurrent_requests": "Requests that each API key may have in flight. Default: no limit.",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    server = parser.add_argument_group("server")
    _add_server_arguments(server)
    _add_reporting_arguments(server)
    _add_access_arguments(parser.add_argument_group("access"))
    _add_limits(parser.add_argument_group("limits"))
    _add_chat_arguments(parser.add_argument_group("chat"))
    add_plugin_arguments(parser)
    add_extension_arguments(parser)
    add_engine_arguments(parser, model_required=False)
    add_foreign_server_options(parser)


def _add_server_arguments(server: Any) -> None:
    """Adds the options of what the server serves, and where."""
    add_address(server)
    server.add_argument("--uds", metavar="PATH", help="Listen on a Unix domain socket instead, open to this user only.")
    server.add_argument(
        "--served-model-name",
        nargs="+",
        default=[],
        metavar="NAME",
        help="Names of the model in requests; responses have the first one. Default: MODEL as given.",
    )
    server.add_argument(
        "--lora-modules",
        nargs="+",
        default=[],
        metavar="NAME=PATH",
        help="LoRA adapters to serve under these model names, from their folders; needs --enable-lora. Also as JSON, "
        '{"name": NAME, "path": PATH}, or a list of such objects.',
    )
    server.add_argument(
        "--api-server-count",
        type=int,
        default=1,
        metavar="N",
        help="API server processes; all share the port and the engine. Default: 1.",
    )
    _add_seconds(server, "shutdown-timeout", "that in-flight requests may take after SIGTERM")
    _add_seconds(
        server,
        "heartbeat-timeout",
        "without a heartbeat of a busy engine after which /health reports it",
    )
    _add_seconds(
        server,
        "api-server-timeout",
        "without a heartbeat of one of several API servers after which the server exits; 0 for never",
    )
    server.add_argument(
        "--docs",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Serve /docs, /openapi.json and the page at /. Default: on.",
    )
    server.add_argument(
        "--http-plugins",
        nargs="+",
        default=[],
        metavar="NAME",
        help="Add HTTP plugins of installed packages, each under /plugins/NAME. Those with routes at the root are used "
        "without this; one that is named here must not fail.",
    )
    server.add_argument(
        "--disable-http-plugins",
        nargs="+",
        default=[],
        metavar="NAME",
        help="Do not use these HTTP plugins with routes at the root.",
    )


def _add_reporting_arguments(server: Any) -> None:
    """Adds the options of logs, metrics, traces and the usage in responses."""
    server.add_argument(
        "--access-log",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Log a line for each response: path, status, time and request id, without content. Default: on.",
    )
    server.add_argument(
        "--metrics-alias-prefix",
        metavar="PREFIX",
        help="Also export every engine metric under this prefix, for dashboards of another engine.",
    )
    server.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="Send traces of requests to this OpenTelemetry collector (OTLP over HTTP), such as "
        "http://localhost:4318/v1/traces. Needs the extra otel. Default: no tracing.",
    )
    server.add_argument(
        "--enable-force-include-usage",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="End every stream with the usage, as if requests had stream_options.include_usage. Default: off.",
    )


def _add_access_arguments(access: Any) -> None:
    """Adds the options of who may use the server."""
    _add_keys(access, "api-key", "Key that requests must have; may be given several times.", KEY_VARIABLE)
    _add_keys(
        access,
        "admin-api-key",
        "Key for all routes, administration included. Without one, administration is disabled.",
        ADMIN_KEY_VARIABLE,
    )
    access.add_argument(
        "--allowed-origins",
        nargs="+",
        default=[],
        metavar="ORIGIN",
        help="Origins that may send requests from a browser (CORS); * for all. Also as a JSON list. Default: none.",
    )
    add_allowed_hosts(access)


def _add_limits(limits: Any) -> None:
    """Adds the options of what requests and clients may take."""
    defaults = ServerSettings()
    limits.add_argument(
        "--max-body-bytes",
        type=human_readable_int,
        default=defaults.max_body_bytes,
        metavar="N",
        help=f"Maximum size of a request body. Default: {defaults.max_body_bytes}.",
    )
    for field in fields(KeyLimits):
        limits.add_argument(
            f"--key-{field.name.replace('_', '-')}", type=positive_int, metavar="N", help=_KEY_LIMITS[field.name]
        )
    limits.add_argument(
        "--unknown-fields",
        choices=get_args(UnknownFieldsPolicy),
        default=defaults.unknown_fields,
        help="Unknown fields of a request, such as misspelt ones: warn in the log and in a response header, refuse the "
        "request (400), or ignore them. "
        f"Default: {defaults.unknown_fields}.",
    )
    _add_seconds(limits, "send-timeout", "that a client may leave a stream unread before its request is aborted")


def _add_chat_arguments(chat: Any) -> None:
    """Adds the options of chat templates and of parsers of outputs."""
    add_chat_template_argument(chat)
    chat.add_argument(
        "--default-chat-template-kwargs",
        type=json_object,
        default={},
        metavar="JSON",
        help="Variables of the chat template for requests that do not set them in chat_template_kwargs, such as "
        '{"enable_thinking": false}.',
    )
    add_parser_arguments(chat)
    chat.add_argument(
        "--trust-request-chat-template",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="Allow templates in requests. They run in a sandbox with a time limit. Default: off.",
    )


def _add_seconds(group: Any, option: str, what: str) -> None:
    """Adds an option in seconds; the default is that of the setting with the same name."""
    default = getattr(ServerSettings(), option.replace("-", "_"))
    group.add_argument(
        f"--{option}", type=seconds, default=default, metavar="S", help=f"Seconds {what}. Default: {default:g}."
    )


def _add_keys(group: Any, option: str, what: str, variable: str) -> None:
    """Adds options for keys and for files with keys."""
    group.add_argument(
        f"--{option}",
        action="append",
        default=[],
        metavar="KEY",
        help=f"{what} Safer: --{option}-file or the variable {variable}.",
    )
    group.add_argument(
        f"--{option}-file", action="append", default=[], metavar="FILE", help="File with one such key per line."
    )


def run(args: argparse.Namespace) -> int:
    """Runs the server until a signal ends it. The port is bound first, so that a used port is reported at once."""
    hide_keys(sys.argv)
    apply_foreign_server_options(args)
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"The server needs {', '.join(missing)}, which this installation lacks. Run: {install_command(*missing)}"
        )
    settings = _settings(args)
    serve = _extension_server(ServeCommand(args, settings, add_arguments, _model))
    if serve is None:
        engine, settings = _model(args, settings)
        serve = functools.partial(_serve_model, engine, settings, args.api_server_count)
    from mvllm.entrypoints.openai.server.listener import open_listener

    with open_listener(settings) as listener:
        return serve(listener)


def _extension_server(command: ServeCommand) -> Serve | None:
    """The server of the first extension whose options are given; None for the server of one model."""
    for extension in load_extensions():
        if (serve := extension.make_server(command)) is not None:
            return serve
    return None


def _serve_model(engine: EngineArgs, settings: ServerSettings, num_servers: int, listener: socket.socket) -> int:
    from mvllm.entrypoints.openai.server.api_server import require_tokenizer, run_server

    require_tokenizer(engine)
    with hold_plugins(settings):
        if num_servers == 1 and engine.data_parallel_size == 1:
            return run_server(engine, settings, listener)
        from mvllm.entrypoints.openai.server.process_manager import run_multi_api_server

        return run_multi_api_server(engine, settings, listener, num_servers)


def hide_keys(argv: Sequence[str]) -> None:
    """If the command line has keys, executes the program again with the keys in environment variables.

    All users of a machine can read the command lines of processes; only the owner can read their environment.
    """
    options = {"--api-key": KEY_VARIABLE, "--admin-api-key": ADMIN_KEY_VARIABLE}
    kept: list[str] = []
    found: dict[str, list[str]] = {}
    rest = iter(argv)
    for argument in rest:
        name, equals, value = argument.partition("=")
        name = name.replace("_", "-")
        if name not in options:
            kept.append(argument)
        else:
            found.setdefault(options[name], []).append(value if equals else next(rest, ""))
    if not found or sys.argv is not argv or not hasattr(os, "execve"):
        return
    environment = dict(os.environ)
    for variable, keys in found.items():
        environment[variable] = "\n".join([*keys, *filter(None, [environment.get(variable)])])
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, "-P", "-m", "mvllm.entrypoints.cli.main", *kept[1:]]
    os.execve(sys.executable, command, environment)  # noqa: S606  (this program itself)


def _model(args: argparse.Namespace, settings: ServerSettings) -> tuple[EngineArgs, ServerSettings]:
    """The engine's arguments, and `settings` with those of the model's server."""
    engine = _engine(args)
    settings = replace(settings, **_settings_of_model(args))
    if settings.lora_modules and not engine.enable_lora:
        raise ConfigError("--lora-modules needs --enable-lora. Add it, or leave --lora-modules out.")
    _check_adapters(settings.lora_modules, engine.max_lora_rank)
    return engine, settings


def _check_adapters(modules: Sequence[tuple[str, str]], max_rank: int) -> None:
    """Reads the descriptions of adapters, before the model is loaded.

    Raises:
        ConfigError: One cannot be used.
    """
    if not modules:
        return
    from mvllm.models.peft_adapter import read_peft_adapter

    for name, path in modules:
        try:
            read_peft_adapter(path, max_rank)
        except ModelError as e:
            raise ConfigError(f"--lora-modules {name}={path}: {e}") from e


def _engine(args: argparse.Namespace) -> EngineArgs:
    if getattr(args, "model", None) is None:
        raise ConfigError("No model is given. Name one, as in `mvllm serve MODEL`, or several with --models FILE.")
    engine = engine_args(args)
    if engine.max_queued_requests is None:
        engine.max_queued_requests = SERVER_MAX_QUEUED_REQUESTS
    if engine.long_prefill_slowdown is None:
        engine.long_prefill_slowdown = SERVER_LONG_PREFILL_SLOWDOWN
    return engine


def _settings(args: argparse.Namespace) -> ServerSettings:
    check_port(args)
    if not 1 <= args.api_server_count <= MOST_API_SERVERS:
        raise ConfigError(f"--api-server-count is {args.api_server_count}; it must be from 1 to {MOST_API_SERVERS}.")
    if args.max_body_bytes < 1:
        raise ConfigError(f"--max-body-bytes is {args.max_body_bytes}; it must be at least 1.")
    user = _keys(args.api_key, args.api_key_file, KEY_VARIABLE)
    admin = _keys(args.admin_api_key, args.admin_api_key_file, ADMIN_KEY_VARIABLE)
    if set(user) & set(admin):
        raise ConfigError("--api-key and --admin-api-key have a key in common. Use different keys.")
    limits = KeyLimits(**{each.name: getattr(args, f"key_{each.name}") for each in fields(KeyLimits)})
    limits_of_keys = read_key_limits(args.api_key_file, limits)
    if read_key_limits(args.admin_api_key_file, limits):
        raise ConfigError("A file of --admin-api-key-file has limits behind a key, but administrators have no limits.")
    prefixes = ("mvllm:", *([args.metrics_alias_prefix] if args.metrics_alias_prefix else []))
    return ServerSettings(
        host=args.host,
        port=args.port,
        uds=args.uds,
        api_keys=tuple(user),
        admin_api_keys=tuple(admin),
        key_limits=limits,
        limits_of_keys=limits_of_keys,
        served_model_names=tuple(args.served_model_name),
        allowed_origins=tuple(_texts("--allowed-origins", args.allowed_origins)),
        allowed_hosts=tuple(args.allowed_hosts),
        max_body_bytes=args.max_body_bytes,
        send_timeout=args.send_timeout,
        heartbeat_timeout=args.heartbeat_timeout,
        api_server_timeout=args.api_server_timeout,
        shutdown_timeout=args.shutdown_timeout,
        access_log=args.access_log,
        runtime_lora_loading=args.api_server_count == 1,
        docs=args.docs,
        metrics_prefixes=prefixes,
        otlp_traces_endpoint=args.otlp_traces_endpoint,
        disabled_http_plugins=tuple(args.disable_http_plugins),
        plugin_settings=plugin_settings(args, args.disable_http_plugins),
    )


def _settings_of_model(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of a server that concern its model."""
    for name in (*args.http_plugins, *args.disable_http_plugins):
        plugin_groups.require(plugin_groups.HTTP, name)  # checked before a process is started
    if both := set(args.http_plugins) & set(args.disable_http_plugins):
        raise ConfigError(f"--http-plugins and --disable-http-plugins both name {', '.join(sorted(both))}.")
    root_plugins(args.disable_http_plugins, args.http_plugins)  # raises
    return {
        "chat_template": load_chat_template(args.chat_template),
        "default_chat_template_kwargs": _template_variables(args),
        "force_include_usage": args.enable_force_include_usage,
        "trust_request_chat_template": args.trust_request_chat_template,
        "tool_call_parser": args.tool_call_parser,
        "reasoning_parser": args.reasoning_parser,
        "unknown_fields": args.unknown_fields,
        "send_timeout": args.send_timeout,
        "http_plugins": tuple(args.http_plugins),
        "plugin_settings": plugin_settings(args, args.disable_http_plugins),
        "lora_modules": tuple(adapter for text in args.lora_modules for adapter in _adapters(text)),
    }


def _template_variables(args: argparse.Namespace) -> dict[str, Any]:
    from mvllm.entrypoints.chat_template import reserved_variables  # imports NumPy

    given: dict[str, Any] = args.default_chat_template_kwargs
    if reserved := reserved_variables(given):
        raise ConfigError(f"--default-chat-template-kwargs may not set {', '.join(reserved)}.")
    return given


def _adapters(text: str) -> list[tuple[str, str]]:
    """The adapters of one value of `--lora-modules`: NAME=PATH, a JSON object, or a list of such objects."""
    if text.lstrip().startswith(("{", "[")):
        given = json_or_text(text)
        entries = given if isinstance(given, list) else [given]
        if not all(isinstance(entry, dict) and _is_adapter(entry) for entry in entries):
            raise ConfigError(
                f'--lora-modules takes JSON objects such as {{"name": "NAME", "path": "PATH"}}, not {text!r}.'
            )
        return [(entry["name"], entry["path"]) for entry in entries]
    name, equals, path = text.partition("=")
    if not name or not equals or not path:
        raise ConfigError(f"--lora-modules must be NAME=PATH, not {text!r}.")
    return [(name, path)]


def _is_adapter(entry: dict[str, Any]) -> bool:
    known = entry.keys() <= {"name", "path", "base_model_name"}  # the base is the model that is served
    return known and all(isinstance(entry.get(key), str) and entry[key] for key in ("name", "path"))


def _texts(option: str, words: Sequence[str]) -> list[str]:
    """The words of an option, each of which may be a JSON list of texts."""
    found: list[str] = []
    for word in words:
        given = json_or_text(word) if word.startswith("[") else [word]
        if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
            raise ConfigError(f"{option} takes texts, or a JSON list of texts, not {word!r}.")
        found += given
    return found


def _keys(given: Sequence[str], files: Sequence[str], variable: str) -> list[str]:
    return read_api_keys(given, files, variable, os.environ.pop(variable, None))  # child processes must not inherit it


def add_foreign_server_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that other engines' servers have and this one does without. None is in the help."""
    for name, own in _OPPOSITES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", dest=own, action="store_false", help=argparse.SUPPRESS)
    add_foreign_options(parser, server_keywords())


def apply_foreign_server_options(args: argparse.Namespace) -> None:
    """Warns of the options that have no effect.

    Raises:
        ConfigError: An option is refused.
    """
    table = server_keywords()
    translate({name: value for name, value in vars(args).items() if name in table}, table, prefix="--")
