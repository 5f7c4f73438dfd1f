"""HTTP plugins with routes at the root: used by default, with options of their own, and never in core's way."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mvllm import plugin_groups
from mvllm.entrypoints import root_plugins
from mvllm.entrypoints.cli import serve
from mvllm.entrypoints.openai.server.settings import ServerSettings
from mvllm.entrypoints.root_plugins import missing_part_of
from mvllm.errors import ConfigError
from tests.helpers.plugins import write_metadata
from tests.unit.entrypoints.builders import save_model_folder
from tests.unit.entrypoints.scripted_server import TEMPLATE, Server

PLUGIN = """
import msgspec
from mvllm.extension_api.http_plugin import HTTPPlugin


class Settings(msgspec.Struct):
    greeting: str = "Hello"


class Greetings(HTTPPlugin):
    tags = {"greetings": "Greets."}
    root_text = "Greetings are running"

    def add_serve_arguments(self, parser):
        parser.add_argument("--greeting", default="Hello")

    def serve_settings(self, args):
        return Settings(args.greeting)

    def formats(self):
        from mvllm.extension_api.http import APIFormat

        class Plain(APIFormat):
            error_name = "PlainError"
            error_schema = {"type": "string"}

            def matches(self, scope):
                return scope["path"].startswith("/greet")

            def error_body(self, error, request_id=None):
                return b'{"no": "no"}'

        return [Plain()]

    def routes(self, server):
        from fastapi import APIRouter
        from mvllm.extension_api.http import HTTPRoutes, ModelRequest, json_response

        class GreetRequest(ModelRequest, kw_only=True):
            name: str = "you"

        async def greet(request):
            context, model, body = await server.body_routes.decode_for_model(request, GreetRequest)
            ids = await context.tokenizer_pool.encode(body.name, add_special_tokens=False)
            text = f"{server.settings(Settings).greeting}, {body.name}"
            return json_response({"model": model, "text": text, "tokens": len(ids)})

        router = APIRouter(tags=["greetings"])
        server.body_routes.add(router, "/greet", GreetRequest, greet, "Greet somebody.", {"name": "Ada"})
        return HTTPRoutes([router])


PLUGIN = Greetings()
"""
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a distribution with a plugin: its name, and the text of its module. No other plugin is allowed."""
    monkeypatch.setenv(plugin_groups.ENVIRONMENT_VARIABLE, "greetings,more")

    def run(text: str = PLUGIN, name: str = "greetings", entry: str = "acme_{name}") -> None:
        module = f"acme_{name}"
        site = write_metadata(tmp_path / name, f"acme-{name}", f"[mvllm.http]\n{name} = {entry.format(name=name)}\n")
        (site / f"{module}.py").write_text(text)
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.delitem(sys.modules, module, raising=False)
        importlib.invalidate_caches()

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model_folder(tmp_path_factory.mktemp("model"), TEMPLATE)


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mvllm serve")
    serve.add_arguments(parser)
    return parser.parse_args(["m", *arguments])


def settings_of(*arguments: str) -> ServerSettings:
    args = parse(*arguments)
    return replace(serve._settings(args), **serve._settings_of_model(args))


def test_it_is_used_without_being_named(folder: str, install: Install) -> None:
    install()
    server = Server(folder, "x")
    server.settings = ServerSettings(disabled_http_plugins=("compat",))  # which has a text of its own for `GET /`
    root, answer, wrong, document = server.exchange(
        ("GET", "/", None),
        ("POST", "/greet", {"name": "Ada"}),
        ("POST", "/greet", {"name": 5}),
        ("GET", "/openapi.json", None),
    )
    assert root.text.startswith("Greetings are running\nmvllm is running. ")
    assert answer.json()["text"] == "Hello, Ada" and answer.json()["tokens"] > 0
    assert wrong.status_code == 400 and wrong.json() == {"no": "no"}
    described = document.json()
    assert described["paths"]["/greet"]["post"]["requestBody"]["content"]["application/json"]["example"] == {
        "name": "Ada"
    }
    assert "PlainError" in described["components"]["schemas"] and "GreetRequest" in described["components"]["schemas"]
    assert {"name": "greetings", "description": "Greets."} in described["tags"]


def test_it_has_options_of_serve(folder: str, install: Install) -> None:
    install()
    server = Server(folder, "x")
    server.settings = settings_of("--greeting", "Hi")
    assert server.post({}, "/greet").json()["text"] == "Hi, you"


def test_an_option_that_serve_has_is_refused(install: Install) -> None:
    install(PLUGIN.replace("--greeting", "--port"))
    with pytest.raises(ConfigError, match=r"acme-greetings 0\.1\.0.*--port"):
        parse()


def test_it_can_be_left_out(folder: str, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    server = Server(folder, "x")
    server.settings = settings_of("--disable-http-plugins", "greetings")
    root, answer = server.exchange(("GET", "/", None), ("POST", "/greet", {}))
    assert "Greetings" not in root.text
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "unknown_path"
    monkeypatch.setenv(plugin_groups.ENVIRONMENT_VARIABLE, "cpu")
    server = Server(folder, "x")
    assert server.post({}, "/greet").status_code == 404


def test_names_that_contradict_or_that_nobody_has_are_refused(install: Install) -> None:
    install()
    with pytest.raises(ConfigError, match="both name greetings"):
        settings_of("--http-plugins", "greetings", "--disable-http-plugins", "greetings")
    with pytest.raises(ConfigError, match="'nobody'"):
        settings_of("--disable-http-plugins", "nobody")


@pytest.mark.parametrize(
    ("path", "other"),
    [("/v1/completions", "mvllm"), ("/v1/load_lora_adapter", "mvllm"), ("/plugins/x", "mvllm"), ("/", "mvllm")],
)
def test_a_route_that_core_has_is_refused(folder: str, install: Install, path: str, other: str) -> None:
    install(PLUGIN.replace('"/greet"', f'"{path}"'))
    with pytest.raises(ConfigError, match=f"acme-greetings .* has a route POST {path}, which {other} has.*--disable"):
        Server(folder, "x").post({})


def test_a_route_of_another_plugin_is_refused(folder: str, install: Install) -> None:
    install()
    install(name="more")
    with pytest.raises(ConfigError, match=r"plugin acme-more .*POST /greet, which acme-greetings 0\.1\.0"):
        Server(folder, "x").post({})


@pytest.mark.parametrize(
    "text", ["raise SystemExit('no licence')", "PLUGIN = 5", PLUGIN.replace("return HTTPRoutes", "return 1 / 0 #")]
)
def test_the_server_runs_without_one_that_fails_unless_it_is_named(
    folder: str, install: Install, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    install(text)
    server = Server(folder, "x")
    assert server.post({"messages": [{"role": "user", "content": "x"}]}).status_code == 200
    assert "acme-greetings" in caplog.text and "without" in caplog.text
    server.settings = ServerSettings(http_plugins=("greetings",))
    with pytest.raises(ConfigError, match="acme-greetings"):
        server.post({})


def test_an_object_is_not_imported_until_it_is_named(folder: str, install: Install) -> None:
    install("raise SystemExit('it is imported')", entry="acme_{name}:make_router")
    assert Server(folder, "x").post({}, "/greet").status_code == 404
    assert "acme_greetings" not in sys.modules


class TestMissingParts:
    @pytest.fixture(autouse=True)
    def nothing_is_installed(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(plugin_groups, "list_plugins", lambda group: [])
        root_plugins._load_all.cache_clear()
        yield
        root_plugins._load_all.cache_clear()

    @pytest.mark.parametrize(
        ("path", "extra"),
        [
            ("/api/chat", "compat"),
            ("/v1/messages", "compat"),
            ("/v1/messages/count_tokens", "compat"),
            ("/v1/images/generations", "image-generation"),
            ("/v1/responses", "responses"),
            ("/v1/conversations", "responses"),
            ("/v1/chat/completions/chatcmpl-1", "responses"),
        ],
    )
    def test_a_path_of_theirs_names_the_package(self, folder: str, path: str, extra: str) -> None:
        assert missing_part_of("/apis") is None and missing_part_of("/v1/messagesx") is None
        error: dict[str, Any] = Server(folder, "x").post({}, path).json()["error"]
        assert error["code"] == "not_installed"
        assert error["message"] == f"This path needs the package mvllm-{extra}, which is not installed on this server."

    def test_a_chat_completion_is_not_stored(self, folder: str) -> None:
        body = {"messages": [{"role": "user", "content": "x"}], "store": True}
        assert Server(folder, "x").post(body).status_code == 200

    @pytest.mark.parametrize("option", ["--responses-store=x.db", "--mcp-server=a=b", "--max-stored-bytes=1"])
    def test_an_option_of_theirs_names_the_package(self, option: str) -> None:
        expected = r"`mvllm serve --.*` needs the package mvllm-responses.*Run: .*plugins/responses"
        with pytest.raises(ConfigError, match=expected):
            parse(option)
