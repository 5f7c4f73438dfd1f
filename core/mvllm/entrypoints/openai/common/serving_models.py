"""The model names of requests: those of the model, and one for each LoRA adapter."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mvllm.config.model import ModelConfig
from mvllm.engine.async_llm import AsyncLLM
from mvllm.engine.run_to_end import run_to_end
from mvllm.entrypoints.openai.common.errors import APIError
from mvllm.errors import ConfigError, RequestError
from mvllm.messages.lora import LoRARequest

_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt")


def weights_size(config: ModelConfig) -> int:
    """Bytes of the files with a model's weights; 0 if there are none. Reads folders."""
    given = Path(config.model)
    try:
        if given.is_file():
            return given.stat().st_size
        return sum(path.stat().st_size for path in config.path.iterdir() if path.suffix in _WEIGHTS)
    except OSError:
        return 0


class OpenAIServingModels:
    """The names of the model and of the loaded LoRA adapters.

    Args:
        names: Names of the model; the first is used in responses.
        root: The model as the user named it.
    """

    def __init__(self, names: Sequence[str], root: str) -> None:
        self._names = list(dict.fromkeys(names))
        self._root = root
        self._created = int(time.time())
        self._lora_requests: dict[str, LoRARequest] = {}
        self._loading: set[str] = set()
        self._adapter_ids = itertools.count(1)  # never reused, so that cached blocks of adapters cannot be confused

    @property
    def name(self) -> str:
        """The model's name in responses to requests without one."""
        return self._names[0]

    @property
    def names(self) -> list[str]:
        """All names that requests may use: the model's, and those of the adapters."""
        return [*self._names, *self._lora_requests]

    def resolve_name(self, name: str | None, *, with_adapters: bool = False) -> str:
        """The model's name in the response to a request for `name`.

        Args:
            with_adapters: Whether `name` may be an adapter.

        Raises:
            APIError: No model has the name (404), or an adapter has it and is not allowed (400).
        """
        if name is None or name in self._names:
            return name or self.name
        if name in self._lora_requests:
            if with_adapters:
                return name
            raise APIError(
                400, "LoRA adapters are not supported for this request: name the model itself.", param="model"
            )
        raise APIError(
            404,
            f"The model `{ascii(name[:100])[1:-1]}` does not exist. There is: "
            f"{', '.join([*self._names, *self._lora_requests])}.",
            param="model",
            code="model_not_found",
        )

    def lora_request(self, name: str) -> LoRARequest | None:
        """The adapter of a name; None for the model itself."""
        return self._lora_requests.get(name)

    async def load_lora_adapter(self, engine: AsyncLLM, name: str, path: str) -> None:
        """Loads an adapter into the engine, and adds its name.

        Raises:
            APIError: The name is in use (400).
            RequestError: The adapter cannot be used.
        """
        if name in self._names or name in self._lora_requests or name in self._loading:
            raise APIError(
                400,
                f"The name `{ascii(name[:100])[1:-1]}` is in use. Unload that adapter first, or choose another name.",
                param="lora_name",
            )
        request = LoRARequest(name, next(self._adapter_ids), path)
        self._loading.add(name)
        try:
            await engine.add_lora(request)
        finally:
            self._loading.remove(name)
        self._lora_requests[name] = request

    async def update_lora_adapter(self, engine: AsyncLLM, name: str, path: str | None) -> None:
        """Loads the files of an adapter anew, or those of another folder.

        Raises:
            APIError: No adapter has the name (404).
            RequestError: The files cannot be used.
        """
        request = self._lora_requests.get(name)
        if request is None:
            raise _no_adapter(name)
        updated = LoRARequest(name, request.lora_int_id, path or request.lora_path)

        async def update() -> None:
            await engine.update_lora(updated)
            self._lora_requests[name] = updated

        await run_to_end(update())

    async def load_lora_modules(self, engine: AsyncLLM, modules: Sequence[tuple[str, str]]) -> None:
        """Loads the adapters of `--lora-modules`, given as names and folders.

        Raises:
            ConfigError: An adapter cannot be used.
        """
        for name, path in modules:
            try:
                await self.load_lora_adapter(engine, name, path)
            except (APIError, RequestError) as e:
                raise ConfigError(f"--lora-modules {name}={path}: {e}") from e

    async def unload_lora_adapter(self, engine: AsyncLLM, name: str) -> None:
        """Removes the name of an adapter, and unloads it.

        Raises:
            APIError: No adapter has the name (404).
        """
        request = self._lora_requests.pop(name, None)
        if request is None:
            raise _no_adapter(name)
        await engine.remove_lora(request.lora_int_id)

    def model_cards(
        self, max_model_len: int | None, facts: Mapping[str, Any] = MappingProxyType({})
    ) -> list[dict[str, Any]]:
        """The entries of `/v1/models`: one for each name.

        Args:
            facts: Further fields of each, such as those of `model_facts`.
        """
        named = [(name, self._root, None) for name in self._names]
        adapters = [(name, request.lora_path, self.name) for name, request in self._lora_requests.items()]
        return [
            {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": "mvllm",
                "root": root,
                "parent": parent,
                "max_model_len": max_model_len,
                **facts,
            }
            for name, root, parent in [*named, *adapters]
        ]


def _no_adapter(name: str) -> APIError:
    message = f"There is no adapter `{ascii(name[:100])[1:-1]}`."
    return APIError(404, message, param="lora_name", code="model_not_found")
