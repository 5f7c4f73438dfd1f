"""`mvllm router`: one HTTP address for engines that compute prompts and engines that generate."""

from __future__ import annotations

import argparse
from dataclasses import replace

from mvllm.entrypoints.cli.number_arguments import positive_seconds
from mvllm.entrypoints.openai.server.settings import DEFAULT_PORT, ServerSettings
from mvllm.entrypoints.shutdown_signals import ignore_shutdown_signals
from mvllm.errors import ConfigError

_PREFILL_TIMEOUT = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    defaults = ServerSettings()
    parser.add_argument(
        "--prefill",
        nargs="+",
        required=True,
        metavar="URL",
        help="Servers that compute prompts, started with --kv-role producer (or both).",
    )
    parser.add_argument(
        "--decode",
        nargs="+",
        required=True,
        metavar="URL",
        help="Servers that generate, started with --kv-role consumer (or both).",
    )
    parser.add_argument("--host", default=defaults.host, help=f"Address to listen on. Default: {defaults.host}.")
    parser.add_argument(
        "--port",
        type=int,
        default=DEFAULT_PORT,
        help=f"Port to listen on; 0 chooses a free port. Default: {DEFAULT_PORT}.",
    )
    add_allowed_hosts(parser)
    parser.add_argument(
        "--prefill-timeout",
        type=positive_seconds,
        default=_PREFILL_TIMEOUT,
        metavar="S",
        help="Seconds that computing a prompt may take; then the decode server computes it. "
        f"Default: {_PREFILL_TIMEOUT:g}.",
    )
    parser.add_argument(
        "--access-log",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Log a line for each response. Default: on.",
    )


def add_allowed_hosts(parser: argparse._ActionsContainer) -> None:
    """Adds the option --allowed-hosts."""
    parser.add_argument(
        "--allowed-hosts",
        nargs="+",
        default=[],
        metavar="NAME",
        help="Further names of the server, such as that of a reverse proxy; *.example.com for all of a domain, * for "
        "all. Without an API key, a server on the loopback address answers only requests whose Host header has an "
        "address, localhost, this machine's name, or one of these.",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the router until a signal ends it."""
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port is {args.port}; it must be from 0 to 65535.")
    from mvllm.entrypoints.openai.server.connections import raise_descriptor_limit
    from mvllm.entrypoints.openai.server.listener import listen_tcp
    from mvllm.entrypoints.router.prefill_decode_server import run_prefill_decode_router
    from mvllm.entrypoints.router.remote_server import RemoteServer

    prefill = [RemoteServer(url) for url in args.prefill]
    decode = [RemoteServer(url) for url in args.decode]
    settings = replace(
        ServerSettings(),
        host=args.host,
        port=args.port,
        access_log=args.access_log,
        allowed_hosts=tuple(args.allowed_hosts),
    )
    raise_descriptor_limit()
    listener = listen_tcp(args.host, args.port)
    try:
        return run_prefill_decode_router(prefill, decode, settings, args.prefill_timeout, listener)
    finally:
        ignore_shutdown_signals()
        listener.close()
