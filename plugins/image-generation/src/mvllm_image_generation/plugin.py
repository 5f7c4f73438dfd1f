"""The entry point of the group `mvllm.http`: `POST /v1/images/generations`."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from mvllm.extension_api.http_plugin import HTTPPlugin

if TYPE_CHECKING:
    from mvllm.extension_api.http import APIServerHandle, HTTPRoutes


class ImageGeneration(HTTPPlugin):
    """OpenAI's API of images."""

    operations = MappingProxyType({"/v1/images/generations": "image_generation"})

    def routes(self, server: APIServerHandle) -> HTTPRoutes:
        """The route."""
        from mvllm.extension_api.http import APIRouter, HTTPRoutes
        from mvllm_image_generation.protocol import ImageGenerationRequest, ImagesResponse
        from mvllm_image_generation.serving import ImageGenerationHandler

        router = APIRouter(tags=["generation"])
        server.body_routes.add_handler(
            router,
            "/v1/images/generations",
            ImageGenerationRequest,
            ImageGenerationHandler,
            "Generate images of a prompt.",
            {"prompt": "A dog that runs in the rain.", "n": 1},
            response=ImagesResponse,
        )
        return HTTPRoutes([router])


PLUGIN = ImageGeneration()
