"""The options of `mvllm serve` for stored responses and tool servers, and the settings that they make."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import shutil
from pathlib import Path
from typing import get_args
from urllib.parse import urlsplit

from mvllm.extension_api import ConfigError, install_command
from mvllm.extension_api.http_plugin import human_readable_int
from mvllm_responses.settings import MCPRequestURLs, MCPServerConfig, MCPSettings, ResponsesSettings

_LABEL = re.compile(r"[A-Za-z0-9_\-]{1,64}")


def add_responses_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    defaults, mcp = ResponsesSettings(), MCPSettings()
    group = parser.add_argument_group("responses")
    group.add_argument(
        "--responses-store",
        metavar="PATH",
        help="File (SQLite) that stores the responses and conversations of /v1/responses: they survive a restart, and "
        "several API servers share them. Default: in memory.",
    )
    group.add_argument(
        "--max-stored-responses",
        type=int,
        default=None,
        metavar="N",
        help="Responses and conversations that are stored, for retrieval and continuation; 0 stores none. "
        f"Default: {defaults.max_stored_responses}; 0 with several API servers without --responses-store.",
    )
    group.add_argument(
        "--max-stored-bytes",
        type=human_readable_int,
        default=defaults.max_stored_bytes,
        metavar="N",
        help=f"Bytes of all of them together. Default: {defaults.max_stored_bytes}.",
    )
    group.add_argument(
        "--max-stored-age",
        type=float,
        default=None,
        metavar="S",
        help="Seconds after their last use when they are deleted. Default: no limit.",
    )
    group.add_argument(
        "--mcp-server",
        action="append",
        default=[],
        metavar="LABEL=SERVER",
        help="MCP server whose tools responses may use under this label: a URL, or a command that is started. May be "
        "given several times. Needs the extra mcp. Default: none.",
    )
    group.add_argument(
        "--mcp-request-urls",
        choices=get_args(MCPRequestURLs),
        default=mcp.request_urls,
        help="Further MCP servers that requests may name by URL: none, those with public addresses, or any, private "
        f"networks and this machine included. Default: {mcp.request_urls}.",
    )
    group.add_argument(
        "--mcp-max-calls",
        type=int,
        default=mcp.max_calls,
        metavar="N",
        help=f"Calls of MCP tools that one response may make. Default: {mcp.max_calls}.",
    )
    group.add_argument(
        "--mcp-start-timeout",
        type=float,
        default=mcp.start_timeout,
        metavar="S",
        help="Seconds for the start of an MCP server's program, or for connecting to its URL. "
        f"Default: {mcp.start_timeout:g}.",
    )
    group.add_argument(
        "--mcp-timeout",
        type=float,
        default=mcp.timeout,
        metavar="S",
        help=f"Seconds for each call of a tool of an MCP server. Default: {mcp.timeout:g}.",
    )
    group.add_argument(
        "--mcp-max-result-bytes",
        type=human_readable_int,
        default=mcp.max_result_bytes,
        metavar="N",
        help=f"Bytes of a call's result that the model gets; the rest is cut off. Default: {mcp.max_result_bytes}.",
    )


def responses_settings(args: argparse.Namespace) -> ResponsesSettings:
    """The settings of the options.

    Raises:
        ConfigError: They are not valid.
    """
    several, path = args.api_server_count > 1, args.responses_store
    stored = args.max_stored_responses
    if stored is None:
        stored = 0 if several and path is None else ResponsesSettings().max_stored_responses
    if stored < 0:
        raise ConfigError(f"--max-stored-responses is {stored}; it must be at least 0.")
    if stored and several and path is None:
        raise ConfigError(
            f"--max-stored-responses is {stored} with --api-server-count {args.api_server_count}; API servers share "
            "stored responses only in a file. Add --responses-store, or leave one of the options out."
        )
    for option in ("max_stored_bytes", "mcp_max_calls", "mcp_max_result_bytes"):
        if getattr(args, option) < 1:
            raise ConfigError(f"--{option.replace('_', '-')} is {getattr(args, option)}; it must be at least 1.")
    for option in ("max_stored_age", "mcp_start_timeout", "mcp_timeout"):
        seconds = getattr(args, option)
        if seconds is not None and not 0 < seconds < 1e9:
            raise ConfigError(f"--{option.replace('_', '-')} is {seconds:g}; it must be a positive number of seconds.")
    if path is not None:
        path = str(Path(path).absolute())
    return ResponsesSettings(
        responses_store=path,
        max_stored_responses=stored,
        max_stored_bytes=args.max_stored_bytes,
        max_stored_seconds=args.max_stored_age,
        mcp=_mcp_settings(args),
    )


def _mcp_settings(args: argparse.Namespace) -> MCPSettings:
    servers = tuple(_server(text) for text in args.mcp_server)
    labels = [server.label for server in servers]
    if len(set(labels)) < len(labels):
        raise ConfigError("--mcp-server: two servers have the same label. Give each a label of its own.")
    settings = MCPSettings(
        servers,
        args.mcp_request_urls,
        args.mcp_max_calls,
        args.mcp_timeout,
        args.mcp_max_result_bytes,
        args.mcp_start_timeout,
    )
    if settings.is_enabled and importlib.util.find_spec("mcp") is None:
        command = install_command("mvllm-responses[mcp]")
        raise ConfigError(f"--mcp-server and --mcp-request-urls need the package mcp. Run: {command}")
    return settings


def _server(text: str) -> MCPServerConfig:
    label, equals, server = text.partition("=")
    if not equals or not _LABEL.fullmatch(label) or not server.strip():
        raise ConfigError(
            f"--mcp-server must be LABEL=URL or LABEL=COMMAND, with a label of 1 to 64 letters, digits, '_' or '-'; "
            f"found {text!r}."
        )
    if server.startswith(("http://", "https://")):
        if not urlsplit(server).hostname:
            raise ConfigError(f"--mcp-server {label}: {server!r} is no URL.")
        return MCPServerConfig(label, url=server)
    try:
        command = tuple(shlex.split(server))
    except ValueError as e:
        raise ConfigError(f"--mcp-server {label}: the command {server!r} cannot be split into words: {e}.") from e
    if shutil.which(command[0]) is None:
        raise ConfigError(f"--mcp-server {label}: there is no program {command[0]!r}. Name one, or a URL.")
    return MCPServerConfig(label, command=command)
