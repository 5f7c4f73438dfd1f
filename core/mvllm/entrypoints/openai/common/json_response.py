"""JSON encoding of values and of whole HTTP responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.responses import Response

encode_json: Callable[[Any], bytes] = msgspec.json.Encoder().encode
"""A value as JSON."""


def json_response(value: Any, status: int = 200) -> Response:
    """A response whose body is `value` as JSON. Bytes are sent as they are."""
    return Response(value if isinstance(value, bytes) else encode_json(value), status, media_type="application/json")
