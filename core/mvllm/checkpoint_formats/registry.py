"""The installed checkpoint formats: entry points of `mvllm.checkpoint_formats`.

The name of a format says what it opens, without an import: `x.gguf` is a file of the format `gguf`, and a folder with
`gguf_files.json` was derived from such a file. A format is imported when such a model is opened.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path

from mvllm import plugin_groups
from mvllm.checkpoint_formats.interface import CheckpointFormat, ModelFiles
from mvllm.errors import ConfigError, ModelError
from mvllm.installable import missing_part

_FORMATS_OF_PARTS = ("gguf",)
"""Formats of mvllm's own parts, named as the parts are: known where the package is not installed."""

_INDEX = "_files.json"

_SUFFIXES_OF_FOLDERS = frozenset(("bin", "jinja", "json", "md", "model", "pt", "py", "safetensors", "txt"))
"""Suffixes in Hugging Face folders, which are no formats: for these folders nothing is looked up."""


def format_names() -> tuple[str, ...]:
    """Names of the formats, sorted: the installed ones that are allowed, and those of mvllm's parts. Imports none."""
    return tuple(sorted({*_FORMATS_OF_PARTS, *_installed()}))


def load_format_names() -> tuple[str, ...]:
    """The values of the setting `load_format`: names of formats, and others."""
    return ("auto", "safetensors", *format_names(), "dummy")


def is_format(load_format: str) -> bool:
    """Whether a value of the setting `load_format` is the name of a format."""
    return load_format not in ("auto", "safetensors", "dummy") and load_format in format_names()


def checkpoint_format(name: str, what: str) -> CheckpointFormat:
    """The format of a name, imported.

    Args:
        name: One of `format_names`.
        what: What needs it, for messages.

    Raises:
        ModelError: Its package is not installed.
        ConfigError: Its package is not allowed or cannot be loaded, or several packages have the name.
    """
    source = plugin_groups.find(plugin_groups.CHECKPOINT_FORMATS, name)
    if source is None:
        missing = missing_part(name, what)
        raise ModelError(missing or f"{what} needs the checkpoint format {name!r}, which no installed package has.")
    return _load(source)


def format_of_file(name: str) -> str | None:
    """The name of the format that a file has by its suffix; None for other files."""
    _, dot, suffix = name.lower().rpartition(".")
    return suffix if dot and suffix not in _SUFFIXES_OF_FOLDERS and suffix in format_names() else None


def format_of_content(path: Path) -> str | None:
    """The name of the installed format that a regular file has by its first bytes. Imports the installed formats.

    Raises:
        OSError: The file cannot be read.
    """
    for name in _installed():
        if checkpoint_format(name, f"The file {str(path)!r}").is_model_file(path):
            return name
    return None


def derived_folder(name: str, found: CheckpointFormat, path: Path, *, with_tokenizer: bool) -> Path:
    """The derived model folder of a file, see `CheckpointFormat.model_folder`.

    Args:
        name: The format's name.
        found: The format.

    Raises:
        ConfigError: The format has not marked the folder as derived.
        ModelError: As `model_folder`.
    """
    folder = found.model_folder(path, with_tokenizer=with_tokenizer)
    if folder.is_dir() and not (folder / f"{name}{_INDEX}").is_file():
        raise ConfigError(
            f"The checkpoint format {name!r} has made {folder} of {path} without {name}{_INDEX}, which says that the "
            "folder is derived, and from which files. Ask the author of its package."
        )
    return folder


def require_allowed(path: Path) -> None:
    """Checks that no installed format with the suffix of a file has been left out by the allow list.

    Raises:
        ConfigError: One has; names the package.
    """
    plugin_groups.find(plugin_groups.CHECKPOINT_FORMATS, path.suffix.lower().removeprefix("."))


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
    return [checkpoint_format(name, f"The format {name!r}") for name in _installed()]


def list_models(names: Iterable[str]) -> list[ModelFiles]:
    """The models in files of installed formats among the files of a folder or a repository, by format and name.

    Args:
        names: Relative paths of all files, with `/`.
    """
    names = list(names)
    present = {format_of_file(name) for name in names} & set(_installed())
    formats = [checkpoint_format(name, f"The format {name!r}") for name in sorted(filter(None, present))]
    return [model for each in formats for model in each.list_models(names)]


def _installed() -> tuple[str, ...]:
    return plugin_groups.allowed_names(plugin_groups.CHECKPOINT_FORMATS)


def _load(source: plugin_groups.PluginSource) -> CheckpointFormat:
    published = "checkpoint_formats.CheckpointFormat"
    return plugin_groups.load_class(plugin_groups.CHECKPOINT_FORMATS, source, CheckpointFormat, published)()
