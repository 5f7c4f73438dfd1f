"""Errors of a plugin's routes: their text is kept, and a body beyond the limit closes the connection. Its router may be
one of FastAPI."""

from __future__ import annotations

import asyncio
from typing import Any, TypedDict

import fastapi
import httpx2
import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Mount, Route, Router

from mvllm.entrypoints.openai.common.api_router import APIRouter
from mvllm.entrypoints.openai.common.openapi import openapi_document
from mvllm.entrypoints.openai.common.request_body import BodyReader
from mvllm.entrypoints.openai.server.error_handlers import make_application
from mvllm.entrypoints.openai.server.fastapi_routers import routes_of
from mvllm.entrypoints.openai.server.http_plugins import LoadedPlugin
from mvllm.entrypoints.openai.server.web_pages import docs_page
from mvllm.errors import RequestError
from mvllm.plugin_groups import PluginSource


@pytest.fixture(params=[fastapi.APIRouter, APIRouter])
def router(request: pytest.FixtureRequest) -> Router:
    router = request.param()

    async def save(request: Request) -> Any:
        return await request.json()

    async def find(request: Request) -> None:
        raise HTTPException(404, "There is no such document.")

    router.add_api_route("/save", save, methods=["POST"])
    router.add_api_route("/find", find, methods=["GET"])
    assert isinstance(router, Router)
    return router


def ask(router: Router, method: str, path: str, **more: Any) -> httpx2.Response:
    plugin = make_application(routes_of(router))
    loaded = LoadedPlugin("p", PluginSource("p", "p:make_router", "acme", "1"), plugin)
    app = make_application([Mount(loaded.prefix, loaded.asgi_app(BodyReader(100, 5.0)))])

    async def run() -> httpx2.Response:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://x") as client:
            return await client.request(method, f"/plugins/p/{path}", **more)

    return asyncio.run(run())


def test_a_body_that_is_too_long_closes_the_connection(router: Router) -> None:
    assert ask(router, "POST", "save", json=[1]).json() == [1]
    answer = ask(router, "POST", "save", json=["x" * 200])
    assert answer.status_code == 413 and "100 bytes" in answer.json()["error"]["message"]
    assert answer.headers["connection"] == "close"


def test_a_plugins_404_keeps_its_text(router: Router) -> None:
    assert ask(router, "GET", "find").json()["error"]["message"] == "There is no such document."
    assert ask(router, "GET", "nothing").json()["error"]["code"] == "unknown_path"
    wrong = ask(router, "GET", "save")
    assert wrong.status_code == 405 and wrong.json()["error"]["code"] == "method_not_allowed"
    assert wrong.headers["allow"] == "POST"


def test_the_headers_of_an_error_are_sent() -> None:
    async def wait(request: Request) -> Any:
        raise HTTPException(429, "Later.", headers={"retry-after": "7"})

    found = ask(Router([Route("/wait", wait)]), "GET", "wait")
    assert found.status_code == 429 and found.headers["retry-after"] == "7"


def test_routes_of_fastapi_keep_their_parameters_and_their_description() -> None:
    router = fastapi.APIRouter()

    async def double(number: int) -> dict[str, int]:
        return {"double": 2 * number}

    router.add_api_route("/double", double, methods=["GET"])
    assert ask(router, "GET", "double?number=4").json() == {"double": 8}
    wrong = ask(router, "GET", "double?number=x").json()["error"]
    assert wrong["param"] == "number" and "'number' is not valid" in wrong["message"]
    document = openapi_document([], {"/plugins/p": routes_of(router)}, ())
    [parameter] = document["paths"]["/plugins/p/double"]["get"]["parameters"]
    assert parameter["name"] == "number" and parameter["schema"]["type"] == "integer"


def test_a_router_of_fastapi_may_include_others() -> None:
    inner, router = fastapi.APIRouter(prefix="/inner"), fastapi.APIRouter(prefix="/outer")

    async def show(number: int) -> dict[str, int]:
        return {"number": number}

    inner.add_api_route("/{number}", show, methods=["GET"])
    router.include_router(inner)
    assert ask(router, "GET", "outer/inner/4").json() == {"number": 4}
    assert ask(router, "GET", "outer/inner/x").json()["error"]["param"] == "number"
    wrong = ask(router, "POST", "outer/inner/4")
    assert wrong.status_code == 405 and wrong.headers["allow"] == "GET"
    assert ask(router, "GET", "inner/4").json()["error"]["code"] == "unknown_path"
    document = openapi_document([], {"/plugins/p": routes_of(router)}, ())
    assert "/plugins/p/outer/inner/{number}" in document["paths"]


def test_routes_without_a_tag_are_on_the_page() -> None:
    router = APIRouter()

    async def hello(request: Request) -> Any:
        return "hello"

    router.add_api_route("/hello", hello)
    document = openapi_document(router.routes, {}, ())
    assert "tags" not in document["paths"]["/hello"]["get"]
    assert b"/hello" in docs_page(document).body


class Whole(TypedDict):
    text: str


class Part(TypedDict):
    delta: str


def test_a_route_names_the_types_of_its_responses() -> None:
    router = APIRouter()

    async def hello(request: Request) -> Any:
        return {"text": "hello"}

    router.add_api_route("/one", hello, response={"application/json": Whole, "text/event-stream": Part})
    router.add_api_route("/two", hello, response=Whole | Part)
    router.add_api_route("/three", hello)
    document = openapi_document([], {"/plugins/p": router.routes}, ())
    found = [document["paths"][f"/plugins/p/{name}"]["get"]["responses"] for name in ("one", "two", "three")]
    refs = [{"$ref": f"#/components/schemas/{name}"} for name in ("Whole", "Part", "Error")]
    assert found[0]["200"]["content"] == {
        "application/json": {"schema": refs[0]},
        "text/event-stream": {"schema": refs[1]},
    }
    assert found[1]["200"]["content"]["application/json"]["schema"] == {"anyOf": refs[:2]}
    assert "content" not in found[2]["200"]
    assert all(each["default"]["content"]["application/json"]["schema"] == refs[2] for each in found)
    assert document["components"]["schemas"]["Whole"]["required"] == ["text"]


def test_every_operation_has_an_id_of_its_own() -> None:
    router = APIRouter()

    async def hello(request: Request) -> Any:
        return "hello"

    for path in ("/items/{id}", "/items/id", "/items/{id}/", "/items_id"):
        router.add_api_route(path, hello)
    paths = openapi_document(router.routes, {"/plugins/p": router.routes}, ())["paths"]
    ids = [operation["operationId"] for operations in paths.values() for operation in operations.values()]
    assert len(set(ids)) == len(ids) == 8


def test_a_plain_router_of_starlette_is_enough() -> None:
    async def hello(request: Request) -> Any:
        raise RequestError("Say who you are.", parameter="name")

    answer = ask(Router([Route("/hello", hello)]), "GET", "hello")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "name"
