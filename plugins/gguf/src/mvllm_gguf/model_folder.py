"""Derived model folders: a GGUF file's metadata as the files of a Hugging Face model folder.

The folder is written once to a cache and has config.json, generation_config.json, the files of the tokenizer, and
gguf_files.json, which names the GGUF files. Weights are not copied. Its name identifies its sources:

    ~/.cache/mvllm/gguf/SmolLM2-135M.Q4_1-4f1a9be2c07d-93d5c8e01b6a
                        │                 │            └ content of each file; sources of mvllm_gguf
                        │                 └ path of the file
                        └ name of the file

Another file content or another version of mvllm therefore gives another folder. Finding an existing folder takes a few
calls of stat and a hash of this package's sources (100 kB), without parsing the header. If only a file's modification
time has changed, its folder stays valid, and gguf_files.json is updated. Processes lock the folders that they use
(`folder_lock.py`), so that other processes do not remove them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mvllm.extension_api import ModelError, get_logger
from mvllm.extension_api.checkpoint_formats import plain_reason
from mvllm_gguf.file_state import (
    FileContent,
    FileState,
    as_contents,
    as_states,
    file_contents,
    file_states,
    has_content,
)
from mvllm_gguf.folder_lock import LOCK_NAME, hold, removing
from mvllm_gguf.header import GGUFModel, gguf_files, read_gguf

logger = get_logger("mvllm.gguf.model_folder")

CACHE_VARIABLE = "MVLLM_CACHE_DIR"
FILES_NAME = "gguf_files.json"
"""Lists the GGUF files of a derived folder: `{"files": [{"path": ..., "size": ..., "mtime_ns": ...}, ...]}`, with
absolute paths; `contents`, a digest of each; and `derived`, the sizes of all other files of the folder."""

_MOST_TENSORS = 500_000  # including each expert's matrices
_DAY = 86_400.0
_UNUSED_FOR = 30 * _DAY
_SPLIT_SUFFIX = re.compile(r"-[0-9]{5}-of-[0-9]{5}$")
_FOLDER_NAME = re.compile(r"(?P<file>.+-[0-9a-f]{12})-[0-9a-f]{12}", re.DOTALL)
_TEMPORARY_NAME = re.compile(r"\.mvllm-[0-9a-f]{16}")


@dataclass(frozen=True)
class _Record:
    """A folder's gguf_files.json.

    Attributes:
        json: The parsed JSON.
        states: The states of the files when they were last read or compared.
        contents: The contents of the files.
    """

    json: dict[str, Any]
    states: list[FileState]
    contents: list[FileContent]

    @property
    def files(self) -> tuple[Path, ...]:
        """The paths of the files."""
        return tuple(Path(state.path) for state in self.states)

    def is_of(self, now: list[FileState]) -> bool:
        """Whether files in these states have the same contents. Reads the files with another modification time."""
        if [(state.path, state.size) for state in self.states] != [(state.path, state.size) for state in now]:
            return False
        before = zip(self.states, now, self.contents, strict=True)
        return all(then == after or has_content(after, content) for then, after, content in before)


def model_folder(path: Path, *, with_tokenizer: bool = True) -> Path:
    """The derived model folder of a GGUF file, written if it does not exist.

    Folders are in `$MVLLM_CACHE_DIR/gguf`, by default `$XDG_CACHE_HOME/mvllm/gguf` or `~/.cache/mvllm/gguf`; if that
    cannot be written, in a private folder in the system's temporary folder. Several processes may call this at the same
    time: folders are created atomically, and the first one is kept.

    A process that writes a folder removes outdated folders that no running process uses: those of files that have
    changed or no longer exist, those of the same file that have not been used for 30 days (of other versions of mvllm),
    and incomplete ones.

    Args:
        path: A GGUF file; any part of a split model.
        with_tokenizer: Whether to derive the tokenizer. If not, the model's tokenizer may be unsupported.

    Raises:
        ModelError: A file is missing or damaged, the model or its tokenizer is not supported, or no folder can be
            written.
    """
    files = tuple(_real_folder(file) for file in gguf_files(path))
    states = file_states(files)
    prefix = _name_prefix(files[0], with_tokenizer)
    if (existing := _existing_folder(prefix, states)) is not None:
        with contextlib.suppress(OSError):  # a read-only cache
            os.utime(existing)
        logger.debug("Configuration and tokenizer of %s are in %s.", files[0], existing)
        return existing
    model = read_gguf(files[0])
    digests = file_contents(model, states)
    contents = _derive(model, with_tokenizer)
    if file_states(files) != states:
        raise ModelError(f"{files[0]} was changed while it was read. Try again when it is complete.")
    name = _folder_name(prefix, digests)
    contents[FILES_NAME] = _as_json(
        {
            "files": [asdict(state) for state in states],
            "contents": [asdict(digest) for digest in digests],
            "derived": {n: len(c) for n, c in contents.items()},
        }
    )
    contents[LOCK_NAME] = b""
    failures = []
    for root in _cache_folders(for_writing=True):
        try:
            folder = _write(root, name, contents)
            hold(folder)
        except OSError as e:
            failures.append(f"{root}: {plain_reason(e)}")
            logger.warning("The cache %s cannot be written (%s).", root, plain_reason(e))
            continue
        logger.info("Wrote configuration and tokenizer of %s to %s.", files[0], folder)
        _remove_outdated(root, name)
        return folder
    raise ModelError(
        f"Configuration and tokenizer of {files[0]} cannot be written to a cache ({'; '.join(failures) or 'none'}). "
        f"Set {CACHE_VARIABLE} to a folder that can be written and has free space."
    )


def derived_files() -> list[list[Path]]:
    """The GGUF files of every derived folder in the cache, one list per model. Files may have been deleted since."""
    found: dict[tuple[Path, ...], None] = {}
    for cache in _cache_folders():
        for record in map(_read_record, sorted(path.parent for path in cache.glob(f"*/{FILES_NAME}"))):
            if record is not None and record.files:
                found[record.files] = None
    return [list(files) for files in found]


def update_states(folder: Path) -> None:
    """Stores the current modification times of the GGUF files of a derived folder if their contents are unchanged.

    Does nothing if a file has changed or cannot be read; reading it raises an error later.
    """
    record = _read_record(folder)
    if record is None:
        return
    with contextlib.suppress(ModelError, OSError):
        now = file_states(record.files)
        if now != record.states and record.is_of(now):
            _store_states(folder, record, now)


def _derive(model: GGUFModel, with_tokenizer: bool) -> dict[str, bytes]:
    """Content of each file of the folder, by name."""
    kind = model.metadata.get("general.type", "model")
    if kind != "model":
        raise ModelError(
            f"{model.files[0]} holds no language model: its general.type is {str(kind)[:40]!r}. Pass the file of the "
            "model itself."
        )
    # Imported here, because an existing folder does not need them.
    from mvllm_gguf.generation_config import generation_config
    from mvllm_gguf.model_config import model_config
    from mvllm_gguf.tensor_names import packed_modules

    config = model_config(model)
    if packed := packed_modules(model, _MOST_TENSORS):
        config["quantization_config"] = {"quant_method": "gguf", "tensors": packed}
    contents: dict[str, bytes] = {}
    if with_tokenizer:  # first, because its errors have a remedy for a damaged vocabulary
        from mvllm_gguf.tokenizer import tokenizer_files

        contents.update(tokenizer_files(model))
    for name, values in (
        ("config.json", config),
        ("generation_config.json", generation_config(model, with_vocabulary=with_tokenizer)),
    ):
        try:
            contents[name] = _as_json(values)
        except ValueError as e:
            raise ModelError(
                f"{model.files[0]} has metadata that {name} cannot hold ({e}): a number that is not finite. Take "
                "another file of the model."
            ) from e
    return contents


def _as_json(values: Any) -> bytes:
    return json.dumps(values, indent=2, allow_nan=False).encode()


# ------------------------------------------------------------------------------------------------- names and comparison


def _real_folder(file: Path) -> Path:
    """An absolute path with resolved folders. A link to the file itself is kept: in the hub's cache the target has
    another name, and the files of a split model are found by name."""
    try:
        return file.parent.resolve() / file.name
    except (OSError, ValueError, RuntimeError) as e:  # a null character; a loop of links
        raise ModelError(f"{str(file)!r} cannot be looked up: {e}") from e


def _name_prefix(file: Path, with_tokenizer: bool) -> str:
    """Common prefix of the names of a file's derived folders."""
    stem = re.sub(r"[^\w.\-]", "_", _SPLIT_SUFFIX.sub("", file.stem), flags=re.ASCII)[:80].lstrip(".") or "model"
    return f"{stem}-{_hash(os.fsencode(file), str(with_tokenizer).encode())}-"


def _folder_name(prefix: str, contents: list[FileContent]) -> str:
    return prefix + _hash(repr(contents).encode(), _version())


def _hash(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


@functools.cache
def _version() -> bytes:
    """A hash of this package's sources, which replaces a version number that must be incremented manually."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.digest()


def _existing_folder(prefix: str, states: list[FileState]) -> Path | None:
    """A complete folder of files in these states, now locked; None if there is none."""
    touched = []
    for root in _cache_folders():
        for folder in _folders(root, prefix):
            record = _read_record(folder)
            if record is None or folder.name != _folder_name(prefix, record.contents):
                continue
            if record.states != states:
                touched.append((folder, record))
            elif hold(folder) and _is_complete(folder):
                return folder
    for folder, record in touched:
        if record.is_of(states) and hold(folder) and _is_complete(folder):
            with contextlib.suppress(OSError):
                _store_states(folder, record, states)
                return folder
    return None


def _folders(root: Path, prefix: str) -> list[Path]:
    try:
        return sorted(folder for folder in root.iterdir() if folder.name.startswith(prefix))
    except OSError:
        return []


def _store_states(folder: Path, record: _Record, states: list[FileState]) -> None:
    """Updates the states in gguf_files.json atomically.

    Raises:
        OSError: It cannot be written.
    """
    temporary = folder / f".{secrets.token_hex(8)}"
    try:
        temporary.write_bytes(_as_json({**record.json, "files": [asdict(state) for state in states]}))
        temporary.replace(folder / FILES_NAME)
    finally:
        temporary.unlink(missing_ok=True)


def _is_complete(folder: Path) -> bool:
    """Whether a folder has all its files; cleaners of temporary folders may remove some."""
    found = _read_files_json(folder)
    if found is None:
        return False
    try:
        return all((folder / name).stat().st_size == size for name, size in found["derived"].items())
    except (OSError, KeyError, AttributeError, TypeError):
        return False


def _read_record(folder: Path) -> _Record | None:
    found = _read_files_json(folder)
    if found is None:
        return None
    states, contents = as_states(found.get("files")), as_contents(found.get("contents"))
    if states is None or contents is None or len(states) != len(contents):
        return None
    return _Record(found, states, contents)


def _read_files_json(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / FILES_NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


# ---------------------------------------------------------------------------------------------------------------- cache


def _cache_folders(*, for_writing: bool = False) -> Iterator[Path]:
    """Folders that may contain derived folders, in the order of preference."""
    chosen, xdg = os.environ.get(CACHE_VARIABLE), os.environ.get("XDG_CACHE_HOME", "")
    with contextlib.suppress(RuntimeError):  # the user has no home
        if chosen:
            yield Path(chosen).expanduser().absolute() / "gguf"
        else:
            yield (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "mvllm" / "gguf"
    user = os.getuid() if hasattr(os, "getuid") else "user"
    private = Path(tempfile.gettempdir()) / f"mvllm-{user}"
    if for_writing:
        with contextlib.suppress(OSError):
            private.mkdir(mode=0o700, exist_ok=True)
    if _is_private(private):
        yield private / "gguf"


def _is_private(folder: Path) -> bool:
    """Whether a folder exists, belongs to this user, and nobody else can access it. Chat templates and tokenizers are
    read from it, and other users could create a folder of this name."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    if not hasattr(os, "getuid"):
        return stat.S_ISDIR(found.st_mode)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _write(root: Path, name: str, contents: dict[str, bytes]) -> Path:
    """Writes a folder under a temporary name and renames it. If it exists already, restores its files.

    Raises:
        OSError: It cannot be written.
    """
    root.mkdir(parents=True, exist_ok=True)
    temporary, folder = root / f".mvllm-{secrets.token_hex(8)}", root / name
    try:
        temporary.mkdir()
        for file, content in contents.items():
            (temporary / file).write_bytes(content)
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
            # The folder exists: it is incomplete, or another process has just created it. Its files may be in use, so
            # each is replaced atomically, except the lock file, which other processes may hold.
            for file in contents:
                if file != LOCK_NAME or not (folder / file).exists():
                    (temporary / file).replace(folder / file)
        return folder
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Removes a folder unless it is in use. It is renamed first, so that readers never see an incomplete folder."""
    renamed = folder.with_name(f".mvllm-{secrets.token_hex(8)}")
    with removing(folder) as is_free, contextlib.suppress(OSError):
        if is_free:
            folder.rename(renamed)
            shutil.rmtree(renamed, ignore_errors=True)


def _remove_outdated(root: Path, name: str) -> None:
    """Removes outdated folders (see `model_folder`). Ignores errors: another process may remove them as well."""
    written = _FOLDER_NAME.fullmatch(name)
    with contextlib.suppress(OSError):
        for folder in list(root.iterdir()):
            match = _FOLDER_NAME.fullmatch(folder.name)
            with contextlib.suppress(OSError):
                unused = time.time() - folder.lstat().st_mtime
                if match and folder.name != name:
                    is_same_file = written is not None and match["file"] == written["file"]
                    if (is_same_file and unused > _UNUSED_FOR) or _has_changed(folder):
                        _remove(folder)
                elif _TEMPORARY_NAME.fullmatch(folder.name) and unused > _DAY:
                    shutil.rmtree(folder, ignore_errors=True)


def _has_changed(folder: Path) -> bool:
    """Whether a GGUF file of a derived folder has changed or no longer exists."""
    record = _read_record(folder)
    if record is None:
        return False
    try:
        now = file_states(record.files)
    except ModelError:
        return True
    return now != record.states and not record.is_of(now)
