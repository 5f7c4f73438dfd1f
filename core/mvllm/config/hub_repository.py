"""A model repository on the Hugging Face hub, reached through `huggingface_hub` and its cache."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mvllm.errors import ModelError, plain_reason
from mvllm.logging import get_logger
from mvllm.progress import has_terminal, progress_class

logger = get_logger(__name__)

# Copies of the weights in other layouts.
_NOT_WANTED = ("consolidated*", "original/*", "onnx/*", "*/*.safetensors")
_TRUE = ("1", "true", "yes", "on")


def is_offline() -> bool:
    """Whether the environment disables access to the hub (`HF_HUB_OFFLINE`)."""
    return os.environ.get("HF_HUB_OFFLINE", "").strip().lower() in _TRUE


@dataclass(frozen=True)
class HubRepository:
    """One repository at one revision.

    Args:
        name: `organisation/name`.
        what: `model` or `tokenizer`, for messages.
        folder: The folder of that name, which does not exist; for messages.
        revision: Branch, tag or commit; None is the default branch.
        token: Hub token; None takes `HF_TOKEN` or the stored one.
    """

    name: str
    what: str
    folder: Path
    revision: str | None
    token: str | None

    def __str__(self) -> str:
        place = "the cached part of the repository" if is_offline() else "the repository"
        return f"{place} {self.name!r}{self._version}"

    def snapshot(self, patterns: Sequence[str]) -> Path:
        """The cache folder with the files that match `patterns`. Downloads them first, unless in offline mode.

        Raises:
            ModelError: They are not available; lists what was tried, the results, and what to do.
        """
        offline = is_offline()
        if not offline:
            logger.info("Fetching %s%s from the hub (cache: %s).", self.name, self._version, hub_cache())
        # Converts the errors of the HTTP client and of the file system.
        try:
            return self._download(patterns, offline)
        except Exception as e:
            raise self._not_found(e, offline) from e

    def file_names(self) -> list[str]:
        """Paths of all files of the repository. In offline mode, or if the hub does not respond, of those in the cache.

        Raises:
            ModelError: As `snapshot`.
        """
        from huggingface_hub import list_repo_files

        offline = is_offline()
        try:
            if offline:
                return self._cached_names()
            return list(list_repo_files(self.name, revision=self.revision, token=self.token))
        except Exception as e:
            error = self._not_found(e, offline)
            if offline or _is_answer_of_the_hub(e):
                raise error from e
            names: list[str] = []
            with contextlib.suppress(Exception):  # the error above says more
                names = self._cached_names()
            if not names:
                raise error from e
            logger.warning("The hub cannot be asked for %s (%s); its cache is used.", self.name, plain_reason(e))
            return names

    def _cached_names(self) -> list[str]:
        root = self._download((), True)
        return [
            (Path(folder) / name).relative_to(root).as_posix()
            for folder, _, names in os.walk(root)
            for name in names
            if os.path.exists(os.path.join(folder, name))  # skips broken links
        ]

    def _download(self, patterns: Sequence[str], local_files_only: bool) -> Path:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import are_progress_bars_disabled

        found = snapshot_download(
            self.name,
            revision=self.revision,
            token=self.token,
            cache_dir=hub_cache(),
            local_files_only=local_files_only,
            allow_patterns=list(patterns),
            ignore_patterns=list(_NOT_WANTED),
            tqdm_class=None if has_terminal() or are_progress_bars_disabled() else progress_class(),
        )
        return Path(str(found))

    @property
    def _version(self) -> str:
        return f" at revision {self.revision!r}" if self.revision else ""

    def _not_found(self, error: Exception, offline: bool) -> ModelError:
        name, folder = f"The {self.what} {self.name!r}{self._version}", str(self.folder.absolute())
        if not offline and _is_network_error(error):
            return ModelError(
                f"{name} could not be fetched: the hub cannot be reached ({plain_reason(error)}).\n"
                f"  Folder: {folder!r} does not exist.\n"
                f"  Cache: {str(hub_cache())!r} does not hold it.\n"
                "Check the network and HF_ENDPOINT. What is in the cache or in a local folder needs no network."
            )
        on_the_hub, remedy = _reason(error, offline)
        return ModelError(
            f"{name} was not found.\n  Folder: {folder!r} does not exist.\n  Hub: {on_the_hub}.\n{remedy}"
        )


def hub_cache() -> Path:
    """The folder of the hub's cache: HF_HUB_CACHE, or below HF_HOME."""
    from huggingface_hub import constants

    return Path(os.path.expandvars(constants.HF_HUB_CACHE)).expanduser()


def _is_network_error(error: BaseException) -> bool:
    """Whether the hub did not answer, as far as the chain of exceptions tells."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, LocalEntryNotFoundError | ConnectionError | TimeoutError | socket.gaierror):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _is_answer_of_the_hub(error: Exception) -> bool:
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    return isinstance(error, RepositoryNotFoundError | RevisionNotFoundError | HFValidationError)


def _reason(error: Exception, offline: bool) -> tuple[str, str]:
    """What happened, and what to do."""
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    cache = str(hub_cache())
    if isinstance(error, GatedRepoError):
        return "the repository is gated", "Accept its terms on its page, and pass hf_token or set HF_TOKEN."
    if isinstance(error, RevisionNotFoundError):
        return "the repository does not have that revision", "Check revision."
    if isinstance(error, RepositoryNotFoundError):
        return (
            "there is no such repository, or it is private",
            "Check the spelling; for a private repository pass hf_token or set HF_TOKEN.",
        )
    if isinstance(error, HFValidationError):
        return (
            "it can have no repository of that name",
            "Check the spelling: names read 'organisation/name', of letters, digits, '-', '_' and '.', and neither "
            "begin nor end with '-' or '.'.",
        )
    if offline:
        return (
            f"the cache {cache!r} does not hold it, and HF_HUB_OFFLINE=1 forbids asking the hub",
            "Pass a local folder, point HF_HOME or HF_HUB_CACHE at a cache that holds it, or unset HF_HUB_OFFLINE.",
        )
    return (
        f"fetching it (cache {cache!r}) failed: {plain_reason(error)}",
        "Check HF_ENDPOINT, the rights on the cache and its free space, or give a local folder.",
    )
