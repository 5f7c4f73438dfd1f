"""Finds the folder of a model: a local one, the packaged demo, a snapshot from the Hugging Face hub, or the one derived
from a GGUF file.

A local folder never causes network traffic. A hub name goes through `huggingface_hub`, which uses the cache in
`HF_HOME` or `HF_HUB_CACHE` and the token `HF_TOKEN`; with `HF_HUB_OFFLINE=1` it reads the cache only. All files of a
model have one revision.

    folder                     the folder; if it has GGUF files and no safetensors, one of them
    organisation/name          the same of a repository, fetched
    either of them:Q4_K_M      the GGUF file with this quantization
    file.gguf                  the file
    organisation/name/x.gguf   the file of the repository
"""

from __future__ import annotations

import contextlib
import glob
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mvllm.config.hub_repository import HubRepository, is_offline
from mvllm.errors import ModelError, plain_reason
from mvllm.gguf.file_choice import GGUFChoice, choose, is_gguf_name, list_choices
from mvllm.gguf.header import MAGIC
from mvllm.gguf.model_folder import model_folder
from mvllm.logging import get_logger

__all__ = ["DEMO", "DEMO_VISION", "find_model", "find_tokenizer", "is_offline", "may_be_fetched"]

logger = get_logger(__name__)

DEMO, DEMO_VISION = "demo", "demo-vision"

_CONFIGURATION = ("*.json", "*.jinja", "*.txt")
_TOKENIZER = ("tokenizer*", "*.model", "*.tiktoken")
_WEIGHTS = ("*.safetensors",)
_CODE = ("*.py",)

_HUB_NAME = re.compile(r"[\w.\-]+(/[\w.\-]+)?", re.ASCII)
_HUB_FILE = re.compile(r"(?P<repository>[\w.\-]+/[\w.\-]+)/(?P<file>(?!.*\.\.)[^\\]+\.gguf)", re.ASCII | re.IGNORECASE)
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
        quantization: Quantization of the GGUF file to choose; None if none was given.
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
    """The folder of `model`; of a GGUF file the one derived from it (`mvllm.gguf.model_folder`).

    Args:
        model: A folder, a GGUF file, `demo`, `demo-vision`, or a hub name (`organisation/name`). `:Q4_K_M` after a
            folder or a hub name chooses one of its GGUF files.
        revision: Branch, tag or commit on the hub; None is the default branch. Does not apply to folders.
        token: Hub token; None takes `HF_TOKEN` or the one stored by `hf auth login`.
        trust_remote_code: Fetch the repository's Python files as well.
        with_weights: Fetch the weights as well. GGUF files are always fetched: they are the configuration, too.
        with_tokenizer: Of a GGUF file, derive the tokenizer as well.
        load_format: As the setting; where there are both, `gguf` takes GGUF files, others safetensors.

    Raises:
        ModelError: It was not found; lists what was tried, the results, and what to do.
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

    Tokenizer files in the folder of a GGUF file have precedence over the tokenizer in the GGUF file.
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
        is_gguf = exists and not is_folder and _is_gguf(folder)
    except (OSError, ValueError) as e:
        raise ModelError(f"The {what} {name!r} cannot be looked up: {plain_reason(e)}.") from e
    if is_folder:
        return _in_folder(search, folder, files)
    if is_gguf:
        return _gguf_file(search, folder)
    if exists:
        raise ModelError(
            f"The {what} {name!r} is a file. Pass the folder that holds it, with config.json, safetensors weights and "
            "tokenizer, or a GGUF file."
        )
    repository_and_file = _HUB_FILE.fullmatch(name)
    if repository_and_file and _may_be_hub_name(repository_and_file["repository"]):
        repository = HubRepository(repository_and_file["repository"], what, folder, revision, token)
        return _hub_file(search, repository, repository_and_file["file"])
    if _may_be_hub_name(name) and not is_gguf_name(name):
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
    if not any(is_gguf_name(name) or name.endswith(".safetensors") for name in names):
        for subfolder in [folder / name for name in names[:_MOST_SUBFOLDERS]]:
            with contextlib.suppress(OSError):
                names += sorted(f"{subfolder.name}/{path.name}" for path in subfolder.iterdir())
    return names


def _is_gguf(path: Path) -> bool:
    """Whether an existing file is a GGUF file, by its name or its first bytes."""
    if is_gguf_name(path.name):
        return True
    if not stat.S_ISREG(path.stat().st_mode):
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _in_folder(search: _Search, folder: Path, names: Sequence[str]) -> Path:
    choices = _gguf_choices(search, names, str(folder))
    if not choices:
        return folder
    choice = choose(choices, search.quantization, str(folder), f"{folder}:{{}}")
    _log_choice(choice, choices, str(folder))
    unused = [name for name in ("config.json", "generation_config.json", "tokenizer.json") if name in names]
    if unused and search.what == "model":
        logger.info(
            "%s: %s not used, as the GGUF file holds configuration and tokenizer.",
            folder,
            f"{', '.join(unused)} {'is' if len(unused) == 1 else 'are'}",
        )
    return model_folder(folder / choice.files[0], with_tokenizer=search.with_tokenizer)


def _gguf_file(search: _Search, path: Path) -> Path:
    _check_file_alone(search)
    return model_folder(path, with_tokenizer=search.with_tokenizer)


def _check_file_alone(search: _Search) -> None:
    if search.quantization is not None:
        raise ModelError(
            f"{search.name!r} is a file, and ':{search.quantization}' would choose one of the files of a folder or a "
            "repository. Leave it out."
        )
    _check_load_format(search, search.name)


def _gguf_choices(search: _Search, names: Iterable[str], where: str) -> list[GGUFChoice]:
    """The GGUF models to choose from; empty if GGUF files are not to be read.

    Raises:
        ModelError: The settings require GGUF files and there are none, or exclude them and there are no other files.
    """
    names = list(names)
    choices = list_choices(names)
    if search.quantization is not None or search.load_format == "gguf":
        if not choices:
            request = f"':{search.quantization}'" if search.quantization is not None else "load_format='gguf'"
            raise ModelError(
                f"{where} holds no model as a GGUF file, and {request} asks for one. Leave it out, or pass a folder or "
                "repository that has GGUF files."
            )
        _check_load_format(search, where)
        return choices
    if search.what == "tokenizer":
        return [] if any(_TOKENIZER_FILE.fullmatch(name) for name in names) else choices
    if any(name.endswith(".safetensors") and "/" not in name for name in names):
        if choices:
            logger.info("%s holds safetensors and GGUF files; safetensors are read.", where)
        return []
    if choices:
        _check_load_format(search, where)
    return choices


def _check_load_format(search: _Search, where: str) -> None:
    if search.load_format == "safetensors":
        raise ModelError(
            f"load_format is 'safetensors', but {where} is a model in GGUF form. Leave load_format out, or pass a "
            "folder with safetensors weights."
        )


def _log_choice(choice: GGUFChoice, choices: Sequence[GGUFChoice], where: str) -> None:
    if len(choices) > 1:
        others = [each.quantization for each in choices if each is not choice]
        logger.info(
            "Chose %s of %s. Further GGUF files: %s%s.",
            choice.files[0],
            where,
            ", ".join(others[:40]),
            ", ..." if len(others) > 40 else "",
        )


# ------------------------------------------------------------------------------------------------------------------ hub


def _on_hub(search: _Search, repository: HubRepository, patterns: tuple[str, ...]) -> Path:
    """The snapshot of a repository. Lists its files first only if GGUF files are likely, because that is one more
    request."""
    is_likely = search.quantization is not None or search.load_format == "gguf" or "gguf" in search.name.lower()
    if is_likely or is_offline():
        names = repository.file_names()
        if choices := _gguf_choices(search, names, str(repository)):
            return _chosen_on_hub(search, repository, choices)
        return repository.snapshot(patterns)
    folder = repository.snapshot(patterns)
    needed = "*.safetensors" if search.what == "model" and search.with_weights else "*.json"
    if any(folder.glob(needed)):
        return folder
    try:
        names = repository.file_names()
    except ModelError as e:
        logger.debug("GGUF files were not looked for: %s", e)
        return folder
    if choices := _gguf_choices(search, names, str(repository)):
        return _chosen_on_hub(search, repository, choices)
    return folder


def _chosen_on_hub(search: _Search, repository: HubRepository, choices: Sequence[GGUFChoice]) -> Path:
    choice = choose(choices, search.quantization, str(repository), f"{repository.name}:{{}}")
    _log_choice(choice, choices, str(repository))
    return _fetched(search, repository, choice)


def _hub_file(search: _Search, repository: HubRepository, file: str) -> Path:
    _check_file_alone(search)
    choices = list_choices(repository.file_names())
    found = next((choice for choice in choices if file in choice.files), None)
    if found is None:
        there = ", ".join(choice.files[0] for choice in choices[:40]) or "none"
        raise ModelError(
            f"{repository} has no model in a GGUF file {file!r}. Its GGUF files: {there}. Pass one of them, or a local "
            "file."
        )
    return _fetched(search, repository, choose([found], None, str(repository), ""))


def _fetched(search: _Search, repository: HubRepository, choice: GGUFChoice) -> Path:
    folder = repository.snapshot([glob.escape(file) for file in choice.files])
    return model_folder(folder / choice.files[0], with_tokenizer=search.with_tokenizer)
