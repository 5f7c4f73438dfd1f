"""Routes of HTTP plugins at the root of the server (`HTTPPlugin`), beside core's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from starlette.routing import Route, Router

from mvllm.entrypoints.http_plugin import HTTPPlugin
from mvllm.entrypoints.openai.chat_completions import StoreCompletion
from mvllm.entrypoints.openai.server.http_plugins import PREFIX
from mvllm.entrypoints.openai.server.server_handle import APIServerHandle, HTTPRoutes
from mvllm.entrypoints.root_plugins import RootPlugin, loaded_plugins
from mvllm.errors import ConfigError, MvllmError
from mvllm.logging import get_logger
from mvllm.plugin_groups import PluginSource

logger = get_logger(__name__)

_OWN_PATHS = ("/", "/docs", "/openapi.json", PREFIX)


class PluginRoutes:
    """The routes of all plugins that are installed and not disabled. Logs the error of one that fails.

    Args:
        server: The API server.

    Attributes:
        plugins: The plugins.
        store_completion: That of the plugin that has it.

    Raises:
        ConfigError: On construction: a plugin cannot run with its settings, or is named in `http_plugins` and fails.
    """

    def __init__(self, server: APIServerHandle) -> None:
        settings = server.server_settings
        self._made: list[tuple[PluginSource, HTTPRoutes]] = []
        self.plugins: list[HTTPPlugin] = []
        self.store_completion: StoreCompletion | None = None
        for each, plugin in loaded_plugins(settings.disabled_http_plugins):
            handle = server.for_plugin(each.name)
            made = _make(each, plugin, handle, is_required=each.name in settings.http_plugins)
            if made is not None:
                self._made.append((each.source, made))
                self.plugins.append(plugin)
                self.store_completion = self.store_completion or made.store_completion

    @property
    def routers(self) -> list[Router]:
        """The routes."""
        return [router for _, made in self._made for router in made.routers]

    def check_conflicts(self, core_routers: Iterable[Router]) -> None:
        """Checks that no plugin has a route that core or another plugin has.

        Raises:
            ConfigError: A plugin has.
        """
        taken = [("mvllm", route) for router in core_routers for route in _routes(router)]
        for source, made in self._made:
            own = [route for router in made.routers for route in _routes(router)]
            _check_conflicts(source, own, taken)
            taken += [(str(source), route) for route in own]


def _make(each: RootPlugin, plugin: HTTPPlugin, handle: APIServerHandle, *, is_required: bool) -> HTTPRoutes | None:
    """The routes of a plugin; None if it fails, and the server runs without it."""
    try:
        made = plugin.routes(handle)
        if not isinstance(made, HTTPRoutes):
            raise TypeError(f"routes() must return HTTPRoutes, found {made!r}.")
        if not all(isinstance(route, Route) for router in made.routers for route in router.routes):
            raise TypeError("the routers of HTTPRoutes may not include others; return each of them")
    except (KeyboardInterrupt, MvllmError):
        raise
    except BaseException as e:  # a plugin may raise anything, SystemExit included
        message = f"The HTTP plugin {each.source} cannot be used: {type(e).__name__}: {e}."
        if is_required:
            raise ConfigError(message) from e
        logger.error("%s The server runs without it.", message, exc_info=e)
        return None
    return made


def _routes(router: Router) -> Iterator[Route]:
    return (route for route in router.routes if isinstance(route, Route))


def _check_conflicts(source: PluginSource, routes: Iterable[Route], taken: Iterable[tuple[str, Route]]) -> None:
    """Checks that nobody else answers a plugin's paths.

    Raises:
        ConfigError: Somebody does.
    """
    for route in routes:
        methods = route.methods or set()
        owner = next(
            (
                owner
                for owner, other in taken
                if methods & (other.methods or set()) and other.path_regex.match(route.path)
            ),
            None,
        )
        if route.path in _OWN_PATHS or route.path.startswith(f"{PREFIX}/"):
            owner = "mvllm"
        if owner is not None:
            raise ConfigError(
                f"The HTTP plugin {source} has a route {'/'.join(sorted(methods))} {route.path}, which {owner} has. "
                f"Start the server with --disable-http-plugins {source.name}, or uninstall {source.distribution}."
            )
