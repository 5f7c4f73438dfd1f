"""Errors of requests for pooled outputs."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from mvllm.entrypoints.openai.common.errors import APIError
from mvllm.entrypoints.openai.common.handler import RequestHandler
from mvllm.entrypoints.openai.pooling.inputs import PoolingRequestHandler
from mvllm.errors import RequestError


class Handler(PoolingRequestHandler):
    def __init__(self) -> None:
        self._inputs: Any = SimpleNamespace(field="documents")


class Features:
    """What a frame holds while it raises."""


def test_an_error_keeps_nothing_of_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[weakref.ref[Features]] = []

    async def fail(self: RequestHandler) -> None:
        features = Features()
        seen.append(weakref.ref(features))
        raise RequestError("too long", parameter="prompt")

    monkeypatch.setattr(RequestHandler, "start", fail)

    def param_of_error() -> str | None:
        start = Handler().start()
        try:
            start.send(None)
        except APIError as e:
            return e.param
        return None

    gc.collect()
    gc.disable()
    try:
        assert param_of_error() == "documents"
        assert seen[0]() is None
    finally:
        gc.enable()
