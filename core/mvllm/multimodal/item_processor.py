"""ItemProcessor: runs a model's processor on decoded items, one at a time.

Each item is processed alone, so its features and its name do not depend on what stands beside it, and they can be kept
and shared between requests.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mvllm.config.hf_config import HFConfig
from mvllm.config.multimodal import MultiModalModel
from mvllm.errors import ModelError, RequestError
from mvllm.messages.multimodal import ArrayData
from mvllm.multimodal import installed_packages
from mvllm.multimodal.contents import ItemContent, hash_content
from mvllm.multimodal.item_families import item_family
from mvllm.multimodal.processed_item import ProcessedItem, embedded_ranges
from mvllm.multimodal.processor_loading import load_processor

_SETTINGS = {"image": "images_kwargs", "video": "videos_kwargs", "audio": "audio_kwargs"}
_FILES = (
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
)


class ItemProcessor:
    """The processor of one model.

    Args:
        path: The model folder.
        architecture: Its architecture.
        model: What the model takes beside text.
        hf_config: Its config.json.
        processor_kwargs: The user's arguments of the processor (`mm_processor_kwargs`).
        trust_remote_code: Whether code from the model folder may run.
        float_dtype: Dtype of the features that are floats: that of the encoder, to which they would be rounded later.
            They then take half of the bytes on their way.
        model_impl: As in ModelConfig.

    Raises:
        ModelError: The folder's processor cannot be loaded.
    """

    def __init__(
        self,
        path: Path,
        architecture: str,
        model: MultiModalModel,
        hf_config: HFConfig,
        processor_kwargs: Mapping[str, Any] | None = None,
        *,
        trust_remote_code: bool = False,
        float_dtype: str = "float32",
        model_impl: str = "auto",
    ) -> None:
        self._model = model
        self._float_dtype = float_dtype
        self._kwargs = dict(processor_kwargs or {})
        self.processor = load_processor(path, trust_remote_code=trust_remote_code)
        self.family = item_family(architecture, self.processor, model, hf_config, model_impl)
        self._fingerprint = _fingerprint(path, self._kwargs)

    def content_hash(
        self,
        modality: str,
        content: ItemContent,
        *,
        counts: Mapping[str, int],
        kwargs: Mapping[str, Any] | None = None,
        uuid: str | None = None,
    ) -> bytes:
        """The name of an item: a hash of its content and of everything that its features depend on.

        Args:
            counts: Number of items of the prompt by modality.
            kwargs: Arguments of the processor for this request, over those of the engine.
            uuid: The user's name of the content, which then is not read.
        """
        arguments = [self.family.arguments(modality, counts), dict(kwargs or {})]
        salt = self._fingerprint + json.dumps([modality, *arguments], sort_keys=True, default=str).encode()
        if uuid is not None:
            return hashlib.sha256(salt + b"uuid" + uuid.encode()).digest()
        return hash_content(content, salt)

    def process(
        self,
        modality: str,
        content: ItemContent,
        *,
        counts: Mapping[str, int],
        kwargs: Mapping[str, Any] | None = None,
        uuid: str | None = None,
    ) -> ProcessedItem:
        """Processes one item. Arguments as in `content_hash`.

        Raises:
            RequestError: The processor refuses it.
        """
        family = self.family
        given = {**self._kwargs, **(kwargs or {})}
        own = {name: given.pop(name) for name in family.own_arguments if name in given}
        settings = {**self._settings(modality, given), **own, **family.arguments(modality, counts)}
        try:
            features, replacement = family.process(modality, content, settings)
        except RequestError:
            raise
        except Exception as e:
            raise RequestError(
                f"The model's processor cannot process the {modality}: {type(e).__name__}: {e}",
                parameter="multi_modal_data",
            ) from e
        token_ids = self.token_ids(replacement)
        embedded_id = self._model.placeholders.get(modality, -1)
        start, stop, embedded = embedded_ranges(token_ids, embedded_id)
        if not embedded and not self._model.cross_attention:
            raise ModelError(
                f"The processor's text for a {modality} has no token {embedded_id}, the placeholder of config.json. "
                "Processor, tokenizer and config.json do not belong together."
            )
        rope = family.rope_positions(modality, features, token_ids[start:stop], embedded)
        kept = family.encoder_inputs(modality, features, token_ids[start:stop])
        placeholder = family.placeholder(modality)
        return ProcessedItem(
            modality=modality,
            content_hash=self.content_hash(modality, content, counts=counts, kwargs=kwargs, uuid=uuid),
            placeholder=placeholder,
            placeholder_id=self._token_id(placeholder),
            replacement=replacement,
            token_ids=token_ids,
            start=start,
            stop=stop,
            embedded=embedded,
            embedded_id=embedded_id,
            num_encoded=family.num_encoded(modality, features, sum(b - a for a, b in embedded)),
            features={name: array_data(value, self._float_dtype) for name, value in kept.items()},
            rope_positions=None if rope is None else array_data(rope[0].astype(np.int32)),
            rope_length=None if rope is None else rope[1],
        )

    def placeholders(self) -> dict[str, str]:
        """By modality, what stands for an item in the text of a prompt; without modalities that cannot be processed."""
        found = {}
        for modality in self._model.modalities:
            with contextlib.suppress(AttributeError):
                found[modality] = self.family.placeholder(modality)
        return found

    def default_size(self, modality: str) -> Any:
        """The setting `size` of the processor of images or videos; that of images where there is none for videos."""
        sizes = (
            getattr(getattr(self.processor, f"{name}_processor", None), "size", None) for name in (modality, "image")
        )
        return next((size for size in sizes if size is not None), None)

    def token_ids(self, text: str) -> list[int]:
        """The token ids of a text, without special tokens around it."""
        return list(self.processor.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _token_id(self, text: str) -> int:
        found = self.token_ids(text)
        return found[0] if len(found) == 1 else -1

    def _settings(self, modality: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of the processor for one modality."""
        tokenizer = getattr(self.processor, "tokenizer", None)
        try:
            merged = self.processor._merge_kwargs(
                tokenizer_init_kwargs=getattr(tokenizer, "init_kwargs", {}), **{"return_tensors": "pt", **kwargs}
            )
        except Exception as e:
            raise RequestError(
                f"mm_processor_kwargs cannot be used with this model's processor: {type(e).__name__}: {e}",
                parameter="mm_processor_kwargs",
            ) from e
        return dict(merged[_SETTINGS[modality]])


def array_data(value: Any, float_dtype: str = "float32") -> ArrayData:
    """An array of numpy or torch, a number, or nested lists of them, as a message.

    Args:
        float_dtype: Dtype of floats.
    """
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    elif isinstance(value, list | tuple):
        value = np.asarray([np.asarray(each) for each in value])
    array = np.ascontiguousarray(value)
    array = array.reshape(np.shape(value))  # ascontiguousarray makes a number a row
    if array.dtype.kind not in "fiub":
        raise ModelError(f"The processor returned a feature of dtype {array.dtype}, which no encoder takes.")
    if array.dtype.kind == "f":
        return _rounded(array.astype(np.float32, copy=False), float_dtype)
    return ArrayData(array.dtype.name, list(array.shape), array.tobytes())


def _rounded(array: np.ndarray[Any, Any], dtype: str) -> ArrayData:
    """Floats in a dtype that numpy may not have; torch rounds, as the worker would."""
    shape = list(array.shape)
    if dtype == "float32":
        return ArrayData(dtype, shape, array.tobytes())
    import torch

    from mvllm.ops.dtypes import torch_dtype

    rounded = torch.from_numpy(array).to(torch_dtype(dtype))
    return ArrayData(dtype, shape, rounded.view(torch.int16).numpy().tobytes())


def _fingerprint(path: Path, kwargs: Mapping[str, Any]) -> bytes:
    """Hash of what a processor is built from: files, settings, and the libraries that compute."""
    from transformers import __version__ as version

    built_from = [dict(kwargs), version, installed_packages.is_installed("torchvision")]
    digest = hashlib.sha256(json.dumps(built_from, sort_keys=True, default=str).encode())
    for name in _FILES:
        try:
            content = (path / name).read_bytes()
        except OSError:
            continue
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.digest()
