"""For packages that send HTTP requests: httpx2 with limits, and the addresses that URLs of clients may reach."""

from __future__ import annotations

from mvllm.http_client import LimitedTransport as LimitedTransport
from mvllm.http_client import ResponseTooLongError as ResponseTooLongError
from mvllm.http_client import open_client as open_client
from mvllm.multimodal.public_addresses import is_public as is_public
from mvllm.multimodal.public_addresses import start_resolving as start_resolving

__all__ = [
    "LimitedTransport",
    "ResponseTooLongError",
    "is_public",
    "open_client",
    "start_resolving",
]
