"""Metadata: typed access to the values that describe a model's architecture."""

from __future__ import annotations

import math
import reprlib
from typing import Any

import numpy as np

from mvllm.extension_api import ModelError
from mvllm_gguf.header import GGUFModel, GGUFTensor

_LARGEST = 2**31 - 1
_LARGEST_VECTOR = 1 << 16


class Metadata:
    """Typed access to a model's values and tensors; errors name the file, the key, the expected type and the value.

    Keys are given without the architecture: `block_count` for `llama.block_count`.

    Args:
        model: The model.

    Attributes:
        architecture: The value of `general.architecture`.
        file: The file with the values.
        num_tensors: Number of tensors of the model.

    Raises:
        ModelError: The architecture is missing or not a text.
    """

    def __init__(self, model: GGUFModel) -> None:
        self.file = model.files[0]
        self._values = model.metadata
        self._tensors = model.tensors
        self.num_tensors = len(model.tensors)
        self.architecture = "general"
        self.architecture = self._get("architecture", str, "a text", None)

    def __contains__(self, key: str) -> bool:
        return self._name(key) in self._values

    def integer(self, key: str, default: int | None = None, *, at_least: int = 1) -> int:
        """An integer. A list of equal integers, one per layer, is accepted as one integer.

        Raises:
            ModelError: It is missing and there is no default, has another type, or is out of range.
        """
        expected = f"an integer from {at_least} to {_LARGEST}"
        value = self._get(key, int, expected, default)
        if not at_least <= value <= _LARGEST:
            raise self._wrong(key, expected, value)
        return int(value)

    def nonzero(self, key: str, default: int | None = None) -> int:
        """A positive integer, which a file may also store as a list with zero for the layers without it.

        Raises:
            ModelError: As `integer`; or layers have different values.
        """
        value = self._values.get(self._name(key))
        if not isinstance(value, list) or not all(type(each) is int for each in value):
            return self.integer(key, default)
        found = {each for each in value if each}
        if len(found) != 1 or not 0 < (only := found.pop()) <= _LARGEST:
            raise self._wrong(key, "a positive integer that is the same for all layers that have it", value)
        return only

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number > 0; a float32 value as the shortest decimal that rounds to it.

        Raises:
            ModelError: It is missing and there is no default, has another type, or is out of range.
        """
        value = self._get(key, (int, float), "a number > 0", default)
        if not 0 < value < math.inf:
            raise self._wrong(key, "a number > 0", value)
        rounded = np.float32(value)
        return float(str(rounded)) if float(rounded) == value else float(value)

    def is_zero(self, key: str) -> bool:
        """Whether a number is absent or zero."""
        value = self._values.get(self._name(key), 0)
        return type(value) in (int, float) and value == 0

    def boolean(self, key: str, default: bool) -> bool:
        """True or false.

        Raises:
            ModelError: It has another type.
        """
        return bool(self._get(key, bool, "true or false", default))

    def text(self, key: str, default: str) -> str:
        """A text.

        Raises:
            ModelError: It has another type.
        """
        return str(self._get(key, str, "a text", default))

    def list_or_integer(self, key: str, default: int) -> int | list[Any]:
        """An integer >= 0, or a list of integers or bools.

        Raises:
            ModelError: It has another type.
        """
        value = self._values.get(self._name(key), default)
        if isinstance(value, list) and all(isinstance(each, int) for each in value):
            return value
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._wrong(key, "an integer >= 0, or a list with a value for each layer", value)
        return value

    def refuse_other(self, key: str, neutral: object) -> None:
        """Checks that an unsupported setting is absent, or has its neutral value.

        Raises:
            ModelError: It has another value.
        """
        value = self._values.get(self._name(key), neutral)
        if value != neutral:
            raise self.error(
                f"has {reprlib.repr(value)} as {self._name(key)!r}, a setting that is not supported in the "
                f"architecture {self.architecture!r}: outputs would be wrong without it"
            )

    def token_id(self, key: str) -> int | None:
        """A token id of `tokenizer.ggml`, or None if there is none."""
        value = self._values.get(f"tokenizer.ggml.{key}")
        return value if type(value) is int and 0 <= value <= _LARGEST else None

    def has_tensor(self, name: str) -> bool:
        """Whether the file has a tensor."""
        return name in self._tensors

    def tensor(self, name: str) -> GGUFTensor:
        """A tensor.

        Raises:
            ModelError: It is missing.
        """
        found = self._tensors.get(name)
        if found is None:
            raise self.error(f"lacks the tensor {name!r}, which the architecture {self.architecture!r} needs")
        return found

    def vector(self, name: str, length: int) -> list[float]:
        """The values of a one-dimensional float32 tensor.

        Raises:
            ModelError: It is missing, has another type or length, or the file cannot be read.
        """
        tensor = self.tensor(name)
        if tensor.type.name != "F32" or tensor.shape != (length,) or length > _LARGEST_VECTOR:
            raise self.error(
                f"has tensor {name!r} as {tensor.type} of shape {list(tensor.shape)}, expected F32 of shape [{length}]"
            )
        try:
            values = np.fromfile(tensor.file, "<f4", length, offset=tensor.start)
        except OSError as e:
            raise ModelError(f"{tensor.file} cannot be read: {e.strerror or e}") from e
        if len(values) < length or not np.all(np.isfinite(values)) or not np.all(values > 0):
            raise self.error(f"has values in tensor {name!r} that are not finite numbers > 0")
        return [float(str(value)) for value in values]

    def error(self, what: str) -> ModelError:
        """An error about the file."""
        return ModelError(f"{self.file} {what}. Convert or download the model again.")

    def _get(self, key: str, kind: type | tuple[type, ...], expected: str, default: Any) -> Any:
        name = self._name(key)
        value = self._values.get(name, default)
        if value is None:
            raise self.error(f"lacks the key {name!r}, expected {expected}")
        if isinstance(value, list) and value and kind is not str and all(each == value[0] for each in value):
            value = value[0]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self._wrong(key, expected, value)
        return value

    def _name(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def _wrong(self, key: str, expected: str, found: Any) -> ModelError:
        return self.error(f"has {reprlib.repr(found)} as {self._name(key)!r}, expected {expected}")
