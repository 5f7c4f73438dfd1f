"""Finds the weight files of a model folder and lists their tensors.

The folder has safetensors files, or was derived from files of another format, which then lists the tensors.

Reads names and headers only, so that a bad checkpoint is refused before any tensor is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

from mvllm.checkpoint_formats.registry import checkpoint_format, format_of_folder
from mvllm.checkpoint_formats.tensor_entry import TensorEntry
from mvllm.config.hf_config import read_json_object
from mvllm.errors import ModelError
from mvllm.models.safetensors_file import MOST_TENSORS, check_size, header_limit, read_header

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_UNREADABLE = (".gguf", ".h5", ".msgpack", ".onnx")
# Copies of the weights in another layout, and weights that do not belong to the model.
_NOT_THE_MODEL = ("consolidated", "adapter_model", "optimizer", "scheduler")
_SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")


def read_checkpoint(
    folder: Path, most_tensors: int = MOST_TENSORS, *, packed: Callable[[str], bool] | None = None
) -> dict[str, TensorEntry]:
    """Every tensor of the checkpoint in `folder`, by name.

    Args:
        most_tensors: A checkpoint that has more is refused before it is parsed.
        packed: As in `CheckpointFormat.read_tensors`; safetensors files have no such weights.

    Raises:
        ModelError: There are no weights, a file is missing, damaged or outside the folder, there are too many tensors,
            or a tensor is in two files.
    """
    if (name := format_of_folder(folder)) is not None:
        found = checkpoint_format(name, f"The model folder {str(folder)!r}")
        return _checked(found.read_tensors(folder, most_tensors, packed), name)
    if (folder / SINGLE_FILE).is_file():
        return _merge({}, folder / SINGLE_FILE, most_tensors)
    if (folder / INDEX_FILE).is_file():
        return _read_indexed(folder, most_tensors)
    tensors: dict[str, TensorEntry] = {}
    for path in _shards_without_index(folder):
        _merge(tensors, path, most_tensors)
    return tensors


def check_files(folder: Path) -> None:
    """Checks that the weight files of a folder are there, are safetensors and have all their bytes.

    Takes milliseconds, so that a front end finds it before workers start: of a header only its size is compared.

    Raises:
        ModelError: As `read_checkpoint`.
    """
    if format_of_folder(folder) is not None:
        return  # its files were read to derive the folder
    if (folder / SINGLE_FILE).is_file():
        files = [folder / SINGLE_FILE]
    elif (folder / INDEX_FILE).is_file():
        names = sorted(set(_weight_map(folder / INDEX_FILE, MOST_TENSORS).values()))
        files = [_inside(folder, name) for name in names]
    else:
        files = _shards_without_index(folder)
    for file in files:
        check_size(file)


def _checked(tensors: object, name: str) -> dict[str, TensorEntry]:
    """What a checkpoint format has read, which may be another package's.

    Raises:
        ModelError: It is not a dict of names to TensorEntry.
    """
    if isinstance(tensors, dict):
        wrong = next(((key, each) for key, each in tensors.items() if not isinstance(each, TensorEntry)), None)
        if wrong is None:
            return tensors
        tensors = {wrong[0]: wrong[1]}
    raise ModelError(
        f"read_tensors of the checkpoint format {name!r} should return a dict of tensor names to TensorEntry, found "
        f"{tensors!r:.200}. Report it to the package that has the format."
    )


def _read_indexed(folder: Path, most_tensors: int) -> dict[str, TensorEntry]:
    weight_map = _weight_map(folder / INDEX_FILE, most_tensors)
    files = {name: _inside(folder, name) for name in sorted(set(weight_map.values()))}
    tensors: dict[str, TensorEntry] = {}
    for path in files.values():
        _merge(tensors, path, most_tensors)
    for name, file in weight_map.items():
        if name not in tensors:
            raise ModelError(f"{folder / INDEX_FILE} says that tensor {name!r} is in {file!r}, but it is not there.")
        if tensors[name].file != files[file]:
            raise ModelError(
                f"{folder / INDEX_FILE} says that tensor {name!r} is in {file!r}, but it is in "
                f"{tensors[name].file.name!r}."
            )
    return tensors


def _weight_map(index: Path, most_tensors: int) -> dict[str, str]:
    weight_map = read_json_object(index, header_limit(most_tensors)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise ModelError(f"{index} should have a key 'weight_map': an object of tensor name to file name.")
    if len(weight_map) > most_tensors:
        raise ModelError(
            f"{index} lists {len(weight_map)} tensors, and at most {most_tensors} are allowed for this model. Check "
            "that config.json and the weights belong together, or download the model again."
        )
    return weight_map


def _inside(folder: Path, name: str) -> Path:
    """`folder / name`, after a check that it neither points nor links out of the folder."""
    index = folder / INDEX_FILE
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name or not pure.parts:
        raise ModelError(f"{index} names the file {name!r}, which lies outside the model folder. It will not be read.")
    if pure.suffix in _PICKLED:
        raise ModelError(_pickled(index, [name]))
    path = folder / pure
    real = path.resolve()
    if not any(real.is_relative_to(root) for root in _permitted_roots(folder)):
        raise ModelError(
            f"{index} names the file {name!r}, which links to {real}, outside the model folder. Put the file itself "
            "into the folder if it is meant."
        )
    if not path.is_file():
        raise ModelError(f"{index} names the file {name!r}, which is missing from {folder}. Download the model again.")
    return path


def _permitted_roots(folder: Path) -> list[Path]:
    """The folder; in the hub's cache (models--x/snapshots/revision) also the blob store to which its files link."""
    real = folder.resolve()
    roots = [real]
    if real.parent.name == "snapshots" and real.parent.parent.name.startswith("models--"):
        roots.append(real.parent.parent / "blobs")
    return roots


def _shards_without_index(folder: Path) -> list[Path]:
    paths = sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith(_NOT_THE_MODEL))
    if not paths:
        raise ModelError(_no_weights(folder))
    groups: dict[tuple[str, int], set[int]] = {}
    for path in paths:
        if match := _SHARD_NAME.fullmatch(path.name):
            groups.setdefault((match["stem"], int(match["count"])), set()).add(int(match["number"]))
    for (stem, count), numbers in groups.items():
        missing = [f"{stem}-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1) if n not in numbers]
        if missing:
            raise ModelError(f"{folder} lacks {_list(missing)}. Download the model again.")
    return paths


def _no_weights(folder: Path) -> str:
    names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    pickled = [name for name in names if name.endswith(_PICKLED) and not name.startswith("training_args")]
    if pickled:
        return _pickled(folder, pickled)
    if any(name.startswith("adapter_model") for name in names):
        return (
            f"{folder} holds an adapter (adapter_model), not a model. Merge it into its base model and save that, or "
            "pass the base model."
        )
    other = [name for name in names if name.endswith(_UNREADABLE)]
    found = f"found {_list(other)}, which it cannot read" if other else f"found {_list(names) or 'nothing'}"
    return (
        f"{folder} holds no safetensors weights: expected {SINGLE_FILE} or {INDEX_FILE} with its shards, {found}. "
        "Download the model again, or pass load_format='dummy' to run with random weights."
    )


def _pickled(where: Path, names: Iterable[str]) -> str:
    return (
        f"{where} offers its weights only as pickle files ({_list(list(names))}), which can run code when they are "
        "opened and are refused. Convert them: load the model with transformers where you trust it, and call "
        "save_pretrained(folder), which writes safetensors; or take a revision of the model that has safetensors."
    )


def _list(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _merge(tensors: dict[str, TensorEntry], path: Path, most_tensors: int) -> dict[str, TensorEntry]:
    """Adds the tensors of a file; all files together may have at most `most_tensors`."""
    for entry in read_header(path, most_tensors - len(tensors)):
        if entry.name in tensors:
            raise ModelError(
                f"Tensor {entry.name!r} is in two files, {tensors[entry.name].file} and {path}: it is not clear which "
                "one is meant. Remove the file that does not belong to the model."
            )
        tensors[entry.name] = entry
    return tensors
