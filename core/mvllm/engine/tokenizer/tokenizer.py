"""Tokenizer: loads a model's Hugging Face tokenizer, and provides the operations that the engine needs."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from mvllm.checkpoint_formats.registry import is_derived_folder
from mvllm.config.hf_config import read_json_object
from mvllm.config.model import ModelConfig
from mvllm.engine.tokenizer.folder_template import FolderTemplate, read_folder_template, read_processor_template
from mvllm.engine.tokenizer.token_lengths import max_chars_per_token
from mvllm.engine.tokenizer.tokenizer_expansion import check_tokenizer_expansion
from mvllm.engine.tokenizer.tokenizer_json import JsonTokenizer, read_tokenizer_json
from mvllm.errors import ModelError, RequestError, plain_reason

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tokenizer_config.json")
"""A folder with a tokenizer has at least one of these files."""

_GUARD = "\n"
_LONG_TEXT = 1 << 16  # characters; shorter texts are tokenized quickly
_BORROWED_SECONDS = 60.0
_BORROWED_PAUSE = 0.001

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


class Tokenizer:
    """A Hugging Face tokenizer.

    Decoding does not remove spaces before punctuation (`clean_up_tokenization_spaces`), so that streamed pieces add up
    to the whole text.

    Args:
        hf: Creates the tokenizer of `transformers`, when it is first needed.
        plain: The same tokenizer, read from `tokenizer.json`. It is used until `hf` is created, for chat templates or
            by the user. After that `hf` is used, so that changes that a user makes to it have an effect.
        template: The chat template of the same tokenizer. It is used with `plain`, and as long.
    """

    def __init__(
        self, hf: Callable[[], Any], plain: JsonTokenizer | None = None, template: FolderTemplate | None = None
    ) -> None:
        self._make_hf = hf
        self._hf_lock = threading.RLock()  # a call of `hf` may set truncation and padding, which all calls share
        self._json_tokenizer = plain
        self._folder_template = template
        self._fast: Any = plain.fast if plain is not None else None
        if plain is None and getattr(self.hf, "is_fast", False):
            self._fast = getattr(self.hf, "backend_tokenizer", None)
        self._token_texts: dict[int, str] = {}

    @cached_property
    def hf(self) -> Any:
        """The tokenizer of `transformers`."""
        with self._hf_lock:
            if "hf" not in vars(self):  # of another thread
                hf = self._make_hf()
                if self._json_tokenizer is not None:
                    self._fast, self._json_tokenizer = hf.backend_tokenizer, None
                vars(self)["hf"] = hf
            return vars(self)["hf"]

    def _call_hf(self, *texts: Any, **settings: Any) -> Any:
        """Calls `hf`, and again if another thread has changed its settings meanwhile, as calls by the user may.

        A call that changes a setting waits while other threads tokenize: the library refuses that.
        """
        deadline = time.monotonic() + _BORROWED_SECONDS
        with self._hf_lock:
            while True:
                try:
                    found = self.hf(*texts, verbose=False, **settings)
                    set_now = None if self._fast is None else self._fast.truncation
                    length = None if set_now is None else set_now["max_length"]
                    if self._fast is None or length == settings.get("max_length") or time.monotonic() > deadline:
                        return found
                except RuntimeError as e:
                    if str(e) != "Already borrowed" or time.monotonic() > deadline:
                        raise
                time.sleep(_BORROWED_PAUSE)

    @property
    def template_renderer(self) -> Any:
        """Has the chat template, and renders it: `hf`, or an equal `FolderTemplate` as long as `hf` is not needed."""
        if self._json_tokenizer is not None and self._folder_template is not None:
            return self._folder_template
        return self.hf

    @property
    def backend(self) -> Any:
        """The object of the library `tokenizers`, or None. Needs transformers only if `tokenizer.json` was not read."""
        plain = self._json_tokenizer
        return plain.fast if plain is not None else getattr(self.hf, "backend_tokenizer", None)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `text`."""
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        check_length: Callable[[int, int], None] = lambda i, length: None,
    ) -> list[list[int]]:
        """The token ids of each text; much faster than one by one. Releases the GIL.

        Args:
            check_length: Called with the index of each text and its number of tokens, before lists are made. An
                exception that it raises ends the call.

        Raises:
            RequestError: The tokenizer rejects a text.
        """
        try:
            encoded = self._encode(list(texts), add_special_tokens)
        except BaseException as e:
            raise _untokenizable(e) from e
        for i, each in enumerate(encoded):
            check_length(i, len(each))
        return [each if isinstance(each, list) else each.ids for each in encoded]

    def encode_pieces(self, pieces: Sequence[str], *, add_special_tokens: bool = False) -> list[int]:
        """The token ids of a text in pieces, none of which reaches over two of them.

        Args:
            pieces: At least one; none is empty.
            add_special_tokens: Whether to add the tokenizer's special tokens around all of them.

        Raises:
            RequestError: The tokenizer rejects a piece.
        """
        first = pieces[0]
        plain = self.encode(first, add_special_tokens=False)
        ids = list(plain)
        for piece in self.encode_within(pieces[1:]):
            ids += piece
        if not add_special_tokens:
            return ids
        special = self.encode(first)
        size = len(plain)
        for start in range(len(special) - size + 1):
            if special[start : start + size] == plain:
                return [*special[:start], *ids, *special[start + size :]]
        raise RequestError(
            "add_special_tokens cannot be used for a conversation with a text like the placeholder of an item: this "
            "tokenizer's special tokens change the text itself. Send add_special_tokens: false.",
            parameter="add_special_tokens",
        )

    def encode_within(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text as within another one, where no tokenizer puts a space before its first word.

        Raises:
            RequestError: The tokenizer rejects a text.
        """
        if not texts:
            return []
        guard, *guarded = self.encode_batch([_GUARD, *(_GUARD + text for text in texts)], add_special_tokens=False)
        size = len(guard)
        return [
            found[size:] if found[:size] == guard else self.encode(text, add_special_tokens=False)
            for text, found in zip(texts, guarded, strict=True)
        ]

    def encode_truncated(
        self, first: str, second: str | None = None, *, max_tokens: int | None = None
    ) -> tuple[list[int], int | None]:
        """The token ids of a text, or of a pair of texts for a cross-encoder, with special tokens.

        Args:
            max_tokens: Truncates the end of the longer text, then of both, to this number of tokens in all.

        Returns:
            The ids, and the position of the first token with type id 1; None if there is none.

        Raises:
            RequestError: The tokenizer rejects a text, or `max_tokens` leaves no room for a text.
        """
        try:
            ids, types = self._encode_truncated(first, second, max_tokens)
        except RequestError:
            raise
        except BaseException as e:
            raise _untokenizable(e) from e
        return ids, types.index(1) if 1 in types else None

    def _encode_truncated(self, first: str, second: str | None, max_tokens: int | None) -> tuple[list[int], list[int]]:
        """Token ids and their type ids."""
        plain, encoding = self._json_tokenizer, None
        if plain is not None:
            encoding = plain.fast.encode(first, second)
        elif self._encodes_by_backend and self._has_default_settings():
            encoding = self._fast.encode(first, second)
        if encoding is None or (plain is None and not self._has_default_settings()):
            longest = {} if max_tokens is None else {"max_length": max_tokens}
            truncation = max_tokens is not None and ("longest_first" if second is not None else "only_first")
            found = self._call_hf(first, second, truncation=truncation, **longest)
            return found["input_ids"], found.get("token_type_ids", [])
        ids: list[int] = encoding.ids
        types: list[int] = encoding.type_ids
        if plain is None and "token_type_ids" not in self.hf.model_input_names:
            types = [0] * len(ids)  # the model has no such input
        if max_tokens is None or len(ids) <= max_tokens:
            return ids, types
        kept = _kept_positions(encoding.sequence_ids, max_tokens)
        return [ids[i] for i in kept], [types[i] for i in kept]

    def _encode(self, texts: list[str], add_special_tokens: bool) -> Sequence[Any]:
        """Token ids, or encodings that contain them. Ignores the tokenizer's own length limit."""
        if (plain := self._json_tokenizer) is not None:
            found: Sequence[Any] = plain.fast.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
            return found
        if self._encodes_by_backend and self._has_default_settings():
            encodings: Sequence[Any] = self._fast.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
            if self._has_default_settings():  # still: the user may call `hf` in another thread
                return encodings
        encoded = self._call_hf(texts, add_special_tokens=add_special_tokens, truncation=False)
        ids: Sequence[Any] = encoded["input_ids"]
        return ids

    def _has_default_settings(self) -> bool:
        """Whether the backend has the settings that a call through transformers would set."""
        fast = self._fast
        expected = getattr(self.hf, "split_special_tokens", False)
        return fast.truncation is None and fast.padding is None and fast.encode_special_tokens == expected

    @cached_property
    def _encodes_by_backend(self) -> bool:
        """Whether `tokenizers` gives the same ids as transformers, which takes many times as long for a short text and
        adds lists that are not used."""
        if self._fast is None or hasattr(self.hf, "_switch_to_input_mode"):
            return False
        homes = ("transformers.tokenization_utils_base", "transformers.tokenization_utils_tokenizers")
        return all(_defining_module(type(self.hf), name) in homes for name in ("__call__", "_encode_plus"))

    def num_tokens_lower_bound(self, text: str) -> int:
        """A lower bound of the number of tokens of `text`, without tokenizing it; 0 if there is none."""
        longest = self.max_chars_per_token if len(text) >= _LONG_TEXT else 0
        return len(text) // longest if longest else 0

    @cached_property
    def max_chars_per_token(self) -> int:
        """Most characters of a text that become one token; 0 if it may be any number. The first call takes a while."""
        return 0 if self._fast is None else max_chars_per_token(self._fast)

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """The text of `token_ids`. Ids outside the vocabulary are skipped."""
        if self._fast is not None:
            text: str = self._fast.decode(token_ids, skip_special_tokens=skip_special_tokens)
            return text
        extra = {} if spaces_between_special_tokens else {"spaces_between_special_tokens": False}
        return str(
            self.hf.decode(
                [i for i in token_ids if i < self.length],
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
                **extra,
            )
        )

    def token_text(self, token_id: int) -> str:
        """One token as text, as within a text: with the space of a word; incomplete characters become U+FFFD."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self._decode_token(token_id)
        return text

    def token_bytes(self, token_id: int, *, is_first: bool = False) -> bytes:
        """The bytes of a token, which may be a part of a character.

        Args:
            is_first: Whether the token begins a text; otherwise it is as in `token_text`.
        """
        name = None if token_id in self.special_ids else self.token_name(token_id)
        if name is not None:
            if self.decodes_bytewise and all(c in _BYTE_OF_CHARACTER for c in name):
                return bytes(_BYTE_OF_CHARACTER[c] for c in name)
            if token_id in self.byte_ids:
                return bytes([int(name[3:5], 16)])
        text = self.decode([token_id], skip_special_tokens=False) if is_first else self.token_text(token_id)
        return text.encode()

    def _decode_token(self, token_id: int) -> str:
        alone = self.decode([token_id], skip_special_tokens=False)
        if self.decodes_bytewise or token_id in self.special_ids:
            return alone
        before, text = self._text_before
        if not before:
            return alone
        together = self.decode([*before, token_id], skip_special_tokens=False)
        return (together[len(text) :] if together.startswith(text) else "") or alone

    @cached_property
    def _text_before(self) -> tuple[list[int], str]:
        """Tokens, and their text, to decode before another token: decoders change the first token of a text."""
        for word in ("a", "e", "1"):
            ids = self.encode(word, add_special_tokens=False)
            text = self.decode(ids, skip_special_tokens=False)
            if text.strip() == word:
                return ids, text
        return [], ""

    def token_name(self, token_id: int) -> str | None:
        """The token's name in the vocabulary; None if no token has the id."""
        backend = self.backend
        name = self.hf.convert_ids_to_tokens(token_id) if backend is None else backend.id_to_token(token_id)
        return name if isinstance(name, str) else None

    @cached_property
    def length(self) -> int:
        """The largest token id plus one."""
        if self._fast is not None:  # without a dictionary of all tokens if no id is missing, which is the usual case
            count: int = self._fast.get_vocab_size()
            if None not in map(self._fast.id_to_token, range(count)):
                return count
        vocab = self._fast.get_vocab() if self._fast is not None else self.hf.get_vocab()
        return max(len(vocab), max(vocab.values(), default=-1) + 1)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` removes from the text."""
        if self._fast is not None:
            return frozenset(i for i, t in self._fast.get_added_tokens_decoder().items() if t.special)
        return frozenset(self.hf.all_special_ids)

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """Ids of the raw-byte tokens (`<0x0A>`). The text of a run of them is known only at its end."""
        id_of = self._fast.token_to_id if self._fast is not None else self.hf.get_vocab().get
        found = frozenset(i for byte in range(256) if (i := id_of(f"<0x{byte:02X}>")) is not None)
        return found if len(found) == 256 else frozenset()

    @cached_property
    def decodes_bytewise(self) -> bool:
        """Whether decoding concatenates the bytes of the tokens, so that their bytes do not depend on other tokens."""
        return self._fast is not None and type(self._fast.decoder).__name__ == "ByteLevel"

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-sequence token, if there is one."""
        if (plain := self._json_tokenizer) is not None:
            return plain.eos_token_id
        value = self.hf.eos_token_id
        return value if isinstance(value, int) else None


def _bytes_of_characters() -> dict[str, int]:
    """The bytes of the characters of byte-level vocabularies: printable ones are themselves, others start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHARACTER = _bytes_of_characters()


def _kept_positions(texts: Sequence[int | None], max_tokens: int) -> list[int]:
    """Which tokens of one or two texts stay if these are truncated at their ends.

    Args:
        texts: By token, the number of its text; None for tokens that the tokenizer adds, which all stay.

    Raises:
        RequestError: The added tokens alone are `max_tokens` or more.
    """
    room = max_tokens - texts.count(None)
    if room < 1:
        raise RequestError(
            f"truncate_prompt_tokens is {max_tokens}, which leaves no room for a text besides the "
            f"{texts.count(None)} tokens that the tokenizer adds.",
            parameter="truncate_prompt_tokens",
        )
    left = _truncated_lengths(texts.count(0), texts.count(1), room)
    kept = []
    for i, text in enumerate(texts):
        if text is not None:
            left[text] -= 1
        if text is None or left[text] >= 0:
            kept.append(i)
    return kept


def _truncated_lengths(first: int, second: int, room: int) -> list[int]:
    """The lengths of two texts truncated to `room` tokens together: the longer one is truncated first."""
    shorter = min(first, second)
    if 2 * shorter <= room:
        longer = room - shorter
    else:  # half each; the longer one gets the odd token
        shorter = room // 2
        longer = room - shorter
    return [shorter, longer] if first <= second else [longer, shorter]


def _untokenizable(error: BaseException) -> RequestError:
    """The RequestError for an error of the tokenizer; raises `error` again if the tokenizer did not cause it.

    The library panics when a regular expression needs too many steps, and `PanicException` is not an `Exception`.
    """
    name = type(error).__name__
    if not isinstance(error, Exception) and name != "PanicException":
        raise error
    return RequestError(f"The tokenizer cannot tokenize the prompt: {name}: {error}", parameter="prompt")


def _defining_module(cls: type, name: str) -> str | None:
    """The module that defines a method of `cls`."""
    return next((kind.__module__ for kind in cls.__mro__ if name in vars(kind)), None)


def load_tokenizer(config: ModelConfig) -> Tokenizer | None:
    """The tokenizer of a model; None with `skip_tokenizer_init`.

    A local folder is read without network access.

    Raises:
        ModelError: There is no tokenizer, it cannot be read, or it expands texts too much. The message has the folder
            and the expected files.
    """
    if config.tokenizer is None:
        return None
    folder = Path(config.tokenizer)
    plain, template = None, None
    if folder.is_dir():
        require_tokenizer_files(config)
        check_tokenizer_expansion(folder / "tokenizer.json")
        settings, model = _read_json(folder / "tokenizer_config.json"), _read_json(folder / "config.json")
        plain = read_tokenizer_json(folder, settings, model, is_complete=is_derived_folder(folder))
        if plain is not None:
            template = read_folder_template(folder, settings, plain.special_tokens)
    return Tokenizer(lambda: _load_with_transformers(config, folder), plain, template)


def _load_with_transformers(config: ModelConfig, folder: Path) -> Any:
    """Loads the tokenizer of `transformers`."""
    local = folder.is_dir()
    with _no_device_backends():
        transformers = importlib.import_module("transformers")
        try:
            if is_derived_folder(folder):
                # AutoTokenizer has classes for some model types that replace parts of tokenizer.json.
                return transformers.PreTrainedTokenizerFast.from_pretrained(
                    str(folder), local_files_only=True, fix_mistral_regex=False
                )
            found = transformers.AutoTokenizer.from_pretrained(
                str(config.tokenizer),
                config=_minimal_config(transformers, folder) if local else None,
                revision=None if local else config.revision,
                trust_remote_code=config.trust_remote_code,
                local_files_only=local,
            )
            if local and (template := read_processor_template(folder)) is not None:
                found.chat_template = template
            return found
        except Exception as e:
            raise _load_error(config, folder if local else None, e) from e


@contextlib.contextmanager
def _no_device_backends() -> Iterator[None]:
    """Keeps torch from loading device backends if it is imported in the `with` statement.

    `transformers` imports torch, and torch imports every installed backend: that opens drivers and uses seconds and
    device memory, in a front end that uses no device. A platform imports its backend itself.
    """
    before = os.environ.get(_AUTOLOAD)
    os.environ[_AUTOLOAD] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_AUTOLOAD]
        else:
            os.environ[_AUTOLOAD] = before


def _minimal_config(transformers: Any, folder: Path) -> Any:
    """A config with the fields that choose a tokenizer class, or None if the choice needs the whole config.

    Without it, `AutoTokenizer` builds the model's config class, whose module imports the compiler and the distributed
    tensors of torch. That takes seconds, for fields that are in two small files.
    """
    named, model = _read_json(folder / "tokenizer_config.json"), _read_json(folder / "config.json")
    if not isinstance(named.get("tokenizer_class"), str) or "auto_map" in named or "auto_map" in model:
        return None
    config = transformers.PreTrainedConfig()
    config.model_type = str(model.get("model_type") or "")
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except ModelError:
        return {}  # transformers reports the error


def require_tokenizer_files(config: ModelConfig) -> None:
    """Checks that the folder of the tokenizer has one.

    Raises:
        ModelError: It has none of TOKENIZER_FILES.
    """
    folder = None if config.tokenizer is None else Path(config.tokenizer)
    if folder is not None and folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(
            f"{folder} holds no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there. Copy the tokenizer's files "
            "into it, or name a folder or model that has them with tokenizer='FOLDER'."
        )


def _load_error(config: ModelConfig, folder: Path | None, error: Exception) -> ModelError:
    found = [name for name in TOKENIZER_FILES if folder and (folder / name).is_file()]
    where = f"{folder} (files: {', '.join(found)})" if folder else repr(config.tokenizer)
    hint = ""
    if "trust_remote_code" in str(error):
        hint = " It has code of its own, which runs only with trust_remote_code=True. Set that only if you trust it."
    return ModelError(f"The tokenizer of {where} cannot be loaded: {plain_reason(error)}.{hint}")


def check_supports_grammars(tokenizer: Tokenizer | None) -> None:
    """Returns if structured outputs support `tokenizer`.

    Raises:
        RequestError: There is no tokenizer, or it has no backend that gives the text of each token.
    """
    if tokenizer is None:
        raise RequestError(
            "structured_outputs needs a tokenizer, but the engine was started with skip_tokenizer_init.",
            parameter="structured_outputs",
        )
    if tokenizer.backend is None:
        raise RequestError(
            f"structured_outputs needs a tokenizer of the tokenizers library; this model's is a "
            f"{type(tokenizer.hf).__name__}.",
            parameter="structured_outputs",
        )
