"""The models on this machine: repositories in the hub's cache, and files of installed formats that were loaded."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mvllm.checkpoint_formats.registry import installed_formats, list_models
from mvllm.config.hf_config import read_json_object
from mvllm.config.hub_repository import hub_cache
from mvllm.errors import ConfigError, ModelError


@dataclass(frozen=True)
class CachedModel:
    """One model.

    Attributes:
        name: As commands take it: a hub name, with `:Q4_K_M` for one of several files of a format, or a path.
        num_bytes: Bytes of its files.
        quantization: The quantization or dtype of its weights; `?` if its files do not say.
        modified: When its files last changed, in seconds since the epoch.
        files: Its files; of a hub repository, links into the cache.
    """

    name: str
    num_bytes: int
    quantization: str
    modified: float
    files: tuple[Path, ...]


def list_cached_models() -> list[CachedModel]:
    """All models, the last modified first. Repositories without weights are left out."""
    found = [model for repo in _repositories() for model in _models_of(repo)]
    cache = os.path.realpath(hub_cache())
    for checkpoint_format in installed_formats():
        for paths in checkpoint_format.known_files():
            is_cached = os.path.realpath(paths[0]).startswith(cache + os.sep)
            if not is_cached and all(path.exists() for path in paths):
                models = checkpoint_format.list_models([paths[0].name])
                quantization = models[0].quantization if models else "?"
                quantization = "?" if quantization == paths[0].stem else quantization
                found.append(_model(str(paths[0]), quantization, paths))
    return sorted(found, key=lambda model: -model.modified)


def list_models_in(folder: Path) -> dict[str, Path]:
    """The models in a folder: each subfolder with a model, and each model that is a file, by their names. A model of
    several files has the path of the first.

    Raises:
        OSError: The folder cannot be read.
    """
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    found = {path.name: path for path in paths if path.is_dir() and _has_model(path)}
    for model in list_models([path.name for path in paths if path.is_file()]):
        found.setdefault(model.stem, folder / model.files[0])
    return found


def _has_model(folder: Path) -> bool:
    names = [path.name for path in folder.iterdir()]
    return "config.json" in names or bool(list_models(names))


def remove_cached_model(name: str) -> int:
    """Deletes a model from the hub's cache.

    Args:
        name: A hub name, or one with `:Q4_K_M` for one of its files of a format.

    Returns:
        The freed bytes.

    Raises:
        ConfigError: `name` is a path: only the cache is changed.
        ModelError: The cache does not contain it, or it cannot be deleted.
    """
    if Path(name).expanduser().exists():
        raise ConfigError(f"{name!r} is a file or folder, not a model of the hub's cache. Delete it yourself.")
    repositories = {repo.repo_id: repo for repo in _repositories()}
    try:
        if (repo := repositories.get(name)) is not None:
            shutil.rmtree(repo.repo_path)  # not by revisions: copies of a repository have the same ones
            return int(repo.size_on_disk)
        return _remove_file(name, repositories.get(name.rpartition(":")[0]))
    except OSError as e:
        raise ModelError(f"The model {name!r} cannot be removed: {e}") from e


def _remove_file(name: str, repo: Any) -> int:
    """Deletes the files of one model, and their contents where no other file of the repository has them."""
    models = [] if repo is None else _models_of(repo)
    found = next((model for model in models if model.name.lower() == name.lower()), None)
    if found is None:
        raise ModelError(
            f"The model {name!r} is not in the hub's cache ({hub_cache()}). `mvllm list` prints its names."
        )
    folder = os.path.realpath(repo.repo_path)
    for path in found.files:
        content = Path(os.path.realpath(path))
        path.unlink()
        shared = any(
            os.path.realpath(file.file_path) == str(content)
            for revision in repo.revisions
            for file in revision.files
            if file.file_path != path and file.file_path not in found.files
        )
        if not shared and content.is_relative_to(folder):  # a link may lead out of the cache
            content.unlink(missing_ok=True)
    return found.num_bytes


def _repositories() -> list[Any]:
    """The cached repositories of models (`CachedRepoInfo`)."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return [repo for repo in scan_cache_dir(hub_cache()).repos if repo.repo_type == "model"]
    except CacheNotFound:
        return []


def _models_of(repo: Any) -> list[CachedModel]:
    """The models of a cached repository, in its newest revision with weights."""
    for revision in sorted(repo.revisions, key=lambda each: -each.last_modified):
        files = {
            file.file_path.relative_to(revision.snapshot_path).as_posix(): file.file_path for file in revision.files
        }
        if any(name.endswith(".safetensors") for name in files):
            return [_model(repo.repo_id, _quantization(revision.snapshot_path), list(files.values()))]
        if models := list_models(files):
            return [
                _model(f"{repo.repo_id}:{each.quantization}", each.quantization, [files[name] for name in each.files])
                for each in models
            ]
    return []


def _quantization(folder: Path) -> str:
    """The method of `quantization_config`, or the dtype."""
    try:
        config = read_json_object(folder / "config.json")
    except (ModelError, OSError, json.JSONDecodeError):
        return "?"
    method = config.get("quantization_config")
    if isinstance(method, dict) and "quant_method" in method:
        return str(method["quant_method"])
    return str(config.get("dtype") or config.get("torch_dtype") or "?")


def _model(name: str, quantization: str, files: list[Path]) -> CachedModel:
    sizes = [state for path in files if (state := _stat(path)) is not None]
    return CachedModel(
        name,
        sum(state.st_size for state in sizes),
        quantization,
        max((state.st_mtime for state in sizes), default=0.0),
        tuple(files),
    )


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None
