"""Fields that requests of many kinds have."""

from __future__ import annotations

from typing import Any

import msgspec


class ModelRequest(msgspec.Struct, kw_only=True):
    """A request with a model name."""

    model: str | None = None


class ClientRequest(ModelRequest, kw_only=True):
    """A request with the fields that clients of OpenAI's API and of other engines send and that have no effect here:
    labels for the client's own records, and hints for services with many tenants."""

    user: str | None = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    prediction: Any = None
    request_id: Any = None
    rid: Any = None
