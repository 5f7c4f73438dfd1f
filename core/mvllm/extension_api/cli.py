"""For packages with a command (entry points of `mvllm.cli`): argument parsers, settings of an engine, progress bars."""

from __future__ import annotations

from mvllm.config.engine_args import EngineArgs as EngineArgs
from mvllm.config.hub import find_model as find_model
from mvllm.config.human_readable_int import human_readable_int as human_readable_int
from mvllm.config.model_limits import DEFAULT_NUM_BATCHED_TOKENS as DEFAULT_NUM_BATCHED_TOKENS
from mvllm.config.option import Option as Option
from mvllm.config.option_arguments import json_object as json_object
from mvllm.entrypoints.cli.argument_parser import ModelAction as ModelAction
from mvllm.entrypoints.cli.argument_parser import add_positional_model as add_positional_model
from mvllm.entrypoints.cli.arguments import add_engine_arguments as add_engine_arguments
from mvllm.entrypoints.cli.arguments import engine_args as engine_args
from mvllm.entrypoints.cli.config_file import add_config_argument as add_config_argument
from mvllm.entrypoints.event_loop import run_in_event_loop as run_in_event_loop
from mvllm.progress import show_progress as show_progress
from mvllm.version import __version__ as __version__

__all__ = [
    "DEFAULT_NUM_BATCHED_TOKENS",
    "EngineArgs",
    "ModelAction",
    "Option",
    "__version__",
    "add_config_argument",
    "add_engine_arguments",
    "add_positional_model",
    "engine_args",
    "find_model",
    "human_readable_int",
    "json_object",
    "run_in_event_loop",
    "show_progress",
]
