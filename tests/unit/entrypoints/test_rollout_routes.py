"""HTTP status codes of weight updates that a platform does not support, or that have failed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mvllm.entrypoints.openai.admin import admin_routes
from mvllm.entrypoints.openai.admin.admin_routes import AdminRoutes
from mvllm.entrypoints.openai.common.api_router import APIRoute, APIRouter
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


class BodyRoutes:
    """Adds routes with a JSON body, which is empty."""

    reader = None

    def add(self, router: APIRouter, path: str, kind: type, endpoint: Any, summary: str, *, response: Any) -> None:
        router.add_api_route(path, endpoint, methods=["POST"])

    async def decode(self, request: Any, kind: type) -> Any:
        return kind()


@pytest.mark.parametrize(
    "path", ["/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"]
)
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (UnsupportedMethodError("no such method"), 501, "weight_updates_unsupported"),
        (PlatformError("the device has failed"), 503, "update_failed"),
    ],
)
def test_an_update_that_is_not_supported_is_501_and_one_that_failed_503(
    path: str, error: Exception, status: int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_routes, "require_admin", lambda request: None)
    router, state = APIRouter(), SimpleNamespace(engine=Engine(error))
    AdminRoutes(cast(Any, SimpleNamespace(state=state, body_routes=BodyRoutes()))).add_to(router)
    [endpoint] = [each.endpoint for each in router.routes if isinstance(each, APIRoute) and each.path == path]
    with pytest.raises(APIError) as found:
        asyncio.run(endpoint(None))
    assert (found.value.status, found.value.code) == (status, code)
