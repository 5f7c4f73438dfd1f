"""The entry point of the group `mvllm.http`: the routes of both APIs, and their formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from mvllm.extension_api.http_plugin import HTTPPlugin

if TYPE_CHECKING:
    from mvllm.extension_api.http import APIFormat, APIServerHandle, HTTPRoutes


class CompatibleAPIs(HTTPPlugin):
    """The APIs of Anthropic (`/v1/messages`) and Ollama (`/api/...`)."""

    tags: Mapping[str, str] = MappingProxyType({"ollama": "The API of Ollama, for its clients."})
    operations: Mapping[str, str] = MappingProxyType(
        {
            "/v1/messages": "chat",
            "/api/chat": "chat",
            "/api/generate": "text_completion",
            "/api/embed": "embeddings",
            "/api/embeddings": "embeddings",
        }
    )
    root_text = "Ollama is running"  # what its clients look for

    def formats(self) -> Sequence[APIFormat]:
        """Those of both APIs."""
        from mvllm_compat.anthropic.api_format import AnthropicFormat
        from mvllm_compat.ollama.api_format import OllamaFormat

        return (OllamaFormat(), AnthropicFormat())

    def routes(self, server: APIServerHandle) -> HTTPRoutes:
        """The routes of both APIs."""
        from mvllm.extension_api.http import APIRouter, HTTPRoutes
        from mvllm_compat.anthropic.routes import AnthropicRoutes
        from mvllm_compat.ollama.routes import OllamaRoutes

        generation, ollama = APIRouter(tags=["generation"]), APIRouter(tags=["ollama"])
        AnthropicRoutes(server.body_routes).add_to(generation)
        OllamaRoutes(server).add_to(ollama)
        return HTTPRoutes([generation, ollama])


PLUGIN = CompatibleAPIs()
