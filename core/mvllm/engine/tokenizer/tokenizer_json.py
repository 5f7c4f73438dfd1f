"""Loads a tokenizer from `tokenizer.json` without importing transformers.

Importing transformers, and torch with it, takes most of a front end's start time and memory. For many models,
transformers only passes `tokenizer.json` to the library `tokenizers`. `read_tokenizer_json` does the same if it is
certain that the result is equal. Otherwise it returns None: for a tokenizer class with code of its own, special tokens
that the file does not have, or an unknown setting.

Some classes of transformers build a tokenizer from the file's vocabulary and merges (`_TokenizerClassSpec`). If the
file describes the same tokenizer as the class builds, it is read, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_GENERIC_CLASSES = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
"""The old and the new name of one class, which adds nothing to the file."""

_MODEL_TYPES = frozenset(
    {
        "deepseek_v2",
        "deepseek_v3",
        "falcon",
        "gemma2",
        "gemma3_text",
        "glm",
        "glm4",
        "gpt2",
        "gpt_oss",
        "granite",
        "llama",
        "llava",
        "olmo2",
        "opt",
        "phi3",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "starcoder2",
    }
)
"""Model types for which transformers uses the class named in tokenizer_config.json if it is a generic one."""

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
        "processor_class",
        "tokenizer_class",
        "truncation_side",
    }
)
"""Settings that do not affect encoding or decoding. `added_tokens_decoder` is checked separately."""


class _Model(msgspec.Struct):
    """The `model` of a `tokenizer.json`, without vocabulary and merges."""

    type: str
    dropout: Any = None
    unk_token: Any = None
    continuing_subword_prefix: Any = None
    end_of_word_suffix: Any = None
    fuse_unk: Any = False
    byte_fallback: Any = False
    ignore_merges: Any = False


class _File(msgspec.Struct):
    """A `tokenizer.json`, without its large parts."""

    model: _Model
    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None
    post_processor: Any = None


@dataclass(frozen=True)
class _TokenizerClassSpec:
    """The tokenizer that a class of transformers builds from a vocabulary and merges.

    Attributes:
        model_types: Model types for which transformers uses the class.
        file: The tokenizer, without the post-processor, which comes from the file or from `add_bos_token` and
            `add_eos_token`.
        tokens: Its default special tokens.
        named: Settings that name further special tokens.
        ignored: Settings without effect, in addition to `_IGNORED_KEYS`.
        defaults: Settings that are read without transformers only with these values, which have no effect.
        for_generic: Model types for which transformers uses the class in place of a generic one.
    """

    model_types: frozenset[str]
    file: _File
    tokens: Mapping[str, str]
    named: frozenset[str]
    ignored: frozenset[str]
    defaults: Mapping[str, object] = field(default_factory=dict)
    for_generic: frozenset[str] = frozenset()


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
_QWEN2 = _TokenizerClassSpec(
    model_types=frozenset({"qwen2", "qwen2_moe", "qwen3", "qwen3_moe"}),
    file=_File(
        model=_Model("BPE"),
        normalizer={"type": "NFC"},
        pre_tokenizer={
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {
                        "Regex": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
                        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
                    },
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        },
        decoder={"type": "ByteLevel"},
    ),
    tokens=dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>"),
    named=frozenset(),
    ignored=frozenset({"add_bos_token", "add_eos_token"}),
    defaults={"add_prefix_space": False, "split_special_tokens": False, "errors": "replace"},
    for_generic=frozenset({"qwen2"}),
)
_TOKENIZER_CLASS_SPECS = {
    "GemmaTokenizer": _GEMMA,
    "GemmaTokenizerFast": _GEMMA,
    "Qwen2Tokenizer": _QWEN2,
    "Qwen2TokenizerFast": _QWEN2,
}

_LEGACY_FILES = ("special_tokens_map.json", "added_tokens.json")
"""Read by transformers if the settings have no `added_tokens_decoder`."""


@dataclass(frozen=True)
class JsonTokenizer:
    """A tokenizer loaded from `tokenizer.json`.

    Attributes:
        fast: The object of the library `tokenizers`, without truncation and padding.
        eos_token_id: The end-of-sequence token, if there is one.
        special_tokens: Texts of special tokens by the names in `tokenizer_config.json`, as chat templates read them.
    """

    fast: Tokenizer
    eos_token_id: int | None
    special_tokens: Mapping[str, str] = field(default_factory=dict)


def read_tokenizer_json(
    folder: Path, settings: Mapping[str, Any], model: Mapping[str, Any], *, is_complete: bool = False
) -> JsonTokenizer | None:
    """The tokenizer of a folder, or None if transformers must load it, or report its errors.

    Args:
        folder: Holds `tokenizer.json`.
        settings: Contents of its `tokenizer_config.json`.
        model: Contents of its `config.json`.
        is_complete: A generic tokenizer class means `tokenizer.json` as it is, whatever class transformers has for the
            model type.
    """
    name, model_type = settings.get("tokenizer_class"), model.get("model_type")
    spec = _TOKENIZER_CLASS_SPECS.get(name) if isinstance(name, str) else None
    if spec is None and name not in _GENERIC_CLASSES:
        return None
    if spec is None and model_type in _QWEN2.for_generic and not is_complete:
        spec = _QWEN2
    if not (spec is None and is_complete) and not _fits_model(spec, model):
        return None
    if not settings.keys() <= _known_settings(spec, settings):
        return None
    if spec is not None:
        settings = {**spec.tokens, **settings}
        if not _file_matches_spec(spec, folder / "tokenizer.json", settings):
            return None
    if "added_tokens_decoder" not in settings and _has_legacy_files(folder):
        return None
    fast = _open_tokenizer(folder / "tokenizer.json")
    if fast is None or not _has_tokens_of_settings(fast, settings, () if spec is None else spec.named):
        return None
    fast.no_truncation()
    fast.no_padding()
    special_tokens = {key: _text(settings[key]) for key in _SPECIAL_TOKEN_KEYS if settings.get(key) is not None}
    return JsonTokenizer(fast, _eos_token_id(fast, special_tokens), special_tokens)


def _eos_token_id(fast: Tokenizer, special_tokens: Mapping[str, str]) -> int | None:
    eos = special_tokens.get("eos_token")
    return None if eos is None else fast.token_to_id(eos)


def _fits_model(spec: _TokenizerClassSpec | None, model: Mapping[str, Any]) -> bool:
    """Whether transformers takes the class for the model's type."""
    model_types = _MODEL_TYPES if spec is None else spec.model_types
    return model.get("model_type") in model_types and "auto_map" not in model


def _known_settings(spec: _TokenizerClassSpec | None, settings: Mapping[str, Any]) -> set[str]:
    """The settings whose effect is known, those with the default value of a class among them."""
    known = {*_SPECIAL_TOKEN_KEYS, *_SPECIAL_TOKEN_LIST_KEYS, *_IGNORED_KEYS}
    if spec is not None:
        known.update(spec.named, spec.ignored)
        known.update(key for key, value in spec.defaults.items() if settings.get(key) == value)
    return known


def _has_legacy_files(folder: Path) -> bool:
    return any((folder / name).exists() for name in _LEGACY_FILES)


def _open_tokenizer(path: Path) -> Tokenizer | None:
    from tokenizers import Tokenizer  # imported only by engines with a tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception:  # noqa: BLE001  # the library raises plain Exception; transformers reports the error
        return None


def _has_tokens_of_settings(fast: Tokenizer, settings: Mapping[str, Any], named: Collection[str]) -> bool:
    """Whether the special and added tokens of the settings are those of the file. transformers would add others.

    Args:
        named: Further settings that name special tokens.
    """
    known = {i: _added_token_fields(token) for i, token in fast.get_added_tokens_decoder().items()}
    special = {fields["content"] for fields in known.values() if fields["special"]}
    required = _special_token_texts(settings, named) | ({fast.padding["pad_token"]} if fast.padding else set())
    return required <= special and _added_tokens_match(settings.get("added_tokens_decoder", {}), known)


def _file_matches_spec(spec: _TokenizerClassSpec, path: Path, settings: Mapping[str, Any]) -> bool:
    """Whether the file describes the tokenizer that the class builds."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
    except (OSError, msgspec.MsgspecError, RecursionError):
        return False
    if spec.file.model.unk_token is not None and _text(settings["unk_token"]) != spec.file.model.unk_token:
        return False
    if _behavior(file) != spec.file:
        return False
    if "add_bos_token" not in settings and "add_eos_token" not in settings:
        return file.post_processor is not None
    if not settings.get("add_bos_token") and not settings.get("add_eos_token") and _adds_nothing(file.post_processor):
        return True
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


def _behavior(file: _File) -> _File:
    """The parts of a file that affect token ids and decoding."""

    def without_offsets(part: Any) -> Any:
        if isinstance(part, list):
            return [without_offsets(each) for each in part]
        if isinstance(part, Mapping):
            return {key: without_offsets(value) for key, value in part.items() if key != "trim_offsets"}
        return part

    decoder, model = file.decoder, file.model
    if isinstance(decoder, Mapping) and decoder.get("type") == "ByteLevel":
        decoder = {"type": "ByteLevel"}  # the other fields are for encoding
    return _File(
        model=msgspec.structs.replace(
            model,
            continuing_subword_prefix=model.continuing_subword_prefix or None,
            end_of_word_suffix=model.end_of_word_suffix or None,
        ),
        normalizer=file.normalizer,
        pre_tokenizer=without_offsets(file.pre_tokenizer),
        decoder=decoder,
    )


def _adds_nothing(post_processor: object) -> bool:
    """Whether a post-processor adds no tokens because it only changes offsets."""
    return isinstance(post_processor, Mapping) and post_processor.get("type") == "ByteLevel"


def _special_token_texts(settings: Mapping[str, Any], more: Collection[str]) -> set[str]:
    """The special tokens that the settings name. An invalid value gives "", which no file contains.

    Args:
        more: Further settings that name special tokens.
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
    """Whether the file contains the tokens that the settings add, with the same properties."""
    if not isinstance(listed, Mapping):
        return False
    return all(key.isdecimal() and known.get(int(key)) == fields for key, fields in listed.items())


def _added_token_fields(token: Any) -> dict[str, Any]:
    return {
        "content": token.content,
        "single_word": token.single_word,
        "lstrip": token.lstrip,
        "rstrip": token.rstrip,
        "normalized": token.normalized,
        "special": token.special,
    }
