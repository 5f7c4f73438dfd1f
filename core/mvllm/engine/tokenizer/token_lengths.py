"""How much text one token of a tokenizer can stand for: a long text is known to be too long without tokenizing it."""

from __future__ import annotations

import json
from typing import Any

_MOST_COMPOSED = 4
"""Most code points that NFC or NFKC joins to one."""
_JOINED_BY = {"NFC": _MOST_COMPOSED, "NFKC": _MOST_COMPOSED, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1}
_BYTE_TOKENS = [f"<0x{i:02X}>" for i in range(256)]


def max_chars_per_token(fast: Any) -> int:
    """Most characters of a text that become one token; 0 if it may be any number.

    Args:
        fast: A tokenizer of the library `tokenizers`.
    """
    normalizer, pre_tokenizer = _state(fast.normalizer), _state(fast.pre_tokenizer)
    joined = 1 if normalizer is None else _joined_by(normalizer)
    if "Removed" in json.dumps(pre_tokenizer):
        return 0
    tokens = fast.get_vocab()
    lengths = [len(token) for token in tokens]
    if type(fast.decoder).__name__ == "ByteLevel":
        has_all_bytes = pre_tokenizer is not None and lengths.count(1) >= 256
    else:
        has_all_bytes = bool(getattr(fast.model, "byte_fallback", False)) and all(
            map(tokens.__contains__, _BYTE_TOKENS)
        )
    if not has_all_bytes:  # unknown characters are dropped, or become one token
        return 0
    strips = any(token.lstrip or token.rstrip for token in fast.get_added_tokens_decoder().values())
    return 0 if strips else joined * max(lengths)


def _joined_by(normalizer: Any) -> int:
    """Most characters that a normalizer makes one; 0 if it may be any number."""
    kind = normalizer.get("type")
    if kind == "Sequence":
        product = 1
        for each in normalizer["normalizers"]:
            product *= _joined_by(each)
        return product
    if kind == "Replace":
        pattern = normalizer["pattern"].get("String")
        return int(pattern is not None and len(normalizer["content"]) >= len(pattern))
    return _JOINED_BY.get(kind, 0)


def _state(part: Any) -> Any:
    """A part of a tokenizer as in tokenizer.json; None if there is none."""
    return None if part is None else json.loads(part.__getstate__())
