"""Routes whose bodies are forms with an audio file."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mvllm.entrypoints.openai.audio.form import parse_form
from mvllm.entrypoints.openai.audio.formats import MEDIA_TYPES
from mvllm.entrypoints.openai.audio.transcriptions import TRANSCRIBE, TRANSLATE, TranscriptionHandler
from mvllm.entrypoints.openai.common.api_router import APIRouter
from mvllm.entrypoints.openai.common.errors import APIError
from mvllm.entrypoints.openai.protocol import TranscriptionRequest
from mvllm.entrypoints.openai.response_types import Transcription
from mvllm.entrypoints.openai.server.server_handle import APIServerHandle

_LIST = "timestamp_granularities"
_PATHS = (
    ("/v1/audio/transcriptions", TRANSCRIBE, "Text of an audio file."),
    ("/v1/audio/translations", TRANSLATE, "English text of an audio file."),
)
_FIELDS = {field.name: {"type": "string"} for field in msgspec.structs.fields(TranscriptionRequest)}
_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {"file": {"type": "string", "format": "binary"}, **_FIELDS},
                }
            }
        },
    }
}

_RESPONSE = {"application/json": Transcription, "text/plain": str, "text/vtt": str}


class AudioRoutes:
    """Answers requests for the text of audio.

    Args:
        server: The API server.
    """

    def __init__(self, server: APIServerHandle) -> None:
        self._server = server

    def add_to(self, router: APIRouter) -> None:
        """Adds the routes."""
        for path, task, summary in _PATHS:
            router.add_api_route(
                path, self._endpoint(task), methods=["POST"], summary=summary, response=_RESPONSE, openapi_extra=_FORM
            )

    def _endpoint(self, task: str) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            return await self._transcribe(task, request)

        return endpoint

    async def _transcribe(self, task: str, request: Request) -> Response:
        context = self._server.state.context
        body = await self._server.body_routes.reader.read_any(request)
        fields = parse_form(request.headers.get("content-type", ""), body)
        audio = fields.pop("file", [b""])[-1]
        if not audio:
            raise APIError(400, "The form needs the field 'file' with an audio file.", param="file")
        values = read_fields(fields)
        model = self._server.models.resolve_name(values.model, with_adapters=False)
        handler = TranscriptionHandler(context, model, values, audio, task)
        response = await self._server.body_routes.run(request, handler, model)
        response.headers["content-type"] = MEDIA_TYPES[handler.response_format]
        return response


def read_fields(fields: dict[str, list[bytes]]) -> TranscriptionRequest:
    """The fields of a form beside its file.

    Raises:
        APIError: A value has the wrong type (400).
    """
    known = {field.name for field in msgspec.structs.fields(TranscriptionRequest)}
    values: dict[str, Any] = {}
    for name, contents in fields.items():
        plain = name.removesuffix("[]")
        if plain in known:
            texts = [content.decode("utf-8", "replace") for content in contents]
            values[plain] = texts if plain == _LIST else texts[-1]
    try:
        return msgspec.convert(values, TranscriptionRequest, strict=False)
    except msgspec.ValidationError as e:
        raise APIError(400, f"A field of the form is not acceptable: {e}.") from None
