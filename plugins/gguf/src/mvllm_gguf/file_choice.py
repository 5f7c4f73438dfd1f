"""Chooses one model among the GGUF files of a folder or a repository, by file name.

Publishers put many quantizations of a model into one folder (`name-Q4_K_M.gguf`, `name.q8_0.gguf`, `BF16/name.gguf`).
Large models are split into several files (`name-Q8_0-00001-of-00003.gguf`). Other files are not models
(`mmproj-name-f16.gguf`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from mvllm.extension_api import ModelError
from mvllm.extension_api.checkpoint_formats import ModelFiles

PREFERRED = "Q4_K_M"
"""The default quantization if there are several, as in llama.cpp."""

SUFFIX = ".gguf"

_SPLIT = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})", re.DOTALL)
# Multimodal projectors, and importance matrices for quantization.
_NOT_A_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)
_QUANTIZATION = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q[1-8]_[A-Z0-9_]+|TQ[12]_0|MXFP4(?:_MOE)?|NVFP4|BF16|FP?16|FP?32))(?=$|[-./])",
    re.IGNORECASE,
)


def list_models(names: Iterable[str]) -> list[ModelFiles]:
    """The models among the files of a folder or a repository, sorted by name.

    Args:
        names: Relative paths of all files, with `/`.
    """
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(SUFFIX) and not _NOT_A_MODEL.search(name.rsplit("/", 1)[-1]):
            stem = name[: -len(SUFFIX)]
            split = _SPLIT.fullmatch(stem)
            models.setdefault(f"{split['stem']}-of-{split['count']}" if split else stem, []).append(name)
    return [_model_files(files) for files in models.values()]


def _model_files(files: list[str]) -> ModelFiles:
    stem = _stem(files[0])
    found = _QUANTIZATION.findall(stem)
    return ModelFiles(stem, tuple(files), found[-1] if found else stem)


def choose(choices: Sequence[ModelFiles], quantization: str | None, where: str, how: str) -> ModelFiles:
    """Chooses one of several models.

    Args:
        choices: From `list_models`; not empty.
        quantization: The requested quantization, case-insensitive; None chooses the only model, or `PREFERRED`.
        where: The searched folder or repository, for messages.
        how: Example of how to request a quantization, for messages; `{}` is replaced by it.

    Raises:
        ModelError: There is no such model, there are several, or one of its files is missing; lists the models.
    """
    wanted = quantization or PREFERRED
    found = _matching(choices, wanted) if quantization or len(choices) > 1 else list(choices)
    if len(found) > 1:  # `Q4_K_M` also matches `UD-Q4_K_M`
        found = [each for each in found if each.quantization.upper() == wanted.upper()] or found
    if not found and quantization:
        raise ModelError(
            f"{where} holds no GGUF file for {quantization!r}, but {_names(choices)}. Ask for one of these, as in "
            f"{how.format(choices[0].quantization)!r}."
        )
    if not found:
        raise ModelError(
            f"{where} holds {len(choices)} models as GGUF files, none of them {PREFERRED}: {_names(choices)}. Ask for "
            f"one of these, as in {how.format(choices[0].quantization)!r}."
        )
    if len(found) > 1:
        raise ModelError(
            f"{where} holds {len(found)} models as GGUF files for {wanted!r}: {_names(found)}. Pass the path of one of "
            "these files."
        )
    return _complete(found[0], where)


def _matching(choices: Sequence[ModelFiles], quantization: str) -> list[ModelFiles]:
    """Models whose names contain the quantization as a separate word: `Q4_K` does not match `name-Q4_K_M`."""
    part = re.compile(rf"(?:^|[-._/]){re.escape(quantization)}(?=$|[-./])", re.IGNORECASE)
    return [each for each in choices if part.search(each.stem)]


def _stem(name: str) -> str:
    stem = name[: -len(SUFFIX)]
    split = _SPLIT.fullmatch(stem)
    return split["stem"] if split else stem


def _complete(choice: ModelFiles, where: str) -> ModelFiles:
    split = _SPLIT.fullmatch(choice.files[0][: -len(SUFFIX)])
    if split is None:
        return choice
    count, suffix = int(split["count"]), choice.files[0][-len(SUFFIX) :]
    numbers = {int(match["number"]) for name in choice.files if (match := _SPLIT.fullmatch(name[: -len(SUFFIX)]))}
    missing = [i for i in range(1, min(count, 10_000) + 1) if i not in numbers]
    if missing:
        first = f"{choice.stem}-{missing[0]:05d}-of-{count:05d}{suffix}"
        raise ModelError(
            f"{where} holds {len(numbers)} of the {count} files of {choice.stem}{SUFFIX}; {first} is missing, for "
            "instance. Download all of them."
        )
    return choice


def _names(choices: Sequence[ModelFiles], most: int = 40) -> str:
    more = f" and {len(choices) - most} more" if len(choices) > most else ""
    return ", ".join(each.stem + SUFFIX for each in choices[:most]) + more
