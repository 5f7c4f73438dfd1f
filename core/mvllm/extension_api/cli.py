"""For packages with a command or with options of `mvllm serve` (entry points of `mvllm.cli` and `mvllm.serve`)."""

from __future__ import annotations

from mvllm.config.engine_args import EngineArgs as EngineArgs
from mvllm.config.human_readable_int import human_readable_int as human_readable_int
from mvllm.entrypoints.cli.address_arguments import add_address as add_address
from mvllm.entrypoints.cli.address_arguments import add_allowed_hosts as add_allowed_hosts
from mvllm.entrypoints.cli.address_arguments import check_port as check_port
from mvllm.entrypoints.cli.argument_parser import CommandLineParser as CommandLineParser
from mvllm.entrypoints.cli.config_file import as_arguments as as_arguments
from mvllm.entrypoints.cli.config_file import option_table as option_table
from mvllm.entrypoints.cli.number_arguments import non_negative_int as non_negative_int
from mvllm.entrypoints.cli.number_arguments import positive_int as positive_int
from mvllm.entrypoints.cli.number_arguments import positive_seconds as positive_seconds
from mvllm.entrypoints.cli.serve_extensions import Serve as Serve
from mvllm.entrypoints.cli.serve_extensions import ServeCommand as ServeCommand
from mvllm.entrypoints.openai.server.settings import ServerSettings as ServerSettings
from mvllm.version import __version__ as __version__

__all__ = [
    "CommandLineParser",
    "EngineArgs",
    "Serve",
    "ServeCommand",
    "ServerSettings",
    "__version__",
    "add_address",
    "add_allowed_hosts",
    "as_arguments",
    "check_port",
    "human_readable_int",
    "non_negative_int",
    "option_table",
    "positive_int",
    "positive_seconds",
]
