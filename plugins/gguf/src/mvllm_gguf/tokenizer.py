"""The tokenizer of a GGUF file as the files of a Hugging Face tokenizer.

Token ids are those of the file. Kinds of vocabularies:

| `tokenizer.ggml.model` | tokenizer |
|---|---|
| `gpt2` | byte-level BPE; `tokenizer.ggml.pre` names the pre-tokenizer (`pre_tokenizers.py`) |
| `llama` | SentencePiece BPE; merges are computed from scores (`merges.py`) |
| `gemma4` | the same with the merges of the file, and no space before a text |

Control and unknown tokens become special added tokens; user-defined tokens become other added tokens. Both are matched
in a text before it is split into words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from mvllm.extension_api import ModelError, get_logger
from mvllm_gguf.header import GGUFModel
from mvllm_gguf.merges import known_merges, merges_from_scores
from mvllm_gguf.pre_tokenizers import DEFAULT, PRE_TOKENIZERS, PreTokenizer
from mvllm_gguf.vocabulary import TokenType, Vocabulary, read_flag, read_merges, read_vocabulary, readable

logger = get_logger("mvllm.gguf.tokenizer")

_SPACE = "\u2581"  # the space character of SentencePiece vocabularies

_MOST_TEMPLATE_BYTES = 4 << 20  # the limit for templates of other models

_NAMED = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",
    "pad_token": "padding",
    "mask_token": "mask",
}
"""Special tokens by their names in `tokenizer_config.json` and in GGUF files."""

_RIGHT_STRIPPED_EXCEPT = frozenset({"<unk>", "<s>", "<|endoftext|>"})
"""Special tokens of Phi-3 that do not strip the white space after them."""


def tokenizer_files(model: GGUFModel) -> dict[str, bytes]:
    """The tokenizer's files by name.

    Returns:
        `tokenizer.json` and `tokenizer_config.json`, and `chat_template.jinja` if the file has one chat template.
        Several are in `tokenizer_config.json`.

    Raises:
        ModelError: The kind of vocabulary or its pre-tokenizer is not supported, or the vocabulary is damaged. The
            remedy is another tokenizer; then the vocabulary is not read.
    """
    try:
        return _tokenizer_files(model)
    except ModelError as e:
        raise ModelError(
            f"{e} Or name a Hugging Face folder or model that has the tokenizer with tokenizer='FOLDER', for instance "
            "the model from which the file was converted: then that in the file is not used."
        ) from e


def _tokenizer_files(model: GGUFModel) -> dict[str, bytes]:
    vocabulary = read_vocabulary(model)
    build = _KINDS.get(vocabulary.kind)
    if build is None:
        raise ModelError(
            f"{model.files[0]} has a vocabulary of the kind {vocabulary.kind!r:.100}, which is not supported. "
            f"Supported: {', '.join(_KINDS)}."
        )
    parts, add_bos = build(model, vocabulary)
    special = _special_ids(vocabulary)
    file = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(model, vocabulary, special),
        "post_processor": _post_processor(model, vocabulary, add_bos),
        **parts,
    }
    content = msgspec.json.encode(file)
    _check(content, vocabulary, str(model.files[0]))
    settings = _settings(model, vocabulary, special)
    files = {"tokenizer.json": content}
    templates = _chat_templates(model)
    if templates.keys() == {"default"}:
        files["chat_template.jinja"] = templates["default"].encode()
    elif templates:
        settings["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    files["tokenizer_config.json"] = msgspec.json.format(msgspec.json.encode(settings), indent=2)
    return files


def _byte_level_bpe(model: GGUFModel, vocabulary: Vocabulary) -> tuple[dict[str, Any], bool]:
    """The parts of a `tokenizer.json` for the kind `gpt2`, and whether prompts begin with bos by default."""
    where = str(model.files[0])
    pre_tokenizer = _pre_tokenizer(model)
    merges = known_merges(read_merges(model), vocabulary, where)
    parts = {
        "normalizer": {"type": "NFC"} if pre_tokenizer.nfc else None,
        "pre_tokenizer": pre_tokenizer.to_json(),
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": _bpe(vocabulary, merges, ignore_merges=pre_tokenizer.ignore_merges),
    }
    return parts, pre_tokenizer.add_bos


def _pre_tokenizer(model: GGUFModel) -> PreTokenizer:
    name = model.metadata.get("tokenizer.ggml.pre")
    if name is None or name == "":
        logger.warning(
            "%s has no 'tokenizer.ggml.pre', which says how a text is split into words. The split 'default' is used; "
            "outputs may be worse. Take a file that was converted later.",
            model.files[0],
        )
        return DEFAULT
    found = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if found is None:
        # Another pre-tokenizer would give other tokens and worse outputs, without any error.
        raise ModelError(
            f"{model.files[0]}: 'tokenizer.ggml.pre' is {name!r:.100}, a split into words that is not supported. "
            f"Supported: {', '.join(sorted(PRE_TOKENIZERS))}."
        )
    return found


def _sentencepiece_bpe(model: GGUFModel, vocabulary: Vocabulary) -> tuple[dict[str, Any], bool]:
    """The parts of a `tokenizer.json` for the kind `llama`, and whether prompts begin with bos by default.

    A space is prepended to a text, and to each text after an added token, unless the file disables it.
    """
    prefix = read_flag(model, "tokenizer.ggml.add_space_prefix", True)
    return _with_byte_fallback(vocabulary, merges_from_scores(vocabulary, str(model.files[0])), prefix), True


def _gemma4_bpe(model: GGUFModel, vocabulary: Vocabulary) -> tuple[dict[str, Any], bool]:
    """Likewise for the kind `gemma4`, whose merges are in the file."""
    merges = known_merges(read_merges(model), vocabulary, str(model.files[0]))
    prefix = read_flag(model, "tokenizer.ggml.add_space_prefix", False)
    return _with_byte_fallback(vocabulary, merges, prefix), True


def _with_byte_fallback(vocabulary: Vocabulary, merges: list[tuple[str, str]], prefix: bool) -> dict[str, Any]:
    """BPE of characters, with a token for each byte of characters that are no tokens.

    Args:
        vocabulary, merges: The tokens and their merges.
        prefix: Whether to prepend a space to a text.
    """
    normalizer: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _SPACE}, normalizer]}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": normalizer,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(vocabulary, merges, unk_token=vocabulary.text("unknown"), fuse_unk=True, byte_fallback=True),
    }


_KINDS: dict[str, Callable[[GGUFModel, Vocabulary], tuple[dict[str, Any], bool]]] = {
    "gpt2": _byte_level_bpe,
    "llama": _sentencepiece_bpe,
    "gemma4": _gemma4_bpe,
}


def _bpe(vocabulary: Vocabulary, merges: list[tuple[str, str]], **settings: Any) -> dict[str, Any]:
    """The `model` of a `tokenizer.json`."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **settings,
        "vocab": {token: i for i, token in enumerate(vocabulary.tokens)},
        "merges": merges,
    }


def _special_ids(vocabulary: Vocabulary) -> set[int]:
    """Tokens that decoding skips: control and unknown tokens, tokens that end a turn, and bos and eos in brackets.

    Old files mark all tokens as normal, or have no types.
    """
    kinds = (TokenType.CONTROL, TokenType.UNKNOWN)
    special = {i for i, kind in enumerate(vocabulary.types) if kind in kinds}
    special.update(vocabulary.known_end_ids())
    for name in ("bos", "eos"):
        text = vocabulary.text(name) or ""
        if len(text) > 2 and text[0] + text[-1] in ("<>", "[]"):
            special.add(vocabulary.special_ids[name])
    return special


def _added_tokens(model: GGUFModel, vocabulary: Vocabulary, special: set[int]) -> list[dict[str, Any]]:
    strips = vocabulary.kind == "llama" and model.metadata.get("general.architecture") == "phi3"
    return [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": strips and i in special and token not in _RIGHT_STRIPPED_EXCEPT,
            "normalized": False,
            "special": i in special,
        }
        for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if i in special or kind == TokenType.USER_DEFINED
    ]


def _post_processor(model: GGUFModel, vocabulary: Vocabulary, add_bos: bool) -> dict[str, Any] | None:
    """The post-processor that adds bos before and eos after a prompt; None if the file has neither.

    Args:
        add_bos: Default of `add_bos_token`.
    """
    ids: dict[str, int] = {}
    around: list[list[dict[str, Any]]] = []
    for name, default in (("bos", add_bos), ("eos", False)):
        key = f"tokenizer.ggml.add_{name}_token"
        wanted, text = read_flag(model, key, default), vocabulary.text(name)
        if wanted and text is None and key in model.metadata:
            raise ModelError(f"{model.files[0]}: {key!r} is true, but 'tokenizer.ggml.{name}_token_id' is no token.")
        around.append([])
        if wanted and text is not None:
            ids[text] = vocabulary.special_ids[name]
            around[-1].append({"SpecialToken": {"id": text, "type_id": 0}})
    if not ids and vocabulary.kind == "gpt2":  # as in published files; changes only offsets
        return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    if not ids:
        return None
    before, after = around
    single, second = ([*before, {"Sequence": {"id": which, "type_id": 0}}, *after] for which in ("A", "B"))
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, *second],
        "special_tokens": {text: {"id": text, "ids": [i], "tokens": [text]} for text, i in ids.items()},
    }


def _settings(model: GGUFModel, vocabulary: Vocabulary, special: set[int]) -> dict[str, Any]:
    """The contents of `tokenizer_config.json`, without chat templates.

    The flags `add_bos_token` and `add_eos_token` are left out: the post-processor implements them, and transformers
    would create a second one.
    """
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    for key, name in _NAMED.items():
        token_id = vocabulary.special_ids.get(name)
        if token_id in special:  # a text such as "!" would disappear from outputs
            settings[key] = vocabulary.tokens[token_id]
    length = model.metadata.get(f"{model.metadata.get('general.architecture')}.context_length")
    if isinstance(length, int) and not isinstance(length, bool) and length > 0:
        settings["model_max_length"] = length
    return settings


def _chat_templates(model: GGUFModel) -> dict[str, str]:
    """The chat templates by name: `default`, and for instance `tool_use`.

    Raises:
        ModelError: They are longer than any template.
    """
    prefix = "tokenizer.chat_template"
    found: dict[str, str] = {}
    for key, text in model.metadata.items():
        if (key == prefix or key.startswith(f"{prefix}.")) and isinstance(text, str) and text.strip():
            found[readable(key[len(prefix) + 1 :]) or "default"] = readable(text)
    if (num_bytes := sum(len(text.encode()) for text in found.values())) > _MOST_TEMPLATE_BYTES:
        raise ModelError(
            f"{model.files[0]} has chat templates of {num_bytes} bytes, and at most {_MOST_TEMPLATE_BYTES} are "
            "allowed. Check where the file comes from."
        )
    return found


def _check(content: bytes, vocabulary: Vocabulary, where: str) -> None:
    """Checks that the tokenizers library loads a `tokenizer.json` and keeps the token ids of the file."""
    from tokenizers import Tokenizer  # imported for GGUF files only

    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as e:  # the library raises plain Exception
        raise ModelError(f"{where}: the tokenizer in its metadata is not valid: {e}") from e
    size = tokenizer.get_vocab_size()
    if size != len(vocabulary.tokens):
        raise ModelError(f"{where}: the tokenizer in its metadata has {len(vocabulary.tokens)} tokens, but {size} ids.")
