"""Tokenizers that are all in their `tokenizer.json`: read without transformers.

Importing transformers, and torch with it, is the longest part of a front end's start and most of its memory; for many
models all that it does in the end is to hand `tokenizer.json` to the library `tokenizers`. `read_plain` does that by
itself where it is certain that nothing else would happen, and answers None everywhere else: a class with behaviour of
its own, special tokens that the file does not have, a setting that it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PLAIN_CLASSES = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
"""One class under its old and its new name: it adds nothing to the file."""

_MODEL_TYPES = frozenset({"llama", "gpt2", "opt", "qwen3"})
"""Models for which transformers takes the class that the tokenizer's settings name; for others it knows better."""

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTED = ("extra_special_tokens", "additional_special_tokens")
_IGNORED = frozenset(
    {
        "added_tokens_decoder",
        "backend",
        "chat_template",
        "clean_up_tokenization_spaces",
        "is_local",
        "local_files_only",
        "model_input_names",
        "model_max_length",
        "name_or_path",
        "padding_side",
        "tokenizer_class",
        "truncation_side",
    }
)
"""Settings without a say in which ids a text has, or a text ids. `added_tokens_decoder` is looked at apart."""

_OLDER_FILES = ("special_tokens_map.json", "added_tokens.json")
"""Read by transformers where the settings have no `added_tokens_decoder`."""


@dataclass(frozen=True)
class PlainTokenizer:
    """A tokenizer as its file says it.

    Attributes:
        fast: Without truncation and padding.
        eos_token_id: The end-of-sequence token, if one is named.
    """

    fast: Tokenizer
    eos_token_id: int | None


def read_plain(folder: Path, settings: Mapping[str, Any], model: Mapping[str, Any]) -> PlainTokenizer | None:
    """The tokenizer of a folder, or None where transformers has to be asked, also for what is wrong with it.

    Args:
        folder: Holds `tokenizer.json`.
        settings: Contents of its `tokenizer_config.json`.
        model: Contents of its `config.json`.
    """
    if settings.get("tokenizer_class") not in _PLAIN_CLASSES or model.get("model_type") not in _MODEL_TYPES:
        return None
    if "auto_map" in model or not settings.keys() <= {*_NAMED, *_LISTED, *_IGNORED}:
        return None
    if "added_tokens_decoder" not in settings and any((folder / name).exists() for name in _OLDER_FILES):
        return None
    from tokenizers import Tokenizer  # engines without a tokenizer do not wait for it

    try:
        fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # noqa: BLE001  # the library raises nothing narrower; transformers will say what is wrong
        return None
    known = {i: _facts(token) for i, token in fast.get_added_tokens_decoder().items()}
    special = {facts["content"] for facts in known.values() if facts["special"]}
    wanted = _wanted(settings) | ({fast.padding["pad_token"]} if fast.padding else set())
    if not wanted <= special or not _repeats(settings.get("added_tokens_decoder", {}), known):
        return None
    fast.no_truncation()
    fast.no_padding()
    eos = settings.get("eos_token")
    return PlainTokenizer(fast, None if eos is None else fast.token_to_id(_text(eos)))


def _wanted(settings: Mapping[str, Any]) -> set[str]:
    """The special tokens that the settings name; what is no token's name is one that no file has."""
    found = {_text(settings[name]) for name in _NAMED if settings.get(name) is not None}
    for name in _LISTED:
        tokens = settings.get(name) or []
        found |= {_text(token) for token in tokens} if isinstance(tokens, list) else {""}
    return found


def _text(token: object) -> str:
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else ""


def _repeats(listed: object, known: Mapping[int, Mapping[str, Any]]) -> bool:
    """Whether the tokens that the settings add are among those of the file, with the same properties."""
    if not isinstance(listed, Mapping):
        return False
    return all(key.isdecimal() and known.get(int(key)) == facts for key, facts in listed.items())


def _facts(token: Any) -> dict[str, Any]:
    return {
        "content": token.content,
        "single_word": token.single_word,
        "lstrip": token.lstrip,
        "rstrip": token.rstrip,
        "normalized": token.normalized,
        "special": token.special,
    }
