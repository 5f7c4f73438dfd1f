"""Several models behind one server: options of `mvllm serve`, and the server if they are given.

An entry point of `mvllm.serve`, which every run of `mvllm serve` imports: what serves is imported when it is made.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from mvllm.extension_api import ConfigError
from mvllm.extension_api.cli import (
    Serve,
    ServeCommand,
    non_negative_int,
    positive_int,
    positive_seconds,
)

if TYPE_CHECKING:
    pass

_MAX_LOADED_MODELS = 4
_MAX_WAITING_REQUESTS = 512
_LOAD_TIMEOUT = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options for several models."""
    group = parser.add_argument_group(
        "several models", "Each model has a process of its own, which the first request starts."
    )
    group.add_argument(
        "--models",
        metavar="FILE",
        help="YAML or TOML file with the models by name: path, aliases, pinned, keep-alive, max-concurrent-requests, "
        "memory, env, and options of this command. Other options of the command line are the defaults.",
    )
    group.add_argument(
        "--models-dir", metavar="FOLDER", help="Serve every model folder and GGUF file in this folder, by its name."
    )
    group.add_argument(
        "--max-loaded-models",
        "--models-max",
        type=non_negative_int,
        default=_MAX_LOADED_MODELS,
        metavar="N",
        help="Models that are loaded at once; the least recently used one makes room. 0 for no limit. "
        f"Default: {_MAX_LOADED_MODELS}.",
    )
    group.add_argument(
        "--max-loaded-bytes",
        type=positive_int,
        metavar="N",
        help="Memory of weights and KV caches of the loaded models together. Default: no limit.",
    )
    group.add_argument(
        "--keep-alive",
        default="-1",
        metavar="TIME",
        help="Time without requests after which a model is unloaded, such as 300, 5m or 1h; -1 for never. Default: -1.",
    )
    group.add_argument(
        "--load-timeout",
        type=positive_seconds,
        default=_LOAD_TIMEOUT,
        metavar="S",
        help=f"Seconds that a request waits for its model to be loaded. Default: {_LOAD_TIMEOUT:g}.",
    )
    group.add_argument(
        "--max-waiting-requests",
        type=non_negative_int,
        default=_MAX_WAITING_REQUESTS,
        metavar="N",
        help=f"Requests that wait for models to be loaded; further ones get 503. Default: {_MAX_WAITING_REQUESTS}.",
    )


def make_server(command: ServeCommand) -> Serve | None:
    """What serves the models, if `--models` or `--models-dir` is given; else None.

    Raises:
        ConfigError: The options, or the entry of a model, are invalid.
    """
    args, settings = command.args, command.settings
    if args.models is None and args.models_dir is None:
        return None
    from mvllm.extension_api.server import loaded_plugins, require_tokenizer
    from mvllm_router.models_file import ModelsReader, check_names, keep_alive_argument
    from mvllm_router.pooled_model import PoolLimits, check_pinned
    from mvllm_router.router_server import MAX_MODELS, RouterConfig, run_router

    if getattr(args, "model", None) is not None:
        raise ConfigError(f"--model {args.model!r} is given with --models or --models-dir. Add it to the file instead.")
    if args.served_model_name:
        raise ConfigError("--served-model-name is for one model. Models of --models have `aliases`.")
    if args.api_server_count > 1:
        raise ConfigError(
            "--api-server-count is for one model. Each model of --models has a server process of its own."
        )
    try:
        keep_alive = keep_alive_argument(args.keep_alive)
    except argparse.ArgumentTypeError as e:
        raise ConfigError(f"--keep-alive {e}.") from None
    reader = ModelsReader(command, keep_alive)
    entries = [] if args.models is None else reader.read_file(args.models)
    entries += [] if args.models_dir is None else reader.read_folder(args.models_dir)
    check_names(entries)
    for entry in entries:
        require_tokenizer(entry.engine)
        for _, plugin in loaded_plugins(settings.disabled_http_plugins):
            plugin.check_model(settings, entry.name, entry.settings)
    if len(entries) > MAX_MODELS:
        raise ConfigError(f"{len(entries)} models are given; one server may have {MAX_MODELS}.")
    if not entries and args.models is None:
        raise ConfigError(f"The folder {args.models_dir!r} of --models-dir has no model folder and no GGUF file.")
    limits = PoolLimits(args.max_loaded_models, args.max_loaded_bytes, args.max_waiting_requests, args.load_timeout)
    try:
        check_pinned(entries, limits)
    except ValueError as e:
        raise ConfigError(str(e)) from None
    scan = None if args.models_dir is None else lambda: reader.read_folder(args.models_dir)
    config = RouterConfig(entries, limits, settings, scan)
    return lambda listener: run_router(config, listener)
