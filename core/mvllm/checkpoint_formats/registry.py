"""The installed checkpoint formats: entry points of `mvllm.checkpoint_formats`.

The name of a format says what it opens, without an import: `x.gguf` is a file of the format `gguf`, and a folder with
`gguf_files.json` was derived from such a file. A format is imported when such a model is opened.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from mvllm import plugin_groups
from mvllm.checkpoint_formats.interface import CheckpointFormat, ModelFiles
from mvllm.errors import ConfigError, ModelError
from mvllm.installable import missing_part

_FORMATS_OF_PARTS = ("gguf",)
"""Formats of mvllm's own parts, named as the parts are: known where the package is not installed."""

_INDEX = "_files.json"


def format_names() -> tuple[str, ...]:
    """Names of the formats, sorted: the installed ones that are allowed, and those of mvllm's parts. Imports none."""
    return tuple(sorted({*_FORMATS_OF_PARTS, *_installed(*_searched())}))


def load_format_names() -> tuple[str, ...]:
    """The values of the setting `load_format`."""
    return ("auto", "safetensors", *format_names(), "dummy")


def checkpoint_format(name: str, what: str) -> CheckpointFormat:
    """The format of a name, imported.

    Args:
        name: One of `format_names`.
        what: What needs it, for messages.

    Raises:
        ModelError: Its package is not installed.
        ConfigError: Its package is not allowed or cannot be loaded, or several packages have the name.
    """
    if name not in (found := _loaded(*_searched())):
        found[name] = _load(name, what)
    return found[name]


def format_of_file(name: str) -> str | None:
    """The name of the format that a file has by its suffix; None for other files."""
    _, dot, suffix = name.rpartition(".")
    return suffix.lower() if dot and suffix.lower() in format_names() else None


def format_of_content(path: Path) -> str | None:
    """The name of the installed format that a regular file has by its first bytes. Imports the installed formats.

    Raises:
        OSError: The file cannot be read.
    """
    for name in _installed(*_searched()):
        if checkpoint_format(name, f"The file {str(path)!r}").is_model_file(path):
            return name
    return None


def format_of_folder(folder: Path) -> str | None:
    """The name of the format from whose files a model folder was derived; None for other folders."""
    with contextlib.suppress(OSError):
        for index in sorted(folder.glob(f"*{_INDEX}")):
            name = index.name.removesuffix(_INDEX)
            if name in format_names() and index.is_file():
                return name
    return None


def is_derived_folder(folder: Path) -> bool:
    """Whether a model folder was derived from files of a format, so that its config and tokenizer are complete."""
    return format_of_folder(folder) is not None


def source_files(folder: Path) -> list[Path] | None:
    """The files with the weights of a derived folder; None for other folders, and if its list cannot be read."""
    name = format_of_folder(folder)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if name is not None:
            return [Path(file["path"]) for file in json.loads((folder / f"{name}{_INDEX}").read_bytes())["files"]]
    return None


def installed_formats() -> list[CheckpointFormat]:
    """The installed and allowed formats, imported, in the order of their names.

    Raises:
        ConfigError: A format cannot be loaded, or several packages have its name.
    """
    return [checkpoint_format(name, f"The format {name!r}") for name in _installed(*_searched())]


def list_models(names: Iterable[str]) -> list[ModelFiles]:
    """The models in files of installed formats among the files of a folder or a repository, by format and name.

    Args:
        names: Relative paths of all files, with `/`.
    """
    names = list(names)
    present = {format_of_file(name) for name in names} & set(_installed(*_searched()))
    formats = [checkpoint_format(name, f"The format {name!r}") for name in sorted(filter(None, present))]
    return [model for each in formats for model in each.list_models(names)]


def _searched() -> tuple[tuple[str, ...], frozenset[str] | None]:
    """What determines the installed formats."""
    return tuple(sys.path), plugin_groups.allow_list()


@functools.lru_cache(maxsize=4)
def _installed(path: tuple[str, ...], allowed: frozenset[str] | None) -> tuple[str, ...]:
    """Kept, because the metadata of all packages takes milliseconds to read."""
    return plugin_groups.allowed_names(plugin_groups.CHECKPOINT_FORMATS)


@functools.lru_cache(maxsize=4)
def _loaded(path: tuple[str, ...], allowed: frozenset[str] | None) -> dict[str, CheckpointFormat]:
    """The formats that have been loaded, by name."""
    return {}


def _load(name: str, what: str) -> CheckpointFormat:
    source = plugin_groups.find(plugin_groups.CHECKPOINT_FORMATS, name)
    if source is None:
        missing = missing_part(name, what)
        raise ModelError(missing or f"{what} needs the checkpoint format {name!r}, which no installed package has.")
    found = plugin_groups.load(plugin_groups.CHECKPOINT_FORMATS, source)
    if not (isinstance(found, type) and issubclass(found, CheckpointFormat)):
        raise ConfigError(
            f"{source} must name a subclass of mvllm.extension_api.checkpoint_formats.CheckpointFormat, found "
            f"{found!r}."
        )
    return found()
