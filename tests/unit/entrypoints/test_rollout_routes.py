"""HTTP status codes of weight updates that a platform does not support, or that have failed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mvllm.entrypoints.openai.admin import rollout_routes
from mvllm.entrypoints.openai.admin.rollout_routes import RolloutRoutes
from mvllm.entrypoints.openai.common.errors import APIError
from mvllm.errors import PlatformError, UnsupportedMethodError


class Engine:
    """Raises one error from every method."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        async def fail(*args: Any, **kwargs: Any) -> None:
            raise self._error

        return fail


async def decode(request: Any, struct: type) -> Any:
    return struct()


@pytest.mark.parametrize("route", ["init_transfer", "start", "update", "finish"])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (UnsupportedMethodError("no such method"), 501, "weight_updates_unsupported"),
        (PlatformError("the device has failed"), 503, "update_failed"),
    ],
)
def test_an_update_that_is_not_supported_is_501_and_one_that_failed_503(
    route: str, error: Exception, status: int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_routes, "require_admin", lambda request: None)
    state: Any = SimpleNamespace(engine=Engine(error))
    routes = RolloutRoutes(cast(Any, SimpleNamespace(state=state, body_routes=SimpleNamespace(decode=decode))))
    with pytest.raises(APIError) as found:
        asyncio.run(getattr(routes, route)(None))
    assert (found.value.status, found.value.code) == (status, code)
