"""Tokenizers that are all in their `tokenizer.json`: read without transformers.

Importing transformers, and torch with it, is the longest part of a front end's start and most of its memory; for many
models all that it does in the end is to hand `tokenizer.json` to the library `tokenizers`. `read_tokenizer_json` does
that by itself where it is certain that nothing else would happen, and answers None everywhere else: a class with
behaviour of its own, special tokens that the file does not have, a setting that it does not know.

Some classes of transformers build a tokenizer of their own from the file's vocabulary and merges
(`_TokenizerClassSpec`). If the file says the same as the class builds, it is read, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_GENERIC_CLASSES = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
"""One class under its old and its new name: it adds nothing to the file."""

_MODEL_TYPES = frozenset({"llama", "gpt2", "opt", "qwen3"})
"""Models for which transformers takes the class that the tokenizer's settings name; for others it knows better."""

_SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SPECIAL_TOKEN_LIST_KEYS = ("extra_special_tokens", "additional_special_tokens")
_IGNORED_KEYS = frozenset(
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


class _Model(msgspec.Struct):
    """The `model` of a `tokenizer.json`, but for its vocabulary and merges."""

    type: str
    dropout: Any = None
    unk_token: Any = None
    continuing_subword_prefix: Any = None
    end_of_word_suffix: Any = None
    fuse_unk: Any = False
    byte_fallback: Any = False
    ignore_merges: Any = False


class _File(msgspec.Struct):
    """A `tokenizer.json`, but for what is large."""

    model: _Model
    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None
    post_processor: Any = None


@dataclass(frozen=True)
class _TokenizerClassSpec:
    """What a class of transformers builds around a vocabulary and merges.

    Attributes:
        model_types: Models for which transformers takes the class.
        file: What it builds, without the post-processor, which it takes from the file or from `add_bos_token` and
            `add_eos_token`.
        tokens: Special tokens that it has if the settings name no others.
        named: Settings that name more special tokens.
        ignored: Settings without a say, beside those of every class.
    """

    model_types: frozenset[str]
    file: _File
    tokens: Mapping[str, str]
    named: frozenset[str]
    ignored: frozenset[str]


_GEMMA = _TokenizerClassSpec(
    model_types=frozenset({"gemma", "gemma2", "gemma3", "gemma3_text"}),
    file=_File(
        model=_Model("BPE", unk_token="<unk>", fuse_unk=True, byte_fallback=True),  # noqa: S106  (no password)
        normalizer={"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        pre_tokenizer={
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        decoder={
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
    ),
    tokens={
        "unk_token": "<unk>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
    named=frozenset({"boi_token", "eoi_token", "image_token"}),
    ignored=frozenset(
        {
            "add_bos_token",
            "add_eos_token",
            "processor_class",
            "sp_model_kwargs",
            "spaces_between_special_tokens",
            "use_default_system_prompt",
        }
    ),
)
_TOKENIZER_CLASS_SPECS = {"GemmaTokenizer": _GEMMA, "GemmaTokenizerFast": _GEMMA}

_LEGACY_FILES = ("special_tokens_map.json", "added_tokens.json")
"""Read by transformers where the settings have no `added_tokens_decoder`."""


@dataclass(frozen=True)
class JsonTokenizer:
    """A tokenizer as its file says it.

    Attributes:
        fast: Without truncation and padding.
        eos_token_id: The end-of-sequence token, if one is named.
    """

    fast: Tokenizer
    eos_token_id: int | None


def read_tokenizer_json(folder: Path, settings: Mapping[str, Any], model: Mapping[str, Any]) -> JsonTokenizer | None:
    """The tokenizer of a folder, or None where transformers has to be asked, also for what is wrong with it.

    Args:
        folder: Holds `tokenizer.json`.
        settings: Contents of its `tokenizer_config.json`.
        model: Contents of its `config.json`.
    """
    name = settings.get("tokenizer_class")
    built = _TOKENIZER_CLASS_SPECS.get(name) if isinstance(name, str) else None
    if built is None and name not in _GENERIC_CLASSES:
        return None
    if model.get("model_type") not in (_MODEL_TYPES if built is None else built.model_types) or "auto_map" in model:
        return None
    if built is not None:
        if not settings.keys() <= {
            *_SPECIAL_TOKEN_KEYS,
            *_SPECIAL_TOKEN_LIST_KEYS,
            *_IGNORED_KEYS,
            *built.named,
            *built.ignored,
        }:
            return None
        settings = {**built.tokens, **settings}
        if not _file_matches_spec(built, folder / "tokenizer.json", settings):
            return None
    elif not settings.keys() <= {*_SPECIAL_TOKEN_KEYS, *_SPECIAL_TOKEN_LIST_KEYS, *_IGNORED_KEYS}:
        return None
    if "added_tokens_decoder" not in settings and any((folder / name).exists() for name in _LEGACY_FILES):
        return None
    from tokenizers import Tokenizer  # engines without a tokenizer do not wait for it

    try:
        fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # noqa: BLE001  # the library raises nothing narrower; transformers will say what is wrong
        return None
    known = {i: _added_token_fields(token) for i, token in fast.get_added_tokens_decoder().items()}
    special = {facts["content"] for facts in known.values() if facts["special"]}
    wanted = _special_token_texts(settings, () if built is None else built.named) | (
        {fast.padding["pad_token"]} if fast.padding else set()
    )
    if not wanted <= special or not _added_tokens_match(settings.get("added_tokens_decoder", {}), known):
        return None
    fast.no_truncation()
    fast.no_padding()
    eos = settings.get("eos_token")
    return JsonTokenizer(fast, None if eos is None else fast.token_to_id(_text(eos)))


def _file_matches_spec(built: _TokenizerClassSpec, path: Path, settings: Mapping[str, Any]) -> bool:
    """Whether a class builds from a file what the file says by itself."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
    except (OSError, msgspec.MsgspecError, RecursionError):
        return False
    if _text(settings["unk_token"]) != built.tokens["unk_token"]:
        return False
    if msgspec.structs.replace(file, post_processor=None) != built.file:
        return False
    if "add_bos_token" not in settings and "add_eos_token" not in settings:
        return file.post_processor is not None
    around = [
        [_text(settings[name])] if settings.get(flag, False) else []
        for flag, name in (("add_bos_token", "bos_token"), ("add_eos_token", "eos_token"))
    ]
    special = [[{"SpecialToken": {"id": token, "type_id": 0}} for token in tokens] for tokens in around]
    single = [*special[0], {"Sequence": {"id": "A", "type_id": 0}}, *special[1]]
    post_processor = file.post_processor
    return (
        isinstance(post_processor, Mapping)
        and post_processor.get("type") == "TemplateProcessing"
        and post_processor.get("single") == single
    )


def _special_token_texts(settings: Mapping[str, Any], more: Collection[str]) -> set[str]:
    """The special tokens that the settings name; what is no token's name is one that no file has.

    Args:
        more: Settings that name special tokens, beside those of every class.
    """
    found = {_text(settings[name]) for name in (*_SPECIAL_TOKEN_KEYS, *more) if settings.get(name) is not None}
    for name in _SPECIAL_TOKEN_LIST_KEYS:
        tokens = settings.get(name) or []
        if more and isinstance(tokens, Mapping):
            tokens = list(tokens.values())
        found |= {_text(token) for token in tokens} if isinstance(tokens, list) else {""}
    return found


def _text(token: object) -> str:
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else ""


def _added_tokens_match(listed: object, known: Mapping[int, Mapping[str, Any]]) -> bool:
    """Whether the tokens that the settings add are among those of the file, with the same properties."""
    if not isinstance(listed, Mapping):
        return False
    return all(key.isdecimal() and known.get(int(key)) == facts for key, facts in listed.items())


def _added_token_fields(token: Any) -> dict[str, Any]:
    return {
        "content": token.content,
        "single_word": token.single_word,
        "lstrip": token.lstrip,
        "rstrip": token.rstrip,
        "normalized": token.normalized,
        "special": token.special,
    }
