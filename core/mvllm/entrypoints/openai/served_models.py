"""The names under which the server offers its model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from mvllm.entrypoints.openai.errors import APIError


class ServedModels:
    """One model and its names.

    Args:
        names: The first is the one that answers carry.
        root: What the model was started from.
    """

    def __init__(self, names: Sequence[str], root: str) -> None:
        self._names = list(dict.fromkeys(names))
        self._root = root
        self._created = int(time.time())

    @property
    def name(self) -> str:
        """The name in answers to requests that name none."""
        return self._names[0]

    def check(self, name: str | None) -> str:
        """The name that the answer to a request for `name` carries.

        Raises:
            APIError: No model is called so (404).
        """
        if name is None or name in self._names:
            return name or self.name
        raise APIError(
            404,
            f"The model `{ascii(name[:100])[1:-1]}` does not exist. There is: {', '.join(self._names)}.",
            param="model",
            code="model_not_found",
        )

    def cards(self, max_model_len: int | None) -> list[dict[str, Any]]:
        """An entry of `/v1/models` for each name."""
        return [
            {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": "mvllm",
                "root": self._root,
                "parent": None,
                "max_model_len": max_model_len,
            }
            for name in self._names
        ]
