"""Bodies of requests, decoded."""

from __future__ import annotations

import pytest

from mvllm.entrypoints.openai.bodies import MAX_NODES, BodyDecoder
from mvllm.entrypoints.openai.errors import APIError
from mvllm.entrypoints.openai.protocol import CompletionRequest


def test_a_body_of_more_lists_than_anybody_needs_is_not_decoded() -> None:
    decoder = BodyDecoder(CompletionRequest)
    assert len(decoder.decode(b'{"prompt":[' + b"[]," * 1000 + b"[]]}").prompt or "") == 1001
    with pytest.raises(APIError, match="lists and objects") as raised:
        decoder.decode(b'{"prompt":[' + b"[]," * MAX_NODES + b"[]]}")
    assert raised.value.status == 400
