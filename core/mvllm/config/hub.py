"""Finds the folder of a model: a local one, the packaged demo, a snapshot from the Hugging Face hub, or the one derived
from a file of an installed checkpoint format, such as GGUF.

A local folder never causes network traffic. A hub name goes through `huggingface_hub`, which uses the cache in
`HF_HOME` or `HF_HUB_CACHE` and the token `HF_TOKEN`; with `HF_HUB_OFFLINE=1` it reads the cache only. All files of a
model have one revision.

    folder                     the folder; if it has such files and no safetensors, one of them
    organisation/name          the same of a repository, fetched
    either of them:Q4_K_M      the file with this quantization
    file.gguf                  the file
    organisation/name/x.gguf   the file of the repository
"""

from __future__ import annotations

import contextlib
import difflib
import glob
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mvllm.checkpoint_formats.interface import CheckpointFormat, ModelFiles
from mvllm.checkpoint_formats.registry import (
    checkpoint_format,
    derived_folder,
    format_names,
    format_of_content,
    format_of_file,
    is_format,
    require_allowed,
)
from mvllm.config.hub_repository import HubRepository, is_offline
from mvllm.errors import ModelError, plain_reason
from mvllm.logging import get_logger

__all__ = ["DEMO", "DEMO_VISION", "find_model", "find_tokenizer", "is_offline", "may_be_fetched"]

logger = get_logger(__name__)

DEMO, DEMO_VISION = "demo", "demo-vision"

_CONFIGURATION = ("*.json", "*.jinja", "*.txt")
_TOKENIZER = ("tokenizer*", "*.model", "*.tiktoken")
_WEIGHTS = ("*.safetensors",)
_CODE = ("*.py",)

_HUB_NAME = re.compile(r"[\w.\-]+(/[\w.\-]+)?", re.ASCII)
_HUB_FILE = re.compile(r"(?P<repository>[\w.\-]+/[\w.\-]+)/(?P<file>(?!.*\.\.)[^\\]+)", re.ASCII)
# Not `C:\folder`: a drive is one letter.
_WITH_QUANTIZATION = re.compile(r"(?P<name>.{2,}):(?P<quantization>[\w.\-]+)", re.ASCII | re.DOTALL)
_TOKENIZER_FILE = re.compile(r"tokenizer.*|vocab\.(json|txt)|.*\.(model|tiktoken)")
_MOST_SUBFOLDERS = 100


@dataclass(frozen=True)
class _Search:
    """The model or tokenizer to find.

    Args:
        what: `model` or `tokenizer`.
        name: As given, without the quantization.
        quantization: Quantization of the file to choose; None if none was given.
        load_format: As the setting.
        with_weights: As `find_model`.
        with_tokenizer: As `find_model`.
    """

    what: str
    name: str
    quantization: str | None
    load_format: str = "auto"
    with_weights: bool = True
    with_tokenizer: bool = True

    def checkpoint_format(self, name: str) -> CheckpointFormat:
        """The format of a name, which this search needs."""
        return checkpoint_format(name, f"The {self.what} {self.name!r}")


@dataclass(frozen=True)
class _Choices:
    """The models of one format to choose from.

    Args:
        format_name: The format's name.
        format: The format.
        models: Its models; not empty.
    """

    format_name: str
    format: CheckpointFormat
    models: Sequence[ModelFiles]


def find_model(
    model: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    trust_remote_code: bool = False,
    with_weights: bool = True,
    with_tokenizer: bool = True,
    load_format: str = "auto",
) -> Path:
    """The folder of `model`; of a file the one derived from it (`CheckpointFormat.model_folder`).

    Args:
        model: A folder, a GGUF file, `demo`, `demo-vision`, or a hub name (`organisation/name`). `:Q4_K_M` after a
            folder or a hub name chooses one of its GGUF files. Likewise for other installed formats.
        revision: Branch, tag or commit on the hub; None is the default branch. Does not apply to folders.
        token: Hub token; None takes `HF_TOKEN` or the one stored by `hf auth login`.
        trust_remote_code: Fetch the repository's Python files as well.
        with_weights: Fetch the weights as well. Files of other formats are always fetched: they are the configuration,
            too.
        with_tokenizer: Of a file of another format, derive the tokenizer as well.
        load_format: As the setting; where there are both, `gguf` takes GGUF files, others safetensors.

    Raises:
        ModelError: It was not found, which lists what was tried, the results, and what to do; or the package of its
            format is not installed.
        ConfigError: The package of its format is not allowed, or cannot be loaded.
    """
    patterns: tuple[str, ...] = _CONFIGURATION + _TOKENIZER
    if with_weights:
        patterns += _WEIGHTS
    if trust_remote_code:
        patterns += _CODE
    name, quantization = _split_quantization(model)
    search = _Search("model", name, quantization, load_format, with_weights, with_tokenizer)
    return _find(search, revision, token, patterns)


def may_be_fetched(model: str) -> bool:
    """Whether `find_model` may fetch files for `model`: it is no local folder or file, and no packaged demo."""
    if model in (DEMO, DEMO_VISION) or is_offline():
        return False
    name, _ = _split_quantization(model)
    try:
        return not Path(name).expanduser().exists()
    except (OSError, ValueError):
        return False  # no path, and no name of a repository


def find_tokenizer(
    tokenizer: str, *, revision: str | None = None, token: str | None = None, trust_remote_code: bool = False
) -> Path:
    """The folder of a tokenizer that is not the model's; arguments and errors as `find_model`.

    Tokenizer files in a folder have precedence over the tokenizer in a file of another format, such as GGUF.
    """
    patterns = _CONFIGURATION + _TOKENIZER + (_CODE if trust_remote_code else ())
    name, quantization = _split_quantization(tokenizer)
    return _find(_Search("tokenizer", name, quantization), revision, token, patterns)


def _split_quantization(name: str) -> tuple[str, str | None]:
    with contextlib.suppress(OSError, ValueError):
        if Path(name).expanduser().exists():
            return name, None
    match = _WITH_QUANTIZATION.fullmatch(name)
    return (match["name"], match["quantization"]) if match else (name, None)


def _find(search: _Search, revision: str | None, token: str | None, patterns: tuple[str, ...]) -> Path:
    name, what = search.name, search.what
    if not name.strip():
        raise ModelError(
            f"No {what} was named. Pass a folder, a GGUF file, a name from the hub, {DEMO!r} or {DEMO_VISION!r}."
        )
    folder = Path(name).expanduser()
    if name in (DEMO, DEMO_VISION) and not (folder / "config.json").is_file():
        folder = _demo_folder(name)
    try:
        is_folder, exists = folder.is_dir(), folder.exists()
        files = _names_in(folder) if is_folder else []
        format_name = _format_of(folder) if exists and not is_folder else None
    except (OSError, ValueError) as e:
        raise ModelError(f"The {what} {name!r} cannot be looked up: {plain_reason(e)}.") from e
    if is_folder:
        return _in_folder(search, folder, files)
    if format_name is not None:
        return _file(search, folder, format_name)
    if exists:
        require_allowed(folder)
        kinds = " or ".join(each.upper() for each in format_names())
        raise ModelError(
            f"The {what} {name!r} is a file. Pass the folder that holds it, with config.json, safetensors weights and "
            f"tokenizer, or a {kinds} file. Files of other formats need a package that reads them."
        )
    format_name, repository_and_file = format_of_file(name), _HUB_FILE.fullmatch(name)
    if format_name and repository_and_file and _may_be_hub_name(repository_and_file["repository"]):
        repository = HubRepository(repository_and_file["repository"], what, folder, revision, token)
        return _hub_file(search, repository, repository_and_file["file"], format_name)
    if _may_be_hub_name(name) and format_name is None:
        _refuse_misspelt_demo(search, folder)
        return _on_hub(search, HubRepository(name, what, folder, revision, token), patterns)
    raise ModelError(
        f"The {what} {name!r} was not found.\n"
        f"  Folder: {str(folder.absolute())!r} does not exist{_nearest(folder.absolute())}.\n"
        f"  Hub: not asked, as this is no name of a repository (those read 'organisation/name').\n"
        "Check the path."
    )


def _demo_folder(name: str) -> Path:
    from mvllm import demo

    try:
        return demo.demo_model_path() if name == DEMO else demo.demo_vision_model_path()
    except FileNotFoundError as e:
        raise ModelError(f"The model {name!r} was asked for, but {e}") from e


def _refuse_misspelt_demo(search: _Search, folder: Path) -> None:
    """
    Raises:
        ModelError: The name is nearly that of a packaged model, which no repository of such a short name is.
    """
    nearest = difflib.get_close_matches(search.name.lower(), (DEMO, DEMO_VISION), n=1, cutoff=0.8)
    if nearest and "/" not in search.name:
        raise ModelError(
            f"The {search.what} {search.name!r} was not found: {str(folder.absolute())!r} does not exist, and the hub "
            f"was not asked. Did you mean {nearest[0]!r}, the packaged one?"
        )


def _nearest(missing: Path) -> str:
    """For messages: the nearest parent of a missing folder that exists."""
    for parent in missing.parents:
        with contextlib.suppress(OSError, ValueError):
            if parent.is_dir():
                return f" ({str(parent)!r} does)"
    return ""


def _may_be_hub_name(name: str) -> bool:
    return bool(_HUB_NAME.fullmatch(name)) and not name.startswith((".", "-")) and ".." not in name


# ---------------------------------------------------------------------------------------------------- files and folders


def _names_in(folder: Path) -> list[str]:
    """Names of the files of a folder; those of its subfolders as well if the folder itself has no weights."""
    names = sorted(path.name for path in folder.iterdir())
    if not any(format_of_file(name) or name.endswith(".safetensors") for name in names):
        for subfolder in [folder / name for name in names[:_MOST_SUBFOLDERS]]:
            with contextlib.suppress(OSError):
                names += sorted(f"{subfolder.name}/{path.name}" for path in subfolder.iterdir())
    return names


def _format_of(path: Path) -> str | None:
    """The name of the format of an existing file, by its suffix or its first bytes."""
    found = format_of_file(path.name)
    return format_of_content(path) if found is None and stat.S_ISREG(path.stat().st_mode) else found


def _in_folder(search: _Search, folder: Path, names: Sequence[str]) -> Path:
    choices = _choices(search, names, str(folder))
    if choices is None:
        return folder
    chosen = _choose(search, choices, str(folder), f"{folder}:{{}}")
    unused = [name for name in ("config.json", "generation_config.json", "tokenizer.json") if name in names]
    if unused and search.what == "model":
        logger.info(
            "%s: %s not used, as the %s file holds configuration and tokenizer.",
            folder,
            f"{', '.join(unused)} {'is' if len(unused) == 1 else 'are'}",
            choices.format_name.upper(),
        )
    return _derived(search, choices.format_name, choices.format, folder / chosen.files[0])


def _derived(search: _Search, format_name: str, found: CheckpointFormat, file: Path) -> Path:
    return derived_folder(format_name, found, file, with_tokenizer=search.with_tokenizer)


def _file(search: _Search, path: Path, format_name: str) -> Path:
    _check_file_alone(search, format_name)
    return _derived(search, format_name, search.checkpoint_format(format_name), path)


def _check_file_alone(search: _Search, format_name: str) -> None:
    if search.quantization is not None:
        raise ModelError(
            f"{search.name!r} is a file, and ':{search.quantization}' would choose one of the files of a folder or a "
            "repository. Leave it out."
        )
    _check_load_format(search, search.name, format_name)


def _choices(search: _Search, names: Iterable[str], where: str) -> _Choices | None:
    """The models to choose from among files; None if the folder is to be read as it is.

    Raises:
        ModelError: The settings require files of a format and there are none, or exclude them and there are no other
            files; or the package of their format is not installed.
    """
    names = list(names)
    formats = sorted({found for name in names if (found := format_of_file(name)) is not None})
    required = search.load_format if is_format(search.load_format) else None
    if required is not None or search.quantization is not None:
        choices = _list_models(search, [required] if required else formats, names)
        if choices is None:
            raise _no_such_file(search, where, required or (formats or format_names())[0])
    elif _has_own_files(search, names):
        if formats and search.what == "model":
            kinds = " and ".join(name.upper() for name in formats)
            logger.info("%s holds safetensors and %s files; safetensors are read.", where, kinds)
        return None
    else:
        choices = _list_models(search, formats, names)
    if choices is not None:
        _check_load_format(search, where, choices.format_name)
    return choices


def _has_own_files(search: _Search, names: Iterable[str]) -> bool:
    """Whether a folder has safetensors, or files of a tokenizer if that is searched."""
    if search.what == "tokenizer":
        return any(_TOKENIZER_FILE.fullmatch(name) for name in names)
    return any(name.endswith(".safetensors") and "/" not in name for name in names)


def _no_such_file(search: _Search, where: str, format_name: str) -> ModelError:
    kind = format_name.upper()
    request = f"':{search.quantization}'" if search.quantization is not None else f"load_format={format_name!r}"
    return ModelError(
        f"{where} holds no model as a {kind} file, and {request} asks for one. Leave it out, or pass a folder or "
        f"repository that has {kind} files."
    )


def _list_models(search: _Search, formats: Iterable[str], names: Sequence[str]) -> _Choices | None:
    """The models of the first of the formats that finds any."""
    for name in formats:
        found = search.checkpoint_format(name)
        if models := found.list_models(names):
            return _Choices(name, found, models)
    return None


def _choose(search: _Search, choices: _Choices, where: str, how: str) -> ModelFiles:
    """Chooses the requested model, and logs that where there are several. The arguments are those of the format."""
    chosen = choices.format.choose(choices.models, search.quantization, where, how)
    if len(choices.models) > 1:
        others = [each.quantization for each in choices.models if each.files != chosen.files]
        logger.info(
            "Chose %s of %s. Further %s files: %s%s.",
            chosen.files[0],
            where,
            choices.format_name.upper(),
            ", ".join(others[:40]),
            ", ..." if len(others) > 40 else "",
        )
    return chosen


def _check_load_format(search: _Search, where: str, format_name: str) -> None:
    if search.load_format == "safetensors":
        raise ModelError(
            f"load_format is 'safetensors', but {where} is a model in {format_name.upper()} form. Leave load_format "
            "out, or pass a folder with safetensors weights."
        )


# ------------------------------------------------------------------------------------------------------------------ hub


def _on_hub(search: _Search, repository: HubRepository, patterns: tuple[str, ...]) -> Path:
    """The snapshot of a repository. Lists its files first only if files of a format are likely, because that is one
    more request."""
    asks = search.quantization is not None or is_format(search.load_format)
    if asks or is_offline() or any(name in search.name.lower() for name in format_names()):
        if (choices := _choices(search, repository.file_names(), str(repository))) is not None:
            return _chosen_on_hub(search, repository, choices)
        return repository.snapshot(patterns)
    folder = repository.snapshot(patterns)
    needed = "*.safetensors" if search.what == "model" and search.with_weights else "*.json"
    if any(folder.glob(needed)):
        return folder
    try:
        names = repository.file_names()
    except ModelError as e:
        logger.debug("Files of other formats were not looked for: %s", e)
        return folder
    if (choices := _choices(search, names, str(repository))) is not None:
        return _chosen_on_hub(search, repository, choices)
    return folder


def _chosen_on_hub(search: _Search, repository: HubRepository, choices: _Choices) -> Path:
    return _fetched(search, repository, choices, _choose(search, choices, str(repository), f"{repository.name}:{{}}"))


def _hub_file(search: _Search, repository: HubRepository, file: str, format_name: str) -> Path:
    _check_file_alone(search, format_name)
    found = search.checkpoint_format(format_name)
    models = found.list_models(repository.file_names())
    model = next((model for model in models if file in model.files), None)
    if model is None:
        kind, there = format_name.upper(), ", ".join(model.files[0] for model in models[:40]) or "none"
        raise ModelError(
            f"{repository} has no model in a {kind} file {file!r}. Its {kind} files: {there}. Pass one of them, or a "
            "local file."
        )
    choices = _Choices(format_name, found, [model])
    return _fetched(search, repository, choices, _choose(search, choices, str(repository), ""))


def _fetched(search: _Search, repository: HubRepository, choices: _Choices, chosen: ModelFiles) -> Path:
    folder = repository.snapshot([glob.escape(file) for file in chosen.files])
    return _derived(search, choices.format_name, choices.format, folder / chosen.files[0])
