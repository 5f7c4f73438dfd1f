"""The vocabulary of a GGUF file: tokens with types, and the ids of special tokens, read and checked.

Names and defaults are those of llama.cpp's `llama-vocab.cpp`.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from mvllm.extension_api import ModelError, get_logger
from mvllm_gguf.header import GGUFModel

logger = get_logger("mvllm.gguf.vocabulary")

_MOST_TOKENS = 1 << 21  # the largest published vocabulary has 2**18
_MOST_CHARACTERS = 1 << 23  # the largest published one has 2**21

_END_OF_TURN = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "[e~[",
    }
)
"""Texts of tokens that end a turn or a text in any vocabulary. Many files name only one of several."""

_DEFAULT_IDS = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "bert": {"bos": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103},
}
"""Default ids of special tokens, by kind of vocabulary. (llama.cpp's defaults for `gpt2`, bos and eos 11, are
Falcon's and not used here.)"""

_SPECIAL_TOKENS = ("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask", "cls")

_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 100


class TokenType(IntEnum):
    """Type of a token. Other numbers in a file mean `NORMAL`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary of a model.

    Attributes:
        kind: `tokenizer.ggml.model`, for instance `gpt2`.
        tokens: The texts by token id, unique and valid UTF-8.
        types: The types by token id.
        scores: The scores by token id; empty if the file has none.
        special_ids: Ids of special tokens by the names in GGUF files: `bos`, `eos`, `eot`, `eom`, `unknown`, `padding`,
            `seperator` (sic), `mask`.
        has_types: Whether the file has token types.
    """

    kind: str
    tokens: list[str] = field(repr=False)
    types: list[TokenType] = field(repr=False)
    scores: list[float] = field(repr=False)
    special_ids: Mapping[str, int]
    has_types: bool

    def text(self, name: str) -> str | None:
        """The text of a special token, or None if there is none."""
        token_id = self.special_ids.get(name)
        return None if token_id is None else self.tokens[token_id]

    def end_ids(self) -> list[int]:
        """Tokens that end a sequence: eos, eot and eom, then tokens whose texts are known to end a turn."""
        ids = [self.special_ids[name] for name in ("eos", "eot", "eom") if name in self.special_ids]
        ids += self.known_end_ids()
        return list(dict.fromkeys(ids))

    def known_end_ids(self) -> list[int]:
        """Tokens whose texts are known to end a turn, in ascending order.

        As in llama.cpp, except that `</s>` has to be a control token: it is an HTML element in Gemma and Qwen.
        """
        found = {text: i for i, text in enumerate(self.tokens) if text in _END_OF_TURN}
        if "</s>" in found and self.has_types and self.types[found["</s>"]] != TokenType.CONTROL:
            del found["</s>"]
        calls = {"<|call|>", "<|calls|>"} & found.keys()
        if calls and {"<|return|>", "<|flush|>"} & found.keys():
            found.pop("<|end|>", None)  # ends a message, not the turn (Harmony)
        return sorted(found.values())


def read_vocabulary(model: GGUFModel) -> Vocabulary:
    """The vocabulary in a file's metadata.

    An empty token gets the text `[EMPTY_7]` (with its id), a token that is not UTF-8 `[INVALID_7]`, so that the ids of
    other tokens do not change. A special token id outside of the vocabulary is ignored, with a warning.

    Raises:
        ModelError: There is none, or it is damaged: lists of different lengths, duplicate tokens, scores that are not
            finite, values of a wrong type.
    """
    metadata = model.metadata
    where = str(model.files[0])
    kind = metadata.get("tokenizer.ggml.model")
    if not isinstance(kind, str):
        raise ModelError(f"{where} has no tokenizer: 'tokenizer.ggml.model' is {_shown.repr(kind)}, expected a text.")
    tokens = _texts(metadata, "tokenizer.ggml.tokens", where)
    if not 0 < len(tokens) <= _MOST_TOKENS:
        raise ModelError(f"{where} has {len(tokens)} tokens; a vocabulary has 1 to {_MOST_TOKENS}.")
    if (characters := sum(map(len, tokens))) > _MOST_CHARACTERS:
        raise ModelError(f"{where} has tokens with {characters} characters together; {_MOST_CHARACTERS} are allowed.")
    tokens = _unique(tokens, kind, where)
    numbers = _list(metadata, "tokenizer.ggml.token_type", int, len(tokens), where)
    types = {kind.value: kind for kind in TokenType}
    scores = _list(metadata, "tokenizer.ggml.scores", (int, float), len(tokens), where)
    if not all(map(math.isfinite, scores)):
        raise ModelError(f"{where}: 'tokenizer.ggml.scores' has values that are not finite numbers.")
    return Vocabulary(
        kind=kind,
        tokens=tokens,
        types=[types.get(number, TokenType.NORMAL) for number in numbers] or [TokenType.NORMAL] * len(tokens),
        scores=scores,
        special_ids=dict(_special_ids(metadata, kind, len(tokens), where)),
        has_types=bool(numbers),
    )


def read_flag(model: GGUFModel, key: str, default: bool) -> bool:
    """A boolean value.

    Raises:
        ModelError: It has another type.
    """
    value = model.metadata.get(key, default)
    if not isinstance(value, bool):
        raise ModelError(f"{model.files[0]}: {key!r} should be true or false, found {_shown.repr(value)}.")
    return value


def read_merges(model: GGUFModel) -> list[str]:
    """The merges of a BPE vocabulary, each `left right`.

    Raises:
        ModelError: There are none, or they are not texts.
    """
    merges = _texts(model.metadata, "tokenizer.ggml.merges", str(model.files[0]))
    return [_utf8(merge) or "" for merge in merges]


def readable(text: str) -> str:
    """A text of the metadata with invalid UTF-8 replaced by U+FFFD."""
    return text.encode("utf-8", errors="surrogateescape").decode("utf-8", errors="replace")


def _utf8(text: str) -> str | None:
    """The text, or None if it is not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return None
    return text


def _unique(tokens: list[str], kind: str, where: str) -> list[str]:
    """The tokens, with generated texts for those that are empty or not UTF-8. Checks that all are unique."""
    named = []
    for i, token in enumerate(tokens):
        if not token:
            named.append(f"[EMPTY_{i}]")
        elif not token.isascii() and _utf8(token) is None:
            if kind == "gpt2":
                raise ModelError(
                    f"{where}: token {i} is {token.encode('utf-8', 'surrogateescape')[:40]!r}, which is not UTF-8. In "
                    "a byte-level vocabulary a character stands for each byte. Download or convert the file again."
                )
            named.append(f"[INVALID_{i}]")
        else:
            named.append(token)
    if len(set(named)) < len(named):
        first: dict[str, int] = {}
        for i, token in enumerate(named):
            if first.setdefault(token, i) != i:
                raise ModelError(
                    f"{where}: tokens {first[token]} and {i} are both {_shown.repr(token)}; the ids of a text would be "
                    "ambiguous. Download or convert the file again."
                )
    return named


def _special_ids(metadata: Mapping[str, Any], kind: str, num_tokens: int, where: str) -> Iterable[tuple[str, int]]:
    defaults = _DEFAULT_IDS.get(kind, {})
    for name in _SPECIAL_TOKENS:
        key = f"tokenizer.ggml.{name}_token_id"
        value = metadata.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ModelError(f"{where}: {key!r} should be the id of a token, found {_shown.repr(value)}.")
        if value is not None and not 0 <= value < num_tokens:
            logger.warning("%s: %s is %d, outside the %d tokens, and is ignored.", where, key, value, num_tokens)
            value = None
        if value is None:
            value = defaults.get(name, num_tokens)
        if value < num_tokens:
            yield name, value


def _texts(metadata: Mapping[str, Any], key: str, where: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ModelError(
            f"{where}: {key!r} should be a list of texts, found {_shown.repr(value)}. Download or convert the file "
            "again."
        )
    return value


def _list(metadata: Mapping[str, Any], key: str, kind: type | tuple[type, ...], length: int, where: str) -> list[Any]:
    """A list with one number per token; empty if there is none."""
    value = metadata.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
        raise ModelError(f"{where}: {key!r} should be a list of numbers, found {_shown.repr(value)}.")
    if len(value) != length:
        raise ModelError(
            f"{where}: {key!r} has {len(value)} values, but there are {length} tokens. Download or convert the file "
            "again."
        )
    return value
