"""`mvllm router`: one HTTP address for engines that compute prompts and engines that generate."""

from __future__ import annotations

import argparse
from dataclasses import replace

from mvllm.extension_api.cli import ServerSettings, add_address, add_allowed_hosts, check_port, positive_seconds

IS_SERVER = True
"""Signals end the program at once until it serves; it exits without waiting for its threads."""

_PREFILL_TIMEOUT = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
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
    add_address(parser)
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


def run(args: argparse.Namespace) -> int:
    """Runs the router until a signal ends it."""
    check_port(args)
    from mvllm.extension_api.server import open_listener
    from mvllm_router.prefill_decode_server import run_prefill_decode_router
    from mvllm_router.remote_server import RemoteServer

    prefill = [RemoteServer(url) for url in args.prefill]
    decode = [RemoteServer(url) for url in args.decode]
    settings = replace(
        ServerSettings(),
        host=args.host,
        port=args.port,
        access_log=args.access_log,
        allowed_hosts=tuple(args.allowed_hosts),
    )
    with open_listener(settings) as listener:
        return run_prefill_decode_router(prefill, decode, settings, args.prefill_timeout, listener)
