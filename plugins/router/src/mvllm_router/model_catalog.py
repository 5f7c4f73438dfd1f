"""The models of a router by name, and their descriptions in the formats of the APIs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from starlette.responses import Response

from mvllm.extension_api import APIError
from mvllm.extension_api.server import APIFormat, json_response
from mvllm_router.model_entry import ModelEntry, weight_bytes
from mvllm_router.model_pool import ModelPool
from mvllm_router.model_server import ModelServerProcess, run_in_thread
from mvllm_router.pooled_model import ModelState, PooledModel

_SCAN_SECONDS = 1.0
_MAX_NAMES_IN_ERROR = 50
_FACTS = ("capabilities", "input_modalities", "example_messages")
"""Fields of the entries of `/v1/models` that the servers of models know."""
_DEFAULT_TAG = ":latest"
"""What Ollama's clients add to names of models that have no tag."""
_NEVER = "9999-12-31T23:59:59Z"


class ModelCatalog:
    """The models by name.

    Args:
        pool: The models.
        scan: Returns the models that have been added to the folder of models; None if there is no such folder.
    """

    def __init__(self, pool: ModelPool, scan: Callable[[], Iterable[ModelEntry]] | None = None) -> None:
        self._pool = pool
        self._scan = scan
        self._scanned = time.monotonic()
        self._created = int(time.time())
        self._sizes: dict[str, int] = {}
        self._max_model_lens: dict[str, int | None] = {}
        self._facts: dict[str, dict[str, Any]] = {}
        self._ollama_entries: dict[str, list[dict[str, Any]]] = {}
        self._ollama_details: dict[str, bytes] = {}

    async def resolve(self, name: str | None, path: str) -> PooledModel:
        """The model that a request means.

        Args:
            name: As the request has it; None if it names none.
            path: Of the request: clients of Ollama add `:latest` to names.

        Raises:
            APIError: The request has to name a model (400), or there is no such model (404).
        """
        models = self._pool.models
        if name is None:
            if len(models) == 1:
                return next(iter(models.values()))
            raise APIError(
                400,
                "This server has several models: name one, in the field `model` of the body or with ?model=NAME. "
                f"{self._names_text()}",
                param="model",
                code="model_missing",
            )
        found = self._find(name, path)
        if found is None and await self.update():
            found = self._find(name, path)
        if found is None:
            raise APIError(
                404,
                f"The model `{ascii(name[:100])[1:-1]}` does not exist. {self._names_text()}",
                param="model",
                code="model_not_found",
            )
        return found

    def _find(self, name: str, path: str) -> PooledModel | None:
        found = self._pool.find(name)
        if found is None and path.startswith("/api/"):
            found = self._pool.find(
                name.removesuffix(_DEFAULT_TAG) if name.endswith(_DEFAULT_TAG) else name + _DEFAULT_TAG
            )
        return found

    def _names_text(self) -> str:
        names = list(self._pool.models)
        shown = ", ".join(names[:_MAX_NAMES_IN_ERROR])
        more = len(names) - _MAX_NAMES_IN_ERROR
        return f"There is: {shown}{f' and {more} more' if more > 0 else ''}."

    async def update(self) -> bool:
        """Adds the models that are new in the folder of models; returns whether there are any."""
        if self._scan is None or time.monotonic() - self._scanned < _SCAN_SECONDS:
            return False
        self._scanned = time.monotonic()
        new = [entry for entry in await run_in_thread(self._scan) if self._pool.find(entry.name) is None]
        sizes = await self._weight_bytes(new)
        for entry in new:
            if self._pool.find(entry.name) is None:
                self._pool.add(PooledModel(entry, sizes[entry.engine.model]))
        return bool(new)

    async def refresh_adapters(self, model: PooledModel) -> None:
        """Reads the names of the adapters that a model server has loaded or unloaded."""
        if not isinstance(model.server, ModelServerProcess):
            return
        if (data := await model.server.client.fetch("/v1/models")) is not None:
            cards = msgspec.json.decode(data)["data"]
            model.adapters = frozenset(card["id"] for card in cards if card["parent"] is not None)

    async def update_facts(self) -> None:
        """Asks the loaded models that have not said it yet what they can do. It is kept when they are unloaded."""
        for model in self._pool.loaded():
            server, name = model.server, model.entry.name
            if name in self._facts or not isinstance(server, ModelServerProcess):
                continue
            if (data := await server.client.fetch("/v1/models")) is not None:
                card = msgspec.json.decode(data)["data"][0]
                self._facts[name] = {fact: card[fact] for fact in _FACTS if fact in card}

    # --- OpenAI

    def cards(self) -> list[dict[str, Any]]:
        """The entries of `/v1/models`: one for each name."""
        return [card for model in self._pool.models.values() for card in self.cards_of(model)]

    def cards_of(self, model: PooledModel) -> list[dict[str, Any]]:
        """The entries of one model: its name, its aliases and its adapters."""
        entry, status = model.entry, self.status(model)
        adapters = sorted({*(name for name, _ in entry.settings.lora_modules), *model.adapters})
        named = [(name, None) for name in (entry.name, *entry.aliases)]
        return [
            {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": "mvllm",
                "root": entry.engine.model,
                "parent": parent,
                "max_model_len": self._max_model_len(model),
                **self._facts.get(entry.name, {}),
                "status": status,
            }
            for name, parent in [*named, *((name, entry.name) for name in adapters)]
        ]

    def status(self, model: PooledModel) -> dict[str, Any]:
        """The state of a model."""
        fields: dict[str, Any] = {
            "value": model.state.value,
            "pinned": model.entry.is_pinned,
            "requests_in_flight": model.num_in_flight,
            "requests_waiting": model.num_waiting,
        }
        if model.failure_text is not None and model.state is ModelState.UNLOADED:
            fields |= {"failed": True, "error": model.failure_text}
        return fields

    def _max_model_len(self, model: PooledModel) -> int | None:
        if isinstance(model.server, ModelServerProcess) and model.server.max_model_len is not None:
            self._max_model_lens[model.entry.name] = model.server.max_model_len
        configured = model.entry.engine.max_model_len  # "auto" is decided when the model is loaded
        return self._max_model_lens.get(model.entry.name, configured if isinstance(configured, int) else None)

    # --- Ollama

    async def ollama_tags(self, ollama: APIFormat) -> list[dict[str, Any]]:
        """The entries of `/api/tags`. Details are known of models that are or were loaded.

        Args:
            ollama: The format of Ollama's API.
        """
        found: list[dict[str, Any]] = []
        models = list(self._pool.models.values())
        sizes = await self._weight_bytes([model.entry for model in models])
        for model in models:
            entries = await self._fetch_models(model, "/api/tags")
            if entries:
                self._ollama_entries[model.entry.name] = entries
            known = self._ollama_entries.get(model.entry.name)
            if known is None:
                size = sizes[model.entry.engine.model]
                known = ollama.model_list([{**card, "size": size} for card in self.cards_of(model)])["models"]
            found += known
        return found

    async def ollama_running(self) -> list[dict[str, Any]]:
        """The entries of `/api/ps`: the loaded models."""
        found = []
        for model in self._pool.loaded():
            seconds = self._pool.seconds_until_expiry(model)
            expires = datetime.now(UTC) + timedelta(seconds=seconds) if seconds is not None else None
            text = _NEVER if expires is None else expires.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            found += [{**entry, "expires_at": text} for entry in await self._fetch_models(model, "/api/ps")]
        return found

    async def ollama_details(self, model: PooledModel) -> bytes | None:
        """The response of `/api/show` for a model that was loaded; None for one that never was. Loads no model."""
        name = model.entry.name
        if model.is_loaded and isinstance(model.server, ModelServerProcess):
            data = await model.server.client.fetch("/api/show", {"model": name})
            if data is not None:
                self._ollama_details[name] = data
        return self._ollama_details.get(name)

    def unloaded_response(self, model: PooledModel, *, is_chat: bool) -> Response:
        """The response to a request of Ollama's clients to unload a model."""
        answer: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
        created = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        head = {"model": model.entry.name, "created_at": created}
        return json_response({**head, **answer, "done": True, "done_reason": "unload"})

    async def _fetch_models(self, model: PooledModel, path: str) -> list[dict[str, Any]]:
        if not model.is_loaded or not isinstance(model.server, ModelServerProcess):
            return []
        data = await model.server.client.fetch(path)
        entries: list[dict[str, Any]] = [] if data is None else msgspec.json.decode(data)["models"]
        return entries

    async def _weight_bytes(self, entries: Iterable[ModelEntry]) -> dict[str, int]:
        models = [entry.engine.model for entry in entries]
        if new := [model for model in models if model not in self._sizes]:
            self._sizes |= await run_in_thread(lambda: weight_bytes(new))
        return self._sizes
