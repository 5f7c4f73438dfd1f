"""Rejects tokenizers that expand a text many times over.

A malicious `tokenizer.json` may replace one character by sixteen, eight times in a row. The library then uses gigabytes
for a line of text, in native code that cannot be interrupted. The largest possible expansion is a product over the
steps of the tokenizer, so it is computed without running it.
"""

from __future__ import annotations

import base64
import binascii
import re
from pathlib import Path
from typing import Any

import msgspec

from mvllm.errors import ModelError

MAX_EXPANSION = 64
"""Allowed characters per input character. Real tokenizers stay below four."""

_CLASS = re.compile(r"\\[pP](\{[^}]*\}|.)")  # Unicode properties, which Python's expressions lack
_BYTES_PER_CHARACTER = 4
_LONGEST_COMPATIBILITY_FORM = 18
"""Characters of the longest compatibility decomposition in Unicode (U+FDFA), which normalization tables contain."""


class _File(msgspec.Struct):
    normalizer: Any = None
    pre_tokenizer: Any = None
    post_processor: Any = None
    decoder: Any = None


def check_tokenizer_expansion(path: Path) -> None:
    """Checks a `tokenizer.json`, without reading its vocabulary into memory.

    Raises:
        ModelError: It can expand a text more than MAX_EXPANSION times.
    """
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
        text = _expansion(file.normalizer, _BYTES_PER_CHARACTER) * _expansion(file.pre_tokenizer, _BYTES_PER_CHARACTER)
        growth = {"prompt": text * _expansion(file.post_processor), "output": _expansion(file.decoder)}
    except (OSError, msgspec.MsgspecError, RecursionError):
        return  # the library reports the error
    for part, times in growth.items():
        if times > MAX_EXPANSION:
            raise ModelError(
                f"{path}: its steps can expand one character of the {part} to {times:.4g} characters or tokens, but "
                f"{MAX_EXPANSION} are allowed: a short text could use all memory. Check the origin of the tokenizer, "
                "or name another folder with tokenizer='FOLDER'."
            )


def _expansion(part: object, byte_level: int = 1) -> float:
    """The largest number of characters, or tokens, that a part of a tokenizer can make of one character.

    Args:
        byte_level: The expansion of a `ByteLevel` step.
    """
    if not isinstance(part, dict):
        return 1.0
    times = 1.0
    for key in ("normalizers", "pretokenizers", "processors", "decoders"):
        steps = part.get(key)
        for step in steps if isinstance(steps, list) else ():
            times *= _expansion(step, byte_level)
    match part.get("type"):
        case "Replace":
            content, pattern = part.get("content"), part.get("pattern")
            if isinstance(content, str) and isinstance(pattern, dict):
                times *= _replacement_expansion(pattern, len(content))
        case "Prepend":
            times *= 1.0 + len(str(part.get("prepend") or ""))
        case "ByteLevel":
            times *= byte_level
        case "Precompiled":
            longest = _longest_precompiled_text(part.get("precompiled_charsmap"))
            times *= longest if longest > _LONGEST_COMPATIBILITY_FORM else 1.0
        case "TemplateProcessing":
            times *= max(1, _num_copies(part.get("single")), _num_copies(part.get("pair")))
    return times


def _num_copies(template: object) -> int:
    """How often a template contains the text, or both texts of a pair."""
    pieces = template if isinstance(template, list) else []
    return sum("Sequence" in piece for piece in pieces if isinstance(piece, dict))


def _longest_precompiled_text(table: object) -> int:
    """Length of the longest text in a compiled table of replacements: 4 bytes with the size of an index, the index,
    then zero-terminated texts."""
    try:
        data = base64.b64decode(str(table or ""))
    except (binascii.Error, ValueError):
        return 0
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max(len(text.decode("utf-8", "replace")) for text in texts.split(b"\0"))


def _replacement_expansion(pattern: dict[str, Any], length: int) -> float:
    text, expression = pattern.get("String"), pattern.get("Regex")
    shortest = len(text) if isinstance(text, str) else _shortest_match(str(expression))
    return max(1.0, length / shortest) if shortest else 1.0 + length


def _shortest_match(expression: str) -> int:
    """The smallest number of characters that a regular expression matches; 0 if unknown."""
    try:
        # The minimum width is not available in the public API.
        shortest: int = re._parser.parse(_CLASS.sub("x", expression)).getwidth()[0]  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001  (another regex dialect: it may match anything)
        return 0
    return shortest
