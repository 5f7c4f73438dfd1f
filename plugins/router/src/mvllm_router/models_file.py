"""`mvllm serve --models FILE` and `--models-dir FOLDER`: the models of one server, with their settings and limits.

The file is YAML or TOML. The options of the command line are the settings of all models; `defaults` and the entry of a
model override them. An entry has the options of `mvllm serve` that concern one model, and those of the router:

    defaults: {max-model-len: 8k}
    models:
      small: org/small-model                  # only the model
      large:
        model: /models/large
        aliases: [gpt-4o]
        pinned: true
        keep-alive: 10m
        max-concurrent-requests: 64
        kv-cache-memory-bytes: 4G
"""

from __future__ import annotations

import argparse
import copy
import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mvllm.extension_api import ConfigError
from mvllm.extension_api.cli import (
    CommandLineParser,
    EngineArgs,
    ServeCommand,
    as_arguments,
    human_readable_int,
    option_table,
)
from mvllm.extension_api.server import list_models_in, model_options
from mvllm_router.model_entry import ModelEntry, parse_keep_alive

_OWN = ("model", "aliases", "pinned", "keep_alive", "max_concurrent_requests", "memory", "env")
SERVER_OPTIONS_OF_A_MODEL = frozenset(
    (
        *("lora_modules", "chat_template", "tool_call_parser", "reasoning_parser", "trust_request_chat_template"),
        *("unknown_fields", "http_plugins", "send_timeout"),
        *("default_chat_template_kwargs", "enable_force_include_usage"),
    )
)
"""Options of core's server that an entry may have; all others concern the whole server."""


class ModelsReader:
    """Makes the entries of models from files and folders.

    Args:
        command: The run of `mvllm serve`, whose options are the defaults.
        keep_alive: Seconds without requests after which models are unloaded; None for never.
    """

    def __init__(self, command: ServeCommand, keep_alive: float | None) -> None:
        self._command = command
        self._keep_alive = keep_alive
        self._parser = CommandLineParser(prog="mvllm serve", allow_abbrev=False)
        command.add_arguments(self._parser)
        table = option_table(self._parser)
        engine = {name for name, action in table.items() if action.dest in {each.name for each in EngineArgs.options()}}
        of_a_model = engine | SERVER_OPTIONS_OF_A_MODEL | model_options()
        self._table = {name: table[name] for name in of_a_model if name != "model"}
        self._of_the_server = table.keys() - self._table.keys() - {"model"}

    def read_file(self, path: str) -> list[ModelEntry]:
        """The models of a file.

        Raises:
            ConfigError: The file cannot be read, or an entry is invalid; the message names it.
        """
        content = _read(path)
        unknown = content.keys() - {"defaults", "models"}
        models, defaults = content.get("models"), _normalized(content.get("defaults") or {}, f"{path}: defaults")
        if unknown or not isinstance(models, Mapping) or not models:
            raise ConfigError(
                f"{path}: the file must have `models`, with an entry for each name, and may have `defaults`"
                + (f"; found {', '.join(sorted(map(str, unknown)))}." if unknown else ".")
            )
        entries = []
        for name, value in models.items():
            where = f"{path}: models: {name}"
            given = _normalized({"model": value} if isinstance(value, str) else value, where)
            entries.append(self._entry(str(name), {**defaults, **given}, where))
        return entries

    def read_folder(self, folder: str) -> list[ModelEntry]:
        """The models in a folder: each subfolder with a model, and each GGUF file, by their names.

        Raises:
            ConfigError: The folder cannot be read.
        """
        try:
            found = list_models_in(Path(folder).expanduser())
        except OSError as e:
            raise ConfigError(f"The folder {folder!r} of --models-dir cannot be read: {e.strerror}.") from e
        return [self._entry(name, {"model": str(path)}, str(path)) for name, path in found.items()]

    def _entry(self, name: str, given: Mapping[str, Any], where: str) -> ModelEntry:
        given = {key: value for key, value in given.items() if value is not None}
        own = {key: given[key] for key in _OWN if key in given}
        if unknown := [key for key in given if key not in _OWN and key not in self._table]:
            raise ConfigError(self._unknown(where, unknown[0]))
        if "model" not in own:
            raise ConfigError(f"{where} names no model. Add `model:` with a folder, a GGUF file or a name on the hub.")
        namespace = copy.copy(self._command.args)
        namespace.model = _text(own.get("model"), f"{where}: model")
        arguments: list[str] = []
        for key, value in given.items():
            if key in _OWN:
                continue
            try:
                arguments += as_arguments(self._table[key], value)
            except (ValueError, TypeError, argparse.ArgumentTypeError) as e:
                raise ConfigError(f"{where}: {key.replace('_', '-')}: {e}") from e
        namespace = self._parser.parse_args(arguments, namespace)
        try:
            engine, settings = self._command.model_settings(namespace, self._command.settings)
        except ConfigError as e:
            raise ConfigError(f"{where}: {e}") from e
        return ModelEntry(
            name=_text(name, f"{where}: the name"),
            engine=engine,
            settings=settings,
            aliases=tuple(_texts(own.get("aliases", []), f"{where}: aliases")),
            is_pinned=_flag(own.get("pinned", False), f"{where}: pinned"),
            keep_alive=_duration(own["keep_alive"], f"{where}: keep-alive")
            if "keep_alive" in own
            else self._keep_alive,
            max_concurrent_requests=_count(own.get("max_concurrent_requests"), f"{where}: max-concurrent-requests"),
            memory_bytes=_count(own.get("memory"), f"{where}: memory"),
            environment=_variables(own.get("env", {}), f"{where}: env"),
        )

    def _unknown(self, where: str, key: str) -> str:
        shown = key.replace("_", "-")
        if key in self._of_the_server:
            return f"{where}: {shown} concerns the whole server. Give it on the command line, as --{shown}."
        nearest = difflib.get_close_matches(key, [*_OWN, *self._table], n=1)
        suggestion = f" Did you mean {nearest[0].replace('_', '-')}?" if nearest else ""
        return f"{where}: {shown} is not an option of a model.{suggestion}"


def check_names(entries: list[ModelEntry]) -> None:
    """Checks that all names are different.

    Raises:
        ConfigError: Two models have a name in common.
    """
    owners: dict[str, str] = {}
    for entry in entries:
        for name in entry.names:
            if owners.setdefault(name, entry.name) != entry.name:
                raise ConfigError(f"The models {owners[name]!r} and {entry.name!r} both have the name {name!r}.")
    if len({entry.name for entry in entries}) < len(entries):
        raise ConfigError("Two models of --models and --models-dir have the same name.")


def keep_alive_argument(text: str) -> float | None:
    """The value of `--keep-alive`.

    Raises:
        ArgumentTypeError: It is not a time.
    """
    try:
        return parse_keep_alive(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"{e}; found {text!r}") from None


def _read(path: str) -> Mapping[str, Any]:
    import yaml

    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        content = tomllib.loads(text) if path.lower().endswith(".toml") else yaml.safe_load(text)
    except OSError as e:
        raise ConfigError(f"The file {path!r} of --models cannot be read: {e.strerror}.") from e
    except (ValueError, yaml.YAMLError) as e:  # TOML's errors are ValueErrors
        kind = "TOML" if path.lower().endswith(".toml") else "YAML"
        raise ConfigError(f"The file {path!r} of --models is not {kind}: {' '.join(str(e).split())}") from e
    if not isinstance(content, dict):
        raise ConfigError(f"The file {path!r} of --models must have `models`, with an entry for each name.")
    return content


def _normalized(options: Any, where: str) -> dict[str, Any]:
    if not isinstance(options, Mapping):
        raise ConfigError(f"{where}: must be options of a model, such as `model: NAME`, found {options!r}.")
    return {str(key).replace("-", "_"): value for key, value in options.items()}


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ConfigError(f"{where}: must be a text, found {value!r}.")
    return value


def _texts(value: Any, where: str) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [_text(each, where) for each in values]


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: must be true or false, found {value!r}.")
    return value


def _duration(value: Any, where: str) -> float | None:
    try:
        return parse_keep_alive(value)
    except ValueError as e:
        raise ConfigError(f"{where}: {e}; found {value!r}.") from None


def _count(value: Any, where: str) -> int | None:
    if value is None:
        return None
    try:
        number = human_readable_int(value) if isinstance(value, str) else value
    except argparse.ArgumentTypeError as e:
        raise ConfigError(f"{where}: {e}") from e
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ConfigError(f"{where}: must be a positive integer, found {value!r}.")
    return number


def _variables(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, Mapping) or any(isinstance(each, Mapping | list) for each in value.values()):
        raise ConfigError(f"{where}: must be environment variables with their values, found {value!r}.")
    return {_text(name, where): str(each) for name, each in value.items()}
