"""Options for the address of a server."""

from __future__ import annotations

import argparse

from mvllm.entrypoints.openai.server.settings import DEFAULT_PORT, ServerSettings
from mvllm.errors import ConfigError


def add_address(parser: argparse._ActionsContainer) -> None:
    """Adds the options --host and --port."""
    host = ServerSettings().host
    parser.add_argument("--host", default=host, help=f"Address to listen on. Default: {host}.")
    parser.add_argument(
        "--port",
        type=int,
        default=DEFAULT_PORT,
        help=f"Port to listen on; 0 chooses a free port. Default: {DEFAULT_PORT}.",
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


def check_port(args: argparse.Namespace) -> None:
    """
    Raises:
        ConfigError: --port is not a port.
    """
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port is {args.port}; it must be from 0 to 65535.")
