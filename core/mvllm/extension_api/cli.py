"""For packages with a command or with options of `mvllm serve` (entry points of `mvllm.cli` and `mvllm.serve`)."""

from __future__ import annotations

from mvllm.config.cached_models import list_cached_models as list_cached_models
from mvllm.config.cached_models import remove_cached_model as remove_cached_model
from mvllm.config.engine_args import EngineArgs as EngineArgs
from mvllm.config.hub import DEMO as DEMO
from mvllm.config.hub import find_model as find_model
from mvllm.config.human_readable_int import human_readable_int as human_readable_int
from mvllm.config.model_limits import DEFAULT_NUM_BATCHED_TOKENS as DEFAULT_NUM_BATCHED_TOKENS
from mvllm.config.option import Option as Option
from mvllm.config.option_arguments import json_object as json_object
from mvllm.entrypoints.cli.address_arguments import add_address as add_address
from mvllm.entrypoints.cli.address_arguments import add_allowed_hosts as add_allowed_hosts
from mvllm.entrypoints.cli.address_arguments import check_port as check_port
from mvllm.entrypoints.cli.argument_parser import CommandLineParser as CommandLineParser
from mvllm.entrypoints.cli.argument_parser import ModelAction as ModelAction
from mvllm.entrypoints.cli.argument_parser import add_positional_model as add_positional_model
from mvllm.entrypoints.cli.arguments import add_engine_arguments as add_engine_arguments
from mvllm.entrypoints.cli.arguments import add_sampling_arguments as add_sampling_arguments
from mvllm.entrypoints.cli.arguments import engine_args as engine_args
from mvllm.entrypoints.cli.arguments import require_model as require_model
from mvllm.entrypoints.cli.chat_arguments import add_chat_template_argument as add_chat_template_argument
from mvllm.entrypoints.cli.chat_arguments import add_parser_arguments as add_parser_arguments
from mvllm.entrypoints.cli.chat_arguments import load_chat_template as load_chat_template
from mvllm.entrypoints.cli.config_file import add_config_argument as add_config_argument
from mvllm.entrypoints.cli.config_file import as_arguments as as_arguments
from mvllm.entrypoints.cli.config_file import option_table as option_table
from mvllm.entrypoints.cli.number_arguments import non_negative_int as non_negative_int
from mvllm.entrypoints.cli.number_arguments import positive_int as positive_int
from mvllm.entrypoints.cli.number_arguments import positive_seconds as positive_seconds
from mvllm.entrypoints.cli.serve_extensions import Serve as Serve
from mvllm.entrypoints.cli.serve_extensions import ServeCommand as ServeCommand
from mvllm.entrypoints.openai.server.settings import ServerSettings as ServerSettings
from mvllm.entrypoints.openai.server.settings import UnknownFieldsPolicy as UnknownFieldsPolicy
from mvllm.errors import plain_reason as plain_reason
from mvllm.installable import missing_part as missing_part
from mvllm.progress import show_progress as show_progress
from mvllm.version import __version__ as __version__

__all__ = [
    "DEFAULT_NUM_BATCHED_TOKENS",
    "DEMO",
    "CommandLineParser",
    "EngineArgs",
    "ModelAction",
    "Option",
    "Serve",
    "ServeCommand",
    "ServerSettings",
    "UnknownFieldsPolicy",
    "__version__",
    "add_address",
    "add_allowed_hosts",
    "add_chat_template_argument",
    "add_config_argument",
    "add_engine_arguments",
    "add_parser_arguments",
    "add_positional_model",
    "add_sampling_arguments",
    "as_arguments",
    "check_port",
    "engine_args",
    "find_model",
    "human_readable_int",
    "json_object",
    "list_cached_models",
    "load_chat_template",
    "missing_part",
    "non_negative_int",
    "option_table",
    "plain_reason",
    "positive_int",
    "positive_seconds",
    "remove_cached_model",
    "require_model",
    "show_progress",
]
