"""Loads the tokenizer of a model and offers the few operations on it that the engine needs."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from mvllm.config.hf_config import read_json_object
from mvllm.config.model import ModelConfig
from mvllm.engine.plain_tokenizer import PlainTokenizer, read_plain
from mvllm.errors import ModelError, RequestError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tokenizer_config.json")
"""Files of which a folder must have at least one to hold a tokenizer; looked for in this order."""

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


class Tokenizer:
    """A Hugging Face tokenizer as the engine uses it.

    Text is decoded without the clean-up that removes spaces before punctuation, so that streamed pieces add up to the
    text decoded in one go.

    Args:
        hf: Makes the tokenizer of `transformers`, where it is wanted.
        plain: The same, read from its file. It serves until `hf` is wanted, for chat templates or by the user; from
            then on that one does, so that what a user changes in it counts.
    """

    def __init__(self, hf: Callable[[], Any], plain: PlainTokenizer | None = None) -> None:
        self._make_hf = hf
        self._plain = plain
        self._fast = plain.fast if plain is not None else None
        if plain is None and getattr(self.hf, "is_fast", False):
            self._fast = getattr(self.hf, "backend_tokenizer", None)
        self._token_texts: dict[int, str] = {}

    @cached_property
    def hf(self) -> Any:
        """The tokenizer as `transformers` makes it."""
        hf = self._make_hf()
        if self._plain is not None:
            self._fast, self._plain = hf.backend_tokenizer, None
        return hf

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `text`."""
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """The token ids of each text; much faster than one by one.

        Raises:
            RequestError: The tokenizer rejects a text.
        """
        try:
            if (plain := self._plain) is not None:
                found = plain.fast.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
                return [encoding.ids for encoding in found]
            # No length limit of the tokenizer's own: the engine's max_model_len is the one that counts.
            encoded = self.hf(list(texts), add_special_tokens=add_special_tokens, truncation=False, verbose=False)
        except Exception as e:
            raise RequestError(
                f"The tokenizer cannot tokenize the prompt: {type(e).__name__}: {e}", parameter="prompt"
            ) from e
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """The text of `token_ids`. Ids that no token has count as nothing."""
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
        """One token as text; incomplete characters show as U+FFFD."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    @cached_property
    def length(self) -> int:
        """One more than the greatest token id."""
        vocab = self._fast.get_vocab() if self._fast is not None else self.hf.get_vocab()
        return max(len(vocab), max(vocab.values(), default=-1) + 1)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out of the text."""
        if self._fast is not None:
            return frozenset(i for i, t in self._fast.get_added_tokens_decoder().items() if t.special)
        return frozenset(self.hf.all_special_ids)

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """Ids of tokens that stand for one raw byte (`<0x0A>`). What a run of them means is known only at its end."""
        id_of = self._fast.token_to_id if self._fast is not None else self.hf.get_vocab().get
        found = frozenset(i for byte in range(256) if (i := id_of(f"<0x{byte:02X}>")) is not None)
        return found if len(found) == 256 else frozenset()

    @cached_property
    def joins_bytes(self) -> bool:
        """Whether decoding just joins the bytes of the tokens, so that no token's text depends on its neighbours."""
        return self._fast is not None and type(self._fast.decoder).__name__ == "ByteLevel"

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-sequence token, if there is one."""
        if (plain := self._plain) is not None:
            return plain.eos_token_id
        value = self.hf.eos_token_id
        return value if isinstance(value, int) else None


def load_tokenizer(config: ModelConfig) -> Tokenizer | None:
    """The tokenizer of a model; None where the configuration has none (`skip_tokenizer_init`).

    A local folder is read without any use of the network.

    Raises:
        ModelError: There is no tokenizer, or it cannot be read; names the folder and the files looked for.
    """
    if config.tokenizer is None:
        return None
    folder = Path(config.tokenizer)
    plain = None
    if folder.is_dir():
        _require_files(folder)
        plain = read_plain(folder, _read_json(folder / "tokenizer_config.json"), _read_json(folder / "config.json"))
    return Tokenizer(lambda: _from_transformers(config, folder), plain)


def _from_transformers(config: ModelConfig, folder: Path) -> Any:
    """The tokenizer as `transformers` makes it."""
    local = folder.is_dir()
    with _no_device_backends():
        transformers = importlib.import_module("transformers")
        try:
            return transformers.AutoTokenizer.from_pretrained(
                str(config.tokenizer),
                config=_small_config(transformers, folder) if local else None,
                revision=None if local else config.revision,
                trust_remote_code=config.trust_remote_code,
                local_files_only=local,
            )
        except Exception as e:
            raise _unreadable(config, folder if local else None, e) from e


@contextlib.contextmanager
def _no_device_backends() -> Iterator[None]:
    """Torch, if it is imported within, loads no vendor's library by itself: this process is not a device's worker.

    `transformers` imports torch, and torch whatever announces itself as a backend: a driver opened, seconds spent and
    device memory taken in the front end. A platform imports its library where it needs it.
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


def _small_config(transformers: Any, folder: Path) -> Any:
    """The few facts of the model's config that choose a tokenizer class, or None where the choice needs all of it.

    Left to itself, `AutoTokenizer` builds the model's own config class, whose module imports the compiler and the
    distributed tensors of torch: seconds of start-up, for facts that are in two small files.
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
        return {}  # transformers says what is wrong with it


def _require_files(folder: Path) -> None:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(
            f"{folder} holds no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there. Copy the tokenizer's files "
            "into it, name another folder with tokenizer=..., or pass skip_tokenizer_init=True and work with token ids."
        )


def _unreadable(config: ModelConfig, folder: Path | None, error: Exception) -> ModelError:
    found = [name for name in TOKENIZER_FILES if folder and (folder / name).is_file()]
    where = f"{folder} (files: {', '.join(found)})" if folder else repr(config.tokenizer)
    hint = ""
    if "trust_remote_code" in str(error):
        hint = " Its code runs only with trust_remote_code=True, which you should pass only if you trust it."
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return ModelError(f"The tokenizer of {where} cannot be loaded: {type(error).__name__}: {first_line}.{hint}")
