"""Finds the folder of a model: a local one, the packaged demo, or a snapshot from the Hugging Face hub.

A local folder never causes network traffic. A hub name goes through `huggingface_hub`, which uses the cache in
`HF_HOME` or `HF_HUB_CACHE` and the token `HF_TOKEN`; with `HF_HUB_OFFLINE=1` it reads the cache only. All files of a
model have one revision.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from mvllm.errors import ModelError, plain_reason
from mvllm.logging import get_logger
from mvllm.progress import has_terminal, progress_class

logger = get_logger(__name__)

DEMO = "demo"

_CONFIGURATION = ("*.json", "*.jinja", "*.txt")
_TOKENIZER = ("tokenizer*", "*.model", "*.tiktoken")
_WEIGHTS = ("*.safetensors",)
_CODE = ("*.py",)
# Copies of the weights in other layouts.
_NOT_WANTED = ("consolidated*", "original/*", "onnx/*", "*/*.safetensors")

_HUB_NAME = re.compile(r"[\w.\-]+(/[\w.\-]+)?", re.ASCII)
_GGUF = ".gguf"
_TRUE = ("1", "true", "yes", "on")


def find_model(
    model: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    trust_remote_code: bool = False,
    with_weights: bool = True,
) -> Path:
    """The folder of `model`.

    Args:
        model: A folder, `demo`, or a hub name (`organisation/name`).
        revision: Branch, tag or commit on the hub; None is the default branch. Does not apply to folders.
        token: Hub token; None takes `HF_TOKEN` or the one stored by `hf auth login`.
        trust_remote_code: Fetch the repository's Python files as well.
        with_weights: Fetch the weights as well.

    Raises:
        ModelError: It was not found; says what was tried, the results, and what to do.
    """
    patterns: tuple[str, ...] = _CONFIGURATION + _TOKENIZER
    if with_weights:
        patterns += _WEIGHTS
    if trust_remote_code:
        patterns += _CODE
    return _find(model, "model", revision, token, patterns)


def find_tokenizer(
    tokenizer: str, *, revision: str | None = None, token: str | None = None, trust_remote_code: bool = False
) -> Path:
    """The folder of a tokenizer that is not the model's; arguments and errors as `find_model`."""
    patterns = _CONFIGURATION + _TOKENIZER + (_CODE if trust_remote_code else ())
    return _find(tokenizer, "tokenizer", revision, token, patterns)


def is_offline() -> bool:
    """Whether the environment disables access to the hub (`HF_HUB_OFFLINE`)."""
    return os.environ.get("HF_HUB_OFFLINE", "").strip().lower() in _TRUE


def _find(name: str, what: str, revision: str | None, token: str | None, patterns: tuple[str, ...]) -> Path:
    if not name.strip():
        raise ModelError(f"No {what} was named. Pass a folder, a name from the hub, or {DEMO!r}.")
    folder = Path(name).expanduser()
    if name == DEMO and not (folder / "config.json").is_file():
        return _demo_folder()
    try:
        is_folder, exists = folder.is_dir(), folder.exists()
        files = sorted(path.name for path in folder.iterdir()) if is_folder else [folder.name]
    except (OSError, ValueError) as e:
        raise ModelError(f"The {what} {name!r} cannot be looked up: {plain_reason(e)}.") from e
    if exists and what == "model":
        _refuse_gguf(folder if is_folder else folder.parent, files)
    if is_folder:
        return folder
    if exists:
        raise ModelError(
            f"The {what} {name!r} is a file. Pass the folder that holds it, with config.json, safetensors weights and "
            "tokenizer."
        )
    if not _may_be_hub_name(name):
        raise ModelError(
            f"The {what} {name!r} was not found.\n"
            f"  Folder: {str(folder.absolute())!r} does not exist{_nearest(folder.absolute())}.\n"
            f"  Hub: not asked, as this is no name of a repository (those read 'organisation/name').\n"
            "Check the path."
        )
    return _snapshot(name, what, folder, revision, token, patterns)


def _refuse_gguf(folder: Path, files: Sequence[str]) -> None:
    """Raises a ModelError if the weights are GGUF files only."""
    found = next((name for name in files if name.lower().endswith(_GGUF)), None)
    if found is None or any(name.endswith(".safetensors") for name in files):
        return
    raise ModelError(
        f"{folder / found} is a model in GGUF form, which mvllm cannot read. Pass the model that it was made from, in "
        "safetensors form, and quantize it while it is loaded (quantization='int4' or 'int8'); its page on the hub "
        "usually names it. Or convert the file with transformers and gguf: "
        f"AutoModelForCausalLM.from_pretrained({str(folder)!r}, gguf_file={found!r}).save_pretrained(NEW), and "
        "AutoTokenizer likewise."
    )


def _demo_folder() -> Path:
    from mvllm.demo import demo_model_path

    try:
        return demo_model_path()
    except FileNotFoundError as e:
        raise ModelError(f"The model 'demo' was asked for, but {e}") from e


def _nearest(missing: Path) -> str:
    """For messages: the nearest parent of a missing folder that exists."""
    for parent in missing.parents:
        with contextlib.suppress(OSError, ValueError):
            if parent.is_dir():
                return f" ({str(parent)!r} does)"
    return ""


def _may_be_hub_name(name: str) -> bool:
    return bool(_HUB_NAME.fullmatch(name)) and not name.startswith((".", "-")) and ".." not in name


def _snapshot(
    name: str, what: str, folder: Path, revision: str | None, token: str | None, patterns: tuple[str, ...]
) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
    from huggingface_hub.utils import are_progress_bars_disabled

    offline = is_offline()
    cache = Path(os.path.expandvars(constants.HF_HUB_CACHE)).expanduser()
    version = f" at revision {revision!r}" if revision else ""
    if not offline:
        logger.info("Fetching %s%s from the hub (cache: %s).", name, version, cache)

    def not_found(on_the_hub: str, remedy: str) -> ModelError:
        return ModelError(
            f"The {what} {name!r}{version} was not found.\n"
            f"  Folder: {str(folder.absolute())!r} does not exist.\n"
            f"  Hub: {on_the_hub}.\n"
            f"{remedy}"
        )

    try:
        found = snapshot_download(
            name,
            revision=revision,
            token=token,
            cache_dir=cache,
            local_files_only=offline,
            allow_patterns=list(patterns),
            ignore_patterns=list(_NOT_WANTED),
            tqdm_class=None if has_terminal() or are_progress_bars_disabled() else progress_class(),
        )
    except GatedRepoError as e:
        raise not_found(
            "the repository is gated", "Accept its terms on its page, and pass hf_token or set HF_TOKEN."
        ) from e
    except RevisionNotFoundError as e:
        raise not_found("the repository does not have that revision", "Check revision.") from e
    except RepositoryNotFoundError as e:
        raise not_found(
            "there is no such repository, or it is private",
            "Check the spelling; for a private repository pass hf_token or set HF_TOKEN.",
        ) from e
    except HFValidationError as e:
        raise not_found(
            "it can have no repository of that name",
            "Check the spelling: names read 'organisation/name', of letters, digits, '-', '_' and '.', and neither "
            "begin nor end with '-' or '.'.",
        ) from e
    # Every way a download can fail (HTTP client, file system) ends here with its cause.
    except Exception as e:
        if offline:
            raise not_found(
                f"the cache {str(cache)!r} does not hold it, and HF_HUB_OFFLINE=1 forbids asking the hub",
                "Pass a local folder, point HF_HOME or HF_HUB_CACHE at a cache that holds it, or unset HF_HUB_OFFLINE.",
            ) from e
        raise not_found(
            f"fetching it (cache {str(cache)!r}) failed: {plain_reason(e)}",
            "Pass a local folder, or check the network, HF_ENDPOINT and the free space of the cache.",
        ) from e
    return Path(str(found))
