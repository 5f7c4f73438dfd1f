"""Errors of a plugin's routes: their text is kept, and a body beyond the limit closes the connection."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request

from mvllm.entrypoints.openai.common.request_body import BodyReader
from mvllm.entrypoints.openai.server.app import _add_handlers
from mvllm.entrypoints.openai.server.http_plugins import LoadedPlugin
from mvllm.plugin_groups import PluginSource


def request_plugin(method: str, path: str, **more: Any) -> httpx.Response:
    plugin, app = _add_handlers(FastAPI()), _add_handlers(FastAPI())

    async def save(request: Request) -> Any:
        return await request.json()

    async def find() -> None:
        raise HTTPException(404, "There is no such document.")

    plugin.add_api_route("/save", save, methods=["POST"])
    plugin.add_api_route("/find", find, methods=["GET"])
    loaded = LoadedPlugin("p", PluginSource("p", "p:make_router", "acme", "1"), plugin)
    app.mount(loaded.prefix, loaded.asgi_app(BodyReader(100, 5.0)))

    async def run() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            return await client.request(method, f"/plugins/p/{path}", **more)

    return asyncio.run(run())


def test_a_body_that_is_too_long_closes_the_connection() -> None:
    assert request_plugin("POST", "save", json=[1]).json() == [1]
    answer = request_plugin("POST", "save", json=["x" * 200])
    assert answer.status_code == 413 and "100 bytes" in answer.json()["error"]["message"]
    assert answer.headers["connection"] == "close"


def test_a_plugins_404_keeps_its_text() -> None:
    assert request_plugin("GET", "find").json()["error"]["message"] == "There is no such document."
    assert request_plugin("GET", "nothing").json()["error"]["code"] == "unknown_path"
